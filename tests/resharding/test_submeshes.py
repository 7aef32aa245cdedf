"""Meshes on parts of every host: rows and weights cross between them whole, and side by side."""

import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support.row_places import spread
from support.waiting import HANG

from distflow_jax.batch import Prompt
from distflow_jax.coordinator.assignment import PackingPlan
from distflow_jax.coordinator.coordinator import Coordinator
from distflow_jax.coordinator.first_fit import RowLimits
from distflow_jax.dag.graph import Graph, Node
from distflow_jax.dag.plan_walker import make_runner, run_step
from distflow_jax.dag.planner import plan
from distflow_jax.data.step_columns import loader_columns
from distflow_jax.layout import Layout
from distflow_jax.observe.spans import Spans
from distflow_jax.parallel.mesh import (
    MeshSizes,
    replica_mesh,
    resolve_submesh,
    role_mesh,
    sampler_mesh,
)
from distflow_jax.parallel.rules import rows_spec
from distflow_jax.resharding.rows_all_to_all import RowsAcrossSubmeshes
from distflow_jax.resharding.weight_sync import WeightSync

MINIS, ROWS = 2, 10
SIZES = [(4, 1), (2, 2), (1, 4)]  # of a part of four devices


def lay(rows, places, ranks, room):
    """[K, ranks room, 5]: every row in its place."""
    out = np.zeros((MINIS, ranks * room, 5), np.float32)
    for (k, r, p), value in zip(places, rows, strict=True):
        out[k, r * room + p] = value
    return out


