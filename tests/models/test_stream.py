"""The residual stream on devices that share products: each has a part of its tokens."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.gradients import distance
from support.tiny_model import TINY, mesh_of, random_params

from distflow_jax.models.attention import masked_attention
from distflow_jax.models.transformer import hidden_states
from distflow_jax.parallel.rules import sharding, use_mesh

ROWS, TOKENS = 4, 40  # unlike any size of the weights


def gradient_on(mesh):
    """(compiled, its value) of a scalar of the hidden states."""
    params = random_params(TINY)
    tokens = np.random.default_rng(0).integers(0, TINY.vocab_size, (ROWS, TOKENS), np.int32)
    place = jnp.broadcast_to(jnp.arange(TOKENS, dtype=jnp.int32), (ROWS, TOKENS))
    causal = jnp.broadcast_to(jnp.tri(TOKENS, dtype=bool), (ROWS, TOKENS, TOKENS))

    def loss(params, tokens):
        def attend(q, k, v, _):
            return masked_attention(q, k, v, causal), None

        with use_mesh(mesh):
            hidden, _ = hidden_states(TINY, params, tokens, place, attend, remat="full")
        return jnp.square(hidden).mean() + hidden[:, :, 0].mean()

    rows = sharding(mesh, ("rows", "length"), tokens.shape)
    compiled = jax.jit(jax.grad(loss)).lower(params, jax.device_put(tokens, rows)).compile()
    return compiled, compiled(params, jax.device_put(tokens, rows))


@pytest.mark.parametrize("tensor", [1, 2])
def test_what_layers_keep_is_divided(tensor):
    compiled, found = gradient_on(mesh_of(2, tensor))
    kept = {
        tuple(map(int, dims.split(",")))
        for dims in re.findall(r"f32\[([\d,]+)\]", compiled.as_text())
        if dims.startswith(f"{TINY.num_layers},") and dims.endswith(f",{TINY.hidden_size}")
    }
    of_stream = {shape for shape in kept if len(shape) == 4 and shape[2] in (TOKENS, TOKENS // 2)}
    assert of_stream == {(TINY.num_layers, ROWS // 2, TOKENS // tensor, TINY.hidden_size)}
    _, expected = gradient_on(mesh_of(1, 1))
    assert distance(found, expected) < 1e-5
