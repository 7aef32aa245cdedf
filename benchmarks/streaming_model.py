"""Workloads of benchmarks/streaming.py, and the speed-ups that an event model finds for them.

    python benchmarks/streaming_model.py

The model is distflow_jax/pods/schedules.py. A speed-up is that of a schedule's best layout over
the best layout of synchronous steps: both choose the width of samplers, and samplers with devices
of their own the split as well. 8 devices of one host, in 2 processes that each decode half of the
slots.
"""

import dataclasses
import functools
import itertools

import numpy as np
from command_line import parser_of, print_header, print_row

from distflow_jax.pods.schedules import (
    SYNCHRONOUS,
    Decode,
    DeviceSplit,
    Schedule,
    StepWork,
    fastest,
)

DEVICES, ENGINES = 8, 2
SLOTS = 256
PROMPTS, SAMPLES = 32, 8  # of a step
CALL = 16  # decode steps of a call
MEDIAN, CAP = 128, 1024  # of a response's length, tokens
# Seconds of a decode step on one device without an active slot: it reads the weights of
# Qwen2.5-32B, 65.5 GB in bfloat16, at the 2,765 GB/s of a v5p chip
STEP = 0.024
# Seconds by the width of a group of devices. A slot's keys and values take 1 / 64 of STEP on one
# device. Links, and prefill of 1,024 tokens: pods/generation.py for the same model and chip
DECODE = {
    1: Decode(STEP, STEP / 64, STEP * 6.1),
    2: Decode(STEP * (1 / 2 + 0.011), STEP * (1 / 128 + 0.0006), STEP * 3.6),
    4: Decode(STEP * (1 / 4 + 0.022), STEP * (1 / 256 + 0.0004), STEP * 2.0),
    8: Decode(STEP * (1 / 8 + 0.033), STEP * (1 / 512 + 0.0003), STEP * 1.1),
}
# of a synchronous step: configs/qwen25_7b.py:v5p-128,8k planned for v5p:4x4x4
WEIGHT_UPDATE = 0.009 / 52.8
REWARD_SIGMA = 1.0  # of the logarithm of a slow reward's seconds
REWARD_WORKERS = 16  # that score responses, one at a time each


