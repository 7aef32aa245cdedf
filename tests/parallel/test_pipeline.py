"""Layers that pipeline ranks divide: outputs and gradients equal those of a plain scan.

Nightly: layers over pipeline stages, micro-batches and rounds give a plain scan's values and
gradients.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_model import mesh_of

from distflow_jax.models.remat import rematerialised
from distflow_jax.parallel.pipeline import bubble_share, scan_layers
from distflow_jax.parallel.rules import constrain, sharding, use_mesh
from distflow_jax.programs import hlo

LAYERS, ROWS, LENGTH, WIDTH = 8, 8, 5, 16
MESHES = {
    "pipeline 2": dict(fsdp=1, tensor=1, pipeline=2),
    "pipeline 4": dict(fsdp=1, tensor=1, pipeline=4),
    "pipeline 8": dict(fsdp=1, tensor=1, pipeline=8),
    "fsdp 2 x pipeline 2 x tensor 2": dict(fsdp=2, tensor=2, pipeline=2),
}


def body_of(rows):
    """A layer that knows its rows by a number each, and by one from outside; it gives a sum."""

    def body(x, given):
        (weight, shift), of_row = given
        shift = shift + rows[:, None, None] + of_row[:, :, None]
        h = jnp.tanh(jnp.einsum("BTD,DF->BTF", x, weight) + shift)
        h = constrain(h, "batch", "length", "mlp")
        return x + h, jnp.sum(h * rows[:, None, None], axis=(0, 1))

    return body


def given():
    rng = np.random.default_rng(0)
    weight = rng.normal(0, 0.3, (LAYERS, WIDTH, WIDTH))
    x = rng.normal(size=(ROWS, LENGTH, WIDTH))
    rows = rng.normal(size=ROWS)
    return weight, x, rows


def single():
    return tuple(x.astype(np.float32) for x in given())


def loss(weight, x, rows, microbatches=0, repeats=1, remat="none"):
    shift = jnp.arange(LAYERS, dtype=weight.dtype) / LAYERS
    by_layer_and_row = shift[:, None, None] * jnp.cos(rows)[None, :, None]
    out, kept = scan_layers(
        body_of,
        x,
        rows,
        (weight, shift),
        by_layer_and_row,
        remat=functools.partial(rematerialised, remat=remat),
        microbatches=microbatches,
        repeats=repeats,
    )
    return jnp.sum(out**2) + jnp.sum(kept**2), (out, kept)


def scheduled(microbatches=0, repeats=1, remat="none"):
    return functools.partial(loss, microbatches=microbatches, repeats=repeats, remat=remat)


def on(axes, *schedule):
    """(gradient by weight and x, (x, sums of layers)), compiled for the mesh, and its text."""
    mesh = mesh_of(**axes)
    layouts = [
        sharding(mesh, ("layers", "hidden", "mlp"), (LAYERS, WIDTH, WIDTH)),
        sharding(mesh, ("rows", "length", "activation"), (ROWS, LENGTH, WIDTH)),
        sharding(mesh, ("rows",), (ROWS,)),
    ]

    @jax.jit
    def run(*arguments):
        with use_mesh(mesh):
            return jax.grad(scheduled(*schedule), argnums=(0, 1), has_aux=True)(*arguments)

    with jax.enable_x64(True):
        arguments = [jax.device_put(x, s) for x, s in zip(given(), layouts, strict=True)]
        compiled = run.lower(*arguments).compile()
        return jax.device_get(compiled(*arguments)), compiled.as_text()


@functools.cache
def plain():
    with jax.enable_x64(True):
        return jax.device_get(jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(*given()))


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "axes, schedule",  # micro-batches, rounds, remat
    [
        ("pipeline 2", (8,)),
        ("fsdp 2 x pipeline 2 x tensor 2", ()),
        ("pipeline 4", (8, 2, "full")),
        ("fsdp 2 x pipeline 2 x tensor 2", (0, 2, "full")),
        slow("fsdp 2 x pipeline 2 x tensor 2", (4,)),
        slow("pipeline 2", (2,)),
        slow("pipeline 8", ()),
        slow("pipeline 2", (2, 2)),
        slow("pipeline 2", (2, 4, "full")),
        slow("pipeline 2", (8, 4, "full")),
        slow("pipeline 4", (4, 2, "full")),
        slow("pipeline 4", (0, 2)),
        slow("fsdp 2 x pipeline 2 x tensor 2", (4, 4, "full")),
    ],
)
def test_pipeline_ranks_give_what_one_device_gives(axes, schedule):
    """In float64: any difference but rounding is a mistake."""
    found, text = on(MESHES[axes], *schedule)
    for got, want in zip(*map(jax.tree.leaves, (found, plain())), strict=True):
        assert got.dtype == np.float64
        assert np.linalg.norm(got - want) < 1e-12 * np.linalg.norm(want)
    if MESHES[axes]["fsdp"] == MESHES[axes]["tensor"] == 1:
        _, repeats, remat = (*schedule, *(0, 1, "none")[len(schedule) :])
        assert_layers_move(text, MESHES[axes]["pipeline"], repeats)
        if remat == "full":
            assert_no_layers_are_kept(text, MESHES[axes]["pipeline"], repeats)


WEIGHT, OF_ROW = 8 * WIDTH * WIDTH, 8 * LENGTH * WIDTH  # bytes


def assert_layers_move(text, ranks, repeats):
    """Rows move from rank to rank. Weights and their gradients stay where they are, or
    are permuted and permuted back where a micro-batch goes several times round."""
    permuted = [one for one in hlo.read(text).collectives if one.bytes > 8 * 64]
    assert {one.kind for one in permuted} == {"collective-permute"}
    layers = [one for one in permuted if one.bytes % OF_ROW]
    assert all(one.bytes % WEIGHT == 0 for one in layers)
    moved = sum(one.bytes * one.times for one in layers)
    assert moved == (2 * WEIGHT * LAYERS // ranks if repeats > 1 else 0)


def assert_no_layers_are_kept(text, ranks, repeats):
    """The weights of a rank differ from tick to tick, and no array has those of several ticks."""
    sizes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"f64\[([\d,]+)\]", text)}
    weights = [math.prod(dims) for dims in sizes if dims[-2:] == (WIDTH, WIDTH)]
    assert max(weights) == LAYERS // ranks * WIDTH**2


@pytest.mark.parametrize("repeats, ticks", [(1, 11), (2, 19)])
def test_ticks(repeats, ticks):
    """r M + S - 1 of them, each with L / (r S) layers."""
    with use_mesh(mesh_of(**MESHES["pipeline 4"])):
        text = str(jax.make_jaxpr(scheduled(8, repeats))(*single()))
    lengths = re.findall(r"length=(\d+)", text)
    assert sorted(map(int, lengths)) == [LAYERS // (4 * repeats), ticks]


def test_a_mesh_without_pipeline_scans():
    weight, x, rows = single()
    got = jax.make_jaxpr(loss)(weight, x, rows)
    assert [eqn.primitive.name for eqn in got.eqns].count("scan") == 1
    assert "shard_map" not in str(got)


@pytest.mark.parametrize(
    "rows, schedule, message",
    [
        (8, (3,), r"3 micro-batches are not a multiple of pipeline=2, .*; use 4"),
        (8, (6,), r"cannot be divided into 6 micro-batches; use one of \[2, 4, 8\]"),
        (7, (2,), r"7 rows .* into 2 micro-batches; give each data rank a multiple of 2 rows"),
        (8, (2, 3), r"pipeline_repeats=3 .* the 4 layers of .* pipeline=2\); use one of"),
    ],
)
def test_what_does_not_divide_is_refused(rows, schedule, message):
    weight, x, number = single()
    with use_mesh(mesh_of(1, 1, pipeline=2)), pytest.raises(ValueError, match=message):
        jax.eval_shape(scheduled(*schedule), weight, x[:rows], number[:rows])


def test_the_bubble_shrinks_with_micro_batches_and_rounds():
    assert bubble_share(1, 1) == 0
    assert bubble_share(4, 4) == 3 / 7
    assert bubble_share(4, 16) == 3 / 19
    assert bubble_share(4, 4, 4) == 3 / 19
