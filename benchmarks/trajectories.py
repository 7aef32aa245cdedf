"""Decode slots that stay busy while responses wait for slow tools.

python benchmarks/trajectories.py
python benchmarks/trajectories.py --workers=2

simulated: 8 slots and 64 trajectories of 4 turns; a turn decodes for 2 s, a tool answers after
10 s. The engine is a real one of a tiny model, and so is its scheduler; a decode call moves a clock
by the seconds that it stands for, and nobody sleeps. Each trajectory that ends is followed by
another one until 192 have begun. Steady state: from the first answer on, until the last trajectory
has begun.

measured: 32 responses of up to 4 turns to 8 prompts, whose tool sleeps for 1 s: on 8 slots with 8
trajectories, on 8 slots with 32, and on 32 slots.

--workers: a run of such a model on this machine, whose workers are processes with 2 slots each and
reach the trainer by its loopback interface; up to 3 turns of some 240 tokens, whose tool sleeps for
10 s, and 64 trajectories a worker. A step trains on 32 a worker, and 5 steps may have begun. Steady
state: after step 1, and while there are steps to begin.

Prints a line for each. Exit code 1 where slots are busy for less than 80 % of the steady state, or
8 slots with 32 trajectories take more than 1.8 times the seconds of 32 slots.
"""

import argparse
import asyncio
import contextlib
import heapq
import json
import pathlib
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np
from jax.sharding import Mesh

from distflow_jax.batch import Prompt
from distflow_jax.environments.environment import Turn
from distflow_jax.environments.registry import CallLimits, Environments
from distflow_jax.environments.sample_episodes import sample_episodes
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.models.weights.load_params import load_or_init_params
from distflow_jax.models.weights.source import open_model
from distflow_jax.report.run_writer import read_metrics
from distflow_jax.rollout.engine.engine import EngineConfig, RolloutEngine
from distflow_jax.rollout.requests import GroupRequest, RolloutStats, SamplingParams
from distflow_jax.rollout.sampler import SamplerState
from distflow_jax.rollout.scheduling.scheduler import Scheduler

MODEL = "random:llama?hidden=64&layers=2&heads=4&kv_heads=2&mlp=128&vocab=320"
SLOTS, PROMPT, TURNS = 8, 16, 4
LEAST_BUSY, MOST_SECONDS = 0.8, 1.8
# of the simulation: tokens and seconds of a turn, seconds of a tool, trajectories at a time, in all
TURN_TOKENS, TURN_SECONDS, TOOL_SECONDS, AT_ONCE, TRAJECTORIES = 16, 2.0, 10.0, 64, 192
TOKENS_PER_CALL = 4
CALL_SECONDS = TURN_SECONDS * TOKENS_PER_CALL / TURN_TOKENS
# of workers: slots and trajectories of each, tokens of a turn, turns; trajectories of a step, for
# each worker; steps, and the steady ones
WORKER_SLOTS, WORKER_AT_ONCE, WORKER_TURN, WORKER_TURNS = 2, 64, 768, 3
WORKER_STEP, STEPS, STEADY, STALENESS = 32, 6, range(2, 5), 4
BUSY, TIME = "perf/slots_busy_share", "perf/time_per_step"
ROOT = pathlib.Path(__file__).resolve().parents[1]
STOP_IDS = tuple(range(20))  # of the measured run: a turn ends after some 16 tokens


class Sampler:
    """An engine of the tiny model, its weights and its slots, all compiled."""

    def __init__(self, lanes: int, slots: int, stop_ids: tuple[int, ...], max_response: int):
        config = EngineConfig(
            slots=slots,
            lanes=lanes if lanes < slots else 0,
            max_prompt=PROMPT,
            max_response=max_response,
            max_read=PROMPT + max_response,
            tokens_per_call=TOKENS_PER_CALL,
            page_size=16,
            group_size=4,
        )
        source = open_model(MODEL)
        mesh = Mesh(np.array(jax.local_devices()[:1]).reshape(1, 1), ("data", "tensor"))
        self.engine = RolloutEngine(source.config, config, mesh, stop_ids=stop_ids, seed=0)
        params = self.engine.load_params(load_or_init_params(source, 0, mesh))
        self.engine.compile(params)
        self.state = SamplerState(params, 0, self.engine.init_decode_state())


