"""Models that wait on the host come back bit for bit, and are not on the devices meanwhile."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from distflow_jax.checkpoint.checkpointer import Checkpointer
from distflow_jax.config.upkeep_config import CheckpointConfig
from distflow_jax.dag.residency import Residency
from distflow_jax.layout import Layout
from distflow_jax.parallel import host_memory
from distflow_jax.parallel.mesh import MeshSizes, role_mesh
from distflow_jax.rollout.sampler import SamplerState
from distflow_jax.runtime.host_offload import Offload
from distflow_jax.training.state import TrainState

MESH = MeshSizes(4, 2)
SIZE = 1 << 12  # numbers in each tree
LAYOUTS = {"actor": MESH.layout, "reference": MESH.layout}

ACTOR = frozenset({("actor", "params"), ("actor", "moments")})
PARAMS = frozenset({("actor", "params")})
REFERENCE = frozenset({("reference", "params")})
SAMPLER = frozenset({("rollout", "params"), ("rollout", "cache")})
STAYS = {
    "sync": Residency(
        Layout("mesh"), PARAMS, frozenset({("rollout", "params")}), PARAMS, frozenset()
    ),
    "rollout": Residency(Layout("mesh"), SAMPLER, evict=SAMPLER, prefetch=PARAMS),
    "logp": Residency(MESH.layout, PARAMS, evict=PARAMS, prefetch=REFERENCE),
    "reference": Residency(MESH.layout, REFERENCE, evict=REFERENCE, prefetch=ACTOR),
    "train": Residency(MESH.layout, ACTOR, evict=ACTOR - PARAMS),
}


def tree(seed):
    layout = NamedSharding(role_mesh(MESH), PartitionSpec("fsdp"))
    values = np.random.default_rng(seed).normal(size=SIZE).astype(np.float32)
    return {"w": jax.device_put(values, layout)}


def first_states():
    count = jax.device_put(np.int32(0), NamedSharding(role_mesh(MESH), PartitionSpec()))
    return {"actor": TrainState(tree(0), tree(1), count), "reference": tree(2)}


@jax.jit
def mean(params):
    return params["w"].mean()


def predict(key):
    def runner(states, values):
        state = states[key]
        params = state.params if isinstance(state, TrainState) else state
        return {}, [mean(params)], {}

    return runner


def make_train():
    @jax.jit
    def step(state):
        moments = jax.tree.map(lambda m, w: 0.9 * m + w, state.opt_state, state.params)
        params = jax.tree.map(lambda w, m: w - 0.1 * m, state.params, moments)
        return TrainState(params, moments, state.count + 1)

    def runner(states, values):
        return {"actor": step(states["actor"])}, [], {"loss": mean(states["actor"].params)}

    return step, runner


def sample(states, values):
    state = states["rollout"]
    decode = jax.tree.map(lambda x: x + 1, state.decode)
    return {"rollout": dataclasses.replace(state, decode=decode)}, [mean(state.params)], {}


def on_device():
    return host_memory.bytes_by_kind().get("device", 0)


def steps(offload, count, watch=lambda name: None):
    """Some steps of a plan of four nodes; what they gave, the last states, the train program."""
    program, train = make_train()
    runners = {
        name: offload.wrap(name, key, runner)
        for name, key, runner in (
            ("rollout", "rollout", sample),
            ("logp", "actor", predict("actor")),
            ("reference", "reference", predict("reference")),
            ("train", "actor", train),
        )
    }
    states = {key: offload.adopt(key, state) for key, state in first_states().items()}
    given = []
    for _ in range(count):
        with offload.staying("sync", states):
            old = states.get("rollout")
            cache = new_cache() if old is None else old.decode
            copy = jax.tree.map(lambda x: x.copy(), states["actor"].params)
            states["rollout"] = SamplerState(copy, 0, cache)
        for name, runner in runners.items():
            kept, written, metrics = runner(states, [])
            states |= kept
            given += [float(x) for x in (*written, *metrics.values())]
            watch(name)
        offload.update(states)
    return given, states, program


def new_cache():
    return {"k": jnp.zeros(SIZE, jnp.float32)}


def values(state):
    return [np.asarray(x) for x in jax.tree.leaves(state)]


def test_results_are_equal_to_the_bit_and_nothing_compiles_again():
    plain, states, _ = steps(Offload({}, LAYOUTS, new_cache), 4)
    given, waiting, program = steps(Offload(STAYS, LAYOUTS, new_cache), 4)
    assert given == plain
    for key in ("actor", "reference"):
        for a, b in zip(values(states[key]), values(waiting[key]), strict=True):
            np.testing.assert_array_equal(a, b)
    assert program._cache_size() == 1


def test_the_devices_have_what_a_node_uses_and_what_comes_next():
    """In trees: each is 2 copies of SIZE floats, as tensor ranks hold the same."""
    before, one = on_device(), 2 * SIZE * 4
    seen = {}

    def watch(name):
        # after it: evicted items are gone, prefetched items are there
        seen[name] = round((on_device() - before) / one, 1)

    steps(Offload(STAYS, LAYOUTS, new_cache), 2, watch)
    # of the second step, in which the first one's leavings would show
    assert seen == {"rollout": 1.0, "logp": 1.0, "reference": 2.0, "train": 1.0}
    plain = {}

    def watch_plain(name):
        plain[name] = round((on_device() - before) / one, 1)

    steps(Offload({}, LAYOUTS, new_cache), 2, watch_plain)
    assert min(plain.values()) >= 4.5  # actor, moments, reference, sampler, half a tree of cache


def test_host_copies_do_not_pile_up():
    sizes = []
    steps(
        Offload(STAYS, LAYOUTS, new_cache),
        4,
        lambda name: sizes.append(host_memory.bytes_by_kind().get("pinned_host", 0)),
    )
    assert sizes[-4:] == sizes[-8:-4]
    assert max(sizes) <= 4 * 2 * SIZE * 4  # params, moments, reference, sampler: once each


def test_a_node_that_is_skipped_leaves_nothing_behind():
    """Prefetched items are evicted when another node needs the devices."""
    offload = Offload(STAYS, LAYOUTS, new_cache)
    states = {key: offload.adopt(key, state) for key, state in first_states().items()}
    logp = offload.wrap("logp", "actor", predict("actor"))
    logp(states, [])  # fetches the reference
    offload.enter("train")  # and not the reference's node
    held = {item: copies.device for item, copies in offload._copies.items()}
    assert {item for item, tree in held.items() if tree is not None} == ACTOR


def test_host_layouts_are_read_from_a_checkpoint(tmp_path):
    offload = Offload(STAYS, LAYOUTS, new_cache)
    state = first_states()["actor"]
    expected = values(state)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    saved = Checkpointer(tmp_path, CheckpointConfig())
    saved.save(1, {"actor": offload.adopt("actor", state)}, {})
    saved.wait()
    abstract = offload.abstract({"actor": shapes})
    _, restored, _ = saved.restore(1, abstract)
    saved.close()
    assert host_memory.on_host(restored["actor"].params)
    assert not host_memory.on_host(restored["actor"].count)
    for a, b in zip(expected, values(restored["actor"]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_platform_without_host_memory_is_refused(monkeypatch):
    class Memory:
        kind = "device"

    class Device:
        platform = "toy"

        def addressable_memories(self):
            return [Memory()]

        def default_memory(self):
            return Memory()

    monkeypatch.setattr(jax, "local_devices", lambda: [Device()])
    with pytest.raises(ValueError, match="needs pinned_host memory, but toy devices have device"):
        host_memory.check_host_memory("training.offload='idle'")
