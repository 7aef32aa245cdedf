"""Lies about the results of nodes: none of them counts, and each names its worker."""

import contextlib
import threading

import numpy as np
import pytest
from support.counted_buffers import LIMITS
from support.tiny_model import prompt_of
from support.waiting import HANG

from distflow_jax.coordinator.column_codec import encode
from distflow_jax.coordinator.field_store import FieldStore
from distflow_jax.coordinator.rounds import joined
from distflow_jax.dag.graph import Graph, Node
from distflow_jax.dag.plan_walker import make_runner
from distflow_jax.dag.planner import plan
from distflow_jax.layout import OF_RESPONSE, Layout, Parts
from distflow_jax.rollout.response_checks import RefusedAnswer
from distflow_jax.stream.border import check_numbers, check_parts
from distflow_jax.stream.frames.frames import Frame
from distflow_jax.stream.frames.node_frames import read_result, result_frame
from distflow_jax.stream.host_nodes import Group, NodesAhead, units_ahead
from distflow_jax.stream.host_thread import HostThread
from distflow_jax.stream.links.buffer_service import BufferService
from distflow_jax.stream.sample_requests import SampleRequests
from distflow_jax.stream.schedule import Rule
from distflow_jax.stream.task_buffer import TaskBuffer
from distflow_jax.stream.wire.calls import Refused

HOST, MESH = Layout("host"), Layout("mesh", (("fsdp", 2),))
KEY, LENGTHS = (4, "score"), (3, 5)


def units(mark="mark", sums=None):
    """A score and a weight of each token, which go to devices, and marks, which stay."""
    nodes = [
        Node(
            *("gen", "ROLLOUT", "MODEL_INFERENCE", [], ["uid", "prompt"]),
            ["response", "response_mask"],
        ),
        Node(
            *("score", "REWARD", "COMPUTE", ["gen"], ["prompt", "response"]),
            {"score": "score", "weight": "weight", "mark": mark},
            fn="mine:score",
            per_token=["weight"],
        ),
        Node("host", "REWARD", "COMPUTE", ["score"], [mark], {"out": "x"}, scope="batch"),
        Node("fit", "ACTOR", "MODEL_TRAIN", ["score"], ["rows", "score", "weight"], []),
    ]
    if sums:
        nodes.append(
            Node("sum", "REWARD", "COMPUTE", ["score"], [sums], {"score": "y"}, fn="weighted_sum")
        )
        nodes.append(Node("last", "REWARD", "COMPUTE", ["sum"], ["y"], {"out": "z"}, scope="batch"))
    layouts = {"ROLLOUT": HOST, "REWARD": HOST, "ACTOR": MESH}
    return units_ahead(plan(Graph("g", nodes), layouts, ("uid", "prompt")), {"gen"})


def score(state, fields, options):
    """Numbers of each response, and of each token."""
    responses = fields["response"]
    written = {
        "score": np.array([float(len(r)) for r in responses], np.float32),
        "weight": [np.ones(len(r), np.float32) for r in responses],
        "mark": [np.zeros(4, np.int32) for _ in responses],
    }
    return state, written, {"seen": 2.0}


class Trainer:
    """A task buffer with one node to run, which a worker holds, and the methods of its server."""

    def __init__(self):
        self.lock = threading.Condition()
        self.buffer = TaskBuffer(
            Rule(8, 1), exact=False, version=0, lease_seconds=100.0, max_tries=1, served=["score"]
        )
        facts = {"attempt": "one", "after": "", "began": 0, "exact": False}
        requests = SampleRequests(self.buffer, self.lock)
        self.methods = BufferService(requests, self.lock, {}, facts, limits=LIMITS).methods()
        (self.unit,) = units()
        runners = {"score": make_runner(self.unit, {"score": score})}
        ahead = NodesAhead(frozenset({"gen"}), (self.unit,), runners)
        self.nodes = HostThread(ahead, contextlib.nullcontext, self.lock, self.buffer)
        writers = dict.fromkeys((None, "gen", "score"), HOST)
        given = {"uid": np.array([[4, 0], [4, 1]], np.int64), "prompt": [prompt_of(5, [1])] * 2}
        self.group = Group(4, FieldStore.of_step(writers, given), set())
        self.group.store.put("gen", "response", [np.arange(n, dtype=np.int32) for n in LENGTHS])
        self.nodes.submit(self.group, lambda: None)
        self.group.running.result(HANG)
        requests.take_complete()
        assert self.lease("liar").facts["task"] == list(KEY)

    def call(self, method, worker, frame):
        facts = {**frame.facts, "attempt": "one"}
        answer = self.methods[method](worker, Frame(facts, frame.arrays).to_bytes())
        return Frame.of_bytes(answer)

    def lease(self, worker):
        return self.call("lease_node", worker, Frame({"capacity": 1, "nodes": ["score"]}))

    def truth(self):
        responses = [np.arange(n, dtype=np.int32) for n in LENGTHS]
        _, written, measured = score(None, {"response": responses}, {})
        return result_frame(KEY, self.unit, [written[f] for _, f in self.unit.outputs], measured)