def prompt_of(counter: int) -> Prompt:
    """Random tokens."""
    tokens = np.random.default_rng(counter).integers(20, 320, PROMPT).astype(np.int32)
    return Prompt(counter, counter, tokens, "", "random", None, {})


# -- simulated seconds ----------------------------------------------------------------------------


class Simulation:
    """Trajectories whose tools and decode calls take seconds of a clock of their own."""

    def __init__(self, sampler: Sampler):
        self.idle = 0.0  # seconds in which nothing was decoded
        self._stats, state = RolloutStats(), sampler.state
        self.scheduler = Scheduler(sampler.engine, state.params, state=state.decode, now=self.now)
        self._stats = self.scheduler.stats
        self._tools: list[tuple[float, int]] = []  # (when it answers, group)
        self._turns: dict[int, int] = {}  # by group
        self.begun = self.ended = 0

    def now(self) -> float:
        """Seconds since the start."""
        return self.idle + CALL_SECONDS * self._stats.generate_calls

    def round(self) -> None:
        """Begins and answers what is due, and decodes; or waits for the next tool."""
        while self.begun < TRAJECTORIES and self.begun - self.ended < AT_ONCE:
            sampling = SamplingParams(1, TURN_TOKENS)
            request = GroupRequest(prompt_of(self.begun), sampling, hold=True)
            self._turns[self.scheduler.submit(request)] = 0
            self.begun += 1
        while self._tools and self._tools[0][0] <= self.now():
            _, group = heapq.heappop(self._tools)
            limit = (TURN_TOKENS + 1) * self._turns[group] + TURN_TOKENS
            self.scheduler.held.extend(group, 0, [20], limit)
        if not self.scheduler.busy:
            self.idle += self._tools[0][0] - self.now()
            return
        for response in self.scheduler.step():
            self._turn_ended(response.prompt.counter)

    def _turn_ended(self, group: int) -> None:
        self._turns[group] += 1
        if self._turns[group] == TURNS:
            self.scheduler.held.release(group, 0)
            self.ended += 1
        else:
            heapq.heappush(self._tools, (self.now() + TOOL_SECONDS, group))


def simulated() -> tuple[float, float, float]:
    """(Share of slots busy in the steady state, in all; seconds in all)."""
    length = TURNS * (TURN_TOKENS + 1)
    simulation = Simulation(Sampler(SLOTS, AT_ONCE, (), length))
    stats, first, last = simulation.scheduler.stats, None, None
    while simulation.ended < TRAJECTORIES:
        simulation.round()
        if first is None and simulation.now() >= TURN_SECONDS + TOOL_SECONDS:
            first = stats.occupancy
        if last is None and simulation.begun == TRAJECTORIES:
            last = stats.occupancy
    steady = last.plus(first, -1)
    whole = stats.occupancy
    return steady.running / steady.slots, whole.running / whole.slots, simulation.now()


# -- real seconds ---------------------------------------------------------------------------------


class SlowTool:
    """Repeats a turn, or its beginning, after some seconds."""

    def __init__(self, tokenizer: Tokenizer, *, seconds: float, most: int | None = None):
        del tokenizer
        self._seconds, self._most = seconds, most

    def reset(self, prompt: Prompt) -> None:
        """Shows nothing."""
        del prompt

    async def step(self, tokens: np.ndarray, text: str) -> Turn:
        """Takes its time."""
        del text
        await asyncio.sleep(self._seconds)
        return Turn(tokens[:-1][: self._most])


def measured(lanes: int, slots: int, seconds: float = 1.0) -> tuple[float, int, dict[str, float]]:
    """(Seconds, turns, perf/* of the rollout) of 32 responses."""
    sampler = Sampler(lanes, slots, STOP_IDS, max_response=160)

    def run(prompts: int, pause: float):
        environments = Environments(
            f"{__file__}:SlowTool",
            {"seconds": pause},
            Tokenizer.byte_level(320),
            calls=CallLimits(60.0),
            turn_length=40,
            max_turns=TURNS,
        )
        with contextlib.closing(environments):
            sampler.state, episodes, stats = sample_episodes(
                sampler.engine,
                sampler.state,
                [prompt_of(i) for i in range(prompts)],
                SamplingParams(4, 160),
                environments,
            )
        return sum(episode.turns for episode in episodes), stats

    run(8, 0.0)  # everything once
    start = time.perf_counter()
    turns, stats = run(8, seconds)
    return time.perf_counter() - start, turns, stats.occupancy.metrics()


