"""The sampler under random requests, aborts, weight swaps and pauses: minutes, or an hour.

Nightly: two minutes of random requests, aborts and weight updates: no wrong token, no leaked page.
"""

import dataclasses
import gc
import os
import pathlib
import statistics
import sys
import time

import numpy as np
import pytest
from support.tiny_model import TINY, mesh_of, prompt_of, random_params

from distflow_jax.observe.compilations import Compilations
from distflow_jax.rollout.engine.engine import EngineConfig, RolloutEngine
from distflow_jax.rollout.requests import GroupRequest, Response, SamplingParams
from distflow_jax.rollout.scheduling import scheduler

SOAK_SECONDS = float(os.environ.get("DISTFLOW_SOAK_SECONDS", "3600"))
STOP_IDS = (258, *range(8))
CONFIG = EngineConfig(
    slots=8,
    max_prompt=32,
    max_response=24,
    tokens_per_call=4,
    page_size=16,
    group_size=4,
    max_read=56,
)
NEAR_TIE = 1e-4  # lead of the best over the second-best perturbed logit
MOST_GROWTH = 0.02  # of resident memory
PROBE, HOUSE, FIRST = 0, 1, 100  # counters: the probe, the full house, the first of the others
BACKLOG = 6  # requests that wait or run, most of the time


def random_request(rng: np.random.Generator, counter: int) -> GroupRequest:
    """Every third prompt begins as others do, so that caches of prefixes are hit and dropped."""
    tokens = rng.integers(0, TINY.vocab_size, rng.integers(1, CONFIG.max_prompt, endpoint=True))
    if rng.random() < 0.33:
        stem = np.random.default_rng(rng.integers(3)).integers(0, TINY.vocab_size, 24)
        tokens = np.concatenate([stem, tokens])[: CONFIG.max_prompt]
    return GroupRequest(
        prompt_of(counter, tokens),
        SamplingParams(
            # up to more than a group has, and more than there are slots
            num_samples=int(rng.integers(1, 10, endpoint=True)),
            limit=int(rng.integers(1, CONFIG.max_response, endpoint=True)),
            temperature=float(rng.choice([0.0, 0.7, 1.0, 1.3])),
            top_k=int(rng.choice([0, 0, 1, 20])),
            top_p=float(rng.choice([1.0, 1.0, 0.5, 0.95])),
        ),
    )


def probe_request() -> GroupRequest:
    """The same each time, its uid too, and so the same tokens."""
    tokens = np.random.default_rng(5).integers(0, TINY.vocab_size, 19)
    return GroupRequest(prompt_of(PROBE, tokens), SamplingParams(2, CONFIG.max_response))


def full_house() -> list[GroupRequest]:
    """One request per slot, no two alike, each of them as long as the engine takes."""
    rng = np.random.default_rng(6)
    prompts = rng.integers(0, TINY.vocab_size, (CONFIG.slots, CONFIG.max_prompt))
    return [
        GroupRequest(prompt_of(HOUSE + i, row), SamplingParams(1, CONFIG.max_response))
        for i, row in enumerate(prompts)
    ]


def check(request: GroupRequest, response: Response, versions: range) -> None:
    """It has what the request asked for; `versions` are those that it may have met."""
    count = len(response.tokens)
    assert response.prompt is request.prompt
    assert response.tokens.dtype == np.int32 and response.logp.dtype == np.float32
    assert len(response.logp) == len(response.margin) == len(response.version) == count
    assert count <= request.sampling.limit and not set(response.tokens[:-1]) & set(STOP_IDS)
    assert ((response.tokens >= 0) & (response.tokens < TINY.vocab_size)).all()
    assert np.isfinite(response.logp).all() and (response.logp <= 1e-6).all()
    assert set(response.version.tolist()) <= set(versions)
    assert (np.diff(response.version) >= 0).all()


def assert_same_tokens(got: Response, wanted: Response, count: int) -> None:
    """The first `count` tokens, up to the first near-tie."""
    ties = np.flatnonzero(wanted.margin[:count] < NEAR_TIE)
    end = ties[0] if len(ties) else count
    np.testing.assert_array_equal(got.tokens[:end], wanted.tokens[:end])
    np.testing.assert_allclose(got.logp[:end], wanted.logp[:end], atol=1e-4)