@pytest.fixture
def trainer():
    made = Trainer()
    yield made
    made.nodes.close()


SCORE, WEIGHT, MARK = "column0", "column1", "column2"


def array(name, value):
    """Another array in the place of a column."""

    def lie(facts, arrays):
        arrays[name] = np.asarray(value)

    return lie


def entries(name, *values):
    """Other entries in the place of a column's list."""
    return array(name, np.frombuffer(encode([np.asarray(v) for v in values], "x"), np.uint8))


def fact(name, value):
    """Another JSON value."""

    def lie(facts, arrays):
        facts[name] = value

    return lie


def column(place, **changes):
    """Other facts of a column."""

    def lie(facts, arrays):
        facts["columns"] = [dict(one) for one in facts["columns"]]
        facts["columns"][place] |= changes

    return lie


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


OF_THE_LOOP = (
    "x/rollout_corr/k3_kl/0",
    "a_rollout_corr/gap_of_group",
    "rollout_corr/kept_weight_max",
    "kto/chosen_share",
    "x/kto/rejected_share",
    "training/nonfinite/x",
    "tokens_of_group",
)
LIES = {  # a lie, and the field and value of it that the log names
    "a score per token": (array(SCORE, ones(2, 3)), "score of shape [3], where [] is"),
    "a score too many": (array(SCORE, ones(3)), "score: column0 as float32[3],"),
    "scores as text": (array(SCORE, ["a", "b"]), "score of type <U1"),
    "complex scores": (array(SCORE, ones(2, dtype=np.complex64)), "score of type complex64"),
    "records as scores": (array(SCORE, np.zeros(2, [("a", "f4")])), "score of type |V4"),
    "an infinite score": (array(SCORE, [1.0, np.inf]), "score with the number inf"),
    "a score of 1e30": (array(SCORE, np.array([1.0, 1e30])), "score with the number 1e+30"),
    "weights of another length": (
        entries(WEIGHT, ones(3), ones(4)),
        "weight of shape [4], where [5] is",
    ),
    "weights of each other's responses": (
        entries(WEIGHT, ones(5), ones(3)),
        "weight of shape [5], where [3] is",
    ),
    "weights in two dims": (
        entries(WEIGHT, ones(3, 1), ones(5, 1)),
        "weight of shape [3, 1], where [3] is",
    ),
    "an infinite weight": (
        entries(WEIGHT, ones(3), np.full(5, np.inf)),
        "weight with the number inf",
    ),
    "weights of a response too many": (
        entries(WEIGHT, ones(3), ones(5), ones(1)),
        "weight: column1 as uint8[78],",
    ),
    "weights that are no entries": (
        array(WEIGHT, np.full(9, 255, np.uint8)),
        "weight: an entry begins with b'\\xff'",
    ),
    "a shape of 2^40": (
        array(WEIGHT, np.frombuffer(b"a\x03\x01<f4" + (1 << 40).to_bytes(8, "little"), np.uint8)),
        "weight: an entry has the shape [1099511627776]",
    ),
    "a type that is an expression": (
        array(WEIGHT, np.frombuffer(b"a\x05\x01f4,01" + bytes(8), np.uint8)),
        "weight: an entry of type 'f4,01'",
    ),
    "marks of several dims": (
        entries(MARK, np.zeros(4, np.int32), 1),
        "mark with entries of several dims",
    ),
    "an array that is missing": (lambda facts, arrays: arrays.pop(SCORE), "'column0'"),
    "fields in another order": (
        lambda facts, arrays: facts.update(columns=facts["columns"][::-1]),
        "fields ['mark', 'weight', 'score']",
    ),
    "a field too many": (
        lambda facts, arrays: facts.update(columns=[*facts["columns"], facts["columns"][0]]),
        "fields ['score', 'weight', 'mark', 'score']",
    ),
    "fields that are a number": (fact("columns", 3), "columns 3,"),
    "an unknown kind": (column(0, kind="pickle"), "score: a frame has a column of kind 'pickle'"),
    "a count of 10^18": (column(0, count=10**18), "where 1000000000000000000 are said"),
    "a count as text": (column(0, count="many"), "score: a count 'many',"),
    "a metric that is nan": (fact("numbers", {"seen": float("nan")}), "the metric 'seen' is nan"),
    "a metric as text": (fact("numbers", {"seen": "much"}), "the metric 'seen' is 'much',"),
    "a thousand metrics": (fact("numbers", {str(i): 1.0 for i in range(1000)}), "1000 metrics,"),
    "a metric of a long name": (fact("numbers", {"a" * 10_000: 1.0}), "a metric 'aaaa"),
    **{
        f"a metric that the loop reads, {name}": (
            fact("numbers", {name: 1.0}),
            f"a metric '{name}', which no number may be named",
        )
        for name in OF_THE_LOOP
    },
    "a metric named as one in parts": (fact("numbers", {"gen": 1.0}), "a metric 'gen',"),
    "metrics in parts of a user's function": (
        fact("parts", {"score": [[1.0, 2]]}),
        "the metric 'score' in other parts than this node has: [[1.0, 2]]",
    ),
    "no key": (fact("keys", []), "keys [],"),
    "two keys": (fact("keys", [list(KEY), [5, "score"]]), "keys [(4, 'score'), (5, 'score')],"),
}


