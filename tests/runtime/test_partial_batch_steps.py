"""Steps in partial batches on nodes that are plain functions: what one partial batch after the
other leaves behind."""

import contextlib

import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_model import prompt_of

from distflow_jax.batch import ONE_NUMBER
from distflow_jax.coordinator.assignment import PackingPlan
from distflow_jax.coordinator.coordinator import Coordinator
from distflow_jax.coordinator.field_store import FieldStore
from distflow_jax.coordinator.first_fit import RowLimits
from distflow_jax.dag.graph import Graph, Node
from distflow_jax.dag.plan_walker import make_runner
from distflow_jax.dag.planner import plan
from distflow_jax.data.step_columns import loader_columns
from distflow_jax.layout import Layout, Parts
from distflow_jax.parallel.mesh import MeshSizes, role_mesh
from distflow_jax.planning.partial_batches.partial_batch_programs import PartialBatchPrograms
from distflow_jax.planning.partial_batches.streamed_nodes import streamed_nodes, streamed_units
from distflow_jax.runtime.steps import PartialBatchSteps
from distflow_jax.stream.batches.group_facts import facts_of
from distflow_jax.stream.batches.partial_batches import PartialBatch
from distflow_jax.stream.host_nodes import Group

HOST, MESH = Layout("host"), MeshSizes(8, 1)
LAYOUTS = {"ACTOR": MESH.layout, "ROLLOUT": HOST, "REWARD": HOST}
SAMPLES = 4


def built():
    """A plan whose mask is written while the step trains, and whose advantages another program
    reads."""
    nodes = [
        Node(
            *("gen", "ROLLOUT", "MODEL_INFERENCE", [], ["uid", "prompt"]),
            ["response", "response_mask", "score"],
        ),
        Node(
            *("mask", "REWARD", "COMPUTE", ["gen"], ["response"], ["response_mask"]),
            fn="own:mask",
        ),
        Node(
            *("advantage", "ACTOR", "COMPUTE", ["mask"], ["rows", "score"], ["advantage"]),
            scope="group",
        ),
        Node("read", "ACTOR", "COMPUTE", ["advantage"], ["advantage"], [], scope="group"),
    ]
    return plan(Graph("g", nodes), LAYOUTS, ("uid", "prompt"), fuse=False)


def mask(state, fields, options):
    return state, {"response_mask": [np.arange(len(r)) > 0 for r in fields["response"]]}, {}


def advantage(state, fields, options):
    rows = fields["rows"]
    measured = {"tokens": jnp.sum(rows.response_mask)}
    return state, {"advantage": jnp.where(rows.response_mask, rows.tokens, 0)}, measured


def read(state, fields, options):
    return state, {}, {}


STAGES = {"mask": mask, "advantage": advantage, "read": read}


def group_of(counter, keep=None):
    """A group whose samples are complete; `keep` chose responses of it, and their order."""
    given = loader_columns([prompt_of(counter, np.arange(3))], SAMPLES)
    store = FieldStore.of_step({None: HOST, "gen": HOST, "mask": HOST}, given)
    responses = [np.full(2 + i, 10 * counter + i, np.int32) for i in range(SAMPLES)]
    store.put("gen", "response", responses)
    store.put("gen", "response_mask", [np.ones(len(r), bool) for r in responses])
    store.put("gen", "score", np.arange(SAMPLES, dtype=np.float32))
    if keep is not None:
        store.put("gen", "keep", keep)
    store.done = frozenset({"gen"})
    return Group(counter, store, set(), done=True)


class Prepared:
    """Hands out partial batches of a group each, and the groups together."""

    def __init__(self, groups):
        self._groups = groups

    def partial_batches(self, step):
        for number, group in enumerate(self._groups, 1):
            last = number == len(self._groups)
            partial_batch = PartialBatch(step, number, 0, (facts_of(group, 0),), last, last)
            yield partial_batch, group.store.copy()

    def fill(self, coordinator, step):
        stores = sorted(self._groups, key=lambda group: group.counter)
        first, *others = [group.store.copy() for group in stores]
        for other in others:
            first = joined(first, other)
        coordinator.use(first)

    def record(self, partial_batch, *, rows, room):
        assert 0 < rows <= room

    def measured(self):
        return {}


