"""Event model of workers that sample for trainers, with the homes' own dispatch.

    python benchmarks/dispatch_model.py
    python benchmarks/dispatch_model.py --known=1 --workers=1,1,0.5

Homes, their groups and the choice of groups are those of a run (flow/homes/, flow/dispatch/).
Slots, trainers and weights are seconds, as in streaming_model.py. A worker asks each home whenever
it has a free slot. Lengths are lognormal. Of their variance a part is known: rows of a data set
differ from each other, and their means are expected. The rest differs between responses.

The table says how many seconds a step takes by each rule of `flow.dispatch`, over "longest".
"""

import argparse
import collections
import dataclasses
import sys
from collections.abc import Sequence

import numpy as np
from streaming_model import (
    CAP,
    EXPOSED,
    MEDIAN,
    PROMPTS,
    SAMPLES,
    SLOT_STEP,
    SLOTS,
    STEP,
    SWAP,
    Sampler,
)

from distflow_jax.flow.dispatch.dispatch_rule import DISPATCHES
from distflow_jax.flow.dispatch.fleet import Fleet, Report
from distflow_jax.flow.homes.home import Begun, Home, Piece
from distflow_jax.flow.lag_rule import Rule

HOMES = 2


@dataclasses.dataclass(frozen=True)
class Pool:
    """Workers, and what they sample."""

    speeds: tuple[float, ...]  # of each worker; at 1 it decodes as a device does
    lag: int
    train: float  # seconds of a step's training, over those of its sampling with all slots active
    known: float  # share of the variance of lengths' logarithms that is of the row
    sigma: float = 1.0  # of the lengths' logarithm

    @property
    def slots(self) -> int:
        """Of each worker."""
        return SLOTS // len(self.speeds)

    def rate(self) -> float:
        """Tokens per second with all slots active."""
        return sum(speed * self.slots / (STEP + SLOT_STEP * self.slots) for speed in self.speeds)


