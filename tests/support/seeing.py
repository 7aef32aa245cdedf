"""Tiny networks with towers, and prompts with images, cut into random patches, for tests."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from distflow_jax.batch import Prompt, Samples
from distflow_jax.coordinator.row_images import pack_images
from distflow_jax.images.patch_chunks import PatchSizes, chunks_for
from distflow_jax.images.prompt_images import prompt_images
from distflow_jax.images.record import Image, ImagePatches, digest_of
from distflow_jax.models.attention import UNLIMITED, masked_attention, within
from distflow_jax.models.transformer import Seen, head_logits, hidden_states
from distflow_jax.models.vision.encode import encode
from distflow_jax.models.vision.vision_config import VisionConfig
from support.tiny_model import TINY, WINDOWED, rows_of, sequences_of

TOWER = VisionConfig(
    family="smolvlm",
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    mlp_size=48,
    patch_size=4,
    merge=2,
    width=TINY.hidden_size,
    grid=4,
)
_QWEN: dict = dict(vars(TOWER), family="qwen2_5_vl", grid=0, mlp_size=40, num_layers=3)
# by family: tiles of one size; windows and positions of three parts; the same interleaved, with
# features behind the first layers; and images that attend both ways in layers with windows
MODELS = {
    "smolvlm": dataclasses.replace(TINY, vision=TOWER),
    "qwen2_5_vl": dataclasses.replace(
        TINY,
        attention_bias=True,
        rope_sections=(2, 3, 3),
        vision=VisionConfig(**_QWEN | dict(window=4, full_layers=(1,))),
    ),
    "qwen3_vl": dataclasses.replace(
        TINY,
        qk_norm=True,
        rope_sections=(4, 2, 2),
        rope_interleaved=True,
        num_layers=3,
        vision=VisionConfig(**_QWEN | dict(family="qwen3_vl", grid=6, deepstack=(0, 1))),
    ),
    "gemma3": dataclasses.replace(WINDOWED, vision=dataclasses.replace(TOWER, family="gemma3")),
}


def sizes_of(model, features: int = 96, chunk: int = 0) -> PatchSizes:
    """Chunks of so many patches, else of 64 or of one tile, for so many features."""
    vision = model.vision
    chunk = chunk or (vision.grid**2 if vision.image_size else 64)
    merge, rotary = vision.patches_per_feature, bool(model.rope_sections)
    chunks = chunks_for(features, merge, chunk)
    return PatchSizes(chunk, chunks, vision.patch_bytes, 2, merge, rotary, vision.window)


def image_of(model, seed: int) -> Image:
    """An image of random content; of any size where the family takes these."""
    rng, vision = np.random.default_rng(seed), model.vision
    rows, columns = (2, 2) if vision.image_size else rng.integers(1, 5, 2).tolist()
    merge, at = vision.merge, []
    for row in range(rows):
        for column in range(columns):
            for down in range(merge):
                at += [(row * merge + down, column * merge + right) for right in range(merge)]
    count = len(at)
    patches = rng.integers(0, 256, (count, vision.patch_bytes), np.uint8)
    cut = ImagePatches(
        patches,
        np.array(at, np.int32),
        np.ones(count, np.int32),
        count // merge**2,
        (rows, columns),
    )
    pixels = np.zeros((4, 4, 3), np.uint8)
    return Image(pixels, digest_of(patches[None, :, :3]), cut)


def seeing_prompt(
    model, counter: int, images: int, *, seed: int = 0, placeholder: int = 5
) -> Prompt:
    """A prompt of random text with images in between; the placeholder's id is in the text too."""
    rng = np.random.default_rng([seed, counter])
    found = tuple(image_of(model, 1000 * seed + 10 * counter + n) for n in range(images))
    tokens, patch, first = [], [], 0
    for image in (*found, None):
        text = rng.integers(0, model.vocab_size, rng.integers(1, 6))
        text[0] = placeholder
        tokens.append(text)
        patch.append(np.full(len(text), -1))
        if image is not None:
            count = image.patches.features
            tokens.append(np.full(count, placeholder))
            patch.append(np.arange(first, first + count))
            first += count
    whole = np.concatenate(tokens).astype(np.int32)
    column = np.concatenate(patch).astype(np.int32) if images else None
    return Prompt(counter, counter, whole, "", "test", None, {}, images=found, patch=column)


