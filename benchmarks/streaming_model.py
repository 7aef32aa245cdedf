"""Event model of a step's schedules: synchronous, and with samplers that run ahead of the training.

python benchmarks/streaming_model.py

Samplers decode all their slots together: a step of n active slots takes STEP (1 + n / 64) seconds.
A trainer's seconds are proportional to its tokens. The figures of benchmarks/streaming.py are the
speed-ups over the synchronous schedule that this model finds.
"""

import argparse
import collections
import dataclasses
import heapq
import sys
from collections.abc import Sequence

import numpy as np

from distflow_jax.flow.budgets.deadline_rule import Deadlines
from distflow_jax.flow.lag_rule import Rule

DEVICES = 8
SLOTS = 256
PROMPTS, SAMPLES = 32, 8  # of a step
MEDIAN, CAP = 128, 1024  # of a response's length, tokens
STEP = 0.002  # seconds of a decode step without an active slot
SLOT_STEP = STEP / 64  # and of each slot that is active
SWAP = 0.1  # seconds of a swap of weights, per second of synchronous generation
EXPOSED = 0.2  # of a swap, where samplers have devices of their own
SPLITS = (2, 4, 6)  # sampler devices that are tried; the others train
BUDGET = 1.0  # tokens of a rollout with a budget, over those of a synchronous step


