"""Rows that devices share, each a part of the tokens, give what whole rows on one device give.

Nightly: rows divided over devices give the loss and gradient of whole rows, windows included.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.gradients import ALGORITHM, TEMPERATURE, assert_same, gradient
from support.tiny_model import (
    TINY,
    WINDOWED,
    mesh_of,
    mini_batch,
    random_params,
    random_samples,
    rows_of,
)

from distflow_jax.batch import Rows, RowShape
from distflow_jax.models.parameters import param_shardings
from distflow_jax.parallel.rules import rows_spec, use_mesh
from distflow_jax.programs import hlo
from distflow_jax.stages.predictions import make_logp
from distflow_jax.training.forward import ForwardConfig
from distflow_jax.training.objectives.policy_objective import PolicyBatch, policy_objective
from distflow_jax.training.state import sharded_params
from distflow_jax.training.update import UpdateShape, accumulate_gradients

PARAMS = random_params(TINY)
MESHES = {
    "fsdp 2 x context 4": dict(fsdp=2, tensor=1, context=4),
    "data 2 x context 2 x tensor 2": dict(fsdp=1, tensor=2, data=2, context=2),
    "fsdp 2 x context 2 x tensor 2": dict(fsdp=2, tensor=2, context=2),
    "fsdp 4 x context 2": dict(fsdp=4, tensor=1, context=2),
    "context 2 x tensor 4": dict(fsdp=1, tensor=4, context=2),
    "context 8": dict(fsdp=1, tensor=1, context=8),
}


@pytest.mark.parametrize(
    "mesh, options",
    [
        ("fsdp 2 x context 4", dict(block=16, micro=2, remat="full")),
        pytest.param("data 2 x context 2 x tensor 2", dict(micro=2), marks=pytest.mark.slow),
        *(
            pytest.param(mesh, dict(block=block), marks=pytest.mark.slow)
            for mesh in MESHES
            for block in (0, 8)
        ),
        *(
            pytest.param("context 8", dict(shared=False, block=block), marks=pytest.mark.slow)
            for block in (0, 4)
        ),
    ],
)
def test_loss_and_gradient_are_those_of_one_device(mesh, options):
    """`context 2 x tensor 4`: 2 key/value heads, repeated for 4 devices."""
    one = gradient(fsdp=1, tensor=1, shared=options.get("shared", True))
    assert_same(gradient(**options, **MESHES[mesh]), one)


@pytest.mark.slow
@pytest.mark.parametrize("block", [16, 0])
def test_windows_reach_over_parts(block):
    one = gradient(fsdp=1, tensor=1, model=WINDOWED)
    assert_same(gradient(fsdp=1, tensor=1, context=2, block=block, model=WINDOWED), one)


def abstract_rows(mesh, rows: int, length: int, sequences: int) -> Rows:
    """[1, R, L] and [1, R, S]."""
    layout = jax.sharding.NamedSharding(mesh, rows_spec(mesh))

    def of(size, dtype=jnp.int32):
        return jax.ShapeDtypeStruct((1, rows, size), dtype, sharding=layout)

    tokens, each = of(length), of(sequences)
    mask, valid = of(length, bool), of(sequences, bool)
    return Rows(tokens, tokens, tokens, tokens, mask, each, each, each, valid, each)


@pytest.mark.parametrize("block", [22, 0])
def test_hidden_states_stay_where_they_are(block):
    """Of a row's tokens only keys and values are gathered, and what is a number per token."""
    length, sequences, mesh = 176, 5, mesh_of(2, 1, context=2)
    forward = ForwardConfig("float32", 16, "none", block)
    logp = make_logp(shape=UpdateShape(mesh, 1, 40), model=TINY, forward=forward)
    rows = abstract_rows(mesh, 4, length, sequences)
    text = logp.lower(sharded_params(TINY, mesh), rows, TEMPERATURE).compile().as_text()
    sizes = collective_sizes(text)
    keys = [1, length, TINY.num_kv_heads, TINY.head_dim]
    if block:
        keys = [1, length // block, TINY.num_kv_heads, block, TINY.head_dim]
    assert keys in sizes
    of_tokens = {length, length // 2, 96}  # of a row, of a part, of what a part predicts at most
    for dims in sizes:
        assert not (of_tokens & set(dims) and TINY.hidden_size in dims), dims


def collective_sizes(text):
    """Shapes of all that collectives give, on each device."""
    kinds = "|".join(hlo.COLLECTIVES)
    given = re.findall(rf"= (.*?) (?:{kinds})(?:-start)?\(", text)
    shapes = [dims for part in given for dims in re.findall(r"\w\[([\d,]*)\]", part)]
    return [[int(n) for n in dims.split(",") if n] for dims in shapes]


LONG = 32768


def long_gradient(parts, batch):
    """(compiled gradient of a row of 32,768 tokens that so many devices share, its arguments)."""
    mesh = mesh_of(1, 1, context=parts)
    forward = ForwardConfig("float32", 128, "none", 64)
    objective = policy_objective(TINY, ALGORITHM, forward, max_response=LONG)
    layout = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    arguments = (
        jax.device_put(PARAMS, param_shardings(TINY, mesh)),
        jax.device_put(batch, layout),
    )

    @jax.jit
    def run(params, batch):
        with use_mesh(mesh):
            shape = UpdateShape(mesh, 1, LONG)
            return accumulate_gradients(
                params, batch, TEMPERATURE, shape=shape, objective=objective
            )

    return run.lower(*arguments).compile(), arguments


@pytest.mark.slow
def test_long_rows():
    """Compiler memory beyond parameters and batch falls with 1 / c; results stay equal."""
    rng = np.random.default_rng(3)
    samples = random_samples(3, groups=12, size=2, prompt=(200, 600), response=(400, 1200))
    rows, _ = rows_of(samples, RowShape(1, 1, LONG, 24), shared=True)
    rows = mini_batch(rows)
    mask = np.asarray(rows.response_mask)
    assert np.asarray(rows.segment > 0).mean() > 0.5
    advantage = np.where(mask, rng.normal(size=mask.shape), 0).astype(np.float32)
    batch = PolicyBatch(rows, advantage, None, None, -np.ones_like(advantage))
    found = {parts: long_gradient(parts, batch) for parts in (1, 2, 8)}
    sizes = {c: run.memory_analysis().temp_size_in_bytes for c, (run, _) in found.items()}
    # among it, the activations of every layer
    assert sizes[1] > LONG * TINY.num_layers * 4 * (2 * TINY.hidden_size + 2 * TINY.mlp_size)
    for parts in (2, 8):
        assert sizes[parts] < 1.25 * sizes[1] / parts
    one, eight = (jax.device_get(run(*given)) for run, given in (found[1], found[8]))
    assert_same(eight, one)
