"""Rounds of a worker, one by one: what it keeps, drops and takes, without task buffers."""

import dataclasses
import functools
import threading
import time
import types

import pytest
from support.counted_buffers import Sampler, length_of, request_of, response_of
from support.waiting import until

from distflow_jax.environments.episode_sampler import Progress
from distflow_jax.environments.episodes import single_turn
from distflow_jax.rollout.requests import SamplingParams
from distflow_jax.stream.frames.frames import Frame, samples_of, work_frame
from distflow_jax.stream.links import buffer_talk, remote_link
from distflow_jax.stream.links.buffer_client import BufferClient
from distflow_jax.stream.links.buffer_links import Links
from distflow_jax.stream.links.buffer_talk import BufferTalk, frames_of
from distflow_jax.stream.links.remote_link import LeasedGroup, RemoteLink, WorkerState
from distflow_jax.stream.node_runner import NodeRunner
from distflow_jax.stream.tasks import progress_bytes
from distflow_jax.stream.wire.calls import Refused, Unreachable
from distflow_jax.stream.worker import Worker

NODE = "gen"
RESTING = types.SimpleNamespace(rest=lambda kept: None)  # a task buffer that nobody calls
FACTS = {"attempt": "one", "ended": False, "newest": 3, "wanted": [3]}


def links_of(attempt, *, after="", began=0, newest=0):
    return Links(attempt, after, began, False, newest, newest, ())


class Rounds:
    """A worker whose rounds the test makes. `again`: links to which it joins again."""

    def __init__(self, links, again=None, slots=64):
        self.pulled = []
        self.sampler = Sampler(links.newest)
        self.state = WorkerState(links=links, version=links.newest, slots=slots)
        self.link = RemoteLink(self.state, self._pull, save_seconds=1e9)
        self.worker = Worker(self.sampler, self.link, cache="keep")
        self.talk = BufferClient(
            self.state,
            types.SimpleNamespace(again=lambda seconds, stopped: again),
            NodeRunner(),
            save_seconds=1e9,
            orphan_seconds=1.0,
        )
        self.round = self.worker.round

    def _pull(self, links, version):
        self.pulled.append((links.attempt, version))
        return f"weights {version}"

    def come(self, counter, progress=None):
        progress = progress or Progress()
        came = LeasedGroup(self.state.version, (counter, NODE), request_of(counter), progress)
        self.state.assigned.append(came)

    def until(self, done):
        def is_done():
            self.round()
            return done()

        until(lambda: done() or is_done(), pause=0.0)


def versions_of(progress):
    found = [e.response.version for e in progress.episodes.values()]
    found += [chunk[3] for partial in progress.partials for chunk in partial.chunks]
    return {int(version) for array in found for version in array}


@pytest.mark.parametrize(
    ("before", "kept"), [("one", {3}), ("an older one", set())], ids=["next start", "later start"]
)
def test_samples_of_weights_that_a_restart_has_undone_are_dropped(before, kept):
    """The next start began with 3 and has a version 5 of its own, which is other weights."""
    again = links_of("two", after=before, began=3, newest=5)
    rounds = Rounds(links_of("one", newest=3), again)
    rounds.come(2)
    rounds.round()
    (work,) = rounds.sampler._open
    known = rounds.sampler.progress()[work]
    rounds.state.whole[9, NODE] = Progress()  # of no weights
    rounds.state.whole[5, NODE] = known  # by version 3
    rounds.sampler.load("weights 5", 5, cache="keep")
    rounds.state.version, rounds.state.said[0] = 5, (5, 5, None)
    rounds.come(4)
    rounds.round()
    joins = threading.Thread(target=rounds.talk._rejoin)
    joins.start()
    rounds.until(lambda: not joins.is_alive())
    found = {key[0]: versions_of(progress) for key, progress in rounds.state.whole.items()}
    assert found == {9: set()} | ({5: kept} if kept else {})
    rounds.until(lambda: rounds.state.version == 5)
    assert rounds.pulled == [("two", 5)] and rounds.sampler.version == 5


def test_the_other_thread_brings_nothing_before_undone_samples_are_dropped():
    rounds = Rounds(links_of("one", newest=3), links_of("two", after="one", began=3, newest=3))
    rounds.come(2)
    rounds.round()
    seen = []
    drop = functools.partial(rounds.sampler.drop)

    def slow(keys):
        seen.append(rounds.state.rejoined)
        drop(keys)

    rounds.sampler.drop = slow
    joins = threading.Thread(target=rounds.talk._rejoin)
    joins.start()
    rounds.until(lambda: not joins.is_alive())
    assert seen == [True] and not rounds.state.rejoined


