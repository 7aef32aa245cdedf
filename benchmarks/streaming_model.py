"""Event model of a step's schedules: synchronous, and with samplers that run ahead of the training.

python benchmarks/streaming_model.py

Samplers decode all their slots together: a step of n active slots takes STEP (1 + n / 64) seconds.
A trainer's seconds are proportional to its tokens. In partial batches it takes all complete groups
of its step whenever it is free. A response with a slow reward counts once that has come. The
figures of benchmarks/streaming.py are the speed-ups over the synchronous schedule that this model
finds.
"""

import argparse
import collections
import dataclasses
import functools
import heapq
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from distflow_jax.stream.deadlines import Deadlines
from distflow_jax.stream.schedule import Rule

DEVICES = 8
SLOTS = 256
PROMPTS, SAMPLES = 32, 8  # of a step
MEDIAN, CAP = 128, 1024  # of a response's length, tokens
STEP = 0.002  # seconds of a decode step without an active slot
SLOT_STEP = STEP / 64  # and of each slot that is active
SWAP = 0.1  # seconds of a weight update of weights, per second of synchronous generation
EXPOSED = 0.2  # of a weight update, where samplers have devices of their own
SPLITS = (2, 4, 6)  # sampler devices that are tried; the others train
BUDGET = 1.0  # tokens of a rollout with a budget, over those of a synchronous step
# least tokens of a partial batch: a step is trained once all of its groups are there
AT_ONCE = float("inf")
REWARD_SIGMA = 1.0  # of the logarithm of a slow reward's seconds
REWARD_WORKERS = 16  # that score responses, one at a time each


@dataclasses.dataclass(frozen=True)
class Workload:
    """Lengths of responses, and the seconds of generation over those of training."""

    name: str
    kind: str  # lognormal, uniform or fixed
    ratio: float  # in the synchronous mode on all devices
    sigma: float = 1.0  # of the lengths' logarithm
    # mean seconds that all workers need for a step's rewards, over those of generation
    reward: float = 0.0

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

    def rewards(self, rng: np.random.Generator, count: int, mean: float) -> np.ndarray:
        """Seconds of `count` rewards, lognormal with this mean, float [count]."""
        return mean * np.exp(REWARD_SIGMA * rng.standard_normal(count) - REWARD_SIGMA**2 / 2)


WORKLOADS = (
    Workload("heavy-2", "lognormal", 2.0),
    Workload("heavy-1", "lognormal", 1.0),
    Workload("heavy-4", "lognormal", 4.0),
    Workload("mild-2", "lognormal", 2.0, sigma=0.6),
    Workload("uniform-2", "uniform", 2.0),
    Workload("fixed-2", "fixed", 2.0),
)
SLOW_REWARDS = Workload("rewards-2", "lognormal", 2.0, reward=0.25)  # heavy-2 but for its rewards
CELLS = (  # (schedule, staleness) with figures
    ("boundary", 1),
    ("in_flight", 1),
    ("in_flight", 2),
    ("partial_batches", 1),
    ("partial_batches", 2),
    ("shared", 1),
    ("shared", 2),
)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds of a workload's parts."""

    generation: float  # of a synchronous step
    tokens: float  # of a step
    token: float  # of training on one token, on one device
    weight_update: float
    reward: float  # of a response, on average

    @classmethod
    def of(cls, workload: Workload, draws: int = 20, seed: int = 0) -> "Costs":
        """Means over some steps of the synchronous mode."""
        rng, seconds, tokens = np.random.default_rng(seed), [], []
        for _ in range(draws):
            lengths = workload.lengths(rng, PROMPTS * SAMPLES)
            seconds.append(generation(lengths))
            tokens.append(lengths.sum())
        mean, count = float(np.mean(seconds)), float(np.mean(tokens))
        token = mean / workload.ratio * DEVICES / count
        reward = workload.reward * mean * REWARD_WORKERS / (PROMPTS * SAMPLES)
        return cls(mean, count, token, SWAP * mean, reward)

    def training(self, tokens: float, devices: int) -> float:
        """Seconds of training on so many tokens."""
        return tokens * self.token / devices


class Sampler:
    """Slots that decode together; `pause` stops them until a time."""

    def __init__(self, slots: int):
        self.free = slots
        self.tokens = 0.0  # decoded so far
        self._steps = 0.0  # decode steps so far
        self._ends: list[tuple[float, Any]] = []  # (steps at the end, response) of active slots
        self._paused = 0.0

    def begin(self, length: int, response: Any) -> None:
        """Fills a slot. `response`: its name, which must have an order."""
        self.free -= 1
        heapq.heappush(self._ends, (self._steps + length, response))

    def pause(self, until: float) -> None:
        """Nothing is decoded before a time."""
        self._paused = until

    def next_end(self, now: float) -> float:
        """When the next response ends; infinity where none is active."""
        if not self._ends:
            return float("inf")
        return max(now, self._paused) + (self._ends[0][0] - self._steps) * self._seconds

    def advance(self, now: float, to: float) -> list[Any]:
        """Decodes from `now` to `to`, no later than the next end; the responses that ended."""
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


