"""Nodes that workers run: their frames, and task buffers and workers over real sockets."""

import collections
import contextlib
import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.seeing import MODELS, seeing_prompt
from support.tiny_model import prompt_of
from support.waiting import HANG, until

from distflow_jax.coordinator.coordinator import merge_parts
from distflow_jax.coordinator.field_store import FieldStore
from distflow_jax.dag.graph import Graph, Node
from distflow_jax.dag.plan_walker import make_runner
from distflow_jax.dag.planner import plan
from distflow_jax.environments.episode_sampler import Progress
from distflow_jax.environments.episodes import single_turn
from distflow_jax.layout import Layout, Parts
from distflow_jax.rollout.occupancy import Occupancy
from distflow_jax.rollout.requests import Response, SamplingParams
from distflow_jax.rollout.response_checks import ResponseLimits
from distflow_jax.stream.batches.group_facts import facts_of
from distflow_jax.stream.checks import check_nodes, sampling_tasks
from distflow_jax.stream.frames.frames import Frame
from distflow_jax.stream.frames.node_frames import (
    read_result,
    result_frame,
    task_frame,
    work_of_task,
)
from distflow_jax.stream.frames.prompt_frames import of_plain, prompt_facts, to_plain
from distflow_jax.stream.host_nodes import Group, NodesAhead, step_metrics, units_ahead
from distflow_jax.stream.host_thread import HostThread
from distflow_jax.stream.links.buffer_addresses import BufferAddresses
from distflow_jax.stream.links.buffer_client import BufferClient
from distflow_jax.stream.links.buffer_links import Joining
from distflow_jax.stream.links.buffer_service import NODE_TABLE, QUICK, BufferService
from distflow_jax.stream.links.remote_link import WorkerState
from distflow_jax.stream.links.run_token import make_run_token
from distflow_jax.stream.node_runner import NodeRunner
from distflow_jax.stream.producer import Producer, SamplingNode
from distflow_jax.stream.sample_requests import SampleRequests
from distflow_jax.stream.saved_samples import SavedSamples
from distflow_jax.stream.schedule import Admission, Rule
from distflow_jax.stream.task_buffer import TaskBuffer
from distflow_jax.stream.wire.wire_server import WireServer

HOST, MESH = Layout("host"), Layout("mesh", (("fsdp", 2),))
LAYOUTS = {
    "ACTOR": MESH,
    "CRITIC": MESH,
    "REFERENCE": MESH,
    "ROLLOUT": HOST,
    "REWARD": HOST,
    "REWARD MODEL_INFERENCE": MESH,
}
TABLES = {"config": {"seed": "1"}}


def built():
    """A score, what follows from it, and nodes that workers cannot run."""
    nodes = [
        Node(
            *("gen", "ROLLOUT", "MODEL_INFERENCE", [], ["uid", "prompt"]),
            ["response", "response_mask"],
        ),
        Node("score", "REWARD", "COMPUTE", ["gen"], ["prompt", "response"], {"out": "score"}),
        Node("mean", "REWARD", "COMPUTE", ["score"], ["score"], {"out": "centred"}, scope="group"),
        Node("late", "REWARD", "COMPUTE", ["score"], ["score"], {"out": "x"}, scope="batch"),
        Node("after", "REWARD", "COMPUTE", ["late"], ["x"], {"out": "y"}),
        Node("some", "REWARD", "COMPUTE", ["mean"], ["score"], {"out": "z"}, when={"every": 2}),
        Node("values", "CRITIC", "MODEL_INFERENCE", ["gen"], ["rows"], ["value"]),
        Node("fit", "CRITIC", "MODEL_TRAIN", ["values"], ["rows", "value"], []),
        Node("ref", "REFERENCE", "MODEL_INFERENCE", ["gen"], ["rows"], ["ref_logp"]),
    ]
    return plan(Graph("g", nodes), LAYOUTS, ("uid", "prompt"))