@pytest.mark.parametrize(
    ("errors", "ends"),
    [
        ([Refused("gone")] * 5, True),
        ([Unreachable("away")] * 50, False),
        ([Unreachable("away")] * 5 + [Refused("another attempt")], False),
    ],
    ids=["refused for too long", "trainers away", "trainers come back"],
)
def test_only_a_refusal_that_stays_ends_a_worker(errors, ends, monkeypatch, caplog):
    """Trainers that are away, or were started again meanwhile, have the weights later."""
    monkeypatch.setattr(remote_link, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(remote_link, "REFUSED_SECONDS", 0.02)
    rounds, left = Rounds(links_of("one", newest=3)), list(errors)
    rounds.state.said[0], pull = (4, 4, None), rounds.link._pull

    def failing(links, version):
        time.sleep(0.01)
        if left:
            raise left.pop(0)
        return pull(links, version)

    rounds.link._pull = failing
    if ends:
        with pytest.raises(ValueError, match="the weights did not come: gone"):
            rounds.until(lambda: rounds.pulled)
    else:
        rounds.until(lambda: rounds.state.version == 4)
    assert sum("weights did not come" in message for message in caplog.messages) == 1


def test_samples_go_to_their_buffers_in_frames_of_bounded_size(monkeypatch):
    found = {}
    for counter in range(12):
        episode = single_turn(response_of(request_of(counter), 0, [0] * (1 + counter)))
        found[counter, NODE] = Progress({0: episode})
    most = progress_bytes(found[9, NODE])
    monkeypatch.setattr(buffer_talk, "SUBMIT_BYTES", most)
    frames = frames_of(found)
    assert not any(more for _, more in frames)
    sent = [key for samples, _ in frames for key in samples]
    assert sorted(sent) == sorted(found) and len(frames) > 4
    for samples, _ in frames:
        assert len(samples) == 1 or sum(map(progress_bytes, samples.values())) <= most


def test_a_large_group_goes_in_several_frames_and_each_ended_response_once(monkeypatch):
    """The task buffer knows response 1; 0, 2 and 3 end here one after the other."""
    links = dataclasses.replace(links_of("one", newest=3), clients=(None,))
    rounds, key = Rounds(links), (2, NODE)
    request = request_of(2)
    ended = {s: single_turn(response_of(request, s, [3] * 10)) for s in range(4)}
    monkeypatch.setattr(buffer_talk, "SUBMIT_BYTES", progress_bytes(Progress({0: ended[0]})))
    brought, answers = [], []

    talk = BufferTalk(rounds.state, NodeRunner(), 0, 1e9)

    def call(method, frame):
        if method == "lease":
            return work_frame(FACTS, [(key, request, Progress({1: ended[1]}))])
        requests = {key: dataclasses.replace(request, sampling=SamplingParams(4, 16))}
        found = samples_of(frame, requests).get(key, Progress())
        brought.append((sorted(found.episodes), frame.facts["goes_on"]))
        return Frame(FACTS | {"dropped": answers.pop() if answers else []})

    monkeypatch.setattr(talk, "_call", call)
    rounds.state.capacity = 8
    talk.lease()
    saves = {key: Progress({1: ended[1], 0: ended[0]})}
    for _ in range(2):
        talk.submit_samples(saves, whole=False)
    assert brought == [([0], True), ([], True)]
    rounds.state.whole[key] = Progress(ended)
    talk.submit_samples({key: Progress(ended)}, whole=True)
    assert brought[2:] == [([2], True), ([3], False)]
    assert not rounds.state.whole and not rounds.state.told
    talk.submit_samples(saves, whole=False)
    answers.append([list(key)])  # the task buffer has given the group to another worker
    talk.submit_samples(saves, whole=False)
    assert rounds.state.dropped == {key} and not rounds.state.told


def test_a_failure_is_told_again_where_the_call_breaks(monkeypatch):
    links = dataclasses.replace(links_of("one", newest=3), clients=(RESTING,))
    rounds, key, told = Rounds(links), (2, NODE), []
    talk = BufferTalk(rounds.state, NodeRunner(), 0, 1e9)

    def call(method, frame):
        told.append((method, frame.facts["why"]))
        if len(told) == 1:
            raise Unreachable("away")
        return Frame(FACTS)

    monkeypatch.setattr(talk, "_call", call)
    rounds.state.told[key] = set()
    rounds.link.fail(key, "too long")
    with pytest.raises(Unreachable):
        talk.submit()
    assert rounds.state.failed and talk._holds()
    for _ in range(2):
        talk.submit()
    assert told == [("fail", "too long")] * 2 and not rounds.state.failed and not talk._holds()


@pytest.mark.parametrize(("seconds", "kept"), [(60.0, {2, 6}), (0.0, set())], ids=["load", "hung"])
def test_leases_go_on_while_an_engine_ends_its_responses_and_not_for_ever(
    seconds, kept, monkeypatch
):
    monkeypatch.setattr(remote_link, "LOAD_SECONDS", seconds)
    rounds = Rounds(dataclasses.replace(links_of("one", newest=3), clients=(RESTING,)))
    talk = BufferTalk(rounds.state, NodeRunner(), 0, 1e9)
    state, weight_update, seen = rounds.state, rounds.sampler.load, []

    def saves():
        with state.lock:
            talk._keep_open()
            found, state.partial = state.partial, {}
        assert all(progress == Progress() for progress in found.values())
        return {key[0] for key in found}

    def load(params, version, *, cache):
        rounds.come(6)  # the other thread goes on to ask
        seen.append(saves())
        weight_update(params, version, cache=cache)

    rounds.sampler.load = load
    rounds.come(2)
    rounds.round()
    state.partial.clear()
    assert saves() == set()
    state.said[0] = (4, 4, None)
    rounds.until(lambda: seen)
    state.partial.clear()
    assert seen == [kept] and saves() == set()


def test_responses_that_ended_elsewhere_take_no_slots():
    """Of two responses to prompt 4 one came with its group; none of prompt 2."""
    rounds = Rounds(links_of("one", newest=3), slots=8)
    episode = single_turn(response_of(request_of(4), 0, [3] * length_of(4, 0)))
    rounds.come(4, Progress({0: episode}))
    assert rounds.state.assigned[0].lacks == 1
    rounds.round()
    assert rounds.state.capacity == 7
    rounds.come(2)
    rounds.round()
    assert rounds.state.capacity == 5
    rounds.state.dropped.add((4, NODE))
    rounds.come(4, Progress({0: episode}))
    rounds.round()
    assert rounds.state.capacity == 8 - rounds.sampler.lacks
    rounds.until(lambda: not rounds.sampler.busy)
    assert rounds.state.capacity == 8
