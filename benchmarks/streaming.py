"""Speed-up of samplers that run ahead, on 8 simulated devices in 2 processes.

    python benchmarks/streaming.py
    python benchmarks/streaming.py --cells=heavy-2 --schedules=in_flight-2,partial_batches-2
    python benchmarks/streaming.py --real=tiny,smollm2 --steps=6
    python benchmarks/streaming.py --budget                     # rollouts of so many tokens
    python benchmarks/streaming.py --quick                      # few steps: all parts run

The cores of one machine cannot show the overlap of two computations, so that the devices are
simulated: where they would decode, train or move weights, the process sleeps (asynchronous/). All
else is real: scheduler, flow, coordinator, rewards, checkpoints, two processes of the launcher.

A cell is a workload of streaming_model.py under one schedule, each in the layout that the event
model finds best: the width of samplers, and the split of devices. Its speed-up is over synchronous
steps in their own best layout. The model runs the same steps with the same lengths. A cell passes
if its seconds are within 5 % of the model's, and it takes less than half of the machine's
CPU-seconds; with more it is refused, and in no mean.

"partial_batches" is in_flight with steps that train on groups as they end. In the workload
rewards-2, which is heavy-2 otherwise, the workers need a quarter of the seconds of generation for a
step's rewards: a step may take at most 1.05 of that of heavy-2.

With --real the models compute on this machine, each process on a core of its own, with a learning
rate of 0: all schedules have the same responses. A step cannot be shorter than its CPU-seconds over
the number of cores; the share of that bound is printed. A model passes if no schedule that runs
ahead is slower than the synchronous one. With --rounds each schedule runs so often, in turn: the
machine drifts, and the run with the median seconds counts.

With --workers samplers are programs outside the job, which join it over the real wire. "equal":
workers with the devices of a cell take at most 1.05 of its seconds. "uneven": a worker and one that
is twice as fast reach 0.9 of the sum of their rates alone.

With --budget rollouts on shared devices end by a budget of tokens, beside those that end with their
step's groups. Their seconds must vary at least 3x less, and nothing that was sampled may be lost.
"""

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from asynchronous import budgets, far_tables
from asynchronous.far_worker import join_runs
from asynchronous.real_cells import MODELS, RealCell
from asynchronous.simulated_run import SimulatedCell
from asynchronous.worker import KINDS, Cell, run_cells
from streaming_model import (
    ENGINES,
    PROMPTS,
    SAMPLES,
    SCHEDULES,
    WORKLOADS,
    best,
    work_of,
    workload_of,
)

from distflow_jax.pods.schedules import SYNCHRONOUS, step_seconds
from distflow_jax.report.run_writer import read_metrics