@dataclasses.dataclass
class Asked:
    """A request that is not answered in full."""

    request: GroupRequest
    version: int  # of the weights when it was submitted
    missing: set[int]  # samples
    called: set[int] = dataclasses.field(default_factory=set)  # samples that on_response saw


class Soak:
    """A scheduler, and what it still owes."""

    def __init__(self):
        mesh = mesh_of(1, 1, names=("data", "tensor"))
        self.engine = RolloutEngine(TINY, CONFIG, mesh, stop_ids=STOP_IDS, seed=3)
        # the weights of even and of odd versions
        self.weights = [self.engine.load_params(random_params(TINY, seed)) for seed in (2, 3)]
        self.engine.compile(self.weights[0])
        self.version = 0
        self.scheduler = scheduler.Scheduler(self.engine, self.weights[0], version=0)
        self.asked: dict[int, Asked] = {}
        self.golden: list[list[Response]] = []  # the probe's, for each of the weights
        self.rng = np.random.default_rng(0)
        self.counter = FIRST
        self.counts = dict.fromkeys(("responses", "probes", "aborts", "swaps", "pauses"), 0)

    # -- requests ------------------------------------------------------------------------------

    def submit(self, request: GroupRequest) -> int:
        asked = Asked(request, self.version, set(range(request.sampling.num_samples)))
        index = self.scheduler.submit(request, on_response=lambda r: asked.called.add(r.sample))
        assert index not in self.asked
        self.asked[index] = asked
        return index

    def owner(self, counter: int) -> int:
        """The id of the one open request with this counter."""
        found = [i for i, a in self.asked.items() if a.request.prompt.counter == counter]
        assert len(found) == 1, f"{len(found)} requests with counter {counter} await responses"
        return found[0]

    def step(self) -> list[Response]:
        """One step; every response that comes is checked and crossed off."""
        responses = self.scheduler.step()
        for response in responses:
            index = self.owner(response.prompt.counter)
            asked = self.asked[index]
            check(asked.request, response, range(asked.version, self.version + 1))
            assert response.finished == (response.tokens[-1] in STOP_IDS)
            assert response.finished or len(response.tokens) == asked.request.sampling.limit
            assert response.sample in asked.called, "it came without a call of on_response"
            asked.missing.remove(response.sample)  # KeyError: it came twice
            if response.prompt.counter == PROBE and self.golden:
                self.check_probe(response, asked.version)
            if not asked.missing:
                assert len(asked.called) == asked.request.sampling.num_samples
                del self.asked[index]
        self.counts["responses"] += len(responses)
        return responses

    def check_probe(self, response: Response, version: int) -> None:
        """Up to a swap of weights it is what these weights have always answered."""
        wanted = self.golden[version % 2][response.sample]
        count = int((response.version == version).sum())
        if count == len(response.tokens):
            assert_same_tokens(response, wanted, max(count, len(wanted.tokens)))
        else:
            assert_same_tokens(response, wanted, count)
        self.counts["probes"] += 1

    def drain(self) -> list[Response]:
        """Steps until nothing is left."""
        responses = []
        while self.scheduler.busy:
            responses += self.step()
        assert not self.asked, "responses are missing, and nothing runs"
        return responses

    def answers(self, requests: list[GroupRequest]) -> tuple[int, list[Response]]:
        """(steps, responses by (counter, sample)) to requests that have the slots to themselves."""
        assert not self.scheduler.busy
        for request in requests:
            self.submit(request)
        steps, responses = 0, []
        while self.scheduler.busy:
            responses += self.step()
            steps += 1
        assert not self.asked
        return steps, sorted(responses, key=lambda r: (r.prompt.counter, r.sample))

    # -- what may happen between two steps -----------------------------------------------------

    def abort(self) -> None:
        """Some request ends as it is: what was sampled comes now, and nothing later."""
        if not self.asked:
            return
        index = int(self.rng.choice(sorted(self.asked)))
        asked = self.asked.pop(index)
        partial = self.scheduler.abort(index)
        samples = [r.sample for r in partial]
        assert len(set(samples)) == len(samples) and set(samples) <= asked.missing
        for response in partial:  # one that has ended had not been returned yet
            assert not response.finished or response.sample in asked.called
            check(asked.request, response, range(asked.version, self.version + 1))
        self.counts["aborts"] += 1

    def weight_update(self) -> None:
        """The other weights, with caches kept or read anew."""
        self.version += 1
        cache = str(self.rng.choice(["keep", "recompute"]))
        self.scheduler.load(self.weights[self.version % 2], self.version, cache=cache)
        self.counts["swaps"] += 1

    def pause(self) -> None:
        """Nothing comes until it is resumed, and nothing is lost."""
        busy = self.scheduler.busy
        self.scheduler.pause()
        for _ in range(3):
            assert self.scheduler.step() == []
        assert self.scheduler.busy == busy
        self.scheduler.resume()
        self.counts["pauses"] += 1

    def act(self) -> None:
        """A few requests, sometimes something else, and a step."""
        probed = any(a.request.prompt.counter == PROBE for a in self.asked.values())
        if not probed and self.rng.random() < 0.2:
            self.submit(probe_request())
        while len(self.asked) < self.rng.integers(0, 2 * BACKLOG):
            self.submit(random_request(self.rng, self.counter))
            self.counter += 1
        for action, probability in (
            (self.abort, 0.05),
            (self.weight_update, 0.03),
            (self.pause, 0.03),
        ):
            if self.rng.random() < probability:
                action()
        self.step()


