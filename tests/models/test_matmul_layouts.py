"""Weights of layers apart or turned: the same numbers, outputs first, laid out as before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_model import TINY, mesh_of, random_params

from distflow_jax.models.attention import masked_attention
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.matmul_layouts import Turned, by_input, by_output, by_row, resolve_layout
from distflow_jax.models.parameters import param_shardings
from distflow_jax.models.sampler_layout import SamplerLayout
from distflow_jax.models.transformer import head_weight, hidden_states

UNTIED = DecoderConfig(**{**TINY.__dict__, "tie_embeddings": False})


@pytest.mark.parametrize("rows", [1, 5, 300])
@pytest.mark.parametrize("inputs", [(6,), (3, 4)])
@pytest.mark.parametrize("outputs", [(7,), (2, 5)])
def test_products(rows, inputs, outputs):
    """Few rows and many, one and two dims on each side, against float64."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, *inputs)).reshape(rows, -1)
    weight = rng.normal(size=(*inputs, *outputs))
    want = (x @ weight.reshape(x.shape[1], -1)).reshape(rows, *outputs)
    turned = np.moveaxis(weight, range(len(inputs)), range(-len(inputs), 0))
    x, weight, turned = (jnp.asarray(a, jnp.float32) for a in (x, weight, turned))
    for product, w in ((by_input, weight), (by_output, turned), (by_row, turned)):
        got = jax.jit(product, static_argnums=2)(x, w, len(inputs))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axes", [(1, 1), (2, 2)])
@pytest.mark.parametrize("config", [TINY, UNTIED], ids=["tied", "untied"])
def test_the_network_is_the_same(config, axes):
    mesh = mesh_of(*axes, names=("data", "tensor"))
    given = random_params(config)
    placed = jax.device_put(given, param_shardings(config, mesh))
    turned = SamplerLayout(config, "tpu", "auto").convert_placed(jax.tree.map(jnp.copy, placed))
    for name in ("query", "gate", "up"):
        (matrix,) = turned["layers"][name]
        assert matrix.shape[-1] == config.hidden_size
        assert matrix.addressable_shards[0].data.shape[1] == matrix.shape[1] // axes[1]
        np.testing.assert_array_equal(np.moveaxis(matrix, -1, 1), given["layers"][name])
    assert isinstance(turned.get("head", Turned(None)), Turned)
    assert turned["layers"]["down"].shape == given["layers"]["down"].shape
    apart = SamplerLayout(config, "cpu", "apart").convert_placed(jax.tree.map(jnp.copy, placed))
    assert len(apart["layers"]) == config.num_layers
    for number, layer in enumerate(apart["layers"]):
        query, output = given["layers"]["query"], given["layers"]["output"]
        np.testing.assert_array_equal(layer["query"], query[number].transpose(1, 2, 0))
        np.testing.assert_array_equal(layer["output"], output[number].transpose(2, 0, 1))
        heads = layer["query"].addressable_shards[0].data.shape[0]
        assert heads == config.num_heads // axes[1]

    tokens = jnp.asarray(np.random.default_rng(1).integers(0, config.vocab_size, (2, 9)))
    position = jnp.broadcast_to(jnp.arange(9, dtype=jnp.int32)[None], (2, 9))
    causal = jnp.tril(jnp.ones((9, 9), bool))[None]

    @jax.jit
    def run(params):
        def attend(q, k, v, layer):
            return masked_attention(q, k, v, causal), (k, layer)

        hidden, kept = hidden_states(
            config,
            params,
            tokens,
            position,
            attend,
            layer_inputs=jnp.arange(config.num_layers, dtype=jnp.int32),
        )
        return hidden, kept, head_weight(config, params)

    wanted = jax.tree.leaves(run(placed))
    for held in (apart, turned):
        for got, want in zip(jax.tree.leaves(run(held)), wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_auto_depends_on_the_platform():
    assert [resolve_layout("auto", platform) for platform in ("cpu", "gpu", "tpu")] == [
        "apart", "apart", "turned"
    ]  # fmt: skip
    assert resolve_layout("stacked", "tpu") == "stacked"
    assert resolve_layout("apart", "tpu") == "apart"
    with pytest.raises(ValueError, match="one of auto, stacked, turned, apart, got 'x'"):
        resolve_layout("x", "cpu")
