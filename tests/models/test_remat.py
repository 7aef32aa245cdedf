"""Arrays kept for the backward pass change memory and work, but no gradient.

Nightly: gradients do not depend on what rematerialisation keeps.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_model import TINY, random_params, random_samples, rows_of

from distflow_jax.batch import RowShape
from distflow_jax.training.forward import ForwardConfig, packed_hidden

MODEL = dataclasses.replace(TINY, num_layers=4, qk_norm=True)
PARAMS = random_params(MODEL)


def gradient(remat, block):
    """(compiled, gradient) of a sum over hidden states, no head in it."""
    rows, _ = rows_of(random_samples(0, groups=8, size=4), RowShape(1, 8, 64, 4), shared=True)
    rows = jax.tree.map(lambda x: jnp.asarray(x[0]), rows)
    config = ForwardConfig(remat=remat, attention_block=block)
    weight = np.random.default_rng(0).normal(size=(8, 64, MODEL.hidden_size)).astype(np.float32)

    def loss(params):
        return jnp.sum(packed_hidden(params, MODEL, rows, config)[0] * weight)

    compiled = jax.jit(jax.grad(loss)).lower(PARAMS).compile()
    return compiled, compiled(PARAMS)


@pytest.mark.parametrize(
    ("block", "remats"),
    [
        (0, ("full", "attention", "dots")),
        (32, ("attention",)),
        pytest.param(32, ("full", "dots"), marks=pytest.mark.slow),
    ],
)
def test_gradients_do_not_depend_on_what_is_kept(block, remats):
    kept, wanted = gradient("none", block)
    sizes = []
    for remat in remats:  # from those that keep little
        compiled, found = gradient(remat, block)
        sizes.append(compiled.memory_analysis().temp_size_in_bytes)
        for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
            norm = np.linalg.norm(a)
            np.testing.assert_allclose(b, a, rtol=0, atol=1e-5 * norm)
    sizes.append(kept.memory_analysis().temp_size_in_bytes)
    assert all(a < b for a, b in itertools.pairwise(sizes))