def score(state, fields, options):
    """A response's sum and its prompt's bonus."""
    prompts, responses = fields["prompt"], fields["response"]
    found = [p.extra_info["bonus"] + r.sum() for p, r in zip(prompts, responses, strict=True)]
    values = np.array(found, np.float32)
    part = (float(values.sum()), len(values))
    return state, {"out": values}, {"score": Parts((part,), mean_of), "seen_calls": 1}


def mean_of(parts):
    return {"reward/mean": sum(s for s, _ in parts) / sum(n for _, n in parts)}


def centre(state, fields, options):
    return state, {"out": fields["score"] - fields["score"].mean()}, {}


def prompt(counter):
    made = dataclasses.replace(prompt_of(counter + 1, [1, 2, 3]), counter=counter)
    return dataclasses.replace(made, ground_truth=str(counter), extra_info={"bonus": counter})


def group_of(counter, samples=2):
    writers = dict.fromkeys((None, "gen", "score", "mean"), HOST)
    uid = np.array([[counter, i] for i in range(samples)], np.int64)
    store = FieldStore.of_step(writers, {"uid": uid, "prompt": [prompt(counter)] * samples})
    store.put("gen", "response", [np.arange(counter + i, dtype=np.int32) for i in range(samples)])
    return Group(counter, store, set())


def ahead(stages=None):
    units = units_ahead(built(), {"gen"})
    stages = {"score": score, "mean": centre} | (stages or {})
    return NodesAhead(
        frozenset({"gen"}), units, {unit.name: make_runner(unit, stages) for unit in units}
    )


@pytest.mark.parametrize(
    "value",
    [
        None,
        ["4", 4, 0.1, True, {"a": [1, None]}],
        {"__is__": "mine", 3: (1, "x"), "b": b"\x00\xff"},
        np.float32(0.1),
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.array(["a", {"b": (1,)}], object),
    ],
)
def test_values_of_rows_come_back_as_they_were(value):
    found = of_plain(to_plain(value, "a row"))
    assert type(found) is type(value) and str(found) == str(value)
    np.testing.assert_equal(found, value)


def test_a_row_that_cannot_be_sent_is_named():
    odd = dataclasses.replace(prompt(3), ground_truth=threading.Lock())
    with pytest.raises(ValueError, match=r"the ground truth of row \d+ of the data .* type lock"):
        prompt_facts(odd)


def test_frames_carry_what_a_node_reads_and_writes():
    group, (unit, *_) = group_of(4), units_ahead(built(), {"gen"})
    values = [group.store.values[edge.source, edge.field] for edge in unit.inputs]
    work = work_of_task(Frame.of_bytes(task_frame((4, "score"), unit, values).to_bytes()))
    (own, other), responses = work.values
    assert work.key == (4, "score") and own is other
    assert (own.counter, own.text, own.ground_truth) == (4, prompt(4).text, "4")
    np.testing.assert_array_equal(own.tokens, prompt(4).tokens)
    np.testing.assert_array_equal(responses[1], [0, 1, 2, 3, 4])
    responses[0][:] = 7  # a function may write to what it gets
    result = result_frame(work.key, unit, [np.ones(2, np.float32)], {"n": np.float32(0.5)})
    back = read_result(Frame.of_bytes(result.to_bytes()), unit, [4, 5])
    assert back.values[0].dtype == np.float32 and back.numbers == {"n": 0.5}
    with pytest.raises(ValueError, match="wrote 2 entries of 'score', one per response is 3"):
        read_result(result, unit, [4, 5, 6])
    for broken in ({"columns": []}, {"columns": 3}, {"numbers": 1}, {"numbers": {"n": "x"}}):
        with pytest.raises(ValueError):
            read_result(Frame({**result.facts, **broken}, result.arrays), unit, [4, 5])


