"""Thousands of responses in turns, with tools of every kind: nothing is lost or left behind.

Nightly: 10,000 trajectories that answer, wait, fail or are given up leave no page, no slot and no
memory.
"""

import gc
import os
import pathlib
import statistics
import sys

import numpy as np
import pytest
from support.tiny_model import TINY, prompt_of
from support.tiny_sampler import NEAR_TIE, Sampler, assert_all_free

from distflow_jax.rollout.requests import GroupRequest, SamplingParams
from distflow_jax.rollout.scheduling.scheduler import Scheduler

SIZES = dict(slots=32, max_response=48, max_read=80, max_forced=6)
TURN = 8  # tokens at most
MOST_GROWTH = 0.02  # of resident memory
# what becomes of a response after a turn, and how often
FATES = {"done": 0.2, "at once": 0.25, "late": 0.35, "raises": 0.05, "hangs": 0.05, "too much": 0.1}
HANGS = 25  # rounds until a tool is given up


@pytest.fixture(scope="module")
def crowded():
    """8 lanes for 32 responses, with pages for some of the lanes."""
    return Sampler(**SIZES, lanes=8, cache_tokens=16 * 20)


class Crowd:
    """Responses that come, are answered, fail and are aborted, over one scheduler.

    All that a response meets follows from its uid and its turn, but for the aborts of groups.
    """

    def __init__(self, sampler, count, at_once, *, changes=True):
        """`changes`: with aborts, and loads of weights, which are the same ones."""
        self.sampler, self.count, self.at_once, self.changes = sampler, count, at_once, changes
        self.scheduler = Scheduler(sampler.engine, sampler.params, state=sampler.state)
        self.tokens = {}  # of responses that have ended, by uid: (sampled, margins) of each turn
        self.rounds = self.begun = 0
        self._turns = {}  # of responses under way, by uid
        self._groups = {}  # their ids, by counter
        self._due = {}  # uid: (round, fate), of those that wait for a tool
        self._rng = np.random.default_rng(7)

    def round(self):
        while self.begun < self.count and len(self._turns) < self.at_once:
            self._begin()
        for uid, (due, fate) in list(self._due.items()):
            if due <= self.rounds:
                del self._due[uid]
                self._answer(uid, fate)
        if self.changes:
            self._change()
        for response in self.scheduler.step():
            self._turn_ended(response)
        self.rounds += 1
        self._check()

    def run(self):
        """All of them; the scheduler is empty then."""
        while self.begun < self.count or self._turns:
            self.round()
        stats = self.scheduler.stats
        self.sampler.state = assert_all_free(self.scheduler)
        return stats

    def _begin(self):
        counter = self.begun
        rng = np.random.default_rng(counter)
        tokens = rng.integers(0, TINY.vocab_size, rng.integers(1, 32))
        sampling = SamplingParams(int(rng.integers(1, 4, endpoint=True)), TURN)
        request = GroupRequest(prompt_of(counter, tokens), sampling, hold=True)
        self._groups[counter] = self.scheduler.submit(request)
        self._turns |= {(counter, sample): [] for sample in request.samples}
        self.begun += len(request.samples)

    def _turn_ended(self, response):
        uid = response.prompt.counter, response.sample
        if uid not in self._turns:
            return  # of a group that was aborted in this round
        turns = self._turns[uid]
        turns.append((response.tokens, response.margin))
        rng = np.random.default_rng((*uid, len(turns)))
        fate = str(rng.choice(list(FATES), p=list(FATES.values())))
        wait = {"late": int(rng.integers(1, 20)), "hangs": HANGS}.get(fate, 0)
        self._due[uid] = (self.rounds + wait, fate)

    def _answer(self, uid, fate):
        counter, sample = uid
        turns, held = self._turns[uid], self.scheduler.held
        rng = np.random.default_rng((*uid, len(turns), 1))
        count = 60 if fate == "too much" else int(rng.integers(1, 9))
        answer = rng.integers(0, TINY.vocab_size, count).astype(np.int32)
        length = sum(len(tokens) for tokens, _ in turns) + count
        if fate in ("done", "raises", "hangs"):
            self._end(uid)
        elif length >= SIZES["max_response"]:
            with pytest.raises(ValueError, match="nothing to sample"):
                held.extend(self._groups[counter], sample, answer, length)
            self._end(uid)
        else:
            turns.append((answer, np.full(count, np.inf)))
            limit = min(length + TURN, SIZES["max_response"])
            held.extend(self._groups[counter], sample, answer, limit)

    def _end(self, uid):
        counter, sample = uid
        self.scheduler.held.release(self._groups[counter], sample)
        self.tokens[uid] = self._turns.pop(uid)
        if not any(other == counter for other, _ in self._turns):
            del self._groups[counter]

    def _change(self):
        if self._rng.random() < 0.02:
            version, cache = self.scheduler.version + 1, ("keep", "recompute")[self.rounds % 2]
            self.scheduler.load(self.sampler.params, version, cache=cache)
        if self._rng.random() < 0.01 and self._groups:
            self._abort(int(self._rng.choice(list(self._groups))))

    def _abort(self, counter):
        self.scheduler.abort(self._groups.pop(counter))
        for uid in [uid for uid in self._turns if uid[0] == counter]:
            del self._turns[uid]
            self._due.pop(uid, None)

    def _check(self):
        """Every slot and every lane is somebody's or free, and every response is somewhere."""
        loop, shapes = self.scheduler._loop, self.scheduler.engine.shapes
        slots = loop.slots
        assert len(slots.sequences) + sum(map(len, slots.free)) == shapes.slots
        assert len(slots.running()) + sum(slots.free_lanes) == shapes.lanes
        assert slots.held.keys() | slots.returning.keys() <= slots.sequences.keys()
        assert not slots.held.keys() & slots.returning.keys()
        places = len(slots.sequences) + len(loop.parked) + loop.waiting.count
        assert places == sum(group.left for group in loop.groups.values())