class TimedSampler(Sampler):
    """Slots of a worker with a speed."""

    def __init__(self, slots: int, speed: float):
        super().__init__(slots)
        self.slots, self.speed = slots, speed
        self.left: dict[int, int] = {}  # responses of each group that have not ended
        self._waiting: collections.deque[tuple[int, tuple[int, int]]] = collections.deque()

    @property
    def room(self) -> int:
        """Slots that are free, and nothing waits for them."""
        return max(0, self.free - len(self._waiting))

    def add(self, length: int, response: tuple[int, int]) -> None:
        """Begins a response as soon as a slot is free."""
        self._waiting.append((length, response))
        self.fill()

    def fill(self) -> None:
        """Fills free slots."""
        while self._waiting and self.free > 0:
            self.begin(*self._waiting.popleft())

    @property
    def _seconds(self) -> float:
        return super()._seconds / self.speed

    def report(self) -> Report:
        """What it says of itself."""
        counts = (1, self.slots // 8, self.slots)
        pace = tuple((float(n), (STEP + SLOT_STEP * n) / self.speed) for n in counts)
        return Report(self.slots, self.slots - self.room, pace)


def lengths_of(pool: Pool, groups: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of all responses, int [groups, samples], and those expected of a group, [groups]."""
    rng = np.random.default_rng(seed)
    row = np.sqrt(pool.known) * rng.standard_normal((groups, 1))
    own = np.sqrt(1 - pool.known) * rng.standard_normal((groups, SAMPLES))
    drawn = MEDIAN * np.exp(pool.sigma * (row + own))
    mean = MEDIAN * np.exp(pool.sigma * row[:, 0] + (1 - pool.known) * pool.sigma**2 / 2)
    return np.clip(np.rint(drawn), 1, CAP).astype(int), np.minimum(mean, CAP)


class Job:
    """Trainers, their homes and workers, from event to event."""

    def __init__(self, pool: Pool, dispatch: str, steps: int, seed: int):
        self._pool, self._steps = pool, steps
        self._lengths, self._expected = lengths_of(pool, (steps + pool.lag + 2) * PROMPTS, seed)
        self._workers = [TimedSampler(pool.slots, speed) for speed in pool.speeds]
        rule = Rule(PROMPTS, pool.lag)
        self._homes = [
            Home(
                rule,
                exact=False,
                version=0,
                lease_seconds=1e9,
                max_tries=1,
                fleet=Fleet(dispatch),
            )
            for _ in range(HOMES)
        ]
        self._begun, self._ready = 0, np.zeros(len(self._lengths), bool)
        self._turn = 0

    def admit(self, version: int) -> None:
        """Begins all groups that a version may begin."""
        end = min((version + self._pool.lag + 1) * PROMPTS, len(self._lengths))
        for counter in range(self._begun, end):
            expected = float(self._expected[counter])
            group = Begun(
                (counter, "gen"),
                counter // PROMPTS + 1,
                range(SAMPLES),
                (-expected, -float(CAP)),
                None,
                expected=expected,
            )
            self._homes[counter % HOMES].begin(group, {})
        self._begun = max(self._begun, end)

    def ask(self, version: int) -> None:
        """Each worker asks each home, one after the other, until none gets anything."""
        some = True
        while some:
            some = False
            self._turn += 1
            for place in range(len(self._workers)):
                number = (place + self._turn) % len(self._workers)
                worker = self._workers[number]
                for home in self._homes:
                    if worker.room > 0:
                        some |= self._give(home, number, worker, version)

    def _give(self, home: Home, number: int, worker: TimedSampler, version: int) -> bool:
        given = home.ask(f"w{number}", version, worker.room, 0.0, worker.report())
        for work in given:
            counter = work.group.key[0]
            worker.left[counter] = SAMPLES
            for sample, length in enumerate(self._lengths[counter].tolist()):
                worker.add(length, (counter, sample))
        return bool(given)

    def bring(self, number: int, ended: Sequence[tuple[int, int]]) -> None:
        """A worker brings groups whose responses have ended."""
        worker = self._workers[number]
        worker.fill()
        for counter, _ in ended:
            worker.left[counter] -= 1
            if not worker.left[counter]:
                del worker.left[counter]
                home = self._homes[counter % HOMES]
                held = home.newest
                pieces = {s: Piece(1, held, held, True, None) for s in range(SAMPLES)}
                home.bring(f"w{number}", (counter, "gen"), pieces, 0.0, goes_on=False)
                home.take()
                self._ready[counter] = True

    def run(self) -> float:
        """Seconds of a step."""
        now, step, training, starts = 0.0, 0, None, []
        full = self._lengths.sum() / len(self._lengths) * PROMPTS / self._pool.rate()
        swap = EXPOSED * SWAP * full
        self.admit(0)
        while step < self._steps:
            self.ask(step)
            of_step = slice(step * PROMPTS, (step + 1) * PROMPTS)
            if training is None and self._ready[of_step].all():
                training = now + self._pool.train * full
            ends = [worker.next_end(now) for worker in self._workers]
            later = min([*ends, *([training] if training is not None else [])])
            for number, worker in enumerate(self._workers):
                self.bring(number, worker.advance(now, later))
            now = later
            if training is not None and now >= training:
                training, step = None, step + 1
                starts.append(now)
                for worker in self._workers:
                    worker.pause(now + swap)
                for home in self._homes:
                    home.publish(step)
                self.admit(step)
        first = self._pool.lag + 1
        return (starts[-1] - starts[first]) / (len(starts) - 1 - first)


def compare(pool: Pool, steps: int, seeds: int) -> dict[str, list[float]]:
    """Seconds of a step by rule, of each seed."""
    return {
        dispatch: [Job(pool, dispatch, steps, seed).run() for seed in range(seeds)]
        for dispatch in DISPATCHES
    }


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", default="", help="speeds with commas, of one pool")
    parser.add_argument("--lags", default="1,2", help="flow.max_lag, with commas")
    parser.add_argument("--known", default="0,0.5,1", help="shares of the variance, with commas")
    parser.add_argument("--train", default="0.25,0.5,1", help="training over sampling, with commas")
    parser.add_argument("--steps", type=int, default=24, help="of each run")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each pool")
    args = parser.parse_args()
    pools = [args.workers] if args.workers else ["1,1,1,1", "2,1", "1,1,0.5,0.5"]
    print("| workers | lag | train | known | " + " | ".join(DISPATCHES) + " |")
    print("|---" * (4 + len(DISPATCHES)) + "|")
    gains = []
    for speeds in pools:
        for lag in map(int, args.lags.split(",")):
            for train in map(float, args.train.split(",")):
                for known in map(float, args.known.split(",")):
                    pool = Pool(tuple(map(float, speeds.split(","))), lag, train, known)
                    found = compare(pool, args.steps, args.seeds)
                    base = np.array(found["longest"])
                    shown = [float(np.mean(base / np.array(found[d]))) for d in DISPATCHES]
                    gains.append(shown)
                    told = f"{np.mean(base):.3f} s | " + " | ".join(f"{x:.3f}" for x in shown[1:])
                    print(f"| {speeds} | {lag} | {train:g} | {known:g} | {told} |", flush=True)
    means = " | ".join(f"{x:.3f}" for x in np.mean(gains, axis=0))
    print(f"| mean | | | | {means} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
