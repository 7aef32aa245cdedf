"""The loop hands each stage what it reads, keeps what it declares, and nothing else."""

import contextlib

import pytest

from distflow_jax.coordinator.coordinator import merge_parts
from distflow_jax.dag.graph import Graph, Node, Region
from distflow_jax.dag.plan_walker import make_runner, run_step
from distflow_jax.dag.planner import plan
from distflow_jax.layout import Layout, Parts

HOST, MESH = Layout("host"), Layout("mesh", (("fsdp", 2),))
LAYOUTS = {"ACTOR": MESH, "ROLLOUT": HOST, "REWARD": HOST}


class Shelf:
    """Fields in a dict; a moved value shows how it moved."""

    def __init__(self, **given):
        self.values = {(None, field): value for field, value in given.items()}
        self.most = 0
        self.names = set()
        self.done = frozenset()

    def put(self, source, field, value):
        assert (source, field) not in self.values
        self.values[source, field] = value
        self.names.add((source, field))
        self.most = max(self.most, len(self.values))

    def get(self, edge):
        value = self.values[edge.source, edge.field]
        return value if edge.move == "stay" else f"{edge.move}({value})"

    def free(self, source, field):
        del self.values[source, field]

    def merged(self, metrics):
        """Parts as if there were one process."""
        return merge_parts(metrics)


class Names:
    def __init__(self):
        self.names = []

    @contextlib.contextmanager
    def span(self, name, **args):
        self.names.append(name)
        yield


def say(text):
    def stage(state, fields, options):
        words = ",".join(f"{key}={fields[key]}" for key in sorted(fields))
        return state, {"out": f"{text}[{words}]"}, {f"seen/{text}": len(fields)}

    return stage


def count(state, fields, options):
    return (state or 0) + options.get("by", 1), {}, {}


def runners(built, stages):
    return {unit.name: make_runner(unit, stages) for unit in built.units}


def run(nodes, stages, step=1, states=None, shelf=None, fuse=True):
    shelf = shelf or Shelf(question="p")
    spans = Names()
    built = plan(Graph("g", nodes), LAYOUTS, {"question"}, fuse=fuse)
    states, metrics = run_step(built, step, runners(built, stages), states or {}, shelf, spans.span)
    return states, metrics, shelf, spans.names


def chain():
    return [
        Node("a", "ROLLOUT", "COMPUTE", [], {"text": "question"}, {"out": "x"}),
        Node("b", "ACTOR", "COMPUTE", ["a"], ["x", "question"], {"out": "y"}),
        Node("c", "ACTOR", "COMPUTE", ["b"], {"left": "y", "right": "y"}, {"out": "z"}),
    ]


@pytest.mark.parametrize(
    "fuse, names, most",
    # of four values; prompt and x are gone when z comes. y never leaves a program of b and c
    [(False, ["a", "b", "c"], 3), (True, ["a", "b.c"], 2)],
)
def test_fields_flow_under_the_names_of_each_side_and_are_freed_after_their_last_reader(
    fuse, names, most
):
    seen = {}

    def last(state, fields, options):
        seen.update(fields)
        return state, {"out": None}, {}

    stages = {"a": say("A"), "b": say("B"), "c": last}
    states, metrics, shelf, spans = run(chain(), stages, fuse=fuse)
    b = "B[question=pack(p),x=pack(A[text=p])]"
    assert seen == {"left": b, "right": b}
    assert shelf.values == {}
    assert shelf.most == most
    assert ("b", "y") in shelf.names if not fuse else ("b", "y") not in shelf.names
    assert metrics == {"seen/A": 1, "seen/B": 2}
    assert spans == names
    assert states == {}  # stages without a state leave none


def test_nodes_of_one_model_share_its_state_and_the_callers_dict_stays():
    nodes = [
        Node("one", "ACTOR", "MODEL_INFERENCE", options={"by": 10}),
        Node("two", "ACTOR", "MODEL_TRAIN", deps=["one"]),
        Node("three", "ACTOR", "COMPUTE"),
    ]
    before = {"actor": 100, "elsewhere": 7}
    states, *_ = run(nodes, dict.fromkeys(("one", "two", "three"), count), states=before)
    assert states == {"actor": 111, "node:three": 1, "elsewhere": 7}
    assert before == {"actor": 100, "elsewhere": 7}


def test_a_conditional_node_runs_only_in_its_steps():
    nodes = [
        Node("a", "ROLLOUT", "COMPUTE", [], ["question"], {"out": "x"}, when={"every": 2}),
        Node("b", "ACTOR", "COMPUTE", ["a"], ["x"], {"out": "y"}, when={"every": 4}),
        Node("c", "ACTOR", "COMPUTE", ["b"], ["question"], {"out": "z"}),
    ]
    stages = {"a": say("A"), "b": say("B"), "c": say("C")}
    for step, ran in ((1, ["c"]), (2, ["a", "c"]), (4, ["a", "b", "c"])):
        _, _, shelf, spans = run(nodes, stages, step=step)
        assert spans == ran
        assert shelf.values == {}


@pytest.mark.parametrize(
    "fields, message",
    [
        ({}, "node 'a': .*missing .'out'.*not declared .."),
        ({"out": 1, "more": 2}, "not declared .'more'."),
        ({"x": 1}, "missing .'out'., not declared .'x'."),
    ],
)
def test_a_stage_writes_exactly_what_its_node_declares(fields, message):
    nodes = chain()[:1]
    with pytest.raises(ValueError, match=message):
        run(nodes, {"a": lambda state, *_: (state, fields, {})})


