"""Images in the trainer: packed rows and shared prompts give what each sequence gives for itself,
log-probs and gradients, those of the tower included.

Nightly: images in packed rows give the gradient of sequences apart, on meshes too.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import seeing
from support.gradients import distance
from support.seeing import features_alone, logits_alone, seeing_rows, seeing_samples
from support.tiny_model import (
    MIXTURE,
    mesh_of,
    mini_batch,
    padded,
    random_params,
    spread,
    values_of,
)

from distflow_jax.batch import RowImages, RowShape
from distflow_jax.models.parameters import param_shardings
from distflow_jax.models.vision.patch_attention import Form
from distflow_jax.parallel.rules import use_mesh
from distflow_jax.training.forward import ForwardConfig, image_ends, response_logp

MODELS = seeing.MODELS | {"mixture": dataclasses.replace(MIXTURE, vision=seeing.TOWER)}
TEMPERATURE = np.float32(0.8)
SHAPE = RowShape(1, 6, 128, 8)


def weight_of(token, position):
    """Any weight of a token's log-prob that does not depend on where it is packed."""
    return jnp.cos(token.astype(jnp.float32) + 2.0 * position.astype(jnp.float32))


@functools.cache
def apart(name):
    """(samples, parameters, log-probs by sample, gradient) of sequences for themselves."""
    model = MODELS[name]
    samples, params = seeing_samples(model), random_params(model)
    tokens, starts, ends = padded(samples)
    mask = spread(samples, samples.response_mask)

    def loss(params):
        total, rows = 0.0, []
        for i, prompt in enumerate(samples.prompt):
            own = tokens[i, : ends[i]]
            found = features_alone(model, params, prompt.images)
            logits = logits_alone(model, params, prompt, own, found) / TEMPERATURE
            logp = jax.nn.log_softmax(logits)[:-1]
            logp = jnp.take_along_axis(logp, own[1:, None], axis=1)[:, 0]
            weight = weight_of(own[1:], jnp.arange(1, ends[i]))
            total += jnp.sum(jnp.where(mask[i, 1 : ends[i]], weight, 0.0) * logp)
            rows.append(logp[starts[i] - 1 :])
        return total, rows

    (_, logp), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return samples, params, [np.asarray(x) for x in logp], gradient


def packed(name, mesh, *, shared=True, ranks=1, **options):
    """(log-probs by sample, gradient) of packed rows."""
    samples, params, *_ = apart(name)
    model = MODELS[name]
    rows, placement = seeing_rows(model, samples, SHAPE, shared=shared, ranks=ranks)
    config, batch = ForwardConfig(logp_chunk=16, **options), mini_batch(rows)

    def loss(params):
        logp, _ = response_logp(params, model, batch, TEMPERATURE, config)
        weight = jnp.where(batch.response_mask, weight_of(batch.tokens, batch.position), 0.0)
        return jnp.sum(weight * logp), logp

    with use_mesh(mesh):
        params = jax.device_put(params, param_shardings(model, mesh))
        (_, logp), found = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return values_of(samples, placement, np.asarray(logp)[None]), found


def check(name, found):
    samples, _, wanted, gradient = apart(name)
    got, found = found
    for mine, theirs, mask in zip(got, wanted, samples.response_mask, strict=True):
        np.testing.assert_allclose(mine[mask], theirs[mask], atol=2e-5)
    assert distance(jax.device_get(found), jax.device_get(gradient)) < 1e-5
    assert np.abs(np.asarray(found["vision"]["patch"])).max() > 1e-3


@pytest.mark.parametrize(
    "name, shared, options",
    [
        ("smolvlm", True, dict(attention_block=16, remat="full")),
        pytest.param("smolvlm", False, dict(remat="none"), marks=pytest.mark.slow),
        pytest.param(
            "qwen2_5_vl", True, dict(remat="full", tower=Form(16)), marks=pytest.mark.slow
        ),
        pytest.param(
            "qwen3_vl", True, dict(attention_block=16, tower=Form(32)), marks=pytest.mark.slow
        ),
        pytest.param(
            "gemma3", True, dict(attention_block=16, tower=Form(8)), marks=pytest.mark.slow
        ),
        pytest.param("gemma3", True, dict(), marks=pytest.mark.slow),
        pytest.param("qwen3_vl", False, dict(remat="none"), marks=pytest.mark.slow),
        pytest.param("gemma3", False, dict(remat="attention"), marks=pytest.mark.slow),
    ],
)
def test_packed_rows_with_images_are_sequences_apart(name, shared, options):
    check(name, packed(name, mesh_of(1, 1), shared=shared, **options))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, sizes",
    [
        ("smolvlm", dict(fsdp=2, tensor=2)),
        ("qwen3_vl", dict(fsdp=2, tensor=2)),
        ("qwen2_5_vl", dict(fsdp=1, tensor=1, context=2)),
        ("gemma3", dict(fsdp=2, tensor=2)),
        ("gemma3", dict(fsdp=1, tensor=1, context=2)),
        ("smolvlm", dict(fsdp=1, tensor=2, pipeline=2)),
        ("mixture", dict(fsdp=1, tensor=1, expert=2)),
    ],
)
def test_any_mesh_gives_the_gradient_of_one_device(name, sizes):
    ranks = sizes["fsdp"] * sizes.get("expert", 1)
    options = dict(attention_block=16, tower=Form(16))
    check(name, packed(name, mesh_of(**sizes), ranks=ranks, **options))


def test_an_update_by_tiles_has_no_array_of_all_pairs_of_patches():
    model, patches = MODELS["qwen2_5_vl"], 112  # a size that no other array has
    samples, params = seeing_samples(model), random_params(model)
    rows, _ = seeing_rows(model, samples, SHAPE, shared=True, chunk=patches)

    def text(**options):
        config = ForwardConfig(logp_chunk=16, remat="full", **options)

        def loss(params, batch):
            return jnp.sum(response_logp(params, model, batch, TEMPERATURE, config)[0])

        return jax.jit(jax.grad(loss)).lower(params, mini_batch(rows)).compile().as_text()

    pairs = re.compile(rf"\[(?:\d+,)*{patches},{patches}\]")
    assert pairs.search(text())
    assert not pairs.findall(text(attention_block=32, tower=Form(16)))


def test_an_image_ends_with_its_own_showing():
    """Two showings of one picture in one segment do not see each other both ways."""
    segment = np.array([[1, 1, 1, 1, 1, 1, 2, 2, 2, 0]], np.int32)
    patch = np.array([[-1, 0, 1, -1, 0, 1, 0, 1, 2, -1]], np.int32)
    patches = np.zeros((1, 1, 16, 3), np.uint8)
    of_patches = np.array([[[1] * 8 + [2] * 4 + [0] * 4]], np.int32)
    images = RowImages(patch, patches, np.zeros((1, 1, 16, 2), np.int32), of_patches, None)
    first, last = image_ends(images, jnp.asarray(segment), merge=4)
    assert first[0].tolist() == [0, 1, 1, 3, 4, 4, 6, 6, 8, 9]
    assert last[0].tolist() == [0, 2, 2, 3, 5, 5, 7, 7, 8, 9]
