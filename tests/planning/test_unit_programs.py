"""Stages on a mesh are evaluated before step 1: what is wrong is said then, with the node's name;
what is right is one program per segment, equal to its nodes one by one.

Nightly: the programs of every built-in graph can be traced before step 1.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from configs import tiny
from distflow_jax.batch import Rows
from distflow_jax.config.config_dict import from_config_dict
from distflow_jax.config.run_config import Config
from distflow_jax.coordinator.assignment import PackingPlan
from distflow_jax.coordinator.first_fit import RowLimits
from distflow_jax.dag.graph import DATA, Graph, Node
from distflow_jax.dag.graph_yaml import built_in
from distflow_jax.dag.planner import plan
from distflow_jax.layout import Layout
from distflow_jax.observe.compilations import Compilations
from distflow_jax.parallel.mesh import MeshSizes, role_mesh
from distflow_jax.planning.field_specs import FieldSpecs
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.plan_run import plan_run
from distflow_jax.planning.program_table import bytes_of_fields, describe, fields_on_meshes, to_tree
from distflow_jax.planning.unit_programs import trace_plan
from distflow_jax.programs.costs import costs_of
from distflow_jax.runtime.build import make_meshes, trace
from distflow_jax.runtime.contexts import ContextFactory
from distflow_jax.stages.stage_context import ModelContext, TrainContext

HOST = Layout("host")
MESH, WIDE = MeshSizes(4, 2), MeshSizes(8, 1)
LAYOUTS = {"ACTOR": MESH.layout, "CRITIC": WIDE.layout, "ROLLOUT": HOST, "REWARD": HOST}
K, L, S = 2, 16, 4
ROWS = {MESH: 8, WIDE: 16}
TOKENS, SEQUENCES = (K, 8, L), (K, 8, S)
SPECS = FieldSpecs(
    PackingPlan(
        RowLimits(tokens=L, sequences=S, shared=True, group_size=0),
        K,
        4,
        {m.layout: rows // m.fsdp for m, rows in ROWS.items()},
        MESH.layout,
    ),
    {m.layout: role_mesh(m) for m in ROWS},
)
ROLL = Node("roll", "ROLLOUT", "COMPUTE", fn="a:b", writes=["logp", "score"], per_token=["logp"])


def on_mesh(name, deps=("roll",), reads=("score",), writes=(), role="ACTOR", **more):
    return Node(name, role, more.pop("type", "COMPUTE"), deps, reads, writes, fn="m:f", **more)


def traced(*nodes, states=None, fuse=True, **functions):
    made = plan(Graph("g", [ROLL, *nodes]), LAYOUTS, DATA["demonstrations"], fuse=fuse)
    return made, trace_plan(made, functions, states or {}, SPECS)


def test_fields_have_the_shapes_of_their_layout():
    seen = {}

    def look(state, fields, options):
        seen.update(fields)
        logp = jnp.where(fields["rows"].response_mask, fields["logp"], 0.0)
        return state, {"out": logp, "total": fields["score"].sum()}, {"mean": logp.mean()}

    def after(state, fields, options):
        return state, {}, {"wide": fields["out"].sum()}

    made, programs = traced(
        on_mesh("look", reads=["logp", "score", "rows"], writes=["out", "total"]),
        on_mesh("after", ["look"], ["out"], role="CRITIC"),
        look=look,
        after=after,
    )
    assert isinstance(seen["rows"], Rows)
    assert (seen["logp"].shape, seen["score"].shape) == (TOKENS, SEQUENCES)
    assert seen["rows"].tokens.dtype == jnp.int32
    (out,) = programs["after"].inputs
    assert out.shape == (K, ROWS[WIDE], L) and out.sharding.mesh.shape["fsdp"] == 8
    fields = fields_on_meshes(made, programs)
    table = {(f.field, str(f.layout)): f for f in fields}
    assert table["out", str(WIDE.layout)].ways == ("after (reshard)",)
    assert table["logp", str(MESH.layout)].ways == ("look (pack)",)
    assert table["logp", str(MESH.layout)].bytes == 4 * K * 8 * L
    assert table["total", str(MESH.layout)].text == "float32[]"
    costs = {name: costs_of(program.traced, None) for name, program in programs.items()}
    text = describe(fields, costs)
    assert all(word in text for word in ("look", "after", "reshard", "float32[2, 8, 16]"))
    assert json.loads(json.dumps(to_tree(fields, costs)))["fields"][0]["bytes"] > 0
    assert bytes_of_fields(fields)["look", "out"] == 4 * K * ROWS[WIDE] * L


def test_a_segment_is_one_program_that_keeps_to_itself_what_only_it_reads():
    def double(state, fields, options):
        return state, {"twice": 2.0 * fields["score"]}, {}

    def add(state, fields, options):
        return state, {"sum": fields["twice"] + fields["score"]}, {"add/max": fields["twice"].max()}

    nodes = [
        on_mesh("double", writes=["twice"]),
        on_mesh("add", ["double"], ["twice", "score"], ["sum"]),
        Node("end", "REWARD", "COMPUTE", ["add"], ["sum"], fn="a:b"),
    ]
    _, whole = traced(*nodes, double=double, add=add)
    score = jnp.ones(SEQUENCES, device=whole["double.add"].inputs[0].sharding)
    assert list(whole) == ["double.add"]
    assert whole["double.add"].unit.outputs == (("add", "sum"),)
    whole["double.add"].compile()
    _, (total,), metrics = whole["double.add"]({}, [score])
    np.testing.assert_array_equal(total, 3 * np.ones(SEQUENCES))
    assert float(metrics["add/max"]) == 2
    _, parts = traced(*nodes, fuse=False, double=double, add=add)
    assert list(parts) == ["double", "add"]


def test_a_program_for_costs_is_never_the_one_that_runs():
    def double(state, fields, options):
        return state, {"twice": 2 * fields["score"]}, {}

    nodes = [
        on_mesh("double", writes=["twice"]),
        Node("end", "REWARD", "COMPUTE", ["double"], ["twice"], fn="a:b"),
    ]
    _, programs = traced(*nodes, double=double)
    program = programs["double"]
    costs = program.compile(for_costs=True)
    assert program.compile(for_costs=True) is costs
    runs = program.compile()
    assert runs is not costs
    # once it is there it gives the costs too: nothing is compiled twice
    assert program.compile() is runs and program.compile(for_costs=True) is runs


def test_a_state_of_ones_own_needs_no_first_value_and_compiles_before_the_first_step():
    def count(state, fields, options):
        state = options["start"] if state is None else state + 1
        return state, {}, {"count": state}

    _, programs = traced(on_mesh("count", options={"start": 5.0}), count=count)
    program = programs["count"]
    program.compile()
    score = jnp.ones(SEQUENCES, device=program.inputs[0].sharding)
    compilations, states, seen = Compilations(), {}, []
    for _ in range(3):
        kept, _, metrics = program(states, [score])
        states |= kept
        seen.append(float(metrics["count"]))
    kept, _, metrics = program({"node:count": np.float32(9)}, [score])  # from a checkpoint
    assert (seen, float(kept["node:count"])) == ([5, 6, 7], 10)
    assert compilations.take() == 0
    compilations.close()


def test_what_a_node_leaves_of_its_state_is_not_donated():
    """So that another state may hold the same array."""

    def train(state, fields, options):
        return {"table": state["table"], "sum": state["sum"] + fields["score"].sum()}, {}, {}

    whole = NamedSharding(SPECS.meshes[MESH.layout], PartitionSpec())
    state = {"table": np.arange(4.0, dtype=np.float32), "sum": np.float32(0)}
    state = jax.device_put(state, whole)
    specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), state)
    node = on_mesh("train", type="MODEL_TRAIN")
    _, programs = traced(node, states={"actor": specs}, train=train)
    program = programs["train"]
    program.compile()
    score = jnp.ones(SEQUENCES, device=program.inputs[0].sharding)
    kept, _, _ = program({"actor": state}, [score])
    assert kept["actor"]["table"] is state["table"] and not state["table"].is_deleted()
    assert state["sum"].is_deleted()
    kept, _, _ = program(kept, [score])
    assert float(kept["actor"]["sum"]) == 2 * np.prod(SEQUENCES)


def needs_values(state, fields, options):
    return state, {}, {"a": 1.0 if fields["score"].sum() > 0 else 2.0}


def uses_numpy(state, fields, options):
    return state, {}, {"a": np.asarray(fields["score"]).mean()}


def raises(state, fields, options):
    raise KeyError("half_length")


def grows(state, fields, options):
    state = jnp.zeros(1) if state is None else jnp.zeros(state.shape[0] + 1)
    return state, {}, {}


def other_shape(state, fields, options):
    return state, {"out": fields["score"].sum(-1)}, {}


def no_scalar(state, fields, options):
    return state, {}, {"a": fields["score"]}


def other_state(state, fields, options):
    return jax.tree.map(lambda x: x + 1, state), {}, {}


@pytest.mark.parametrize(
    "function, more, message",
    [
        (needs_values, {}, "node 'a': m:f needs the values of its fields, but functions on a mesh"),
        (uses_numpy, {}, "use jax.numpy and no `if` on values, or run the node on the host"),
        (raises, {}, "node 'a': m:f raised KeyError: 'half_length' .*test_unit_programs.py, line"),
        (grows, {}, r"node 'a': its state changes from float32\[1\] to float32\[2\]"),
        (other_shape, {"writes": ["out"]}, r"writes 'out' as float32\[2,8\], but a field"),
        (no_scalar, {}, r"metric 'a' has shape \(2, 8, 4\), but a metric is one number"),
        (other_state, {"type": "MODEL_INFERENCE"}, "returns a changed state of model 'actor'"),
    ],
)
def test_what_cannot_be_compiled_is_said_with_the_node(function, more, message):
    nodes = [on_mesh("a", **more)]
    if "writes" in more:
        nodes.append(Node("b", "REWARD", "COMPUTE", ["a"], ["out"], fn="a:b"))
    states = {"actor": {"w": jax.ShapeDtypeStruct((4,), jnp.float32)}}
    with pytest.raises(ValueError, match=message) as caught:
        traced(*nodes, states=states, a=function)
    assert "\n" not in str(caught.value)


def planned(**overrides):
    config = tiny.get_config()
    config.model.source = "random:llama?hidden=32&layers=1&heads=4&kv_heads=2&mlp=64&vocab=512"
    config.mesh.tensor = 2
    config.update_from_flattened_dict(overrides)
    return plan_run(from_config_dict(Config, config), Machine.current())


def slow_unless(names):
    for name in sorted(built_in()):
        yield pytest.param(name, marks=[] if name in names else [pytest.mark.slow])


@pytest.mark.parametrize(
    "name", list(slow_unless({"ppo", "remax", "dpo", "kto", "reward_model", "sft"}))
)
def test_every_built_in_graph_can_be_traced(name):
    made = planned(dag=name)
    programs = trace(made)
    assert list(programs) == [u.name for u in made.plan.units if u.layout.kind == "mesh"]
    for program in programs.values():
        costs = costs_of(program.traced, None)
        assert costs.unbounded == ()
        models = {t.node.type for t in program.unit.tasks} & {"MODEL_TRAIN", "MODEL_INFERENCE"}
        assert (costs.flops > 0) == bool(models)


def test_specs_on_another_mesh_follow_from_those_of_one():
    """Equal to those traced there; a field without rows is traced again."""
    first = trace(planned(dag="ppo"))
    other = planned(**{"dag": "ppo", "mesh.tensor": 1})
    traced_there, found = trace(other), trace(other, first)
    assert list(found) == list(traced_there)
    for name, program in found.items():
        there = traced_there[name]
        assert program.traced is None is not there.traced
        for part in ("inputs", "outputs", "given_states"):
            assert getattr(program, part) == getattr(there, part), (name, part)

    def total(state, fields, options):
        return state, {"total": fields["score"].sum()}, {}

    def after(state, fields, options):
        return state, {}, {"double": 2.0 * fields["total"]}

    nodes = on_mesh("sums", writes=["total"]), on_mesh("after", ["sums"], ["total"])
    made, programs = traced(*nodes, fuse=False, sums=total, after=after)
    again = trace_plan(made, {"sums": total, "after": after}, {}, SPECS, like=programs)
    assert again["sums"].traced is not None is again["after"].traced


@pytest.mark.parametrize(("name", "wanted"), [("dpo", 1.0), ("online_dpo", 0.5), ("grpo", 0.5)])
def test_logits_are_divided_by_the_temperature_of_a_sampler(name, wanted):
    """Where nothing is sampled there is none, whatever the config says."""
    overrides = {"dag": name, "rollout.temperature": 0.5, "algorithm.kl_coef": 0.1}
    run = planned(**overrides | ({} if name == "grpo" else {"algorithm.kl_coef": 0.0}))
    factory = ContextFactory(run, make_meshes(run.sizes))
    contexts = [factory.of(t) for t in run.plan.tasks if t.layout.kind == "mesh"]
    found = {c.temperature for c in contexts if isinstance(c, ModelContext | TrainContext)}
    assert found == {wanted}


def test_a_fused_program_gives_what_its_nodes_give_one_by_one():
    """Old and reference log-probs and values; norm-relative 1e-6."""
    overrides = {"dag": "ppo", "algorithm.kl_coef": 0.1, "training.mini_batches": 2}
    fused, apart = (trace(planned(**overrides, **{"training.fuse": f})) for f in (True, False))
    names = ["old_logp", "values", "reference"]
    whole = fused[".".join(names)]
    rng = np.random.default_rng(0)

    def fill(spec):
        if spec.dtype == jnp.bool_:
            values = rng.random(spec.shape) < 0.5
        elif spec.dtype == jnp.int32:
            values = rng.integers(0, 4, spec.shape)
        else:
            values = 0.1 * rng.standard_normal(spec.shape)
        return jax.device_put(values.astype(spec.dtype), spec.sharding)

    states = jax.tree.map(fill, whole.given_states)
    values = [jax.tree.map(fill, spec) for spec in whole.inputs]
    whole.compile()
    _, together, _ = whole(states, values)
    for name, got in zip(names, together, strict=True):
        program = apart[name]
        program.compile()
        _, (alone,), _ = program(states, values[: len(program.inputs)])
        difference = np.linalg.norm(np.asarray(got) - np.asarray(alone))
        assert difference <= 1e-6 * np.linalg.norm(np.asarray(alone)), name
        assert np.abs(np.asarray(alone)).max() > 0
