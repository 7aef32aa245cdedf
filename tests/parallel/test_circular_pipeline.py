"""Layers dealt round the stages: every chunk gets to its stage, in permutations, and back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from support.tiny_model import mesh_of

from distflow_jax.parallel.circular_pipeline import collect, deal, matchings, rounds


@pytest.mark.parametrize("stages", range(1, 9))
@pytest.mark.parametrize("repeats", range(1, 9))
def test_perfect_matchings(stages, repeats):
    chunk, each = matchings(stages, repeats), np.arange(stages)
    assert sorted(chunk.flat) == list(range(stages * repeats))
    for of_stage, got in zip(chunk, rounds(stages, repeats), strict=True):
        np.testing.assert_array_equal(of_stage // repeats, each)  # of its own
        np.testing.assert_array_equal(np.sort(of_stage % stages), each)  # one to each
        assert set(zip(of_stage % stages, of_stage // stages, strict=True)) == set(
            zip(each, got, strict=True)
        )


@pytest.mark.parametrize("stages, repeats", [(2, 1), (2, 3), (4, 2), (4, 6)])
def test_dealt_and_collected(stages, repeats):
    """Two layers of a chunk: which ones a stage gets, and that all come back to their places."""
    size, axis = 2, "pipeline"
    layers = np.arange(size * stages * repeats, dtype=np.int32)
    spec = PartitionSpec(axis)

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh_of(1, 1, pipeline=stages),
        in_specs=(spec, spec),
        out_specs=(spec, spec),
        check_vma=False,
    )
    def there_and_back(number, layers):
        stage = number[0]
        dealt = deal(layers, stage, axis, stages, repeats)
        slot = jnp.asarray(np.argsort(rounds(stages, repeats), axis=0))[:, stage]
        by_round = dealt.reshape(repeats, size)[slot]
        return by_round[None], collect(by_round, stage, axis, stages, repeats)

    by_round, back = there_and_back(np.arange(stages, dtype=np.int32), layers)
    wanted = layers.reshape(repeats, stages, size).swapaxes(0, 1)
    np.testing.assert_array_equal(by_round, wanted)
    np.testing.assert_array_equal(back, layers)
