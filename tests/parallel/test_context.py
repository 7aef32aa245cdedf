"""Rows in parts: every token in one part, all parts with the same causal work, and back again."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_model import mesh_of

from distflow_jax.parallel import context_parallel
from distflow_jax.parallel.rules import rows_spec, use_mesh

ROWS, LENGTH = 6, 48
MESHES = {
    "fsdp 2 x context 4": dict(fsdp=2, tensor=1, context=4),
    "data 2 x context 2 x tensor 2": dict(fsdp=1, tensor=2, data=2, context=2),
    "context 8": dict(fsdp=1, tensor=1, context=8),
}


def on_mesh(axes, function, *arguments):
    """`function` compiled within the mesh; its arguments' rows are divided over the data ranks."""
    mesh = mesh_of(**axes)

    def run(*arguments):
        with use_mesh(mesh):
            return function(*arguments)

    spec = jax.sharding.PartitionSpec(*rows_spec(mesh)[1:])
    layout = jax.sharding.NamedSharding(mesh, spec)
    return jax.jit(run), [jax.device_put(x, layout) for x in arguments]


def places(parts):
    """[c, L / c]: of the tokens of each part in the row, piece by piece."""
    pieces = np.arange(LENGTH).reshape(2 * parts, -1)
    return np.stack([np.concatenate([pieces[i], pieces[2 * parts - 1 - i]]) for i in range(parts)])


def number_of_part(axes):
    """[R c]: (row, part) of each, in the order in which they lie on the devices."""
    ranks, parts = axes["fsdp"] * axes.get("data", 1), axes["context"]
    of_rank = np.arange(ROWS).reshape(ranks, -1)
    return [(row, part) for rows in of_rank for part in range(parts) for row in rows]


def test_parts_have_the_same_causal_work():
    for parts in (1, 2, 4, 8):
        work = (places(parts) + 1).sum(1)  # keys that a token sees
        assert (work == work[0]).all()


@pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES)
def test_rows_are_divided_and_united(axes):
    x = np.random.default_rng(0).normal(size=(ROWS, LENGTH, 3)).astype(np.float32)
    at, order = places(axes["context"]), number_of_part(axes)
    expected = np.stack([x[row, at[part]] for row, part in order])
    divide, given = on_mesh(axes, context_parallel.divide, x)
    divided = divide(*given)
    np.testing.assert_array_equal(divided, expected)
    # and each device holds its own part: nothing came from another
    of_device = {shard.data.shape[0] for shard in divided.addressable_shards}
    assert of_device == {ROWS // (axes["fsdp"] * axes.get("data", 1))}
    assert not re.search("all-|permute", divide.lower(*given).compile().as_text())
    united, given = on_mesh(axes, lambda x: context_parallel.unite(context_parallel.divide(x)), x)
    np.testing.assert_array_equal(united(*given), x)


@pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES)
def test_what_belongs_to_a_row_stands_beside_each_part(axes):
    x = np.random.default_rng(1).integers(0, 99, (ROWS, LENGTH), np.int32)
    at, order = places(axes["context"]), number_of_part(axes)
    run, given = on_mesh(
        axes,
        lambda x: (
            context_parallel.of_each_shard(x),
            context_parallel.in_gathered_order(x),
            context_parallel.sum_over_shards(context_parallel.of_each_shard(x)),
            context_parallel.located(x % LENGTH),
        ),
        x,
    )
    beside, gathered, total, (is_here, place) = run(*given)
    np.testing.assert_array_equal(beside, np.stack([x[row] for row, _ in order]))
    np.testing.assert_array_equal(gathered, np.stack([x[row, at.reshape(-1)] for row, _ in order]))
    np.testing.assert_array_equal(total, axes["context"] * x)
    for n, (row, part) in enumerate(order):
        wanted = x[row] % LENGTH
        np.testing.assert_array_equal(is_here[n], np.isin(wanted, at[part]))
        mine = np.asarray(is_here[n])
        np.testing.assert_array_equal(at[part][np.asarray(place[n])[mine]], wanted[mine])


def test_whole_rows_stay_as_they_are():
    x = jnp.ones((2, 5))
    for same in (
        context_parallel.divide,
        context_parallel.unite,
        context_parallel.of_each_shard,
        context_parallel.in_gathered_order,
    ):
        assert same(x) is x
    with use_mesh(mesh_of(2, 4)):
        assert context_parallel.divide(x) is x and context_parallel.context_shards() == 1


def test_a_length_that_does_not_divide_is_refused():
    with use_mesh(mesh_of(1, 1, context=4)):
        with pytest.raises(ValueError, match="rows of 44 tokens .* 2 x context=8 .* use 48 tokens"):
            context_parallel.divide(jnp.zeros((2, 44)))