@dataclasses.dataclass(frozen=True)
class Workload:
    """Lengths of responses, and the seconds of generation over those of training."""

    name: str
    kind: str  # lognormal, uniform or fixed
    ratio: float  # in the synchronous mode on all devices
    sigma: float = 1.0  # of the lengths' logarithm

    @property
    def longest(self) -> int:
        """Tokens that no response exceeds."""
        return {"lognormal": CAP, "uniform": 2 * MEDIAN, "fixed": MEDIAN}[self.kind]

    def lengths(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Tokens of `count` responses, int [count]."""
        if self.kind == "lognormal":
            drawn = MEDIAN * np.exp(self.sigma * rng.standard_normal(count))
            return np.clip(np.rint(drawn), 1, CAP).astype(int)
        if self.kind == "uniform":
            return rng.integers(1, 2 * MEDIAN + 1, count)
        return np.full(count, MEDIAN)


WORKLOADS = (
    Workload("heavy-2", "lognormal", 2.0),
    Workload("heavy-1", "lognormal", 1.0),
    Workload("heavy-4", "lognormal", 4.0),
    Workload("mild-2", "lognormal", 2.0, sigma=0.6),
    Workload("uniform-2", "uniform", 2.0),
    Workload("fixed-2", "fixed", 2.0),
)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds of a workload's parts."""

    generation: float  # of a synchronous step
    tokens: float  # of a step
    token: float  # of training on one token, on one device
    swap: float

    @classmethod
    def of(cls, workload: Workload, draws: int = 20, seed: int = 0) -> "Costs":
        """Means over some steps of the synchronous mode."""
        rng, seconds, tokens = np.random.default_rng(seed), [], []
        for _ in range(draws):
            lengths = workload.lengths(rng, PROMPTS * SAMPLES)
            seconds.append(generation(lengths))
            tokens.append(lengths.sum())
        mean, count = float(np.mean(seconds)), float(np.mean(tokens))
        return cls(mean, count, mean / workload.ratio * DEVICES / count, SWAP * mean)

    def training(self, tokens: float, devices: int) -> float:
        """Seconds of training on so many tokens."""
        return tokens * self.token / devices


class Sampler:
    """Slots that decode together; `pause` stops them until a time."""

    def __init__(self, slots: int):
        self.free = slots
        self.tokens = 0.0  # decoded so far
        self._steps = 0.0  # decode steps so far
        self._ends: list[tuple[float, int]] = []  # (steps at the end, group) of active slots
        self._paused = 0.0

    def begin(self, length: int, group: int) -> None:
        """Fills a slot."""
        self.free -= 1
        heapq.heappush(self._ends, (self._steps + length, group))

    def pause(self, until: float) -> None:
        """Nothing is decoded before a time."""
        self._paused = until

    def next_end(self, now: float) -> float:
        """When the next response ends; infinity where none is active."""
        if not self._ends:
            return float("inf")
        return max(now, self._paused) + (self._ends[0][0] - self._steps) * self._seconds

    def advance(self, now: float, to: float) -> list[int]:
        """Decodes from `now` to `to`, no later than the next end; the groups of ended responses."""
        if not self._ends:
            return []
        steps = max(0.0, to - max(now, self._paused)) / self._seconds
        self._steps, self.tokens = self._steps + steps, self.tokens + steps * len(self._ends)
        ended = []
        while self._ends and self._ends[0][0] <= self._steps + 1e-6:
            ended.append(heapq.heappop(self._ends)[1])
        self.free += len(ended)
        return ended

    @property
    def _seconds(self) -> float:
        """Of a decode step."""
        return STEP + SLOT_STEP * len(self._ends)


def drained(lengths: Sequence[int], slots: int, groups: Sequence[int]) -> list[tuple[float, int]]:
    """(seconds, group) of the end of each response, where one sampler answers all of them."""
    sampler, waiting = Sampler(slots), collections.deque(zip(lengths, groups, strict=True))
    now, ends = 0.0, []
    while len(ends) < len(lengths):
        while waiting and sampler.free:
            sampler.begin(*waiting.popleft())
        later = sampler.next_end(now)
        ends += [(later, group) for group in sampler.advance(now, later)]
        now = later
    return ends


def generation(lengths: np.ndarray) -> float:
    """Seconds until all devices have answered their shares of a step."""
    shares = (lengths[first::DEVICES] for first in range(DEVICES))
    return max(drained(s, SLOTS // DEVICES, [0] * len(s))[-1][0] for s in shares)


def synchronous(workload: Workload, costs: Costs, steps: int, seed: int = 1) -> float:
    """Seconds of a step that samples, trains and swaps, one after the other."""
    rng, total = np.random.default_rng(seed), 0.0
    for _ in range(steps):
        lengths = workload.lengths(rng, PROMPTS * SAMPLES)
        total += generation(lengths) + costs.training(lengths.sum(), DEVICES) + costs.swap
    return total / steps


def _groups(workload: Workload, steps: int, seed: int) -> np.ndarray:
    """Lengths int [groups, samples] of so many steps."""
    rng = np.random.default_rng(seed)
    return workload.lengths(rng, steps * PROMPTS * SAMPLES).reshape(-1, SAMPLES)


def boundary(
    workload: Workload, costs: Costs, samplers: int, lag: int, steps: int, seed: int = 1
) -> float:
    """Seconds of a step; each step is sampled wholly by the weights of `lag` steps before."""
    lengths = _groups(workload, steps, seed)
    free, finished = [0.0] * samplers, [0.0]  # by sampler, by version
    for step in range(steps):
        version = max(0, step - lag)
        ready = finished[version] + (EXPOSED * costs.swap if version else 0.0)
        groups = range(step * PROMPTS, (step + 1) * PROMPTS)
        for number in range(samplers):
            share = lengths[[g for g in groups if g % samplers == number]].reshape(-1)
            start = max(free[number], ready)
            free[number] = start + drained(share, SLOTS // samplers, [0] * len(share))[-1][0]
        tokens = lengths[groups.start : groups.stop].sum()
        training = costs.training(tokens, DEVICES - samplers)
        finished.append(max(finished[-1], *free) + training)
    return finished[-1] / steps


class _Queue:
    """Responses that wait for a slot of any sampler, in the order of their prompts."""

    def __init__(self, lengths: np.ndarray, samplers: int, slots: int):
        self.samplers = [Sampler(slots) for _ in range(samplers)]
        self._lengths, self._next = lengths, 0
        self._waiting: collections.deque[tuple[int, int]] = collections.deque()
        self.left = np.full(len(lengths), lengths.shape[1])  # responses of each group

    def admit(self, end: int) -> None:
        """All groups below `end` may begin."""
        for group in range(self._next, min(end, len(self._lengths))):
            self._waiting.extend((int(length), group) for length in self._lengths[group])
            self._next = group + 1

    def fill(self) -> None:
        """Fills free slots."""
        for sampler in self.samplers:
            while self._waiting and sampler.free:
                sampler.begin(*self._waiting.popleft())

    def next_end(self, now: float) -> float:
        """When the next response ends."""
        return min(sampler.next_end(now) for sampler in self.samplers)

    def advance(self, now: float, to: float) -> None:
        """Decodes on all samplers."""
        for sampler in self.samplers:
            for group in sampler.advance(now, to):
                self.left[group] -= 1

    def has(self, step: int) -> bool:
        """Whether a step's groups are complete."""
        return not self.left[step * PROMPTS : (step + 1) * PROMPTS].any()

    def tokens(self, step: int) -> int:
        """Tokens of a step's groups."""
        return int(self._lengths[step * PROMPTS : (step + 1) * PROMPTS].sum())


def in_flight(
    workload: Workload,
    costs: Costs,
    samplers: int,
    lag: int,
    steps: int,
    *,
    latency: float = 0.0,
    seed: int = 1,
) -> float:
    """Seconds of a step; samplers take new weights at once, and go on beside the training.

    `latency`: seconds from the end of an update until samplers can take its weights.
    """
    queue = _Queue(_groups(workload, steps, seed), samplers, SLOTS // samplers)
    queue.admit((lag + 1) * PROMPTS)
    now, step, training, arrivals = 0.0, 0, None, collections.deque()
    version = 0
    while step < steps:
        queue.fill()
        if training is None and queue.has(step):
            training = now + costs.training(queue.tokens(step), DEVICES - samplers)
        events = [queue.next_end(now), *([training] if training is not None else [])]
        later = min([*events, *list(arrivals)[:1]])
        queue.advance(now, later)
        now = later
        if training is not None and now >= training:
            step, training = step + 1, None
            arrivals.append(now + latency)
        while arrivals and now >= arrivals[0]:
            arrivals.popleft()
            version += 1
            for sampler in queue.samplers:
                sampler.pause(now + EXPOSED * costs.swap)
            queue.admit((version + lag + 1) * PROMPTS)
    return now / steps


def shared(workload: Workload, costs: Costs, lag: int, steps: int, seed: int = 1) -> float:
    """Seconds of a step on devices that sample until the step's groups are there, then train."""
    queue = _Queue(_groups(workload, steps + lag + 1, seed), DEVICES, SLOTS // DEVICES)
    now = 0.0
    for step in range(steps):
        queue.admit((step + 1 + lag) * PROMPTS)
        queue.fill()
        while not queue.has(step):
            later = queue.next_end(now)
            queue.advance(now, later)
            queue.fill()
            now = later
        now += costs.training(queue.tokens(step), DEVICES) + costs.swap
    return now / steps


@dataclasses.dataclass(frozen=True)
class Rollout:
    """The rollout of one step on shared devices."""

    seconds: float
    groups: int  # that the step trains


def rollouts(
    workload: Workload, lag: int, steps: int, *, budget: int = 0, seed: int = 1
) -> list[Rollout]:
    """Rollouts on shared devices; `budget`: tokens after which they may end, 0: each ends with B
    groups of its step."""
    queue = _Queue(_groups(workload, steps + lag + 1, seed), DEVICES, SLOTS // DEVICES)
    rule, found = Deadlines(Rule(PROMPTS, lag)), []

    def over(step: int, tokens: float) -> bool:
        if not budget:
            return queue.has(step)
        for counter, _ in rule.begun["waiting"]:
            if not queue.left[counter]:
                rule.complete(counter)
        return rule.awaited() is None and (tokens >= budget or not rule.lacking)

    for step in range(steps):
        queue.admit(rule.end(step) if budget else (step + 1 + lag) * PROMPTS)
        queue.fill()
        now, before = 0.0, sum(sampler.tokens for sampler in queue.samplers)
        while not over(step, sum(sampler.tokens for sampler in queue.samplers) - before):
            later = queue.next_end(now)
            queue.advance(now, later)
            queue.fill()
            now = later
        groups = len(rule.finish(step + 1).kept) if budget else PROMPTS
        found.append(Rollout(now, groups))
    return found


def variation(values: Sequence[float]) -> float:
    """The coefficient of variation."""
    return float(np.std(values) / np.mean(values))


def least_seconds(costs: Costs, tokens: float, *, shared_devices: bool) -> float:
    """No schedule has a shorter step of so many tokens: all devices are at work all the time."""
    if shared_devices:
        return sampling_seconds(tokens, DEVICES) + costs.training(tokens, DEVICES) + costs.swap
    return min(
        max(sampling_seconds(tokens, r), costs.training(tokens, DEVICES - r)) for r in SPLITS
    )


def sampling_seconds(tokens: float, devices: int) -> float:
    """Seconds in which devices sample so many tokens, with all slots active."""
    slots = SLOTS / devices
    return tokens / SLOTS * (STEP + SLOT_STEP * slots)


def predict(workload: Workload, schedule: str, lag: int, steps: int = 40) -> tuple[float, int]:
    """(speed-up over the synchronous mode, sampler devices of the best split)."""
    costs = Costs.of(workload)
    base = synchronous(workload, costs, steps)
    if schedule == "shared":
        return base / shared(workload, costs, lag, steps), DEVICES
    schedules = {"boundary": boundary, "in_flight": in_flight}
    run = schedules[schedule]
    return max((base / run(workload, costs, r, lag, steps), r) for r in SPLITS)


def main() -> int:
    """Prints the table of figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=40, help="of each schedule")
    steps = parser.parse_args().steps
    cells = (("boundary", 1), ("in_flight", 1), ("in_flight", 2), ("shared", 1), ("shared", 2))
    print("| workload | bound | " + " | ".join(f"{name}, lag {lag}" for name, lag in cells) + " |")
    print("|---" * (len(cells) + 2) + "|")
    found = []
    for workload in WORKLOADS:
        costs = Costs.of(workload)
        bound = synchronous(workload, costs, steps) / least_seconds(
            costs, costs.tokens, shared_devices=False
        )
        figures = [predict(workload, name, lag, steps) for name, lag in cells]
        found.append([speed for speed, _ in figures])
        shown = " | ".join(f"{speed:.2f} ({devices})" for speed, devices in figures)
        print(f"| {workload.name} | {bound:.2f} | {shown} |")
    print("| mean | | " + " | ".join(f"{mean:.2f}" for mean in np.mean(found, axis=0)) + " |")
    workload, lag = WORKLOADS[0], 2
    for budget in (0, round(BUDGET * Costs.of(workload).tokens)):
        made = rollouts(workload, lag, steps, budget=budget)[lag + 2 :]
        print(
            f"{workload.name}, shared, lag {lag}, rollouts of {budget or 'no budget of'} tokens: "
            f"coefficient of variation {variation([r.seconds for r in made]):.3f}, "
            f"{np.mean([r.groups for r in made]):.1f} groups a step"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
