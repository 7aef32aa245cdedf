"""Lies that a worker with the run's token may tell: none of them counts, and each names it."""

import contextlib
import dataclasses
import functools
import json
import math
import random
import threading

import numpy as np
import pytest
from support.counted_buffers import LIMITS, STOP, VOCABULARY, length_of, request_of, response_of

from distflow_jax.environments.episode_sampler import Progress
from distflow_jax.environments.episodes import REASONS, Episode, single_turn
from distflow_jax.images import turn_images
from distflow_jax.images.patch_chunks import PatchSizes
from distflow_jax.images.record import Image, ImagePatches
from distflow_jax.images.turn_images import TurnImages
from distflow_jax.layout import Parts
from distflow_jax.rewards.pool import failures
from distflow_jax.rewards.records import RewardResult
from distflow_jax.rollout.requests import Partial, Response
from distflow_jax.rollout.response_checks import RefusedAnswer
from distflow_jax.stream.border import check_parts, check_samples
from distflow_jax.stream.frames.frames import Frame, samples_frame
from distflow_jax.stream.links.buffer_service import BufferService
from distflow_jax.stream.links.refusals import MOST_REFUSED
from distflow_jax.stream.sample_requests import SampleRequests
from distflow_jax.stream.schedule import Rule
from distflow_jax.stream.task_buffer import TaskBuffer
from distflow_jax.stream.wire.calls import Refused

KEY, COUNTER = (4, "gen"), 4
SIZES = PatchSizes(chunk=16, chunks=1, patch_bytes=6, dims=2, merge=4)
OF_TURNS = dataclasses.replace(LIMITS, max_turns=3, turn_length=3, images=SIZES)
FACTS = {"attempt": "one", "spent": [8.0, 6.0, 1.5, 0, 2, 0, 1], "goes_on": True}


class Trainer:
    """A task buffer with one group, which a worker holds, and the methods of its server."""

    def __init__(self, limits=LIMITS):
        self.lock = threading.Condition()
        self.buffer = TaskBuffer(
            Rule(8, 1), exact=False, version=3, lease_seconds=100.0, max_tries=1
        )
        self.requests = SampleRequests(self.buffer, self.lock)
        facts = {"attempt": "one", "after": "", "began": 0, "exact": False}
        service = BufferService(self.requests, self.lock, {}, facts, limits=limits)
        self.methods = service.methods()
        self.requests.begin(KEY, request_of(COUNTER), Progress())
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