@dataclasses.dataclass(frozen=True)
class Workload:
    """Lengths of responses, and the seconds of generation over those of training."""

    name: str
    kind: str  # lognormal, uniform or fixed
    ratio: float  # in the best synchronous layout
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

    def draw(self, group: int, mean: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Lengths of a group's responses, those of a simulated run with this seed, and seconds of
        their rewards, lognormal with this mean; both [samples]."""
        lengths = self.lengths(np.random.default_rng((seed, group)), SAMPLES)
        of_rewards = np.random.default_rng((seed, group, 1)).standard_normal(SAMPLES)
        return lengths, mean * np.exp(REWARD_SIGMA * of_rewards - REWARD_SIGMA**2 / 2)


WORKLOADS = (
    Workload("heavy-2", "lognormal", 2.0),
    Workload("heavy-1", "lognormal", 1.0),
    Workload("heavy-4", "lognormal", 4.0),
    Workload("mild-2", "lognormal", 2.0, sigma=0.6),
    Workload("uniform-2", "uniform", 2.0),
    Workload("fixed-2", "fixed", 2.0),
    Workload("rewards-2", "lognormal", 2.0, reward=0.25),  # heavy-2 but for its rewards
)
SCHEDULES = {
    f"{schedule.name}-{schedule.staleness}": schedule
    for schedule in (
        Schedule("boundary", 1, own_devices=True, boundary=True),
        Schedule("in_flight", 1, own_devices=True),
        Schedule("in_flight", 2, own_devices=True),
        Schedule("partial_batches", 1, own_devices=True, partial_batch=0),
        Schedule("partial_batches", 2, own_devices=True, partial_batch=0),
        Schedule("shared", 1),
        Schedule("shared", 2),
    )
}


PAYS = ("shared-1", "partial_batches-1", "shared-2", "partial_batches-2")


def workload_of(name: str) -> Workload:
    """A workload by its name."""
    (found,) = (w for w in WORKLOADS if w.name == name)
    return found


def layouts(schedule: Schedule) -> list[DeviceSplit]:
    """All layouts of a schedule on the devices."""
    splits = (2, 4, 6) if schedule.own_devices else (DEVICES,)
    return [
        DeviceSplit(n, DEVICES - n if schedule.own_devices else n, width, ENGINES, SLOTS)
        for n in splits
        for width in DECODE
        if n % width == 0
    ]


@functools.cache
def mean_tokens(workload: Workload) -> float:
    """Tokens of a step's responses."""
    groups = 40 * PROMPTS
    return sum(workload.draw(g, 0.0, 0)[0].sum() for g in range(groups)) * PROMPTS / groups


@functools.cache
def generation(workload: Workload) -> float:
    """Seconds of generation in the best synchronous layout, without rewards."""
    return fastest(_bare(workload, 0), SYNCHRONOUS, layouts(SYNCHRONOUS))[0]


def mean_reward(workload: Workload) -> float:
    """Mean seconds of a response's reward."""
    return workload.reward * generation(workload) * REWARD_WORKERS / (PROMPTS * SAMPLES)


def _bare(workload: Workload, seed: int) -> StepWork:
    """A workload that costs nothing but generation."""
    return StepWork(
        prompts=PROMPTS,
        samples=SAMPLES,
        call=CALL,
        draw=functools.partial(workload.draw, mean=0.0, seed=seed),
        decode=DECODE,
        token=0.0,
        weight_update=0.0,
        scorers=REWARD_WORKERS,
    )


def work_of(workload: Workload, seed: int = 0) -> StepWork:
    """A workload with its costs, which follow from generation in the best synchronous layout."""
    seconds = generation(workload)
    training = seconds / workload.ratio
    return dataclasses.replace(
        _bare(workload, seed),
        draw=functools.partial(workload.draw, mean=mean_reward(workload), seed=seed),
        token=training * DEVICES / mean_tokens(workload),
        weight_update=WEIGHT_UPDATE * (seconds + training),
    )


@functools.cache
def best(workload: Workload, schedule: Schedule, steps: int = 40) -> tuple[float, DeviceSplit]:
    """(seconds of a step, layout) of the fastest layout."""
    return fastest(work_of(workload), schedule, layouts(schedule), steps)


def without_idling(workload: Workload) -> float:
    """Seconds of a step in which no device ever idles: the bound of all schedules.

    Every slot decodes all the time, at the best width, and a device trains otherwise.
    """
    work = work_of(workload)
    tokens, seconds = mean_tokens(workload), []
    for width, group in work.decode.items():
        decode = group.of(DEVICES / width)
        steps = tokens / SLOTS * (decode.step + decode.slot * SLOTS)
        seconds.append(steps + PROMPTS * decode.prompt)
    trained = tokens * work.token / DEVICES + work.weight_update
    scored = mean_reward(workload) * PROMPTS * SAMPLES / REWARD_WORKERS
    return max(min(seconds) + trained, scored)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=40, help="of each schedule")
    args = parser.parse_args()
    print_header("workload", "synchronous, s (width)", *SCHEDULES, "no device idle")
    found = []
    for workload in WORKLOADS:
        base, layout = best(workload, SYNCHRONOUS, args.steps)
        found_best = [best(workload, schedule, args.steps) for schedule in SCHEDULES.values()]
        gains = [base / seconds for seconds, _ in found_best]
        shown = [
            f"{gain:.2f} ({at.samplers} / {at.width})"
            for gain, (_, at) in zip(gains, found_best, strict=True)
        ]
        bound = base / without_idling(workload)
        print_row(workload.name, f"{base:.3f} ({layout.width})", *shown, f"{bound:.2f}")
        found.append([*gains, bound])
    print_row("mean", "", *(f"{mean:.2f}" for mean in np.mean(found, axis=0)))
    print_tails(args.steps)


def print_tails(steps: int) -> None:
    """Prints speed-ups by the longest over the mean response of a step, and by slow rewards."""
    print_header("longest / mean", "rewards / generation", "generation / training", *PAYS)
    kinds = [(sigma, 0.0) for sigma in (0.0, 0.25, 0.5, 0.75, 1.0)]
    kinds += [(0.25, reward) for reward in (0.25, 0.5, 1.0)]
    for (sigma, reward), ratio in itertools.product(kinds, (1.0, 2.0, 4.0)):
        workload = Workload("", "lognormal", ratio, sigma=sigma, reward=reward)
        drawn = [workload.lengths(np.random.default_rng(n), PROMPTS * SAMPLES) for n in range(40)]
        tail = np.mean([lengths.max() / lengths.mean() for lengths in drawn])
        base, _ = best(workload, SYNCHRONOUS, steps)
        gains = [base / best(workload, SCHEDULES[name], steps)[0] for name in PAYS]
        print_row(f"{tail:.1f}", reward, f"{ratio:g}", *(f"{gain:.2f}" for gain in gains))


if __name__ == "__main__":
    main()
