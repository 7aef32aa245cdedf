"""Lies that a worker with the run's token may tell: none of them counts, and each names it."""

import dataclasses
import functools
import json
import math
import threading

import numpy as np
import pytest
from support.counted_buffers import BORDER, STOP, VOCABULARY, length_of, request_of, response_of

from distflow_jax.environments.episode_sampler import Progress
from distflow_jax.environments.episodes import single_turn
from distflow_jax.layout import Parts
from distflow_jax.rewards.pool import failures
from distflow_jax.rewards.records import RewardResult
from distflow_jax.rollout.requests import Partial
from distflow_jax.rollout.response_checks import RefusedAnswer
from distflow_jax.stream.border import MOST_REFUSED, Border, check_parts
from distflow_jax.stream.frames.frames import Frame, samples_frame
from distflow_jax.stream.links.buffer_service import BufferService
from distflow_jax.stream.sample_requests import SampleRequests
from distflow_jax.stream.schedule import Rule
from distflow_jax.stream.task_buffer import TaskBuffer
from distflow_jax.stream.wire.calls import Refused

KEY, COUNTER = (4, "gen"), 4
FACTS = {"attempt": "one", "calls": 1, "goes_on": True}


class Trainer:
    """A task buffer with one group, which a worker holds, and the methods of its server."""

    def __init__(self, border=BORDER):
        self.lock = threading.Condition()
        self.buffer = TaskBuffer(
            Rule(8, 1), exact=False, version=3, lease_seconds=100.0, max_tries=1
        )
        self.requests = SampleRequests(self.buffer, self.lock)
        facts = {"attempt": "one", "after": "", "began": 0, "exact": False}
        service = BufferService(self.requests, self.lock, {}, facts, border=border)
        self.methods = service.methods()
        self.requests.begin(KEY, request_of(COUNTER))
        self.lease("liar")

    def lease(self, worker):
        told = {"attempt": "one", "version": 3, "capacity": 8, "slots": 8}
        return self.call("lease", worker, Frame(told))

    def call(self, method, worker, frame):
        return Frame.of_bytes(self.methods[method](worker, frame.to_bytes()))


def truth(**facts):
    """A frame with a response that has ended and one under way."""
    request = request_of(COUNTER)
    ended = single_turn(response_of(request, 0, [3] * length_of(COUNTER, 0)))
    part = response_of(request, 1, [3])
    part.tokens[:] = 7
    chunk = (part.tokens, part.logp, part.margin, part.version)
    partial = Partial(request, 1, np.zeros(0, np.int32), [chunk])
    return samples_frame(FACTS | facts, {KEY: Progress({0: ended}, [partial])})


def put(name, value, place=0):
    """The array of this name with a value at a place."""

    def lie(facts, arrays):
        arrays[name] = arrays[name].copy()
        arrays[name][place] = value

    return lie


def become(name, change):
    """Another array in the place of that of this name."""

    def lie(facts, arrays):
        arrays[name] = change(arrays[name])

    return lie


def say(name, value):
    """Another JSON value."""

    def lie(facts, arrays):
        facts[name] = value

    return lie


def index(column, value, row=0):
    """Another value in the index of samples."""
    return put("index", value, (row, column))


SAMPLE, TOKENS, FED, EXPERTS, ENDED, FINISHED, TURNS, REASON = range(2, 10)
LIES = {
    "an id beyond the vocabulary": put("tokens", VOCABULARY),
    "an id of 10^9": put("tokens", 10**9),
    "a negative id": put("tokens", -1),
    "an end token first": put("tokens", STOP),
    "no end token": put("tokens", 7, length_of(COUNTER, 0) - 1),
    "an end token under way": put("tokens", STOP, -1),
    "a log-prob that is nan": put("logp", np.nan),
    "a log-prob that is infinite": put("logp", -np.inf, -1),
    "a log-prob above 0": put("logp", 0.5),
    "a version to come": put("version", 4),
    "a version of 10^9": put("version", 10**9, -1),
    "a negative version": put("version", -1),
    "nothing sampled": become("mask", np.zeros_like),
    "a token that was not sampled": put("mask", False),
    "tokens as text": become("tokens", lambda x: x.astype("U8")),
    "tokens as floats": become("tokens", lambda x: x.astype(np.float32)),
    "tokens in two dims": become("tokens", lambda x: np.stack([x, x], 1)),
    "tokens in no dim": become("tokens", lambda x: x[0]),
    "log-probs as doubles": become("logp", lambda x: x.astype(np.float64)),
    "log-probs in two dims": become("logp", lambda x: np.stack([x, x], 1)),
    "log-probs as text": become("logp", lambda x: x.astype("U8")),
    "margins as text": become("margin", lambda x: x.astype("U8")),
    "versions as floats": become("version", lambda x: x.astype(np.float32)),
    "versions in two dims": become("version", lambda x: x[:, None]),
    "masks as integers": become("mask", lambda x: x.astype(np.int32)),
    "a token too many": become("tokens", lambda x: np.append(x, x[:1])),
    "a log-prob too few": become("logp", lambda x: x[:-1]),
    "an index as text": become("index", lambda x: x.astype("U8")),
    "an index of floats": become("index", lambda x: x.astype(np.float64)),
    "an index of one row": become("index", lambda x: x[0]),
    "an index of no column": become("index", lambda x: x[:, :0]),
    "a negative length": index(TOKENS, -1),
    "a length of 10^12": index(TOKENS, 10**12),
    "fed tokens": index(FED, 1, 1),
    "a negative number of fed ones": index(FED, -5, 1),
    "experts where none are recorded": index(EXPERTS, 0),
    "the same response twice": index(SAMPLE, 0, 1),
    "no turn of many": index(TURNS, 10**9),
    "an unknown reason": index(REASON, 99),
    "a reason from behind": index(REASON, -1),
    "a node that is none": index(1, 7),
    "rewards as text": become("reward", lambda x: x.astype("U8")),
    "no rewards": become("reward", lambda x: x[:0]),
    "logged bytes that are no text": become("logged", lambda x: np.full(9, 255, np.uint8)),
    "logged numbers of nobody": become("logged", lambda x: np.frombuffer(b"[]", np.uint8)),
    "nodes that are a number": say("nodes", 5),
    "nodes that are numbers": say("nodes", [5]),
    "images that are not there": say("response_images", True),
    "decode calls of 10^18": say("calls", 10**18),
    "decode calls below 0": say("calls", -1),
    "decode calls as text": say("calls", "many"),
    "an array that is missing": lambda facts, arrays: arrays.pop("mask"),
}


