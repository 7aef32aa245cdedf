"""A step's fields without a plan: a store, an assignment and a mesh are all that the moves take."""

import jax
import numpy as np
import pytest
from support.tiny_model import prompt_of

from distflow_jax.batch import ONE_NUMBER
from distflow_jax.coordinator import field_moves
from distflow_jax.coordinator.assignment import PackingPlan, Shares
from distflow_jax.coordinator.coordinator import Coordinator, repartitions
from distflow_jax.coordinator.field_store import FieldStore
from distflow_jax.coordinator.first_fit import RowLimits
from distflow_jax.data.step_columns import loader_columns
from distflow_jax.layout import Edge, Layout, move_between
from distflow_jax.parallel.mesh import MeshSizes, role_mesh

HOST, PAIRS = Layout("host"), Layout("host", (("hosts", 2),))
MESH, WIDE = MeshSizes(4, 2), MeshSizes(8, 1)
PLAN = PackingPlan(
    RowLimits(tokens=64, sequences=8, shared=True), 1, 3, {MESH.layout: 8, WIDE.layout: 4},
    MESH.layout,
)  # fmt: skip
SAMPLES = 4


def response_of(counter, sample):
    return np.full(1 + (3 * counter + sample) % 7, 10 * counter + sample, np.int32)


def store_of(sampler=HOST, process=0):
    """Three prompts, their responses, and a number per token and per response of each."""
    given = loader_columns([prompt_of(c, np.arange(2 + c)) for c in (1, 4, 5)], SAMPLES)
    store = FieldStore.of_step({None: sampler, "roll": sampler, "score": HOST}, given, process)
    responses = [response_of(*uid) for uid in given["uid"].tolist()]
    store.put("roll", "response", responses)
    store.put("roll", "response_mask", [np.ones(len(r), bool) for r in responses])
    store.put("roll", "logp", [np.sin(r, dtype=np.float32) for r in responses])
    store.put("score", "score", store.columns["uid"] @ np.array([100.0, 1.0]))
    return store


def edge(field, source, start, end):
    return Edge(field, source, "reader", start, end, move_between(start, end))


@pytest.mark.parametrize(
    "field, source, column", [("logp", "roll", ONE_NUMBER), ("score", "score", None)]
)
def test_a_field_that_was_packed_resharded_and_unpacked_is_what_it_was(field, source, column):
    store = store_of()
    shares = Shares.make(PLAN, field_moves.gathered_lengths(store), processes=1)
    meshes = {m.layout: role_mesh(m) for m in (MESH, WIDE)}
    there = edge(field, source, HOST, MESH.layout)
    packed = field_moves.pack(store, shares, there, meshes[MESH.layout], column)
    across = edge(field, source, MESH.layout, WIDE.layout)
    move = repartitions(PLAN, meshes)[MESH.layout, WIDE.layout]
    moved = field_moves.reshard(store, shares, across, packed, move)
    assert moved.sharding.mesh == meshes[WIDE.layout]
    back = field_moves.unpack(store, shares, edge(field, source, WIDE.layout, HOST), moved)
    assert isinstance(back, list if column else np.ndarray)  # as a node of the host writes it
    jax.tree.map(np.testing.assert_array_equal, list(back), list(store.columns[field]))


def test_rows_hold_every_response_once():
    store = store_of()
    shares = Shares.make(PLAN, field_moves.gathered_lengths(store), processes=1)
    rows = field_moves.pack_rows(store, shares, MESH.layout, role_mesh(MESH))
    valid = np.asarray(rows.valid)
    members = zip(np.asarray(rows.group)[valid], np.asarray(rows.member)[valid], strict=True)
    assert sorted(members) == [(g, m) for g in range(3) for m in range(SAMPLES)]
    tokens = np.asarray(rows.tokens)[np.asarray(rows.response_mask)]
    assert sorted(tokens) == sorted(np.concatenate(store.columns["response"]))


def test_a_copy_changes_apart():
    store = store_of()
    before = store.copy()
    store.put("score", "score", np.zeros(len(store.own)))
    store.put("roll", "keep", [1, 0, 0, 2] + [0] * 4 + [2, 1, 0, 0])
    store.free("roll", "logp")
    assert store.columns["uid"].tolist() == [[1, 0], [1, 3], [5, 1], [5, 0]]
    assert [r[0] for r in store.samples().response] == [10, 13, 51, 50]
    assert "logp" not in store.columns and ("roll", "logp") not in store.values
    assert before.columns["uid"].tolist() == [[c, s] for c in (1, 4, 5) for s in range(SAMPLES)]
    assert before.columns["score"][1] == 101 and len(before.values["roll", "logp"]) == 12


@pytest.mark.parametrize("process, counters", [(2, [1]), (3, [4, 5])])
def test_hosts_that_share_a_sampler_divide_its_prompts(process, counters):
    store = store_of(PAIRS, process)
    assert len(store.values["roll", "response"]) == 3 * SAMPLES
    assert store.columns["uid"].tolist() == [[c, s] for c in counters for s in range(SAMPLES)]
    assert [r[0] // 10 for r in store.columns["response"][::SAMPLES]] == counters


def test_a_column_has_an_entry_per_response():
    with pytest.raises(ValueError, match="field 'score' written by 'score' has 3 entries, one per"):
        store_of().put("score", "score", np.zeros(3))


def coordinator_of(store):
    """A coordinator that goes on with a store, whose nodes on a mesh have the id "actor"."""
    meshes = {MESH.layout: role_mesh(MESH)}
    coordinator = Coordinator(
        PLAN, meshes, store.writers | {"actor": MESH.layout}, {MESH.layout: ()}
    )
    coordinator.use(store)
    return coordinator


def test_advantages_are_means_over_the_tokens_that_the_policy_chose():
    store = store_of()
    store.put(
        "roll", "response_mask", [np.arange(len(t)) % 2 == 1 for t in store.samples().response]
    )
    coordinator = coordinator_of(store)
    assert coordinator.advantages() == {}
    shares, mesh = coordinator.shares, role_mesh(MESH)
    column = [np.cos(t * np.arange(len(t)), dtype=np.float32) for t in store.columns["response"]]
    means = [float(np.mean(x[1::2], dtype=np.float64)) if len(x) > 1 else None for x in column]
    assert None in means and len(set(means)) > 6
    store.put("score", "advantage", column)  # by a node on the host
    there = edge("advantage", "score", HOST, MESH.layout)
    per_token = field_moves.pack(store, shares, there, mesh, ONE_NUMBER)
    coordinator.free("score", "advantage")
    assert coordinator.advantages() == {"advantage": means}
    coordinator.put("actor", "advantage", per_token)  # by one on a mesh, with its last reader gone
    coordinator.free("actor", "advantage")
    assert ("actor", "advantage") not in store.values
    assert coordinator.advantages() == {"advantage": means}
    there = edge("score", "score", HOST, MESH.layout)
    coordinator.put("actor", "advantage", field_moves.pack(store, shares, there, mesh, None))
    assert coordinator.advantages()["advantage"] == store.columns["score"].tolist()
