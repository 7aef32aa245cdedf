"""Collectives of compiled programs, by the mesh axes they go over."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from support.tiny_model import mesh_of
from support.training_programs import MICRO, MINI_BATCHES, MODEL, ROWS, TOKENS, trace

from distflow_jax.programs.costs import costs_of
from distflow_jax.programs.hlo import Collective
from distflow_jax.programs.traffic import UNKNOWN, bytes_by_axes, traffic_of

MESH = {"fsdp": 2, "tensor": 2}


def test_collectives_are_summed_by_what_they_go_over():
    found = traffic_of(
        [
            Collective("all-gather", 8.0, 3, "{{0,1},{2,3}}"),
            Collective("all-gather", 2.0, 1, "{{0,1},{2,3}}"),
            Collective("all-reduce", 5.0, 2, "[2,2]<=[2,2]T(1,0)"),
            Collective("all-reduce", 5.0, 1, "[2,2]<=[2,2]T(1,0)", overlapped=True),
            Collective("collective-permute", 7.0, 1, "{{0,0},{1,1}}"),  # nothing moves
            Collective("all-to-all", 1.0, 1, ""),
        ],
        MESH,
    )
    shown = [(t.kind, t.axes, t.overlapped, t.bytes, t.times) for t in found]
    assert shown == [
        ("all-gather", ("tensor",), False, 26.0, 4),
        ("all-reduce", ("fsdp",), False, 10.0, 2),
        ("all-reduce", ("fsdp",), True, 5.0, 1),
        ("all-to-all", UNKNOWN, False, 1.0, 1),
    ]
    assert bytes_by_axes(found) == {
        "tensor": {"all-gather": 26.0},
        "fsdp": {"all-reduce": 15.0},
        "?": {"all-to-all": 1.0},
    }


def test_groups_go_by_the_numbers_of_the_devices():
    one = Collective("all-gather", 8.0, 1, "{{0,1},{2,3}}")
    (found,) = traffic_of([one], MESH, np.array([4, 5, 12, 13]))
    assert found.groups.tolist() == [[4, 5], [12, 13]] and found.axes == ("tensor",)


def test_axes_of_a_compiled_program():
    mesh = mesh_of(2, 2)

    def local(x):
        x = jax.lax.psum(x, "tensor")
        return jax.lax.all_gather(jnp.tanh(x), "fsdp", axis=0, tiled=True)

    f = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=PartitionSpec("fsdp"),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    x = jax.ShapeDtypeStruct(
        (64, 32), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("fsdp"))
    )
    traced = jax.jit(f).trace(x)
    costs = costs_of(traced, traced.lower().compile(), dict(mesh.shape))
    assert bytes_by_axes(costs.traffic) == {
        "tensor": {"all-reduce": 4.0 * 32 * 32},
        "fsdp": {"all-gather": 4.0 * 64 * 32},
    }
    assert costs.to_tree()["bytes_by_axes"] == bytes_by_axes(costs.traffic)


def test_parameters_are_gathered_over_fsdp_and_the_stream_over_tensor():
    mesh = mesh_of(2, 2)
    traced = trace("logp", fsdp=2, tensor=2)
    costs = costs_of(traced, traced.lower().compile(), dict(mesh.shape))
    found = bytes_by_axes(costs.traffic)
    assert UNKNOWN[0] not in found
    assert found["fsdp"]["all-gather"] > 0 and found["tensor"]["all-reduce"] > 0
    # before attention and MLP of each layer, and before the head
    microbatches = MINI_BATCHES * ROWS // (2 * MICRO)
    stream = 4 * MICRO * TOKENS * MODEL.hidden_size
    assert found["tensor"]["all-gather"] == microbatches * (2 * MODEL.num_layers + 1) * stream
