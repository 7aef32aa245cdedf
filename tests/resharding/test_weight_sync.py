"""Weights to the samplers in chunks: the same numbers, whatever the mesh, in little memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support.tiny_model import MIXTURE, TINY, assert_same_arrays, random_params

from distflow_jax.config.training_config import LoraConfig
from distflow_jax.models import lora
from distflow_jax.models.decoder_config import adapted, without_adapters
from distflow_jax.models.parameters import param_shardings
from distflow_jax.models.sampler_layout import SamplerLayout
from distflow_jax.observe.compilations import Compilations
from distflow_jax.parallel.host_memory import buffers
from distflow_jax.parallel.mesh import MeshSizes, replica_mesh, role_mesh, sampler_mesh
from distflow_jax.programs.costs import costs_of
from distflow_jax.resharding.layer_chunks import LayerChunks
from distflow_jax.resharding.weight_sync import WeightSync
from distflow_jax.rollout.sampler import SamplerState, update_weights

FOUR = dataclasses.replace(TINY, num_layers=4, tie_embeddings=False)
FIVE = dataclasses.replace(TINY, num_layers=5)
LORA = LoraConfig(rank=2, alpha=6.0)


def sync_of(
    model, *, tensor=2, dtype="bfloat16", form=("stacked", "auto"), chunk_bytes=1, submesh=None
):
    """By default one layer of each stage at a time."""
    model = without_adapters(model)
    return WeightSync(
        param_shardings(model, replica_mesh(tensor, submesh=submesh)),
        sampler_mesh(tensor, submesh=submesh),
        dtype,
        SamplerLayout(model, "cpu", *form),
        functools.partial(lora.merged, scale=LORA.scale),
        chunk_bytes=chunk_bytes,
    )


def placed(model, sizes, seed=1):
    params = random_params(model, seed)
    return jax.device_put(params, param_shardings(model, role_mesh(sizes)))


@pytest.mark.parametrize(
    ("model", "sizes", "dtype", "form"),
    [
        (FOUR, MeshSizes(1, 2, pipeline=4), "bfloat16", ("stacked", "int8")),
        (FOUR, MeshSizes(1, 2, data=2, context=2), "bfloat16", ("apart", "int8")),
        (FOUR, MeshSizes(1, 1, (1, 3), pipeline=2), "bfloat16", ("apart", "auto")),
        (FOUR, MeshSizes(2, 2, (0, 4)), "bfloat16", ("turned", "int8")),
        (MIXTURE, MeshSizes(2, 1, expert=4), "float32", ("turned", "auto")),
    ],
    ids=["stages", "copies and context", "stages of a part", "a part", "experts"],
)
def test_weights_are_those_of_the_trainer_to_the_bit(model, sizes, dtype, form):
    sync = sync_of(model, dtype=dtype, form=form)
    local = sampler_mesh(2)
    layouts = param_shardings(model, local)
    cast = jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)), random_params(model, 1))
    want = SamplerLayout(model, "cpu", *form).convert_placed(jax.device_put(cast, layouts))
    given = placed(model, sizes)
    assert_same_arrays(sync(given), want)
    assert [n for _, n in sync.programs(given)][-1] == model.num_layers // sizes.pipeline
    # again: other values, no other program
    counter = Compilations()
    weights = sync(placed(model, sizes, seed=2))
    sync.temporaries(given)
    assert counter.take() == 0, counter.names()
    counter.close()
    cast = jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)), random_params(model, 2))
    placed_again = jax.device_put(cast, layouts)
    assert_same_arrays(weights, SamplerLayout(model, "cpu", *form).convert_placed(placed_again))


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 30])
@pytest.mark.parametrize(
    ("sizes", "submesh", "form"),
    [
        (MeshSizes(2, 2, (0, 4)), (4, 8), ("stacked", "auto")),
        (MeshSizes(2, 1, (2, 4)), (4, 8), ("apart", "int8")),
        (MeshSizes(2, 2, (4, 8)), (0, 2), ("turned", "auto")),
        (MeshSizes(2, 2, (0, 4)), (0, 4), ("stacked", "auto")),
    ],
    ids=str,
)
def test_samplers_on_a_part_get_them_too(sizes, submesh, form, chunk_bytes):
    """Other devices than the trainer's, or the same ones; at once, or by way of the host."""
    sync = sync_of(FOUR, form=form, submesh=submesh, chunk_bytes=chunk_bytes)
    local = sampler_mesh(2, submesh=submesh)
    cast = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_params(FOUR, 1))
    given = jax.device_put(cast, param_shardings(FOUR, local))
    of_sampler = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(given))
    want = SamplerLayout(FOUR, "cpu", *form).convert_placed(given)
    trained = placed(FOUR, sizes)
    assert_same_arrays(sync(trained), want)
    if submesh != sizes.submesh:
        left = sync.leave(trained)
        jax.tree.map(lambda x: x.delete(), trained)  # an update may follow at once
        # one copy for all samplers of a host, beside the devices
        assert left.nbytes == 2 * of_sampler
        assert {x.sharding.memory_kind for x in left.arrays} == {"pinned_host"}
        assert_same_arrays(sync.arrive(left), want)