@pytest.mark.parametrize(
    "source, target",
    [
        *itertools.product([MeshSizes(*s, (0, 4)) for s in SIZES], [MeshSizes(2, 1, (6, 8))]),
        (MeshSizes(2, 1, (6, 8)), MeshSizes(4, 1, (0, 4))),
        (MeshSizes(1, 2, (6, 8)), MeshSizes(2, 2, (0, 4))),
        (MeshSizes(3, 1, (5, 8)), MeshSizes(4, 1, (0, 4))),
        (MeshSizes(2, 1, (0, 4), data=2), MeshSizes(1, 2, (4, 8), data=2)),
        (MeshSizes(2, 1, (0, 4), pipeline=2), MeshSizes(1, 1, (4, 8), pipeline=4)),
    ],
    ids=str,
)
def test_rows_cross_whole(source, target):
    values = np.random.default_rng(1).normal(size=(2 * ROWS - 3, 5)).astype(np.float32)
    rooms = [-(-ROWS // s.ranks) + 1 for s in (source, target)]
    places = [
        [(k, r, p) for k in range(MINIS) for _, r, p in spread(ROWS - 3 * k, s.ranks)]
        for s in (source, target)
    ]
    before, after = (
        lay(values, at, s.ranks, room)
        for at, s, room in zip(places, (source, target), rooms, strict=True)
    )
    layout = NamedSharding(role_mesh(source), rows_spec(role_mesh(source)))
    cross = RowsAcrossSubmeshes(role_mesh(source), role_mesh(target), tuple(rooms))
    batch = {"a": jax.device_put(before, layout), "b": jax.device_put(2 * before, layout)}
    moved, _ = cross(batch, list(zip(*places, strict=True)))
    for name, scale in (("a", 1), ("b", 2)):
        expected = NamedSharding(role_mesh(target), rows_spec(role_mesh(target)))
        assert moved[name].sharding == expected
        for shard in moved[name].addressable_shards:  # every copy of a rank, too
            np.testing.assert_array_equal(shard.data, scale * after[shard.index])


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
@pytest.mark.parametrize("part", [(0, 4), (5, 8), (7, 8)])
def test_weights_reach_the_devices_outside_of_the_part(part, tensor):
    devices = part[1] - part[0]
    mesh = role_mesh(MeshSizes(devices, 1, part))
    rng = np.random.default_rng(0)
    whole = {"wide": rng.normal(size=(24, 16)), "norm": rng.normal(size=12)}
    whole = {name: x.astype(np.float32) for name, x in whole.items()}
    params = jax.device_put(whole, NamedSharding(mesh, PartitionSpec("fsdp")))
    specs = {"wide": PartitionSpec(None, "tensor"), "norm": PartitionSpec()}
    replicas = replica_mesh(tensor)
    local = sampler_mesh(tensor)
    sync = WeightSync({n: NamedSharding(replicas, s) for n, s in specs.items()}, local, "bfloat16")
    weights = sync(params)
    for name, x in weights.items():
        assert x.sharding == NamedSharding(local, specs[name])
        assert x.dtype == jnp.bfloat16
        assert {shard.device for shard in x.addressable_shards} == set(jax.devices())
        for shard in x.addressable_shards:
            expected = whole[name][shard.index].astype(jnp.bfloat16)
            np.testing.assert_array_equal(np.asarray(shard.data), expected)
    # of its own: the next update overwrites the trainer's
    jax.tree.map(lambda x: x.delete(), params)
    jax.block_until_ready(jax.tree.map(lambda x: x + 1, weights))


def test_a_device_of_the_part_needs_no_room_beyond_its_own():
    """Where the sampler's width divides the part, what arrives by resharding is what stays."""
    mesh = role_mesh(MeshSizes(4, 1, (0, 4)))
    replicas = NamedSharding(replica_mesh(2), PartitionSpec("tensor"))
    sync = WeightSync({"w": replicas}, sampler_mesh(2), "float32")
    before = buffers(*jax.live_arrays())
    params = {"w": jax.device_put(np.ones(64, np.float32), NamedSharding(mesh, PartitionSpec()))}
    weights = sync(params)
    mine = buffers(weights["w"])
    assert len(mine) == 8 and sum(mine.values()) == 8 * 32 * 4
    # nothing that was on the way lives on beside them
    assert buffers(*jax.live_arrays()).items() <= (mine | before | buffers(params["w"])).items()


def buffers(*arrays):
    """{address: bytes} of what these arrays lie in."""
    shards = [shard.data for x in arrays for shard in x.addressable_shards]
    return {x.unsafe_buffer_pointer(): x.nbytes for x in shards}


def calling(mesh, call):
    """Compiled [K, R, L] -> the same plus what `call` gives, on every device of the mesh."""

    def program(x):
        return x + jax.pure_callback(call, jax.ShapeDtypeStruct((), jnp.float32), x.sum())

    spec = PartitionSpec(None, "fsdp")
    return jax.jit(
        jax.shard_map(program, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )


def test_a_step_goes_on_while_a_part_waits_for_another():
    """The first node ends when the third one has run, and the second reads what the first gives.

    A barrier between nodes, or a move that waits for its source, would end in the timeout. One
    device for the third: XLA:CPU runs programs of several devices one after the other.
    """
    first, second, third = MeshSizes(4, 1, (0, 4)), MeshSizes(2, 1, (4, 6)), MeshSizes(1, 1, (7, 8))
    layouts = {"ACTOR": first.layout, "REFERENCE": second.layout, "CRITIC": third.layout}
    nodes = [
        Node(
            "rollout", "ROLLOUT", "MODEL_INFERENCE", [], ["prompt"], ["response", "response_mask"]
        ),
        Node("first", "ACTOR", "MODEL_INFERENCE", ["rollout"], ["rows"], ["old_logp"]),
        Node("second", "REFERENCE", "MODEL_INFERENCE", ["first"], ["old_logp"], ["ref_logp"]),
        Node("third", "CRITIC", "MODEL_INFERENCE", ["second"], ["rows"], ["value"]),
        Node("last", "REWARD", "COMPUTE", ["third"], ["value", "ref_logp"], ["sum"]),
    ]
    hosts = dict.fromkeys(("ROLLOUT", "REWARD"), Layout("host"))
    built = plan(Graph("apart", nodes), layouts | hosts, {"prompt"})
    assert [task.node.id for task in built.tasks][1:4] == ["first", "second", "third"]

    coordinator = Coordinator(
        PackingPlan(
            RowLimits(tokens=16, sequences=2, shared=False),
            1,
            4,
            {first.layout: 2, second.layout: 4, third.layout: 8},
            first.layout,
        ),
        {sizes.layout: role_mesh(sizes) for sizes in (first, second, third)},
        {task.node.id: task.layout for task in built.tasks} | {None: Layout("host")},
        dict.fromkeys(layouts.values(), {("rollout", "rows")}),
    )
    ran, order = threading.Event(), []

    def wait(_):
        return np.float32(ran.wait(HANG))

    def announce(_):
        ran.set()
        return np.float32(1)

    def stage(name, compute):
        def run(state, fields, options):
            order.append((name, ran.is_set()))
            return state, compute(fields), {}

        return run

    waiting, announcing = calling(role_mesh(first), wait), calling(role_mesh(third), announce)
    tokens = [np.arange(1, 4, dtype=np.int32)] * 4
    stages = {
        "rollout": stage(
            "rollout", lambda f: {"response": tokens, "response_mask": [t > 0 for t in tokens]}
        ),
        "first": stage(
            "first", lambda f: {"old_logp": waiting(f["rows"].tokens.astype(jnp.float32))}
        ),
        "second": stage("second", lambda f: {"ref_logp": f["old_logp"] * 2}),
        "third": stage(
            "third", lambda f: {"value": announcing(f["rows"].tokens.astype(jnp.float32))}
        ),
        "last": stage("last", lambda f: {"sum": [*map(np.add, f["value"], f["ref_logp"])]}),
    }
    prompts = [Prompt(c, c, tokens[0], "", "s", None, {}) for c in range(4)]
    coordinator.begin(loader_columns(prompts, 1))
    got = []
    coordinator.free = lambda source, field: (
        got.extend(coordinator.store.values[source, field]) if field == "sum" else None
    )
    runners = {unit.name: make_runner(unit, stages) for unit in built.units}
    run_step(built, 1, runners, {}, coordinator, Spans().span)
    # all three were issued before the first had ended, and what it gave crossed whole
    assert order[:4] == [("rollout", False), ("first", False), ("second", False), ("third", False)]
    for values in got:
        np.testing.assert_array_equal(values, (tokens[0] + 1) + 2 * (tokens[0] + 1))
    assert len(got) == 4


def test_a_program_on_one_part_runs_while_another_part_waits_for_it():
    """The same for the way between two parts alone."""
    waiting, other = role_mesh(MeshSizes(4, 1, (0, 4))), role_mesh(MeshSizes(1, 1, (7, 8)))
    cross = RowsAcrossSubmeshes(waiting, role_mesh(MeshSizes(2, 1, (4, 6))), (1, 2))
    ran = threading.Event()

    def on(mesh, call):
        layout = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
        return calling(mesh, call), jax.device_put(np.zeros((1, 4, 2), np.float32), layout)

    def announce(x):
        ran.set()
        return np.float32(1)

    slow, x = on(waiting, lambda x: np.float32(ran.wait(HANG)))
    quick, y = on(other, announce)
    blocked = slow(x)
    pairs = [((0, r, 0), (0, r // 2, r % 2)) for r in range(4)]
    crossed, _ = cross(blocked, pairs)  # while the source is still waiting
    assert not ran.is_set()
    done = quick(y)
    np.testing.assert_array_equal(np.asarray(crossed), np.ones((1, 4, 2)))
    np.testing.assert_array_equal(np.asarray(done), np.ones((1, 4, 2)))


def test_all_devices_of_a_host_are_no_part():
    assert resolve_submesh("mesh.devices", "0:8", 8) is None
    assert resolve_submesh("mesh.devices", "", 8) is None
    assert resolve_submesh("mesh.devices", "2:8", 8) == (2, 8)