def test_two_nodes_may_not_report_one_metric():
    stages = {"a": say("same"), "b": say("same"), "c": say("C")}
    with pytest.raises(ValueError, match="one of the nodes 'b.c': .*seen/same"):
        run(chain(), stages)


def test_a_stage_cannot_change_the_options_of_its_node():
    def greedy(state, fields, options):
        options.clear()
        return state, {}, {}

    node = Node("a", "ACTOR", "COMPUTE", options={"by": 1})
    run([node], {"a": greedy})
    assert node.options == {"by": 1}


def test_a_rehearsal_runs_what_waits_on_empty_fields_and_keeps_nothing_of_it():
    seen = {}

    def train(state, fields, options):
        seen["train"] = fields
        return state + 1, {}, {"loss": 1}

    def values(state, fields, options):
        return state + 100, {"value": "v"}, {"values": 1}

    nodes = [
        Node("roll", "ROLLOUT", "COMPUTE", writes={"out": "x"}),
        Node("values", "ACTOR", "MODEL_INFERENCE", ["roll"], ["x"], ["value"], when={"every": 5}),
        Node("train", "ACTOR", "MODEL_TRAIN", ["values"], ["x", "value"], when={"every": 5}),
        Node("late", "REWARD", "COMPUTE", ["roll"], ["x"], when={"every": 5}),
    ]
    built = plan(Graph("g", nodes), LAYOUTS, {"question"})
    stages = {"roll": say("A"), "values": values, "train": train, "late": None}
    shelf = Shelf(question="p")
    states, metrics = run_step(
        built,
        1,
        runners(built, stages),
        {"actor": 0},
        shelf,
        Names().span,
        rehearse=lambda values: ["empty"] * len(values),
    )
    assert seen["train"] == {"x": "empty", "value": "empty"}
    assert states == {
        "actor": 1
    }  # the training stage's own affair: on empty fields it adds nothing
    assert metrics == {"seen/A": 0}
    assert shelf.values == {}
    seen.clear()
    run_step(built, 1, runners(built, stages), {"actor": 0}, Shelf(question="p"), Names().span)
    assert seen == {}


def run_region(stage, rounds):
    """(names of the nodes that ran, metrics) of a step whose region runs so many rounds."""
    nodes = [
        Node("a", "ROLLOUT", "COMPUTE", [], {"text": "question"}, {"out": "x"}),
        Node("b", "ACTOR", "COMPUTE", ["a"], ["x"], {"out": "y"}),
    ]
    left = iter([True] * rounds)

    class Rewritten(Shelf):
        def put(self, source, field, value):
            self.values[source, field] = value

    def next_round():
        shelf.put(None, "question", "p")
        return next(left, False)

    built = plan(Graph("g", nodes, [Region(["a"], "informative")]), LAYOUTS, {"question"})
    shelf, spans = Rewritten(prompt="p"), Names()
    stages = runners(built, {"a": stage, "b": say("B")})
    _, metrics = run_step(built, 1, stages, {}, shelf, spans.span, next_round)
    return spans.names, metrics


def test_a_region_runs_until_there_is_enough():
    counted = iter(range(10))

    def stage(state, fields, options):
        n = next(counted)
        numbers = ("perf/generate_calls", "rollout/prefix/hits", "reward/mean")
        return state, {"out": n}, dict.fromkeys(numbers, n)

    names, metrics = run_region(stage, 3)
    assert names == ["a", "a", "a", "b"]
    counts = {"perf/generate_calls": 3, "rollout/prefix/hits": 3}
    assert metrics == counts | {"reward/mean": 1.0, "seen/B": 1}


def merged_of_calls(values):
    """Metrics of responses, each of which made so many calls."""
    if max(values) > 9:
        raise RuntimeError("too many")
    means = {"environment/tool_calls": sum(values) / len(values)}
    return means | {"environment/turns/max": max(values), "reward/no_answer": values.count(0)}


@pytest.mark.parametrize("rounds", [[[4, 0]], [[4, 0], [1, 0, 0, 1]], [[2], [4, 0, 0], [0], [1]]])
def test_metrics_in_parts_are_those_of_the_responses_of_all_rounds(rounds):
    given = iter(rounds)

    def stage(state, fields, options):
        return state, {"out": 0}, {"a": Parts(tuple(next(given)), merged_of_calls)}

    _, metrics = run_region(stage, len(rounds))
    assert metrics == merged_of_calls(sum(rounds, [])) | {"seen/B": 1}


def test_an_error_of_a_rounds_parts_ends_the_step_before_the_next_round():
    given = iter([[1], [10], [1]])

    def stage(state, fields, options):
        return state, {"out": 0}, {"a": Parts(tuple(next(given)), merged_of_calls)}

    with pytest.raises(RuntimeError, match="too many"):
        run_region(stage, 3)
    assert list(given) == [[1]]


def test_nodes_that_ran_before_do_not_run_again():
    nodes = [
        Node("a", "ROLLOUT", "COMPUTE", [], {"text": "question"}, {"out": "x"}),
        Node("b", "ACTOR", "COMPUTE", ["a"], ["x"], {"out": "y"}),
    ]
    built = plan(Graph("g", nodes), LAYOUTS, {"question"})
    shelf, spans = Shelf(question="p"), Names()
    shelf.put("a", "x", "sampled")
    shelf.done = {"a"}
    stages = runners(built, {"a": None, "b": say("B")})
    _, metrics = run_step(built, 1, stages, {}, shelf, spans.span)
    assert spans.names == ["b"] and metrics == {"seen/B": 1}
    assert shelf.values == {}
