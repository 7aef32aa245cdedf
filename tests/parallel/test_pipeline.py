"""Layers that stages divide give what a plain scan over them gives, and so do their gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import mesh_of

from distflow_jax.parallel.pipeline import bubble_share, scan_layers
from distflow_jax.parallel.rules import constrain, sharding, use_mesh
from distflow_jax.programs import hlo

LAYERS, ROWS, LENGTH, WIDTH = 8, 8, 5, 16
MESHES = {
    "stage 2": dict(fsdp=1, tensor=1, stage=2),
    "stage 8": dict(fsdp=1, tensor=1, stage=8),
    "fsdp 2 x stage 2 x tensor 2": dict(fsdp=2, tensor=2, stage=2),
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
    weight = rng.normal(0, 0.3, (LAYERS, WIDTH, WIDTH)).astype(np.float32)
    x = rng.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
    rows = rng.normal(size=ROWS).astype(np.float32)
    return weight, x, rows


def loss(weight, x, rows, microbatches=0):
    shift = jnp.arange(LAYERS, dtype=jnp.float32) / LAYERS
    by_layer_and_row = shift[:, None, None] * jnp.cos(rows)[None, :, None]
    out, kept = scan_layers(
        body_of, x, rows, (weight, shift), by_layer_and_row, microbatches=microbatches
    )
    return jnp.sum(out**2) + jnp.sum(kept**2), (out, kept)


def on(axes, microbatches):
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
            function = functools.partial(loss, microbatches=microbatches)
            return jax.grad(function, argnums=(0, 1), has_aux=True)(*arguments)

    arguments = [jax.device_put(x, s) for x, s in zip(given(), layouts, strict=True)]
    compiled = run.lower(*arguments).compile()
    return jax.device_get(compiled(*arguments)), compiled.as_text()


@functools.cache
def plain():
    return jax.device_get(jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(*given()))


@pytest.mark.parametrize(
    "axes, microbatches",
    [
        ("stage 2", 8),
        ("fsdp 2 x stage 2 x tensor 2", 0),
        pytest.param("fsdp 2 x stage 2 x tensor 2", 4, marks=pytest.mark.slow),
        pytest.param("stage 2", 2, marks=pytest.mark.slow),
        pytest.param("stage 8", 0, marks=pytest.mark.slow),
    ],
)
def test_stages_give_what_one_device_gives(axes, microbatches):
    found, text = on(MESHES[axes], microbatches)
    for got, want in zip(*map(jax.tree.leaves, (found, plain())), strict=True):
        assert np.linalg.norm(got - want) < 1e-5 * np.linalg.norm(want)
    if MESHES[axes]["fsdp"] == MESHES[axes]["tensor"] == 1:
        assert_layers_stay(text)


def assert_layers_stay(text):
    """What goes from stage to stage are rows; weights and their gradients stay where they are."""
    found = hlo.read(text).collectives
    assert "collective-permute" in {one.kind for one in found}
    for one in found:
        assert one.bytes <= 64 or one.bytes % (4 * LENGTH * WIDTH) == 0, one


def test_a_mesh_without_stages_scans():
    weight, x, rows = given()
    got = jax.make_jaxpr(loss)(weight, x, rows)
    assert [eqn.primitive.name for eqn in got.eqns].count("scan") == 1
    assert "shard_map" not in str(got)


@pytest.mark.parametrize(
    "rows, microbatches, message",
    [
        (8, 3, r"3 micro-batches are no multiple of stage=2, .*; use 4"),
        (8, 6, r"8 rows of a data rank cannot be cut into 6 micro-batches; use one of \[2, 4, 8\]"),
        (7, 2, r"7 rows .* into 2 micro-batches; give it a multiple of 2 rows"),
    ],
)
def test_rows_that_do_not_divide_are_refused(rows, microbatches, message):
    weight, x, number = given()
    with use_mesh(mesh_of(1, 1, stage=2)), pytest.raises(ValueError, match=message):
        jax.eval_shape(
            functools.partial(loss, microbatches=microbatches), weight, x[:rows], number[:rows]
        )


def test_the_bubble_shrinks_with_the_micro_batches():
    assert bubble_share(1, 1) == 0
    assert bubble_share(4, 4) == 3 / 7
    assert bubble_share(4, 16) == 3 / 19