def test_images_go_to_functions_of_the_user_alone():
    (unit, *_), sees = units_ahead(built(), {"gen"}), seeing_prompt(MODELS["qwen2_5_vl"], 0, 2)
    (task,) = unit.tasks
    node = dataclasses.replace(task.node, fn="mine.py:score")
    users = dataclasses.replace(unit, tasks=(dataclasses.replace(task, node=node),))
    for one, images in ((unit, 0), (users, 2)):
        frame = task_frame((0, "score"), one, [[sees] * 2, [np.arange(2), np.arange(3)]])
        found = work_of_task(Frame.of_bytes(frame.to_bytes())).values[0][0]
        assert len(found.images) == images and (found.patch is None) == (not images)
        np.testing.assert_array_equal(found.tokens, sees.tokens)
    parts = {"score": Parts(((1.0, 2),), mean_of)}
    with pytest.raises(ValueError, match="measures 'score' in parts, and a worker sends numbers"):
        result_frame((0, "score"), users, [np.ones(2)], parts)


@pytest.mark.parametrize(
    "name, message",
    [
        ("scor", "dag 'g' has no such node .*did you mean 'score'"),
        ("late", "needs a whole batch: give it scope group or sample, or leave it"),
        ("after", "it reads fields of 'late'|only after the trainers have run"),
        ("some", "runs in some steps only"),
        ("values", "runs model 'critic', which this run trains"),
        ("fit", "runs model 'critic', which this run trains"),
        ("ref", "runs on devices, but workers run host nodes only"),
    ],
)
def test_nodes_that_workers_cannot_run_are_refused(name, message):
    with pytest.raises(ValueError, match=f"--nodes={name} names '{name}'.*({message})"):
        check_nodes([name], built(), f"--nodes={name}")


def test_nodes_that_sample_need_nothing_more():
    assert [t.node.id for t in sampling_tasks(built())] == ["gen"]
    assert [u.name for u in check_nodes(["gen", "mean"], built(), "--nodes")] == ["mean"]


def test_a_prompt_that_is_given_up_after_it_was_sampled_leaves_the_account_whole(caplog):
    lock = threading.Condition()
    buffer = TaskBuffer(
        Rule(2, 1),
        exact=False,
        version=0,
        lease_seconds=HANG,
        max_tries=1,
        served=["score"],
    )
    requests = SampleRequests(buffer, lock)
    batches = [[prompt(0), prompt(1)], [prompt(2), prompt(3)]]
    producer = Producer(
        requests,
        Admission(Rule(2, max_staleness=1)),
        [SamplingNode(built().tasks[0].node, SamplingParams(2, 4), None)],
        lambda: batches.pop(0) if batches else None,
        writers=dict.fromkeys((None, "gen", "score", "mean"), HOST),
        num_samples=2,
        saved=SavedSamples(),
    )
    nodes = HostThread(ahead(), contextlib.nullcontext, lock, buffer)
    producer.admit()
    for task in requests.lease("w", 0, 100):
        key, request = task.key, task.content
        ones = [np.ones(3, dtype) for dtype in (np.int32, np.float32, np.float32)]
        made = [Response(request.prompt, s, *ones, True, np.zeros(3, np.int32)) for s in (0, 1)]
        found = {key: Progress({s: single_turn(one) for s, one in enumerate(made)})}
        requests.submit("w", [key], found, spent=Occupancy(), goes_on=False)
    groups = {group.counter: group for group in producer.collect()}
    for group in groups.values():
        nodes.submit(group, lambda: None)
        group.running.result(HANG)
    assert producer.under_way == 24
    assert buffer.lease_node("w", ["score"], 0.0).key == (0, "score")
    buffer.fail("w", (0, "score"), "no")
    producer.collect()
    assert "prompt 0 is given up" in caplog.text and producer.groups[0].given_up
    assert producer.under_way == 18
    assert groups[0].done and not groups[0].samples  # a checkpoint does not wait for it
    assert not facts_of(groups[0], 0).keep  # what the other processes hear
    producer.judge(0, False)
    assert 0 not in producer.groups and producer.facts() == {"given_up": [0]}
    producer.collect()
    assert producer.under_way == 18
    assert producer.admission.cut(1).kept == (1, 2)
    nodes.close()