ROOT = pathlib.Path(__file__).parents[1]
FAR = ("equal", "uneven")  # kinds of runs with workers
FAR_SECONDS = 60.0  # for workers to end after the last run
RESPONSES = PROMPTS * SAMPLES  # of a step
MOST_OFF = 0.05  # of the model's seconds
MOST_REWARDS = 1.05  # of a step's seconds without slow rewards
MOST_CPU = 0.5  # of the machine's CPU-seconds
HEADER = (
    "| workload | schedule | samplers x width | s a step | model | ratio | speed-up | model "
    "| idle: samplers | trainers | age mean / max | CPU: own | all | |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)
REAL_HEADER = (
    "| model | schedule | s a step | CPU-s / cores | share of that bound | speed-up "
    "| age mean / max | CPU of the machine |\n|---|---|---|---|---|---|---|---|"
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ",".join(w.name for w in WORKLOADS)
    parser.add_argument("--cells", default=names, help="workloads, with commas between them")
    schedules = ",".join(SCHEDULES)
    parser.add_argument("--schedules", default=schedules, help="NAME-STALENESS, with commas")
    parser.add_argument("--steps", type=int, default=36, help="timed steps of a run")
    parser.add_argument("--warmup", type=int, default=4, help="steps before them")
    parser.add_argument("--quick", action="store_true", help="2 steps: to see that all parts run")
    parser.add_argument(
        "--beside-others",
        action="store_true",
        help="other jobs run on the machine: judge by the CPU-seconds of the run alone",
    )
    parser.add_argument("--real", default="", help=f"instead: models of {', '.join(MODELS)}")
    parser.add_argument("--rounds", type=int, default=1, help="of --real: runs of each, in turn")
    parser.add_argument("--budget", action="store_true", help="instead: rollouts with a budget")
    parser.add_argument(
        "--workers", default="", help=f"instead: samplers outside the job, of {', '.join(FAR)}"
    )
    parser.add_argument("--workdir", default="", help="keep the runs in this new folder")
    parser.add_argument("--json", default="", help="file for the results")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    parser.add_argument("--far", type=int, default=-1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    known = {
        "cells": set(names.split(",")),
        "schedules": set(SCHEDULES),
        "real": set(MODELS),
        "workers": set(FAR),
    }
    for name, values in known.items():
        chosen = [value for value in getattr(args, name).split(",") if value]
        if wrong := [value for value in chosen if value not in values]:
            parser.error(f"--{name}={wrong[0]} is unknown; choose of {', '.join(sorted(values))}")
        setattr(args, name, chosen)
    if args.quick:
        args.steps, args.warmup = 2, 2
    return args


def cells_of(workload: str, args: argparse.Namespace) -> list[SimulatedCell]:
    """The synchronous run of a workload, and those beside it, in their best layouts."""
    cells = []
    for schedule in (SYNCHRONOUS, *(SCHEDULES[name] for name in args.schedules)):
        _, layout = best(workload_of(workload), schedule)
        cell = SimulatedCell(
            workload=workload,
            schedule=schedule.name,
            staleness=schedule.staleness,
            samplers=layout.samplers,
            steps=args.steps,
            warmup=args.warmup,
            width=layout.width,
        )
        cells.append(cell)
    return cells


@contextlib.contextmanager
def run_folder(args: argparse.Namespace) -> Iterator[pathlib.Path]:
    """The folder of a job's runs: a temporary one, unless they are to be kept."""
    if args.workdir:
        folder = pathlib.Path(args.workdir).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="streaming-") as name:
        yield pathlib.Path(name)


def run_job(
    cells: Sequence[Cell], folder: pathlib.Path, *, processes: int = ENGINES, workers: int = 0
) -> None:
    """Makes runs in a job of processes with two devices each, with workers beside them. Raises
    RuntimeError if it fails."""
    spec = folder / "cells.json"
    spec.write_text(json.dumps([[type(cell).__name__, vars(cell)] for cell in cells]))
    launch = ["scripts/launch_local.py", f"--processes={processes}", "--devices_per_process=2"]
    command = [*launch, "--", "benchmarks/streaming.py", f"--worker={spec}"]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu"}
    with contextlib.ExitStack() as beside:
        for number in range(workers):
            beside.enter_context(_far_worker(spec, number, env))
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True
        )
    if done.returncode:
        raise RuntimeError(f"the job failed:\n{done.stdout[-6000:]}{done.stderr[-2000:]}")


@contextlib.contextmanager
def _far_worker(spec: pathlib.Path, number: int, env: dict[str, str]) -> Iterator[None]:
    """A worker outside the job, which ends after the last run; its log is beside the cells."""
    command = [sys.executable, "benchmarks/streaming.py", f"--worker={spec}", f"--far={number}"]
    with open(spec.with_name(f"far-{number}.log"), "w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)
        try:
            yield
            with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for a job that failed
                process.wait(FAR_SECONDS)
        finally:
            process.kill()
            process.wait()


class Window:
    """The timed steps of a run: notes of all processes at their beginning and end, and metrics."""

    def __init__(self, cell: Cell, folder: pathlib.Path):
        place, first, last = folder / cell.name, cell.warmup - 1, cell.warmup + cell.steps - 1
        marks = [json.loads((place / f"marks-{p}.json").read_text()) for p in range(ENGINES)]
        self._spans = [(m[first], m[last]) for m in marks]
        self.seconds = self.total("time") / ENGINES
        rows = read_metrics(place / "metrics.jsonl")
        steps = range(cell.warmup + 1, cell.warmup + cell.steps + 1)
        self.rows = [row for row in rows if row["step"] in steps]

    def total(self, key: str) -> float:
        """Sum over all processes of what was spent under a key."""
        return sum(end[key] - start[key] for start, end in self._spans)

    def busy(self, side: str, kinds: Sequence[str]) -> float:
        """Share of the time in which simulated devices did work of these kinds."""
        spent = [
            end[side].get(kind, 0.0) - start[side].get(kind, 0.0)
            for start, end in self._spans
            for kind in kinds
        ]
        return sum(spent) / ENGINES / self.seconds

    def mean(self, name: str) -> float:
        """Of a metric; 0 where it is missing."""
        return float(np.mean([row.get(name, 0.0) for row in self.rows]))

    def common(self, cell: Cell) -> dict[str, Any]:
        """Means over the steps that all runs have."""
        cores, age = os.cpu_count(), "training/off_policy/trajectory_staleness/"
        return {
            **vars(cell),
            "seconds": self.seconds / cell.steps,
            "age_mean": self.mean(age + "mean"),
            "age_max": max(row.get(age + "max", 0.0) for row in self.rows),
            "own_cpu": self.total("own_cpu") / self.seconds / cores,
            "machine_cpu": self.total("machine_cpu") / ENGINES / self.seconds / cores,
            "compilations": sum(row["perf/compilations"] for row in self.rows),
        }


def measured(cell: SimulatedCell, folder: pathlib.Path) -> dict[str, Any]:
    """Means over the timed steps of a run on simulated devices."""
    window = Window(cell, folder)
    kinds = (
        ("decode", "weight_update") if cell.own_devices else ("decode", "train", "weight_update")
    )
    trainers = 1 - window.busy("trainer", ("train",)) if cell.own_devices else None
    return window.common(cell) | {
        "idle_samplers": 1 - window.busy("sampler", kinds),
        "idle_trainers": trainers,
    }


def modelled(cell: SimulatedCell) -> float:
    """Seconds of the same steps in the event model."""
    names = {f"{s.name}-{s.staleness}": s for s in (SYNCHRONOUS, *SCHEDULES.values())}
    schedule = names[f"{cell.schedule}-{cell.staleness}"]
    return step_seconds(
        work_of(cell.lengths, cell.seed), schedule, cell.layout, cell.steps, cell.warmup
    )


def judged(found: dict[str, Any], base: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """A run's numbers beside those of the model and of the synchronous run."""
    used = found["own_cpu" if args.beside_others else "machine_cpu"]
    ratio = found["seconds"] / found["modelled"]
    problems = [f"refused: CPU {used:.0%}"] if used >= MOST_CPU else []
    problems += [f"off the model by {ratio - 1:+.0%}"] if abs(ratio - 1) > MOST_OFF else []
    problems += ["compiled"] if found["compilations"] else []
    return found | {
        "ratio": ratio,
        "speed": base["seconds"] / found["seconds"],
        "figure": base["modelled"] / found["modelled"],
        "problems": problems,
        "refused": used >= MOST_CPU,
    }


def line(x: dict[str, Any]) -> str:
    """A row of the table."""
    trainers = "-" if x["idle_trainers"] is None else f"{x['idle_trainers']:.0%}"
    return (
        f"| {x['workload']} | {schedule_of(x)} | {x['samplers']} x {x['width']} "
        f"| {x['seconds']:.3f} | {x['modelled']:.3f} | {x['ratio']:.2f} | {x['speed']:.2f} "
        f"| {x['figure']:.2f} | {x['idle_samplers']:.0%} | {trainers} "
        f"| {x['age_mean']:.2f} / {x['age_max']:.0f} | {x['own_cpu']:.0%} "
        f"| {x['machine_cpu']:.0%} | {'; '.join(x['problems'])} |"
    )


def simulate(args: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """Prints the table of all cells; returns their numbers, and whether all pass."""
    results: list[dict[str, Any]] = []
    print(HEADER, flush=True)
    for workload in args.cells:
        cells = cells_of(workload, args)
        with run_folder(args) as folder:
            run_job(cells, folder)
            found = [measured(cell, folder) | {"modelled": modelled(cell)} for cell in cells]
        for x in found:
            results.append(judged(x, found[0], args))
            print(line(results[-1]), flush=True)
    kept = [x for x in results if not x["refused"]]
    for schedule in args.schedules:
        of_schedule = [x for x in kept if schedule_of(x) == schedule]
        if of_schedule:
            mean, model = (np.mean([x[key] for x in of_schedule]) for key in ("speed", "figure"))
            print(f"{schedule}: mean of {len(of_schedule)} {mean:.2f}x, model {model:.2f}x")
    return results, all([*(not x["problems"] for x in results), hides_rewards(kept)])


def schedule_of(x: dict[str, Any]) -> str:
    """A run's schedule, as flags name it."""
    return f"{x['schedule']}-{x['staleness']}"


def hides_rewards(results: Sequence[dict[str, Any]]) -> bool:
    """Prints what slow rewards add to a step in partial batches; whether that is little enough."""
    seconds = {(x["workload"], schedule_of(x)): x["seconds"] for x in results}
    shares = {
        schedule: seconds["rewards-2", schedule] / value
        for (workload, schedule), value in seconds.items()
        if workload == "heavy-2" and ("rewards-2", schedule) in seconds and "partial" in schedule
    }
    for schedule, share in shares.items():
        print(f"{schedule}: with slow rewards a step takes {share:.3f} (at most {MOST_REWARDS})")
    return all(share <= MOST_REWARDS for share in shares.values())


def compute(args: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """Prints the table of models that compute; returns their numbers, and whether all pass."""
    results: list[dict[str, Any]] = []
    print(REAL_HEADER, flush=True)
    for model in args.real:
        chosen = (("synchronous", 0), ("shared", 1), ("in_flight", 1))
        cells = [
            RealCell(model, name, staleness, args.steps, args.warmup, number)
            for number in range(args.rounds)
            for name, staleness in chosen
        ]
        with run_folder(args) as folder:
            run_job(cells, folder)
            windows = [Window(cell, folder).common(cell) for cell in cells]
        found = [median_of(windows[i :: len(chosen)]) for i in range(len(chosen))]
        for x in found:
            x["share"] = x["own_cpu"] * os.cpu_count() / min(ENGINES, os.cpu_count())
            x["speed"] = found[0]["seconds"] / x["seconds"]
            print(
                f"| {model} | {x['schedule']}, staleness {x['staleness']} | {x['seconds']:.3f} "
                f"| {x['share'] * x['seconds']:.3f} | {x['share']:.0%} | {x['speed']:.2f} "
                f"| {x['age_mean']:.2f} / {x['age_max']:.0f} | {x['machine_cpu']:.0%} |",
                flush=True,
            )
        results += found
    return results, all(x["speed"] >= 1 for x in results)


def median_of(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The run of one kind whose steps took the median of the rounds' seconds."""
    return sorted(rounds, key=lambda x: x["seconds"])[len(rounds) // 2]


def compare_budgets(args: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """Prints the table of rollouts with and without a budget; returns their numbers, and whether
    they pass."""
    cells = budgets.cells_of(args.steps, args.warmup)
    with run_folder(args) as folder:
        run_job(cells, folder)
        results = [
            budgets.measured(
                cell,
                read_metrics(folder / cell.name / "metrics.jsonl"),
                cell.settings()["training.steps"],
            )
            for cell in cells
        ]
    print("\n".join([budgets.HEADER, *map(budgets.line, results)]), flush=True)
    return results, budgets.passes(results)


def compare_workers(args: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """Prints the table of runs with workers; returns their numbers, and whether they pass."""
    cells = far_tables.cells_of(args)
    with run_folder(args) as folder:
        run_job(cells, folder, workers=max(len(getattr(c, "speeds", ())) for c in cells))
        found = [far_tables.measured(cell, Window(cell, folder), folder) for cell in cells]
    cpu = "own_cpu" if args.beside_others else "machine_cpu"
    results = far_tables.compared(found, MOST_CPU, cpu)
    print("\n".join([far_tables.HEADER, *map(far_tables.line, results)]), flush=True)
    return results, not any(x["problems"] for x in results)


def main() -> int:
    """Prints tables; returns the exit code."""
    args = parse_arguments()
    if args.worker:
        spec = pathlib.Path(args.worker)
        cells = [KINDS[n](**c) for n, c in json.loads(spec.read_text())]
        if args.far < 0:
            run_cells(cells, spec.parent)
        else:
            join_runs(cells, spec.parent, args.far)
        return 0
    kind = compare_budgets if args.budget else compute if args.real else simulate
    kind = compare_workers if args.workers else kind
    results, passed = kind(args)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(results, indent=1))
    return int(not (passed or args.quick))


if __name__ == "__main__":
    sys.exit(main())