def lied(lie):
    frame = truth()
    facts, arrays = dict(frame.facts), dict(frame.arrays)
    lie(facts, arrays)
    return Frame(facts, arrays)


def test_the_truth_counts():
    trainer = Trainer()
    answer = trainer.call("submit", "liar", truth())
    assert answer.facts["dropped"] == []
    (task,) = trainer.buffer.groups()
    assert set(task.ended) == {0} and set(task.under_way) == {1}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_lie_counts_for_nothing_and_names_its_worker(lie, caplog):
    trainer = Trainer()
    try:
        trainer.call("submit", "liar", lied(lie))
    except Refused:
        pass
    (task,) = trainer.buffer.groups()
    assert not task.ended and not task.under_way and not trainer.buffer.given_up
    assert task.worker == "" and not task.failures  # for others, and no try of the prompt
    (record,) = caplog.records
    assert record.getMessage().startswith("a result of worker liar is refused: ")
    assert trainer.requests.counts.generate_calls == 0
    # somebody else answers the group
    trainer.lease("honest")
    assert task.worker == "honest"
    trainer.call("submit", "honest", truth())
    assert set(task.ended) == {0}


def test_a_worker_of_which_too_much_was_refused_is_ended(caplog):
    trainer = Trainer()
    for number in range(MOST_REFUSED):
        trainer.call("submit", "liar", lied(LIES["a negative id"]))
        assert len(caplog.records) == number + 1
    assert caplog.records[-1].getMessage().endswith("; it is ended")
    with pytest.raises(
        Refused, match=f"{MOST_REFUSED} results of liar were refused, .* it is ended"
    ):
        trainer.lease("liar")
    assert "liar" not in trainer.buffer.workers


def test_bytes_that_are_no_frame_name_their_worker(caplog):
    trainer = Trainer()
    with pytest.raises(Refused, match="which is no tag"):
        trainer.methods["submit"]("liar", b"\0\1\2")
    assert "worker liar" in caplog.text


def in_turns(**changes):
    """Whether an episode in turns passes."""
    border = Border(dataclasses.replace(BORDER.limits, in_turns=True))
    request = request_of(COUNTER)
    episode = single_turn(response_of(request, 0, [3] * length_of(COUNTER, 0)))
    episode.response.logp[0], episode.mask[0] = 0.0, False
    episode.turns, episode.reward, episode.logged = 2, 1.5, {"steps": 2.0}
    for name, value in changes.items():
        setattr(episode, name, value)
    check = functools.partial(border.check, {KEY: Progress({0: episode})}, {KEY: request}, 3)
    try:
        check()
    except ValueError as error:
        return str(error)
    return ""


def test_episodes_in_turns_have_turns_rewards_and_numbers():
    assert in_turns() == ""
    assert in_turns(reward=float("nan")) == ""  # it has no score
    for changes in (
        {"reward": float("inf")},
        {"turns": -1},
        {"turns": 10**9},
        {"logged": {"x": float("nan")}},
        {"logged": {"x": "text"}},
        {"logged": {str(i): 1.0 for i in range(1000)}},
        {"mask": np.zeros(length_of(COUNTER, 0), bool)},
        {"mask": np.ones(2, np.int32)},
    ):
        assert in_turns(**changes).startswith("response 0 to prompt 4: "), changes


def refused_parts(*values):
    """Whether metrics of the reward node in parts, as JSON brings them, are refused."""
    none = Parts((({}, failures([])),), dict)
    try:
        check_parts({"reward": json.loads(json.dumps(values))}, {"reward": none})
    except RefusedAnswer:
        return True
    return False


def test_numbers_of_a_reward_function_pass_under_any_name_and_lies_do_not():
    results = [RewardResult(1.0, logged={"right": 1.0}), RewardResult(math.nan, error="timeout")]
    counts = failures(results)
    assert not refused_parts(({"right": (1.0, 1), "other": (0.5, 2)}, counts), ({}, failures([])))
    for lie in (
        ({"right": 1.0}, counts),
        ({"right": (1.0, 1, 1)}, counts),
        ({"right": (math.inf, 1)}, counts),
        ({"right": ("1", 1)}, counts),
        ({}, counts | {"failed": "all"}),
        ({}, counts | {"more": 1}),
        ({}, counts | {"first": 1}),
        ({}, []),
        [{}],
    ):
        assert refused_parts(lie), lie