@pytest.mark.parametrize("sizes", [MeshSizes(2, 2, pipeline=2), MeshSizes(2, 1, (5, 7))], ids=str)
def test_adapters_are_merged_piece_by_piece(sizes):
    model = adapted(FOUR, LORA)
    params = jax.tree.map(lambda x: x + 0.1, placed(model, sizes))
    assert_same_arrays(sync_of(model)(params), sync_of(model, chunk_bytes=1 << 30)(params))


def test_pieces_that_do_not_divide_the_layers():
    """Five layers, three in a chunk: the second begins with a layer that was there already."""
    params = placed(FIVE, MeshSizes(4, 2))
    layer = sum(x.nbytes for x in jax.tree.leaves(params["layers"])) // 5 // 4  # bfloat16, tensor 2
    sync = sync_of(FIVE, chunk_bytes=7 * layer // 2)
    assert [n for _, n in sync.programs(params)][-1] == 2
    assert_same_arrays(sync(params), sync_of(FIVE, chunk_bytes=1 << 30)(params))


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("most", [1, 3, 4, 6, 100])
def test_what_is_taken_and_put_back(stages, most):
    x = jnp.arange(14 * 3, dtype=jnp.int32).reshape(14, 3)
    chunks, out = LayerChunks.of_at_most(14, stages, most), jnp.zeros_like(x)
    assert stages <= stages * chunks.size <= max(stages, most)
    numbers = []
    for start in chunks.starts:
        chunk = chunks.take(x, start)
        np.testing.assert_array_equal(chunk, x[np.array(chunks.layer_numbers(start))])
        numbers += chunks.layer_numbers(start)
        out = chunks.put(out, chunk, start)
    assert set(numbers) == set(range(14))
    np.testing.assert_array_equal(out, x)


def test_axes_that_end_within_each_other():
    """3 x 2 devices, of which samplers take pairs: no mesh has the axes of both."""
    mesh = role_mesh(MeshSizes(2, 3, (0, 6)))
    whole = np.random.default_rng(0).normal(size=(24, 12)).astype(np.float32)
    given = jax.device_put(whole, NamedSharding(mesh, PartitionSpec("fsdp", "tensor")))
    layout = NamedSharding(replica_mesh(2), PartitionSpec(None, "tensor"))
    sync = WeightSync({"w": layout}, sampler_mesh(2), "float32")
    np.testing.assert_array_equal(sync({"w": given})["w"], whole)


# -- memory and traffic ----------------------------------------------------------------------------

DEEP = dataclasses.replace(TINY, num_layers=16, hidden_size=64, mlp_size=256)


@pytest.mark.parametrize("form", [("stacked", "auto"), ("apart", "int8")], ids=str)
def test_a_sync_takes_little_beside_the_weights(form):
    before = buffers(jax.live_arrays()).keys()
    params = placed(DEEP, MeshSizes(4, 2))
    sync = sync_of(DEEP, dtype="float32", form=form)
    weights = sum(x.nbytes for x in jax.tree.leaves(params)) // 2  # float32, tensor 2
    held = sync(params)
    assert sync.temporaries(params) < weights / 4
    # nothing of it lives on, and what came is not the trainer's
    kept = buffers([*jax.tree.leaves(held), *jax.tree.leaves(params)])
    assert len(kept) == len(buffers(jax.tree.leaves(held))) + len(buffers(jax.tree.leaves(params)))
    assert buffers(jax.live_arrays()).keys() - before <= kept.keys()


@pytest.mark.parametrize("sizes", [MeshSizes(4, 2), MeshSizes(2, 2, pipeline=2)], ids=str)
def test_nothing_is_gathered_that_is_not_kept(sizes):
    """All-gathers give what stays, where two dims are gathered half of it before; nothing is
    summed, which is how XLA gives everybody all."""
    model = dataclasses.replace(FOUR, num_kv_heads=4)
    params = placed(model, sizes)
    sync = sync_of(model, tensor=4, dtype="float32")
    kinds: dict[str, float] = {}
    for traced, times in sync.programs(params):
        costs = costs_of(traced, traced.lower().compile())
        for kind, size in costs.collective_bytes.items():
            kinds[kind] = kinds.get(kind, 0.0) + times * size
    held = sum(
        s.data.nbytes for x in jax.tree.leaves(sync(params)) for s in x.addressable_shards[:1]
    )
    assert kinds.pop("all-gather") <= (1.5 if sizes.pipeline > 1 else 1) * held
    assert set(kinds) <= {"all-to-all", "collective-permute"} and sum(kinds.values()) <= held


def test_old_weights_are_gone_before_new_ones_come():
    given = placed(TINY, MeshSizes(4, 2))
    sync = sync_of(TINY)
    state = SamplerState(sync(given), 0, None)
    old = jax.tree.leaves(state.params)

    def watched(params):
        assert all(x.is_deleted() for x in old)
        return sync(params)

    state = update_weights(state, watched, given, 1)
    assert state.version == 1 and not any(x.is_deleted() for x in jax.tree.leaves(state.params))