# -- whole jobs -------------------------------------------------------------------------------


class BufferOfNodes:
    """A task buffer whose groups are sampled already, with its server."""

    def __init__(self, folder, served, *, lease=HANG, attempt="one"):
        self.lock, self.folder = threading.Condition(), folder
        self.tasks = TaskBuffer(
            Rule(8, 1),
            exact=False,
            version=0,
            lease_seconds=lease,
            max_tries=2,
            served=served,
        )
        self.requests = SampleRequests(self.tasks, self.lock)
        self.nodes = HostThread(ahead(), contextlib.nullcontext, self.lock, self.tasks)
        facts = {"attempt": attempt, "after": "", "began": 0, "exact": False}
        answers = BufferService(
            self.requests,
            self.lock,
            TABLES,
            facts,
            {"reward.function": '"f"'},
            limits=ResponseLimits(100, [99]),
        )
        self.answers = answers
        self.server = WireServer(
            "127.0.0.1:0", make_run_token(folder), answers.methods(), quick=QUICK
        )
        buffers = [f"127.0.0.1:{self.server.port}"]
        answers.meet(buffers)
        BufferAddresses(attempt, tuple(buffers)).write(folder)
        self.given_up, self.done = {}, collections.Counter()

    def begin(self, counters):
        groups = [group_of(counter) for counter in counters]
        for group in groups:
            self.nodes.submit(group, lambda c=group.counter: self.done.update([c]))
        return groups

    def finish(self, groups):
        def is_finished():
            for group in groups:
                if group.running.done():
                    group.running.result()
            with self.lock:
                self.tasks.expire(now := time.monotonic())
                self.answers.answer_waiting(now)
                self.given_up |= self.requests.give_up()
            self.requests.take_complete()
            return all(g.done or g.counter in self.given_up for g in groups)

        until(is_finished, pause=0.002)

    def close(self):
        self.answers.end(0.2)
        self.nodes.close()
        self.server.close()


@pytest.fixture
def buffer(tmp_path):
    with contextlib.ExitStack() as files:

        def opened(served, **options):
            return files.enter_context(
                contextlib.closing(BufferOfNodes(tmp_path, served, **options))
            )

        yield opened


@contextlib.contextmanager
def serving(folder, *names, stages=None):
    """A worker that serves nodes, in a thread; yields (what runs them, its end)."""
    nodes = ahead(stages)
    units = tuple(unit for unit in nodes.units if unit.name in names)
    tables = TABLES | {NODE_TABLE: {"reward.function": '"f"'}}
    runner = NodeRunner(dataclasses.replace(nodes, units=units))
    joining = Joining(str(folder), f"w{id(units)}", tables, runner.nodes)
    state = WorkerState(links=joining.first(HANG))
    talk = BufferClient(state, joining, runner, save_seconds=0.0, orphan_seconds=HANG)
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        end = pool.submit(talk.serve, stop.is_set)
        try:
            yield runner, end
        finally:
            stop.set()
            end.exception(HANG)


def plain(counters):
    """The groups as trainers that run all nodes have them."""
    groups, nodes = [group_of(counter) for counter in counters], ahead()
    for group in groups:
        for unit in nodes.units:
            nodes.run_unit(unit, group, contextlib.nullcontext)
    return groups


@pytest.mark.parametrize("served", [["score"], ["mean"], ["score", "mean"]], ids="+".join)
def test_groups_have_what_the_trainers_would_have_given_them(tmp_path, buffer, served):
    buffers, counters = buffer(served), range(12)
    with serving(tmp_path, *served) as (one, _), serving(tmp_path, served[0]) as (two, end):
        groups = buffers.begin(counters)
        buffers.finish(groups)
        buffers.answers.end(HANG)
        end.result(HANG)
    assert one.served + two.served == len(served) * len(groups)
    for group, other in zip(groups, plain(counters), strict=True):
        for value in (("score", "score"), ("mean", "centred")):
            found, wanted = group.store.values[value], other.store.values[value]
            assert found.dtype == wanted.dtype
            np.testing.assert_array_equal(found, wanted)
    merged = merge_parts(step_metrics(groups))
    assert merged == merge_parts(step_metrics(plain(counters))) and merged["seen_calls"] == 12
    assert set(buffers.done.values()) == {1} and len(buffers.done) == 12
    assert not buffers.tasks.counts.second