def assert_same(found, wanted):
    """Equal tokens up to the first near-tie of each response; and most responses have none."""
    whole = 0
    for uid in found.tokens.keys() & wanted.tokens.keys():
        (mine, _), (theirs, margin) = (
            map(np.concatenate, zip(*turns, strict=True))
            for turns in (found.tokens[uid], wanted.tokens[uid])
        )
        ties = np.flatnonzero(margin < NEAR_TIE)
        end = ties[0] if len(ties) else max(len(mine), len(theirs))
        np.testing.assert_array_equal(mine[:end], theirs[:end], str(uid))
        whole += not len(ties)
    assert whole > 0.8 * found.count


@pytest.mark.slow
def test_40_at_a_time_are_those_that_never_wait(crowded):
    """With pages for some of 8 lanes, and more responses than slots. What is held is parked before
    any other is preempted; loads of weights with recompute preempt all that run."""
    found = Crowd(crowded, 300, at_once=40)
    stats = found.run()
    assert stats.parked > 100 and stats.occupancy.reread_tokens > 1000
    wanted = Crowd(crowded, 300, at_once=1, changes=False)  # one group
    stats = wanted.run()
    assert stats.parked == stats.preempted == 0
    assert_same(found, wanted)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is in /proc")
def test_10000_leave_nothing_behind(crowded):
    """No slot, page or response, and memory as it was."""
    crowd, memory = Crowd(crowded, 10_000, at_once=40), []
    while crowd.begun < crowd.count or crowd._turns:
        crowd.round()
        crowd.tokens.clear()
        if crowd.rounds % 50 == 0:
            memory.append((crowd.begun / crowd.count, resident_bytes()))
    stats = crowd.scheduler.stats
    crowded.state = assert_all_free(crowd.scheduler)
    early = statistics.median(size for share, size in memory if 0.2 < share < 0.4)
    late = statistics.median(size for share, size in memory if share > 0.8)
    print(f"{crowd.rounds} rounds, {stats}, {early / 2**20:.1f} MiB, then {late / 2**20:.1f} MiB")
    assert late <= early * (1 + MOST_GROWTH)


def resident_bytes():
    """Resident memory of this process. Linux."""
    gc.collect()
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
