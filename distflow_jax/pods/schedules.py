"""Event model of the steps of a run: synchronous, and with samplers that run ahead of training.

A sampler decodes its slots together, in calls of several decode steps, and fills free slots between
two calls, as rollout/scheduling does. It decodes on groups of `width` devices, each with a copy of
the weights. A trainer's seconds are proportional to its tokens. A response counts once it has its
reward. Nothing is measured here: seconds follow from costs that are given.
"""

import collections
import dataclasses
import heapq
from collections.abc import Callable, Iterable, Mapping

import numpy as np

AT_ONCE = float("inf")  # tokens of a partial batch: a step is trained once all its groups are there


@dataclasses.dataclass(frozen=True)
class Decode:
    """Seconds of devices that decode together."""

    step: float  # of a decode step, whatever its active slots: weights are read, links
    slot: float  # and of each active slot
    prompt: float  # of the prefill of a prompt

    def of(self, groups: float) -> "Decode":
        """Seconds of several groups of such devices, which divide slots and prompts evenly."""
        return Decode(self.step, self.slot / groups, self.prompt / groups)


@dataclasses.dataclass(frozen=True)
class StepWork:
    """The work of each step, and its costs."""

    prompts: int
    samples: int  # responses to a prompt
    call: int  # decode steps of a call, at most
    # prompt counter -> (tokens int, seconds of the reward float) of its responses, [samples] each
    draw: Callable[[int], tuple[np.ndarray, np.ndarray]]
    decode: Mapping[int, Decode]  # of a group, by its width
    token: float  # seconds of one device that trains on a token
    weight_update: float
    scorers: int = 1  # responses that are scored at a time

    @property
    def responses(self) -> int:
        """Of a step."""
        return self.prompts * self.samples


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The order of sampling and training."""

    name: str
    staleness: int  # steps that samplers may be ahead
    own_devices: bool = False  # samplers decode while others train
    boundary: bool = False  # a sampler has responses of one step at a time
    partial_batch: float = AT_ONCE  # tokens that training takes at least, but for a step's last


SYNCHRONOUS = Schedule("synchronous", 0)


@dataclasses.dataclass(frozen=True)
class DeviceSplit:
    """Devices of a schedule. With devices of their own, samplers and trainers are disjoint."""

    samplers: int  # devices that sample
    trainers: int  # devices that train
    width: int  # devices that share a copy of the sampler's weights
    engines: int  # samplers: processes, each with a share of devices, slots and prompts
    slots: int  # of all samplers
    shared_queue: bool = False  # prompts go to whichever sampler is free, not to each in turn

    def decode(self, work: StepWork) -> Decode:
        """Seconds of one sampler."""
        return work.decode[self.width].of(self.samplers / self.width / self.engines)


def step_ends(work: StepWork, schedule: Schedule, layout: DeviceSplit, steps: int) -> np.ndarray:
    """Seconds from the beginning of a run to the end of each step, float [steps]."""
    return _Run(work, schedule, layout).ends(steps)


def step_seconds(
    work: StepWork, schedule: Schedule, layout: DeviceSplit, steps: int = 40, warmup: int = 4
) -> float:
    """Mean seconds of a step, over `steps` steps after `warmup` others (at least one)."""
    ends = step_ends(work, schedule, layout, warmup + steps)
    return float(ends[-1] - ends[warmup - 1]) / steps


def fastest(
    work: StepWork, schedule: Schedule, layouts: Iterable[DeviceSplit], steps: int = 40
) -> tuple[float, DeviceSplit]:
    """(mean seconds of a step, layout) of the layout with the shortest steps."""
    found = ((step_seconds(work, schedule, layout, steps), layout) for layout in layouts)
    return min(found, key=lambda x: x[0])


@dataclasses.dataclass(frozen=True)
class _Queued:
    """A response that has no slot yet."""

    group: int
    length: int
    reward: float


class _Sampler:
    """Slots that decode together. `ends`: when the call under way ends; infinity: there is none."""

    def __init__(self, slots: int, decode: Decode, work: StepWork, waiting: collections.deque):
        self.ends, self.waiting = float("inf"), waiting
        self._decode, self._call, self._enough = decode, work.call, work.samples
        self._left = np.zeros(slots, np.int64)  # tokens still to decode; 0: the slot is free
        self._responses: list[_Queued | None] = [None] * slots
        self._steps = 0  # of the call under way
        self._read = -1  # group whose prompt was read last
        self.late = 0.0  # seconds before its next call

    @property
    def idle(self) -> bool:
        """Whether it has nothing to decode."""
        return not self.waiting and not self._left.any()

    def begin(self, now: float) -> None:
        """Fills free slots, and begins a call if a slot is active."""
        read = self._fill()
        active = np.sort(self._left[self._left > 0])
        if not len(active):
            return
        # with responses waiting, a call ends early, once slots for a group are free
        least = max(0, len(active) - self._enough) if self.waiting else 0
        self._steps = min(self._call, int(active[len(active) - 1 - least]))
        decoded = np.minimum(active, self._steps).sum()
        seconds = self._steps * self._decode.step + float(decoded) * self._decode.slot
        self.ends = now + self.late + read * self._decode.prompt + seconds
        self.late = 0.0

    def _fill(self) -> int:
        """Fills free slots; the number of prompts that are read for it."""
        read = 0
        if self.waiting:
            for slot in np.flatnonzero(self._left == 0)[: len(self.waiting)]:
                response = self.waiting.popleft()
                self._left[slot], self._responses[slot] = response.length, response
                read += response.group != self._read
                self._read = response.group
        return read

    def end(self) -> list[_Queued]:
        """Ends the call under way; the responses that are complete."""
        ended = np.flatnonzero((self._left > 0) & (self._left <= self._steps))
        self._left = np.maximum(self._left - self._steps, 0)
        self.ends = float("inf")
        return [self._responses[slot] for slot in ended]


class _Run:
    """The state of a run. Steps and groups are numbered from 0."""

    def __init__(self, work: StepWork, schedule: Schedule, layout: DeviceSplit):
        self._work, self._schedule, self._trainers = work, schedule, layout.trainers
        slots, decode = layout.slots // layout.engines, layout.decode(work)
        common: collections.deque[_Queued] = collections.deque()
        self._samplers = [
            _Sampler(slots, decode, work, common if layout.shared_queue else collections.deque())
            for _ in range(layout.engines)
        ]
        self._begun = [0] * layout.engines  # steps whose groups each sampler has got
        self._free = [0.0] * work.scorers  # when each of them is free; a heap
        self._scoring: list[tuple[float, int]] = []  # (time, group); a heap
        self._left: dict[int, int] = {}  # responses of a group that are not complete
        self._tokens: dict[int, int] = {}  # of groups that are not trained
        self._training: float | None = None  # when what is under way ends
        self._stopped = False  # shared devices are the trainer's
        self._ends: list[float] = []  # of steps

    def ends(self, steps: int) -> np.ndarray:
        """Runs until so many steps have ended."""
        now = 0.0
        while len(self._ends) < steps:
            self._end_training(now)
            self._begin_training(now)
            self._admit()
            for sampler in self._samplers:
                if sampler.ends == float("inf") and not self._stopped:
                    sampler.begin(now)
            events = [sampler.ends for sampler in self._samplers]
            events += [when for when, _ in self._scoring[:1]]
            events += [] if self._training is None else [self._training]
            now = min(events)
            assert now < float("inf"), "a step waits for nothing"
            self._end_calls(now)
        return np.array(self._ends[:steps])

    def _admit(self) -> None:
        """Gives samplers the groups that they may begin."""
        last = len(self._ends) + self._schedule.staleness
        for step in range(min(self._begun), last + 1):
            for number, sampler in enumerate(self._samplers):
                waits = self._schedule.boundary and not sampler.idle
                if self._begun[number] == step and not waits:
                    self._begun[number] = step + 1
                    self._give(sampler, step, number)

    def _give(self, sampler: _Sampler, step: int, number: int) -> None:
        """Gives a sampler its groups of a step: one of as many as there are samplers, in turn."""
        first, prompts = step * self._work.prompts, self._work.prompts
        for group in range(first + number, first + prompts, len(self._samplers)):
            lengths, rewards = self._work.draw(group)
            self._left[group], self._tokens[group] = len(lengths), int(lengths.sum())
            for length, reward in zip(lengths.tolist(), rewards.tolist(), strict=True):
                sampler.waiting.append(_Queued(group, length, reward))

    def _end_calls(self, now: float) -> None:
        """Ends calls that are over; scores their responses."""
        for sampler in self._samplers:
            if sampler.ends > now:
                continue
            for response in sampler.end():
                done = now
                if response.reward:
                    done = max(now, self._free[0]) + response.reward
                    heapq.heapreplace(self._free, done)
                heapq.heappush(self._scoring, (done, response.group))
        while self._scoring and self._scoring[0][0] <= now:
            self._left[heapq.heappop(self._scoring)[1]] -= 1

    def _end_training(self, now: float) -> None:
        if self._training is None or self._training > now:
            return
        self._training, self._stopped = None, False
        if any(group in self._tokens for group in self._of_step()):
            return
        self._ends.append(now)
        for sampler in self._samplers:
            sampler.late += self._work.weight_update

    def _begin_training(self, now: float) -> None:
        if self._training is not None:
            return
        groups = self._of_step()
        ready = [g for g in groups if g in self._tokens and not self._left[g]]
        tokens = sum(self._tokens[g] for g in ready)
        whole = all(self._left.get(g) == 0 for g in groups)
        if not ready or not (whole or tokens >= self._schedule.partial_batch):
            return
        if not self._schedule.own_devices:
            self._stopped = True
            if any(sampler.ends < float("inf") for sampler in self._samplers):
                return  # a call under way ends first
        for group in ready:
            del self._tokens[group]
        self._training = now + tokens * self._work.token / self._trainers

    def _of_step(self) -> range:
        """The groups of the step that is trained next."""
        first = len(self._ends) * self._work.prompts
        return range(first, first + self._work.prompts)