COUNTER_OF, SAMPLE, TOKENS, FED, EXPERTS, ENDED, FINISHED, TURN, REASON = 0, *range(2, 10)
LIES = {  # a lie, and the field and value of it that the log names
    "an id beyond the vocabulary": (
        put("tokens", VOCABULARY),
        "response 0 to prompt 4: token id 10000,",
    ),
    "an id of 10^9": (put("tokens", 10**9), "response 0 to prompt 4: token id 1000000000,"),
    "a negative id": (put("tokens", -1), "response 0 to prompt 4: token id -1,"),
    "an end token first": (
        put("tokens", STOP),
        "response 0 to prompt 4: end token 9999 at place 0,",
    ),
    "no end token": (
        put("tokens", 7, length_of(COUNTER, 0) - 1),
        "response 0 to prompt 4: an end at token 7,",
    ),
    "an end token under way": (
        put("tokens", STOP, -1),
        "response 1 to prompt 4: end token 9999 at place 0,",
    ),
    "a log-prob that is nan": (put("logp", np.nan), "response 0 to prompt 4: the log-prob nan"),
    "a log-prob above 0": (put("logp", 0.5), "response 0 to prompt 4: the log-prob 0.5"),
    "a version to come": (put("version", 4), "response 0 to prompt 4: a token of version 4,"),
    "a negative version": (put("version", -1), "response 0 to prompt 4: a token of version -1,"),
    "nothing sampled": (
        become("mask", np.zeros_like),
        "response 0 to prompt 4: 7 tokens that were not sampled",
    ),
    "a token that was not sampled": (
        put("mask", False),
        "response 0 to prompt 4: 1 tokens that were not sampled",
    ),
    "tokens as text": (become("tokens", lambda x: x.astype("U8")), "tokens as <U8[8]"),
    "tokens in two dims": (
        become("tokens", lambda x: np.stack([x, x], 1)),
        "tokens as int32[8, 2]",
    ),
    "log-probs as doubles": (become("logp", lambda x: x.astype(np.float64)), "logp as float64[8]"),
    "versions as floats": (
        become("version", lambda x: x.astype(np.float32)),
        "version as float32[8]",
    ),
    "masks as integers": (become("mask", lambda x: x.astype(np.int32)), "mask as int32[8]"),
    "a token too many": (
        become("tokens", lambda x: np.append(x, x[:1])),
        "9 entries of tokens, and the index has 8",
    ),
    "a log-prob too few": (
        become("logp", lambda x: x[:-1]),
        "7 entries of logp, and the index has 8",
    ),
    "an index as text": (become("index", lambda x: x.astype("U8")), "index as <U8[2, 10]"),
    "an index of no column": (become("index", lambda x: x[:, :0]), "an index of 0 columns"),
    "a negative length": (index(TOKENS, -1), "tokens from -1 to 1 in the index"),
    "a length of 10^12": (index(TOKENS, 10**12), "tokens from 1 to 1000000000000 in the index"),
    "fed tokens": (index(FED, 1, 1), "0 entries of fed, and the index has 1"),
    "a negative number of fed ones": (index(FED, -5, 1), "fed from -5 to 0 in the index"),
    "experts where none are recorded": (index(EXPERTS, 0), "response 0 to prompt 4: experts,"),
    "the same response twice": (index(SAMPLE, 0, 1), "two results of response 0 to prompt 4"),
    "no turn of many": (index(TURN, 10**9), "response 0 to prompt 4: (1000000000, "),
    "an unknown reason": (index(REASON, 99), "reason from 0 to 99 in the index"),
    "a reason from behind": (index(REASON, -1), "reason from -1 to 0 in the index"),
    "a node that is none": (index(1, 7), "a response to prompt 4 of node 7,"),
    "logged bytes that are no text": (
        become("logged", lambda x: np.full(9, 255, np.uint8)),
        "logged b'\\xff\\xff",
    ),
    "logged numbers of nobody": (
        become("logged", lambda x: np.frombuffer(b"[]", np.uint8)),
        "logged []",
    ),
    "nodes that are numbers": (say("nodes", [5]), "nodes [5]"),
    "images that are not there": (say("response_images", True), "no array 'response_image_bytes'"),
    "decode calls of 10^18": (say("spent", [0] * 6 + [10**18]), "1000000000000000000] for what"),
    "slots busy for infinite seconds": (say("spent", [math.inf] * 7), "for what its slots did"),
    "nothing of its slots": (say("spent", []), "[] for what its slots did"),
    "an array that is missing": (lambda facts, arrays: arrays.pop("mask"), "no array 'mask'"),
    "an answer to another prompt": (index(COUNTER_OF, 5), "a response to prompt 5 of node 0,"),
    "an answer to a prompt of 2^62": (
        index(COUNTER_OF, 1 << 62, 1),
        f"prompt {1 << 62} of node 0,",
    ),
    "a negative prompt": (index(COUNTER_OF, -1), "counter from -1 to 4 in the index"),
    "a response that nobody wants": (index(SAMPLE, 7), "response 7 to prompt 4, of which 2 "),
    "an end at the limit that is none": (
        index(FINISHED, 0),
        "response 0 to prompt 4: an end at the limit, and end token 9999 ",
    ),
    "two turns without an environment": (index(TURN, 2), "response 0 to prompt 4: (2, "),
    "a reason of environments": (index(REASON, 1), f"{REASONS[1]!r}) of turns, reward and reason"),
    "a reward without an environment": (put("reward", 1.5), "response 0 to prompt 4: (1, 1.5, "),
    "a reward that is infinite": (put("reward", np.inf), "response 0 to prompt 4: (1, inf, "),
    "a log of an environment": (
        become("logged", lambda x: np.frombuffer(b'[{"x": 1.0}, {}]', np.uint8)),
        "response 0 to prompt 4: (1, ",
    ),
    "logs that are numbers": (
        become("logged", lambda x: np.frombuffer(b"[1, 2]", np.uint8)),
        "logged [1, 2],",
    ),
    "a key of text": (say("keys", [["4", "gen"]]), "key ['4', 'gen'],"),
    "a key of one part": (say("keys", [[4]]), "key [4],"),
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


@pytest.mark.parametrize(("lie", "named"), LIES.values(), ids=LIES)
def test_a_lie_counts_for_nothing_and_names_its_worker(lie, named, caplog):
    trainer = Trainer()
    try:
        trainer.call("submit", "liar", lied(lie))
    except Refused:
        pass
    (task,) = trainer.buffer.groups()
    assert not task.ended and not task.under_way and not trainer.buffer.given_up
    assert not task.failures  # no try of the prompt
    assert not task.worker or named.startswith("key")  # for others, where it is said of what it is
    (record,) = caplog.records
    assert record.getMessage().startswith("a result of worker liar is refused: ")
    assert named in record.getMessage() and "\n" not in record.getMessage()
    assert trainer.requests.occupancy.calls == 0
    # somebody else answers the group
    trainer.buffer.deregister("liar")
    trainer.lease("honest")
    assert task.worker == "honest"
    trainer.call("submit", "honest", truth())
    assert set(task.ended) == {0}


def test_a_worker_of_which_too_much_was_refused_is_ended(caplog):
    trainer = Trainer()
    for number in range(MOST_REFUSED):
        trainer.call("submit", "liar", lied(LIES["a negative id"][0]))
        assert len(caplog.records) == number + 1
    assert caplog.records[-1].getMessage().endswith("; it is ended")
    with pytest.raises(
        Refused, match=f"liar is ended: {MOST_REFUSED} of its results were refused, .* token id -1"
    ):
        trainer.lease("liar")
    assert "liar" not in trainer.buffer.workers


def test_bytes_that_are_no_frame_name_their_worker(caplog):
    trainer = Trainer()
    with pytest.raises(Refused, match="which is no tag"):
        trainer.methods["submit"]("liar", b"\0\1\2")
    assert "worker liar" in caplog.text


@pytest.mark.parametrize("record", [False, True], ids=["evaluation", "training"])
def test_a_response_has_experts_where_its_request_wants_them(record):
    """A run of a mixture records them for what it trains on, and for no evaluation."""
    limits = dataclasses.replace(LIMITS, experts=(1, 1, 4))
    request = request_of(COUNTER)
    request = dataclasses.replace(
        request, sampling=dataclasses.replace(request.sampling, record=record)
    )
    episode = single_turn(response_of(request, 0, [3] * length_of(COUNTER, 0)))
    check = functools.partial(
        check_samples, {KEY: Progress({0: episode})}, {KEY: request}, limits, 3
    )
    if record:
        with pytest.raises(RefusedAnswer, match="no experts"):
            check()
    else:
        check()


# a first observation, and three turns: an image follows the first one, and nothing the second
TURNS = "oo s s S o i i o s S s S"
IMAGE = Image(
    np.zeros((0, 0, 3), np.uint8),
    bytes(16),
    ImagePatches(
        np.zeros((8, 6), np.uint8), np.zeros((8, 2), np.int32), np.ones(8, np.int32), 2, (1, 2)
    ),
)


def episode_in_turns(request, sample=0):
    """An episode whose environment has answered twice."""
    kinds = TURNS.replace(" ", "")
    mask = np.array([kind in "sS" for kind in kinds])
    tokens = np.where([kind == "S" for kind in kinds], STOP, 7).astype(np.int32)
    logp = np.where(mask, -1.0, 0.0).astype(np.float32)
    margin = np.where(mask, 1.0, np.inf).astype(np.float32)
    version = np.where(mask, 3, 0).astype(np.int32)
    patch = np.full(len(kinds), -1, np.int32)
    patch[[place for place, kind in enumerate(kinds) if kind == "i"]] = [0, 1]
    shown = TurnImages((IMAGE,), patch)
    response = Response(request.prompt, sample, tokens, logp, margin, True, version, None, shown)
    return Episode(response, mask, 1.5, 3, "done", {"steps": 2.0, "infra/raised": 1.0})


def truth_in_turns():
    """A frame with a response in turns."""
    found = {KEY: Progress({0: episode_in_turns(request_of(COUNTER))})}
    return samples_frame(FACTS, found)


def changed_image(change):
    """Another image in the response, of `change` of its patches' record."""

    def lie(facts, arrays):
        shown = turn_images.from_bytes(arrays["response_images"])
        cut = change(shown.images[0].patches)
        image = dataclasses.replace(shown.images[0], patches=cut)
        blob = turn_images.to_bytes(TurnImages((image,), shown.patch))
        arrays["response_images"] = blob
        arrays["response_image_bytes"] = np.array([len(blob)], np.int64)

    return lie


def moved_features(*places):
    """The image's features at other tokens."""

    def lie(facts, arrays):
        shown = turn_images.from_bytes(arrays["response_images"])
        patch = np.full(len(shown.patch), -1, np.int32)
        patch[list(places)] = range(len(places))
        arrays["response_images"] = turn_images.to_bytes(TurnImages(shown.images, patch))

    return lie


def other(**changes):
    """Another record of the image's patches."""
    return changed_image(
        lambda cut: dataclasses.replace(cut, **{k: v(getattr(cut, k)) for k, v in changes.items()})
    )


def log(numbers):
    return become("logged", lambda x: np.frombuffer(json.dumps([numbers]).encode(), np.uint8))


LIES_IN_TURNS = {
    "a log-prob of an observation": put("logp", -1.0, 0),
    "a log-prob that is nan": put("logp", np.nan, 2),
    "a version to come": put("version", 4, 2),
    "an end token within a turn": put("tokens", STOP, 2),
    "no end token before an observation": put("tokens", 7, 4),
    "an observation that was sampled": put("mask", True, 0),
    "nothing sampled": become("mask", np.zeros_like),
    "an observation at the end": put("mask", False, -1),
    "no end token at the end": put("tokens", 7, -1),
    "no turn": index(TURN, 0),
    "two turns of three": index(TURN, 2),
    "more turns than an environment answers": become(
        "index", lambda x: np.where(np.arange(10) == TURN, 9, x)
    ),
    "an end that is none": index(FINISHED, 0),
    "a limit that was not met": index(REASON, REASONS.index("turn_length")),
    "a reward that is infinite": put("reward", np.inf),
    "a reward of 10^300": put("reward", 1e300),
    "no reward of what has not failed": put("reward", np.nan),
    "a reward of what has failed": index(REASON, REASONS.index("failed")),
    "logged text": log({"steps": "many"}),
    "a thousand logged numbers": log({str(i): 1.0 for i in range(1000)}),
    "a response under way": index(ENDED, 0),
    "tokens that were fed": index(FED, 1),
    "experts where none are recorded": index(EXPERTS, 0),
    "patches of another size": other(patches=lambda x: np.repeat(x, 2, axis=1)),
    "positions below 0": other(positions=lambda x: x - 1),
    "segments from 0": other(segments=lambda x: x - 1),
    "segments beyond a chunk": other(
        patches=lambda x: np.tile(x, (9, 1)),
        positions=lambda x: np.tile(x, (9, 1)),
        segments=lambda x: np.tile(x, 9),
        features=lambda x: 9 * x,
    ),
    "features that are text": other(features=str),
    "a large grid": other(grid=lambda x: (1 << 40, 1)),
    "features that were sampled": moved_features(2, 3),
    "features out of place": moved_features(6),
    "features with text between": moved_features(5, 8),
    "an image cut short": become("response_images", lambda x: x[:-1]),
    "bytes that are no image": become("response_images", np.zeros_like),
    "images of nobody": become("response_image_bytes", lambda x: x * 0 + 10**12),
    "images of several": become("response_image_bytes", lambda x: np.append(x, x)),
}


def test_an_answer_in_turns_counts():
    trainer = Trainer(OF_TURNS)
    answer = trainer.call("submit", "liar", truth_in_turns())
    assert answer.facts["dropped"] == [] and "refused" not in answer.facts
    (task,) = trainer.buffer.groups()
    assert set(task.ended) == {0} and task.ended[0].tokens == 7


@pytest.mark.parametrize("lie", LIES_IN_TURNS.values(), ids=LIES_IN_TURNS)
def test_a_lie_in_turns_counts_for_nothing_and_names_its_worker(lie, caplog):
    trainer, frame = Trainer(OF_TURNS), truth_in_turns()
    facts, arrays = dict(frame.facts), dict(frame.arrays)
    lie(facts, arrays)
    try:
        trainer.call("submit", "liar", Frame(facts, arrays))
    except Refused:
        pass
    (task,) = trainer.buffer.groups()
    assert not task.ended and not task.under_way and not task.failures and task.worker == ""
    (record,) = caplog.records
    assert record.getMessage().startswith("a result of worker liar is refused: ")


def test_responses_that_end_in_other_ways_count():
    """A failed one has no score, a cut one no end token, and a late one nothing behind its turn."""
    check = functools.partial(
        check_samples, requests={KEY: request_of(COUNTER)}, limits=OF_TURNS, newest=3
    )
    for reason, end, reward in (
        ("failed", STOP, np.nan),
        ("failed", 7, np.nan),
        ("max_turns", STOP, 0.0),
        ("turn_length", 7, -1.0),
        ("response_length", 7, 0.5),
        ("response_length", STOP, 0.5),
    ):
        one = episode_in_turns(request_of(COUNTER))
        one.reason, one.reward, one.response.finished = reason, reward, False
        one.response.tokens[-1] = end
        check({KEY: Progress({0: one})})


def test_a_turn_without_a_limit_is_as_long_as_its_response_may_be():
    """An evaluation's response may be longer than those that are trained on."""
    request, limits = request_of(COUNTER), dataclasses.replace(OF_TURNS, turn_length=0)
    one = Progress({0: episode_in_turns(request)})
    for limit in (16, 13):  # the response has 13 tokens
        check_samples({KEY: one}, {KEY: request.with_limit(limit)}, limits, newest=3)
    with pytest.raises(RefusedAnswer, match="13 tokens, of 12"):
        check_samples({KEY: one}, {KEY: request.with_limit(12)}, limits, newest=3)


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


VALUES = (
    None,
    True,
    -1,
    10**30,
    0.5,
    float("nan"),
    float("inf"),
    "text",
    [],
    {},
    [[]],
    [None],
    {"a": 1},
)
DTYPES = ("i1", "i8", "u4", "f2", "f4", "f8", "U3", "S2", "?", "c8", "M8[s]", "V3")
METHODS = ("register", "lease", "lease_node", "submit", "submit_node", "fail", "deregister")


def changed(draw):
    """The bytes of a frame of which some values, arrays and bytes are others."""
    frame = truth(version=3, capacity=8, slots=8, why="none", response_images=False)
    facts, arrays = json.loads(json.dumps(frame.facts)), dict(frame.arrays)
    for _ in range(draw.randint(0, 2)):
        name = draw.choice([*facts, *arrays])
        if name in facts:
            facts[name] = draw.choice(VALUES)
        elif draw.random() < 0.5:
            places = np.array(arrays[name])
            if places.size and places.dtype.kind in "if":
                places.flat[draw.randrange(places.size)] = draw.choice((-1, 0, 1, 2, 5, 10**9))
            arrays[name] = places
        else:
            shape = [draw.randint(0, 3) for _ in range(draw.randint(0, 3))]
            arrays[name] = np.zeros(shape, draw.choice(DTYPES))
    data = bytearray(Frame(facts, arrays).to_bytes())
    for _ in range(draw.choice((0, 0, 1, 4))):
        data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data[: draw.choice((None, None, draw.randrange(len(data))))])


def test_random_changes_of_frames_are_refused_or_are_samples(caplog):
    """No other error leaves a method, and what counts keeps to all limits."""
    draw = random.Random(0)
    for _ in range(3000):
        trainer, method = Trainer(), draw.choice((*METHODS, *["submit"] * 8))
        with contextlib.suppress(Refused):
            trainer.methods[method]("liar", changed(draw))
        for task in trainer.buffer.groups():
            for piece in (*task.ended.values(), *task.under_way.values()):
                content = piece.content
                response = content.response if piece.whole else content.response(frozenset())
                count = len(response.tokens)
                assert ((response.tokens >= 0) & (response.tokens < VOCABULARY)).all()
                assert np.isfinite(response.logp).all() and (response.logp <= 1e-3).all()
                assert ((response.version >= 0) & (response.version <= 3)).all()
                columns = response.logp, response.margin, response.version
                assert {column.shape for column in columns} == {(count,)}
    assert all("\n" not in record.getMessage() for record in caplog.records)