def test_a_worker_that_keeps_a_task_loses_it_and_its_late_result_is_dropped(tmp_path, buffer):
    buffers, go = buffer(["score"], lease=1.0), threading.Event()

    def slow(state, fields, options):
        go.wait(HANG)
        return score(state, fields, options)

    with serving(tmp_path, "score", stages={"score": slow}) as (kept, _):
        groups = buffers.begin([5])
        until(lambda: any(task.worker for task in buffers.tasks.open.values()))
        with serving(tmp_path, "score") as (other, _):
            buffers.finish(groups)
        go.set()
        until(lambda: buffers.tasks.counts.second)
    # once they have ended: a worker counts a result after the task buffer has
    assert kept.served == other.served == 1
    assert buffers.done == {5: 1} and buffers.tasks.expired >= 1


def test_a_prompt_on_which_a_function_fails_is_given_up(tmp_path, buffer, caplog):
    buffers = buffer(["score"])

    def picky(state, fields, options):
        if fields["prompt"][0].counter == 2:
            raise KeyError("no such unit")
        return score(state, fields, options)

    with serving(tmp_path, "score", stages={"score": picky}):
        groups = buffers.begin(range(4))
        buffers.finish(groups)
    assert list(buffers.given_up) == [2] and "'score' failed with KeyError" in buffers.given_up[2]
    assert [group.done for group in groups] == [True, True, False, True]


def test_a_region_decides_on_a_group_whose_last_node_a_worker_runs(tmp_path, buffer):
    buffers = buffer(["score", "mean"])
    buffers.nodes._nodes = dataclasses.replace(ahead(), until=_scores_differ)
    with serving(tmp_path, "score", "mean"):
        groups = [group_of(3, samples=1), group_of(4)]
        for group in groups:
            buffers.nodes.submit(group, lambda: None)
        buffers.finish(groups)
    assert [group.keep for group in groups] == [False, True]


def _scores_differ(columns):
    """A decision for each response: whether its group's scores differ."""
    scores = columns["score"]
    return np.full(len(scores), len(set(scores.tolist())) > 1)


def test_a_worker_goes_on_with_trainers_that_were_started_again(tmp_path, buffer):
    buffers = buffer(["score"])
    with serving(tmp_path, "score") as (service, end):
        buffers.finish(buffers.begin([0]))
        buffers.server.close()
        again = buffer(["score"], attempt="two")
        again.finish(again.begin([0, 1]))
        again.answers.end(HANG)
        end.result(HANG)
    assert service.served == 3 and again.done == {0: 1, 1: 1}


def test_workers_that_would_run_other_nodes_or_another_reward_are_refused(tmp_path, buffer):
    buffer(["score"])
    with pytest.raises(ValueError, match=r"run node 'mean' themselves .* stream\.worker_nodes"):
        with serving(tmp_path, "mean"):
            pass
    tables = TABLES | {NODE_TABLE: {"reward.function": '"g"'}}
    with pytest.raises(ValueError, match=r'config reward\.function is "g" at this worker'):
        Joining(str(tmp_path), "w", tables, ["score"]).first(HANG)


def test_a_result_that_fits_no_group_ends_its_worker_and_harms_nobody(tmp_path, buffer):
    buffers = buffer(["score"])

    def short(state, fields, options):
        return state, {"out": np.zeros(1, np.float32)}, {}

    with serving(tmp_path, "score", stages={"score": short}) as (_, end):
        groups = buffers.begin([3])
        assert "wrote 1 entries of 'score', one per response is 2" in str(end.exception(HANG))
    with serving(tmp_path, "score"):
        buffers.finish(groups)
    assert buffers.done == {3: 1}
