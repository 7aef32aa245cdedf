"""Layers that see a window only, in the trainer: packed rows, shared prompts and tiles give what
each sequence gives for itself, log-probs and gradients.

Nightly: layers with windows on packed rows equal separate sequences, with adapters too.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.gradients import distance
from support.tiny_model import (
    WINDOWED,
    mesh_of,
    mini_batch,
    padded,
    random_params,
    random_samples,
    rows_of,
    spread,
    values_of,
)

from distflow_jax.batch import RowShape
from distflow_jax.config.training_config import LoraConfig
from distflow_jax.models.attention import UNLIMITED, causal_attention
from distflow_jax.models.decoder_config import adapted
from distflow_jax.models.lora import merged
from distflow_jax.models.transformer import head_logits, hidden_states
from distflow_jax.parallel.rules import use_mesh
from distflow_jax.training.forward import ForwardConfig, response_logp

PARAMS = random_params(WINDOWED)
SAMPLES = random_samples(0, groups=3, size=3)
TEMPERATURE = np.float32(0.8)


def weight_of(token, position):
    """Any weight of a token's log-prob that does not depend on where it is packed."""
    return jnp.cos(token.astype(jnp.float32) + 2.0 * position.astype(jnp.float32))


@functools.cache
def apart():
    """(log-probs by sample, gradient) of whole sequences, one per row, with full attention's mask
    and the window's."""
    tokens, starts, ends = padded(SAMPLES)
    mask = spread(SAMPLES, SAMPLES.response_mask)
    position = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)

    def loss(params):
        hidden, _ = hidden_states(
            WINDOWED,
            params,
            tokens,
            position,
            lambda q, k, v, _, window: (causal_attention(q, k, v, window), None),
        )
        logits = head_logits(WINDOWED, params, hidden.reshape(tokens.size, -1)) / TEMPERATURE
        logp = jax.nn.log_softmax(logits).reshape(*tokens.shape, -1)[:, :-1]
        logp = jnp.take_along_axis(logp, tokens[:, 1:, None], axis=2)[..., 0]
        weight = jnp.where(mask[:, 1:], weight_of(tokens, position)[:, 1:], 0.0)
        return jnp.sum(weight * logp), logp

    (_, logp), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(PARAMS)
    return [
        np.asarray(row)[start - 1 : end - 1]
        for row, start, end in zip(logp, starts, ends, strict=True)
    ], gradient


@pytest.mark.parametrize(
    "shared, options",
    [
        (True, dict(attention_block=16, remat="full")),
        pytest.param(True, dict(remat="none"), marks=pytest.mark.slow),
        pytest.param(False, dict(attention_block=32), marks=pytest.mark.slow),
        pytest.param(False, dict(), marks=pytest.mark.slow),
        pytest.param(True, dict(attention_block=8, remat="attention"), marks=pytest.mark.slow),
    ],
)
def test_packed_rows_are_sequences_apart(shared, options):
    wanted, gradient = apart()
    rows, placement = rows_of(SAMPLES, RowShape(1, 6, 96, 8), shared=shared)
    config = ForwardConfig(logp_chunk=16, **options)
    batch = mini_batch(rows)

    def loss(params):
        logp, _ = response_logp(params, WINDOWED, batch, TEMPERATURE, config)
        weight = jnp.where(batch.response_mask, weight_of(batch.tokens, batch.position), 0.0)
        return jnp.sum(weight * logp), logp

    with use_mesh(mesh_of(1, 1)):
        (_, logp), found = jax.jit(jax.value_and_grad(loss, has_aux=True))(PARAMS)
    got = values_of(SAMPLES, placement, np.asarray(logp)[None])
    for mine, theirs, mask in zip(got, wanted, SAMPLES.response_mask, strict=True):
        np.testing.assert_allclose(mine[mask], theirs[mask], atol=2e-5)
    assert distance(found, gradient) < 1e-5


@pytest.mark.slow
def test_adapters_are_what_they_are_merged_to():
    model = adapted(WINDOWED, LoraConfig(4, alpha=8.0))
    params = random_params(model, 1)
    rows, _ = rows_of(SAMPLES, RowShape(1, 6, 96, 8), shared=True)
    config, batch = ForwardConfig(logp_chunk=16), mini_batch(rows)

    @jax.jit
    def both(params):
        plain = merged(params, model.lora.scale)
        pairs = ((params, model), (plain, WINDOWED))
        return [response_logp(p, m, batch, TEMPERATURE, config)[0] for p, m in pairs]

    with_adapters, without = both(params)
    assert np.asarray(with_adapters).std() > 0.1
    np.testing.assert_allclose(with_adapters, without, atol=1e-4)


def test_without_windows_a_program_has_nothing_of_them():
    """No mask, no list of tiles and no second table of rotations is computed for them."""
    rows, _ = rows_of(SAMPLES, RowShape(1, 6, 96, 8), shared=True)
    batch = mini_batch(rows)
    texts = []
    for model in (WINDOWED, dataclasses.replace(WINDOWED, sliding_window=0, full_every=0)):

        def logp(params, model=model):
            return response_logp(params, model, batch, TEMPERATURE, ForwardConfig(logp_chunk=16))

        texts.append(str(jax.make_jaxpr(logp)(PARAMS)))
    with_windows, without = texts
    assert str(UNLIMITED) in with_windows and str(UNLIMITED) not in without
    assert with_windows.count(" cos ") == 2 * without.count(" cos ") > 0