def seeing_samples(model, *, groups: int = 3, size: int = 3, seed: int = 0) -> Samples:
    """Prompts with 0 to 2 images, each with `size` responses; one token of ten is masked out."""
    rng = np.random.default_rng(seed)
    prompts, responses, masks = [], [], []
    for counter in range(groups):
        prompt = seeing_prompt(model, counter, (counter + 1) % 3, seed=seed)
        for _ in range(size):
            length = rng.integers(1, 12)
            prompts.append(prompt)
            response = rng.integers(0, model.vocab_size, length).astype(np.int32)
            response[length // 2] = 5  # a sampled placeholder is text
            responses.append(response)
            masks.append(rng.random(length) < 0.9)
    uid = [(counter, sample) for counter in range(groups) for sample in range(size)]
    return Samples(prompts, np.array(uid, np.int64), responses, masks)


def seeing_rows(
    model, samples: Samples, shape, *, shared: bool, ranks: int = 1, shown=(), chunk: int = 0
):
    """(Rows with images, Placement) of samples; `shown`: TurnImages of each response, or None.
    `chunk`: of sizes_of."""
    rows, placement = rows_of(samples, shape, shared=shared, ranks=ranks)
    images = [prompt_images(p.images, p.patch) for p in samples.prompt]
    sizes = sizes_of(model, shape.tokens, chunk)
    rows.images = pack_images(sequences_of(samples), images, placement, sizes, shown)
    return rows, placement


def features_alone(model, params, images) -> list:
    """Features [1 + N, S, W] of each image, encoded in a row of its own."""
    found = []
    for image in images:
        cut = image.patches
        args = (jnp.asarray(x) for x in (cut.patches, cut.positions, cut.segments))
        features = encode(model.vision, params["vision"], *args)
        found.append(features if features.ndim == 3 else features[None])
    return found


def logits_alone(model, params, prompt, tokens, found):
    """Logits [T, V] of one sequence int32 [T] that begins with the prompt.

    `found`: `features_alone` of the prompt's images.
    """
    image = np.zeros(len(tokens), np.int32)
    images = prompt_images(prompt.images, prompt.patch)
    patch = np.full(len(tokens), -1, np.int32)
    position = np.repeat(np.arange(len(tokens), dtype=np.int32)[:, None], 3, axis=1)
    seen = None
    if images is not None:
        size = len(prompt.tokens)
        patch[:size] = prompt.patch
        position[:size] = images.rotary
        position[size:] = (np.arange(size, len(tokens)) + images.shift)[:, None]
        features = jnp.concatenate(found, axis=1)
        deep = features[None, 1:] if len(features) > 1 else None
        seen = Seen(patch[None], features[:1], deep)
        number = np.arange(len(found)) + 1
        owner = np.repeat(number, [x.patches.features for x in prompt.images])
        image = np.where(patch >= 0, owner[np.maximum(patch, 0)], 0)
    position = position if model.rope_sections else np.arange(len(tokens))
    place = jnp.arange(len(tokens))[None]
    same = (image[:, None] == image[None]) & (image[:, None] > 0) & model.image_both_ways

    def attend(q, k, v, _, window=UNLIMITED):
        mask = (place[0][:, None] >= place) & within(place, place, window)[0]
        return masked_attention(q, k, v, (mask | same)[None]), None

    hidden, _ = hidden_states(model, params, tokens[None], position[None], attend, seen=seen)
    return head_logits(model, params, hidden[0])