# -- workers --------------------------------------------------------------------------------------


def of_workers(count: int, folder: pathlib.Path) -> dict[int, dict[str, float]]:
    """Metrics of the steps of a run with so many workers, by step."""
    settings = {
        # of few words, so that turns end by themselves
        "model.source": f"{MODEL.partition('&vocab')[0]}&vocab=259&max_position=4096",
        "data.prompts_per_step": WORKER_STEP * count // 4,
        "data.max_prompt_length": 64,
        "rollout.num_samples": 4,
        "rollout.num_slots": WORKER_SLOTS,
        "rollout.max_trajectories": WORKER_AT_ONCE,
        "rollout.tokens_per_call": 1,
        "rollout.environment": f"{__file__}:SlowTool",
        "rollout.environment_kwargs": json.dumps({"seconds": TOOL_SECONDS, "most": 8}),
        "rollout.environment_timeout": 6 * TOOL_SECONDS,
        "rollout.turn_length": WORKER_TURN,
        "rollout.max_turns": WORKER_TURNS,
        "rollout.max_response_length": (WORKER_TURN + 8) * WORKER_TURNS,
        "training.row_tokens": 2560,
        "training.steps": STEPS,
        "stream.workers": True,
        "stream.max_staleness": STALENESS,
        "eval.dataset": "",
        "observe.trackers": (),
    }
    launch = ["scripts/launch_local.py", "--processes=1", f"--workers={count}", "--"]
    train = ["scripts/train.py", "--config=configs/tiny.py", f"--workdir={folder}"]
    flags = [f"--config.{key}={value}" for key, value in settings.items()]
    with open(f"{folder}.log", "w") as log:
        command = [sys.executable, *launch, *train, *flags]
        if subprocess.run(command, cwd=ROOT, stdout=log, stderr=log).returncode:
            raise SystemExit(f"the run has ended early: see {folder}.log")
    return {row["step"]: row for row in read_metrics(folder / "metrics.jsonl") if row["step"]}


def report_workers(count: int) -> int:
    """Prints the part with workers; returns the exit code."""
    rows = of_workers(count, pathlib.Path(tempfile.mkdtemp()) / "run")
    for step, row in rows.items():
        shown = [name for name in row if name in (BUSY, TIME) or "/trajectories/" in name]
        numbers = ", ".join(f"{name} {row[name]:.3g}" for name in shown)
        print(f"{count} workers, step {step}: {numbers}")
    steady = [rows[step] for step in STEADY if BUSY in rows[step]]
    busy = np.average([row[BUSY] for row in steady], weights=[row[TIME] for row in steady])
    print(f"{count} workers: slots busy {busy:.1%} of steps {STEADY.start} to {STEADY.stop - 1}")
    return int(busy < LEAST_BUSY)


def main() -> int:
    """Prints both parts, or that with workers; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=0, help="processes that sample, in a run")
    if count := parser.parse_args().workers:
        return report_workers(count)
    steady, whole, seconds = simulated()
    print(
        f"simulated, {SLOTS} slots, {AT_ONCE} trajectories at a time: slots busy "
        f"{steady:.1%} of the steady state, {whole:.1%} of all {seconds:.0f} s"
    )
    found = {}
    for lanes, slots in ((8, 8), (8, 32), (32, 32)):
        found[lanes, slots], turns, metrics = measured(lanes, slots)
        numbers = ", ".join(f"{name} {value:.3g}" for name, value in metrics.items())
        print(
            f"measured, {lanes} slots, {slots} trajectories: {found[lanes, slots]:.2f} s, {turns} "
            f"turns, {numbers}"
        )
    ratio = found[8, 32] / found[32, 32]
    print(f"8 slots with 32 trajectories: {ratio:.2f} times the seconds of 32 slots")
    return int(steady < LEAST_BUSY or ratio > MOST_SECONDS)


if __name__ == "__main__":
    raise SystemExit(main())
