"""One tiny model of each family with a vision tower, and images, drawn by NumPy alone."""

import zlib
from collections.abc import Iterator

import numpy as np

from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.families import gemma3, qwen2_5_vl, qwen3_vl, smolvlm
from distflow_jax.models.families.tower_config import PICTURES
from distflow_jax.models.vision.vision_config import VisionConfig

_TEXT = dict(
    vocab_size=48,
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mlp_size=64,
    rope_theta=1000.0,
    max_position=4096,
    norm_eps=1e-6,
)
_TOWER = dict(hidden_size=32, num_layers=3, num_heads=4, mlp_size=48, width=32)
# ids that no family's text below has
_IDS = dict(image_token=47, start_token=46, end_token=45)
_SIGLIP = dict(grid=8, patch_size=8, merge=2)

FAMILY_MODULES = {
    "smolvlm": smolvlm,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "gemma3": gemma3,
}
CASES = {
    "smolvlm": DecoderConfig(
        **_TEXT,
        family="smolvlm",
        vision=VisionConfig(
            "smolvlm", **_TOWER, **_SIGLIP, longest_edge=256, image_token=_IDS["image_token"]
        ),
    ),
    "smolvlm whole": DecoderConfig(
        **_TEXT,
        family="smolvlm",
        vision=VisionConfig(
            "smolvlm", **_TOWER, **_SIGLIP, longest_edge=0, image_token=_IDS["image_token"]
        ),
    ),
    # windows of 4 x 4 patches in the first and last layer
    "qwen2_5_vl": DecoderConfig(
        **_TEXT | {"head_dim": 8},
        **qwen2_5_vl.SWITCHES,
        family="qwen2_5_vl",
        rope_sections=(1, 1, 2),
        vision=VisionConfig(
            "qwen2_5_vl",
            **_TOWER,
            **_IDS,
            **PICTURES["qwen2_5_vl"],
            patch_size=14,
            window=4,
            full_layers=(1,),
            tokens_per_second=4,
        ),
    ),
    "qwen3_vl": DecoderConfig(
        **_TEXT | {"tie_embeddings": False},
        **qwen3_vl.SWITCHES,
        family="qwen3_vl",
        rope_sections=(4, 2, 2),
        rope_interleaved=True,
        vision=VisionConfig(
            "qwen3_vl",
            **_TOWER,
            **_IDS,
            **PICTURES["qwen3_vl"] | {"least_pixels": 32 * 32, "most_pixels": 300 * 300},
            patch_size=8,
            grid=6,
            deepstack=(0, 1),
        ),
    ),
    "gemma3": DecoderConfig(
        **_TEXT,
        **gemma3.SWITCHES,
        family="gemma3",
        sliding_window=24,
        full_every=2,
        rope_local_theta=100.0,
        query_scalar=12,
        vision=VisionConfig("gemma3", **_TOWER, **_SIGLIP, **_IDS),
    ),
}
SIZES = ((28, 28), (150, 600), (97, 133))  # height and width
IMAGES = tuple(
    np.random.default_rng(n).integers(0, 256, (*size, 3), np.uint8) for n, size in enumerate(SIZES)
)
NUM_IMAGES = (0, 1, 3)  # of the prompts whose logits are golden


def drawn_params(config: DecoderConfig) -> Iterator[tuple[str, np.ndarray]]:
    """(path, float32 parameter, layers stacked), each from a generator of its own."""
    for weight in FAMILY_MODULES[config.family].hf_weights(config):
        rng = np.random.default_rng(zlib.crc32(weight.path.encode()))
        noise = rng.standard_normal(weight.param_shape(config.num_layers))
        name = weight.path.rpartition("/")[2]
        offset = config.norm_offset and not weight.path.startswith("vision/layers")
        offset = offset and name.endswith("norm") and weight.path != "vision/final_norm"
        if name.endswith("norm"):
            value = 0.3 * noise + (0 if offset else 1)
        elif name.endswith("bias"):
            value = 0.3 * noise
        else:
            value = 0.2 * noise
        yield weight.path, value.astype(np.float32)


def tokens_of(config: DecoderConfig, features: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Ids [T] and patch [T] of a prompt: text, then every image with its features and more text.

    `patch` is -1 for text, else which feature of all images stands there. With an image's start and
    end token, if the family has them.
    """
    rng = np.random.default_rng(7)
    assert config.vision is not None
    v, first = config.vision, 0
    ids, patch = list(rng.integers(0, 40, 5)), [-1] * 5
    for count in features:
        around = [[x] if x >= 0 else [] for x in (v.start_token, v.end_token)]
        text = list(rng.integers(0, 40, 4))
        ids += [*around[0], *[v.image_token] * count, *around[1], *text]
        patch += [-1] * len(around[0]) + list(range(first, first + count))
        patch += [-1] * (len(around[1]) + 4)
        first += count
    return np.array(ids, np.int32), np.array(patch, np.int32)
