"""Layers assigned round the ranks: every group gets to its rank, in permutations, and back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from support.tiny_model import mesh_of

from distflow_jax.parallel.circular_pipeline import (
    CircularPipeline,
    assign,
    collect,
    matchings,
    rounds,
)


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("repeats", range(1, 9))
def test_perfect_matchings(ranks, repeats):
    group, each = matchings(ranks, repeats), np.arange(ranks)
    assert sorted(group.flat) == list(range(ranks * repeats))
    for of_rank, received in zip(group, rounds(ranks, repeats), strict=True):
        np.testing.assert_array_equal(of_rank // repeats, each)  # of its own
        np.testing.assert_array_equal(np.sort(of_rank % ranks), each)  # one to each
        assert set(zip(of_rank % ranks, of_rank // ranks, strict=True)) == set(
            zip(each, received, strict=True)
        )


@pytest.mark.parametrize("ranks, repeats", [(2, 1), (2, 3), (4, 2), (4, 6)])
def test_assigned_and_collected(ranks, repeats):
    """Two layers of a group: which ones a rank gets, and that all come back to their places."""
    size, pipeline = 2, CircularPipeline("pipeline", ranks, repeats)
    layers = np.arange(size * ranks * repeats, dtype=np.int32)
    spec = PartitionSpec(pipeline.axis)

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh_of(1, 1, pipeline=ranks),
        in_specs=(spec, spec),
        out_specs=(spec, spec),
        check_vma=False,
    )
    def there_and_back(number, layers):
        rank = number[0]
        assigned = assign(layers, rank, pipeline)
        slot = jnp.asarray(np.argsort(rounds(ranks, repeats), axis=0))[:, rank]
        by_round = assigned.reshape(repeats, size)[slot]
        return by_round[None], collect(by_round, rank, pipeline)

    by_round, back = there_and_back(np.arange(ranks, dtype=np.int32), layers)
    wanted = layers.reshape(repeats, ranks, size).swapaxes(0, 1)
    np.testing.assert_array_equal(by_round, wanted)
    np.testing.assert_array_equal(back, layers)