def resident_bytes() -> int:
    """Resident memory of this process. Linux."""
    gc.collect()
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def soak_for(seconds: float) -> None:
    """Random work for so long; what holds throughout, and what must be as it was at the end."""
    soak = Soak()
    golden = []
    for _ in range(2):  # alone, with each of the weights
        golden.append(soak.answers([probe_request()])[1])
        soak.weight_update()
    soak.golden = golden
    steps, house = soak.answers(full_house())
    assert soak.engine.max_concurrent_decodes == len(house)
    for _ in range(100):
        soak.act()
    for action in (soak.pause, soak.weight_update, soak.abort):
        action()
    compilations, start = Compilations(), time.monotonic()
    memory: list[tuple[float, int]] = []  # (share of the time, bytes)
    while (share := (time.monotonic() - start) / seconds) < 1:
        soak.act()
        if not memory or share - memory[-1][0] > 0.005:
            memory.append((share, resident_bytes()))
    assert compilations.take() == 0, compilations.names()

    # every slot and every page is free again: as many run side by side as at the start
    soak.drain()
    if soak.version % 2:
        soak.weight_update()
    again, rehoused = soak.answers(full_house())
    assert again <= steps
    for got, wanted in zip(rehoused, house, strict=True):
        assert_same_tokens(got, wanted, max(len(got.tokens), len(wanted.tokens)))
    for version in (0, 1):
        for response in soak.answers([probe_request()])[1]:
            wanted = golden[version][response.sample]
            assert_same_tokens(response, wanted, max(len(response.tokens), len(wanted.tokens)))
        soak.weight_update()
    assert compilations.take() == 0, compilations.names()
    compilations.close()

    early = statistics.median(size for share, size in memory if 0.2 < share < 0.4)
    late = statistics.median(size for share, size in memory if share > 0.8)
    print(f"{soak.counts}, resident {early / 2**20:.1f} MiB, then {late / 2**20:.1f} MiB")
    assert late <= early * (1 + MOST_GROWTH), f"{early} bytes were resident, now {late}"
    assert all(soak.counts.values())


needs_proc = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="resident memory is read from /proc"
)


@pytest.mark.slow
@needs_proc
def test_two_minutes():
    soak_for(120)


@pytest.mark.soak
@needs_proc
def test_an_hour():
    """Or as many seconds as DISTFLOW_SOAK_SECONDS says."""
    soak_for(SOAK_SECONDS)