def joined(one, other):
    uid = np.concatenate([one.uid, other.uid])
    own = np.concatenate([one.own, len(one.uid) + other.own])
    store = FieldStore(one.writers, uid, own, done=one.done)
    for value, column in one.values.items():
        added = other.values[value]
        arrays = isinstance(column, np.ndarray)
        store.put(*value, np.concatenate([column, added]) if arrays else [*column, *added])
    return store


def steps(stages=STAGES):
    made = built()
    units = streamed_units(made, streamed_nodes(made, {}))
    assert units == made.units
    packing = PackingPlan(RowLimits(32, 8, shared=True), 1, 2, {MESH.layout: 2}, MESH.layout)
    meshes = {MESH.layout: role_mesh(MESH)}
    packs = {MESH.layout: {("gen", "rows"), ("gen", "score")}}
    writers = {None: HOST} | {task.node.id: task.layout for task in made.tasks}
    coordinators = [
        Coordinator(packing, meshes, writers, packs, {("gen", "logp"): ONE_NUMBER})
        for _ in range(2)
    ]
    runners = {unit.name: make_runner(unit, stages) for unit in units if unit.name != "gen"}
    of_all = (runners | {"gen": None}, *coordinators, Prepared([]))
    span = lambda name, **_: contextlib.nullcontext()  # noqa: E731
    return PartialBatchSteps(made, units, PartialBatchPrograms({}, {}), *of_all, span)


def run(partial_batches, groups):
    partial_batches._source = Prepared(groups)
    return partial_batches.run(1, {}, None)


def test_advantages_stand_beside_their_responses():
    """For any order of partial batches, and of the responses of a group after a node."""
    partial_batches = steps()
    run(partial_batches, [group_of(7), group_of(2, [2, 0, 0, 1])])
    samples = partial_batches._batch.samples()
    assert samples.uid.tolist() == [[2, 3], [2, 0]] + [[7, i] for i in range(SAMPLES)]
    wanted = [float(response[0]) for response in samples.response]
    assert partial_batches.advantages() == {"advantage": wanted}


def test_a_mask_that_a_streaming_node_writes_is_that_of_its_partial_batches_rows():
    partial_batches = steps()
    _, metrics = run(partial_batches, [group_of(1), group_of(2)])
    assert list(map(int, partial_batches._found.sequences)) == [SAMPLES] * 2
    assert float(metrics["tokens"]) == 1 + 2 + 3 + 4
    masks = partial_batches._batch.samples().response_mask
    assert [int(mask.sum()) for mask in masks] == [1, 2, 3, 4] * 2


def test_a_node_on_the_host_that_keeps_a_state_is_refused():
    def counts(state, fields, options):
        return (state or 0) + 1, *mask(None, fields, options)[1:]

    partial_batches = steps(STAGES | {"mask": counts})
    with pytest.raises(ValueError, match="node 'mask' keeps a state, .*: give it scope batch"):
        run(partial_batches, [group_of(1)])


def test_metrics_in_parts_are_those_of_the_responses_of_all_partial_batches():
    def merged(lengths):
        return {"mask/api_calls": max(lengths), "mask/mean": sum(lengths) / len(lengths)}

    def measured(state, fields, options):
        parts = Parts(tuple(map(len, fields["response"])), merged)
        return *mask(state, fields, options)[:2], {"mask": parts}

    groups = [group_of(7), group_of(2, [2, 0, 0, 1])]
    _, metrics = run(steps(STAGES | {"mask": measured}), groups)
    lengths = [len(r) for group in groups for r in group.store.columns["response"]]
    assert len(set(lengths)) > 1 and merged(lengths).items() <= metrics.items()