def test_the_truth_counts(trainer):
    trainer.call("submit_node", "liar", trainer.truth())
    assert not trainer.buffer.open and trainer.buffer.has_news


@pytest.mark.parametrize(("lie", "named"), LIES.values(), ids=LIES)
def test_a_lie_counts_for_nothing_and_names_its_worker(trainer, lie, named, caplog):
    truth = trainer.truth()
    facts, arrays = dict(truth.facts), dict(truth.arrays)
    lie(facts, arrays)
    with contextlib.suppress(Refused):
        trainer.call("submit_node", "liar", Frame(facts, arrays))
    (task,) = trainer.buffer.open.values()
    assert not trainer.buffer.has_news and not task.failures  # no try of the prompt
    (record,) = caplog.records
    assert record.getMessage().startswith("a result of worker liar is refused: ")
    assert named in record.getMessage() and "\n" not in record.getMessage()
    assert len(record.getMessage()) < 500
    # somebody else runs the node
    trainer.buffer.deregister("liar")
    trainer.lease("honest")
    assert task.worker == "honest"
    trainer.call("submit_node", "honest", trainer.truth())
    assert not trainer.buffer.open and trainer.buffer.has_news


@pytest.mark.parametrize("name", OF_THE_LOOP)
def test_names_that_the_loop_reads_are_none_of_a_response_or_of_a_reward(name):
    with pytest.raises(RefusedAnswer, match="which no number may be named"):
        check_numbers({name: 1.0})
    none = {"reward": Parts((({},),), dict)}
    check_parts({"reward": [[{"mine": [1.0, 1]}]]}, none)
    with pytest.raises(RefusedAnswer, match="in other parts"):
        check_parts({"reward": [[{name: [1.0, 1]}]]}, none)


def test_what_the_loop_and_nodes_of_ours_read_on_the_host_is_a_number_per_response():
    """A region's filter reads scores before shaping by their name, weighted_sum by its edges."""
    mine, ours = units(sums="mark")
    runners = dict.fromkeys(("score", "sum"))
    nodes = NodesAhead(frozenset({"gen"}), (mine, ours), runners)
    thread = HostThread(nodes, contextlib.nullcontext, threading.Condition(), None)
    thread.close()
    assert thread._nodes.single == OF_RESPONSE | {"mark"}
    written = [np.zeros(2, np.float32), [np.ones(n, np.float32) for n in LENGTHS], np.zeros((2, 3))]
    frame = result_frame(KEY, mine, written, {})
    read_result(frame, mine, LENGTHS)
    with pytest.raises(ValueError, match=r"mark of shape \[3\], where \[\] is"):
        read_result(frame, mine, LENGTHS, single=thread._nodes.single)
    (before,) = units(mark="unshaped_score")
    with pytest.raises(ValueError, match=r"unshaped_score of shape \[3\], where \[\] is"):
        read_result(result_frame(KEY, before, written, {}), before, LENGTHS)


def test_columns_of_several_shapes_are_joined_by_their_entries():
    stores = []
    for counter, mark in enumerate((np.zeros(2), np.zeros((2, 3)), np.zeros((2, 4)))):
        given = {"uid": np.array([[counter, 0], [counter, 1]], np.int64)}
        stores.append(FieldStore.of_step({None: HOST, "score": HOST}, given))
        stores[-1].put("score", "mark", mark)
    column = joined(stores, np.arange(3)).columns["mark"]
    assert [np.shape(entry) for entry in column] == [(), (), (3,), (3,), (4,), (4,)]


def test_bytes_of_deep_json_name_their_worker(trainer, caplog):
    deep = b"[" * 100_000 + b"]" * 100_000
    with pytest.raises(Refused, match="RecursionError"):
        trainer.methods["submit_node"]("liar", encode([np.frombuffer(deep, np.uint8)], "x"))
    assert "worker liar" in caplog.text and trainer.buffer.open


def test_numbers_that_are_none_are_no_lie(trainer):
    """A reward function leaves a response out by them."""
    truth = trainer.truth()
    arrays = truth.arrays | {SCORE: np.array([np.nan, 1.0], np.float32)}
    trainer.call("submit_node", "honest", Frame(truth.facts, arrays))
    assert trainer.buffer.has_news