def drained(lengths: Sequence[int], slots: int) -> np.ndarray:
    """Seconds until the end of each response, float [responses], of one sampler that answers all
    of them."""
    sampler, waiting = Sampler(slots), collections.deque(enumerate(lengths))
    now, ends = 0.0, np.full(len(lengths), np.inf)
    while not np.isfinite(ends).all():
        while waiting and sampler.free:
            response, length = waiting.popleft()
            sampler.begin(int(length), response)
        later = sampler.next_end(now)
        ends[sampler.advance(now, later)] = later
        now = later
    return ends


class Workers:
    """Workers that score one response after the other, as they end."""

    def __init__(self):
        self._free = [0.0] * REWARD_WORKERS  # when each is free; a heap

    def scored(self, end: float, seconds: float) -> float:
        """When a response has its reward, which takes so many seconds; it ended last so far."""
        done = max(end, self._free[0]) + seconds if seconds else end
        if seconds:
            heapq.heapreplace(self._free, done)
        return done

    def last(self, ends: np.ndarray, rewards: np.ndarray) -> float:
        """When all of some responses have their rewards; both float [responses], in seconds."""
        order = np.argsort(ends, kind="stable")
        return max(self.scored(float(ends[i]), float(rewards[i])) for i in order)


def generation(lengths: np.ndarray, rewards: np.ndarray | None = None) -> float:
    """Seconds until all devices have answered their shares of a step, and `rewards` (seconds of
    each response, float [responses]; None: no time) have come."""
    ends = np.empty(len(lengths))
    for first in range(DEVICES):
        ends[first::DEVICES] = drained(lengths[first::DEVICES], SLOTS // DEVICES)
    return float(ends.max()) if rewards is None else Workers().last(ends, rewards)


def synchronous(workload: Workload, costs: Costs, steps: int, seed: int = 1) -> float:
    """Seconds of a step that samples, trains and weight updates, one after the other."""
    rng, of_rewards, total = np.random.default_rng(seed), np.random.default_rng((seed, 1)), 0.0
    for _ in range(steps):
        lengths = workload.lengths(rng, PROMPTS * SAMPLES)
        rewards = workload.rewards(of_rewards, len(lengths), costs.reward)
        total += generation(lengths, rewards) + costs.training(lengths.sum(), DEVICES)
        total += costs.weight_update
    return total / steps


def _groups(
    workload: Workload, costs: Costs, steps: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Lengths int and seconds of rewards float, [groups, samples] of so many steps."""
    rng, of_rewards = np.random.default_rng(seed), np.random.default_rng((seed, 1))
    count = steps * PROMPTS * SAMPLES
    drawn = workload.lengths(rng, count), workload.rewards(of_rewards, count, costs.reward)
    lengths, rewards = (x.reshape(-1, SAMPLES) for x in drawn)
    return lengths, rewards


def boundary(
    workload: Workload, costs: Costs, samplers: int, staleness: int, steps: int, seed: int = 1
) -> float:
    """Seconds of a step; each step is sampled wholly by the weights of `staleness` steps before."""
    lengths, rewards = _groups(workload, costs, steps, seed)
    free, finished, workers = [0.0] * samplers, [0.0], Workers()  # by sampler, by version
    for step in range(steps):
        version = max(0, step - staleness)
        ready = finished[version] + (EXPOSED * costs.weight_update if version else 0.0)
        groups = range(step * PROMPTS, (step + 1) * PROMPTS)
        ended, seconds = [], []
        for number in range(samplers):
            mine = [g for g in groups if g % samplers == number]
            ends = drained(lengths[mine].reshape(-1), SLOTS // samplers)
            ended.append(ends + max(free[number], ready))
            free[number] = float(ended[-1].max())
            seconds.append(rewards[mine].reshape(-1))
        scored = workers.last(np.concatenate(ended), np.concatenate(seconds))
        tokens = lengths[groups.start : groups.stop].sum()
        training = costs.training(tokens, DEVICES - samplers)
        finished.append(max(finished[-1], scored) + training)
    return finished[-1] / steps


class _Queue:
    """Responses that wait for a slot of any sampler, in the order of their prompts, and the groups
    that the training has not taken.

    `lengths` and `rewards`: tokens, and seconds of the reward, of each response [groups, samples].

    Attributes:
      left: responses of each group that are not complete, int [groups].
    """

    def __init__(self, lengths: np.ndarray, rewards: np.ndarray, samplers: int, slots: int):
        self.samplers = [Sampler(slots) for _ in range(samplers)]
        self._lengths, self._rewards, self._next = lengths, rewards, 0
        self._waiting: collections.deque[tuple[int, tuple[int, int]]] = collections.deque()
        self._scoring: list[tuple[float, int]] = []  # (time, group) of rewards to come
        self._workers = Workers()
        self.left = np.full(len(lengths), lengths.shape[1])
        self._taken = np.zeros(len(lengths), bool)

    def admit(self, end: int) -> None:
        """All groups below `end` may begin."""
        for group in range(self._next, min(end, len(self._lengths))):
            responses = enumerate(self._lengths[group].tolist())
            self._waiting.extend((length, (group, sample)) for sample, length in responses)
            self._next = group + 1

    def fill(self) -> None:
        """Fills free slots."""
        for sampler in self.samplers:
            while self._waiting and sampler.free:
                sampler.begin(*self._waiting.popleft())

    def next_end(self, now: float) -> float:
        """When the next response ends, or the next reward comes."""
        rewards = [when for when, _ in self._scoring[:1]]
        return max(now, min([*rewards, *(sampler.next_end(now) for sampler in self.samplers)]))

    def advance(self, now: float, to: float) -> None:
        """Decodes on all samplers, and scores what has ended."""
        for sampler in self.samplers:
            for group, sample in sampler.advance(now, to):
                scored = self._workers.scored(to, self._rewards[group, sample])
                heapq.heappush(self._scoring, (scored, group))
        while self._scoring and self._scoring[0][0] <= to:
            self.left[heapq.heappop(self._scoring)[1]] -= 1

    def go_on(self, now: float) -> float:
        """Decodes until something ends, and fills its slots; returns when that is."""
        later = self.next_end(now)
        self.advance(now, later)
        self.fill()
        return later

    def has(self, step: int) -> bool:
        """Whether a step's groups are complete."""
        return not self.left[_of(step)].any()

    def take(self, step: int, least: float) -> int:
        """Tokens of the next partial batch of a step, all of its groups that are complete; 0: none.

        A partial batch has at least `least` tokens, unless it is the step's last.
        """
        groups = (self.left == 0) & ~self._taken
        groups[: _of(step).start] = groups[_of(step).stop :] = False
        tokens = int(self._lengths[groups].sum())
        if tokens < least and not self.has(step):
            return 0
        self._taken |= groups
        return tokens

    def taken(self, step: int) -> bool:
        """Whether all of a step's groups were taken."""
        return bool(self._taken[_of(step)].all())


def _of(step: int) -> slice:
    """The groups of a step."""
    return slice(step * PROMPTS, (step + 1) * PROMPTS)


def in_flight(
    workload: Workload,
    costs: Costs,
    samplers: int,
    staleness: int,
    steps: int,
    *,
    partial_batch: float = AT_ONCE,
    latency: float = 0.0,
    seed: int = 1,
) -> float:
    """Seconds of a step; samplers take new weights at once, and go on beside the training.

    `partial_batch`: tokens that a partial batch has at least, unless it is its step's last.
    `latency`: seconds from the end of an update until samplers can take its weights.
    """
    queue = _Queue(*_groups(workload, costs, steps, seed), samplers, SLOTS // samplers)
    queue.admit((staleness + 1) * PROMPTS)
    now, step, training, arrivals = 0.0, 0, None, collections.deque()
    version = 0
    while step < steps:
        queue.fill()
        if training is None and (tokens := queue.take(step, partial_batch)):
            training = now + costs.training(tokens, DEVICES - samplers)
        events = [queue.next_end(now), *([training] if training is not None else [])]
        later = min([*events, *list(arrivals)[:1]])
        queue.advance(now, later)
        now = later
        if training is not None and now >= training:
            training = None
            if queue.taken(step):
                step += 1
                arrivals.append(now + latency)
        while arrivals and now >= arrivals[0]:
            arrivals.popleft()
            version += 1
            for sampler in queue.samplers:
                sampler.pause(now + EXPOSED * costs.weight_update)
            queue.admit((version + staleness + 1) * PROMPTS)
    return now / steps


def shared(workload: Workload, costs: Costs, staleness: int, steps: int, seed: int = 1) -> float:
    """Seconds of a step on devices that sample until the step's groups are there, then train."""
    groups = _groups(workload, costs, steps + staleness + 1, seed)
    queue = _Queue(*groups, DEVICES, SLOTS // DEVICES)
    now = 0.0
    for step in range(steps):
        queue.admit((step + 1 + staleness) * PROMPTS)
        queue.fill()
        while not queue.has(step):
            now = queue.go_on(now)
        now += costs.training(queue.take(step, AT_ONCE), DEVICES) + costs.weight_update
    return now / steps


@dataclasses.dataclass(frozen=True)
class Rollout:
    """The rollout of one step on shared devices."""

    seconds: float
    groups: int  # that the step trains


def rollouts(
    workload: Workload, staleness: int, steps: int, *, budget: int = 0, seed: int = 1
) -> list[Rollout]:
    """Rollouts on shared devices; `budget`: tokens after which they may end, 0: each ends with B
    groups of its step."""
    groups = _groups(workload, Costs.of(workload), steps + staleness + 1, seed)
    queue = _Queue(*groups, DEVICES, SLOTS // DEVICES)
    rule, found = Deadlines(Rule(PROMPTS, staleness)), []

    def over(step: int, tokens: float) -> bool:
        if not budget:
            return queue.has(step)
        for counter, _ in rule.begun["waiting"]:
            if not queue.left[counter]:
                rule.complete(counter)
        return rule.awaited() is None and (tokens >= budget or not rule.lacking)

    for step in range(steps):
        queue.admit(rule.end(step) if budget else (step + 1 + staleness) * PROMPTS)
        queue.fill()
        now, before = 0.0, sum(sampler.tokens for sampler in queue.samplers)
        while not over(step, sum(sampler.tokens for sampler in queue.samplers) - before):
            now = queue.go_on(now)
        groups = len(rule.finish(step + 1).kept) if budget else PROMPTS
        found.append(Rollout(now, groups))
    return found


def variation(values: Sequence[float]) -> float:
    """The coefficient of variation."""
    return float(np.std(values) / np.mean(values))


def least_seconds(costs: Costs, tokens: float, *, shared_devices: bool) -> float:
    """No schedule has a shorter step of so many tokens: all devices are at work all the time."""
    if shared_devices:
        training = costs.training(tokens, DEVICES)
        return sampling_seconds(tokens, DEVICES) + training + costs.weight_update
    return min(
        max(sampling_seconds(tokens, r), costs.training(tokens, DEVICES - r)) for r in SPLITS
    )


def sampling_seconds(tokens: float, devices: int) -> float:
    """Seconds in which devices sample so many tokens, with all slots active."""
    slots = SLOTS / devices
    return tokens / SLOTS * (STEP + SLOT_STEP * slots)


def predict(
    workload: Workload,
    schedule: str,
    staleness: int,
    steps: int = 40,
    *,
    partial_batch: float = 0.0,
) -> tuple[float, int]:
    """(speed-up over the synchronous mode, sampler devices of the best split).

    `partial_batch`: as of `in_flight`, for the schedule "partial_batches".
    """
    costs = Costs.of(workload)
    base = synchronous(workload, costs, steps)
    if schedule == "shared":
        return base / shared(workload, costs, staleness, steps), DEVICES
    schedules = {
        "boundary": boundary,
        "in_flight": in_flight,
        "partial_batches": functools.partial(in_flight, partial_batch=partial_batch),
    }
    run = schedules[schedule]
    return max((base / run(workload, costs, r, staleness, steps), r) for r in SPLITS)


def main() -> int:
    """Prints the table of figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=40, help="of each schedule")
    parser.add_argument(
        "--partial_batch_tokens",
        type=int,
        default=0,
        help="least tokens of a partial batch that is not its step's last; 0: whatever is complete",
    )
    args = parser.parse_args()
    print("| workload | bound | " + " | ".join(f"{n}, staleness {s}" for n, s in CELLS) + " |")
    print("|---" * (len(CELLS) + 2) + "|")
    found = []
    for workload in (*WORKLOADS, SLOW_REWARDS):
        costs = Costs.of(workload)
        least = least_seconds(costs, costs.tokens, shared_devices=False)
        bound = synchronous(workload, costs, args.steps) / least
        figures = [
            predict(workload, name, staleness, args.steps, partial_batch=args.partial_batch_tokens)
            for name, staleness in CELLS
        ]
        found.append([speed for speed, _ in figures])
        shown = " | ".join(f"{speed:.2f} ({devices})" for speed, devices in figures)
        print(f"| {workload.name} | {bound:.2f} | {shown} |", flush=True)
    means = np.mean(found[: len(WORKLOADS)], axis=0)
    print("| mean but for the last | | " + " | ".join(f"{mean:.2f}" for mean in means) + " |")
    workload, staleness = WORKLOADS[0], 2
    for budget in (0, round(BUDGET * Costs.of(workload).tokens)):
        made = rollouts(workload, staleness, args.steps, budget=budget)[staleness + 2 :]
        print(
            f"{workload.name}, shared, staleness {staleness}, rollouts of "
            f"{budget or 'no budget of'} tokens: coefficient of variation "
            f"{variation([r.seconds for r in made]):.3f}, {np.mean([r.groups for r in made]):.1f} "
            "groups a step"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
