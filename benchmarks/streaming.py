"""Speed-up of samplers that run ahead, on 8 simulated devices in 2 processes.

    python benchmarks/streaming.py
    python benchmarks/streaming.py --cells=heavy-2 --schedules=in_flight-2,partial_batches-2
    python benchmarks/streaming.py --real=tiny,smollm2 --steps=6
    python benchmarks/streaming.py --workers=equal,uneven       # samplers outside the job
    python benchmarks/streaming.py --quick                      # few steps: all parts run

Where devices would decode, train or move weights, the process sleeps (asynchronous/). All else is
real: scheduler, flow, coordinator, rewards, checkpoints, two processes of the launcher.

A cell is a workload of streaming_model.py under one schedule, each in the layout that the event
model finds best. Its speed-up is over synchronous steps in their own best layout. The model runs
the same steps with the same lengths. A cell passes if its seconds are within 5 % of the model's,
and it takes less than half of the machine's CPU-seconds; with more it is refused, and in no mean.

With --real the models compute on this machine, each process on a core of its own, with a learning
rate of 0: all schedules have the same responses. A step cannot be shorter than its CPU-seconds over
the number of cores; the share of that bound is printed. With --rounds each schedule runs so often,
in turn, and the run with the median seconds counts: the machine drifts.

With --workers samplers are programs outside the job, which join it over the real wire: with the
devices of a cell ("equal"), or a worker and one that is twice as fast ("uneven").
"""

import argparse
import contextlib
import json
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from asynchronous import results
from asynchronous.cells import KINDS, MODELS, Cell, RealCell, SimulatedCell
from asynchronous.results import Window, schedule_of
from asynchronous.worker import join_runs, run_cells
from command_line import Columns, cells, parser_of, titles, write_json
from programs import running
from streaming_model import ENGINES, SCHEDULES, WORKLOADS, best, workload_of

from distflow_jax.pods.schedules import SYNCHRONOUS

FAR = ("equal", "uneven")  # kinds of runs with workers
FAR_SECONDS = 60.0  # for workers to end after the last run
SIMULATED: Columns = (
    ("workload", "workload", ""),
    ("schedule", "named", ""),
    ("samplers", "samplers", ""),
    ("width", "width", ""),
    ("s a step", "seconds", ".3f"),
    ("model", "modelled", ".3f"),
    ("ratio", "ratio", ".2f"),
    ("speed-up", "speed", ".2f"),
    ("model", "figure", ".2f"),
    ("idle: samplers", "idle_samplers", ".0%"),
    ("trainers", "idle_trainers", ".0%"),
    ("age mean", "age_mean", ".2f"),
    ("max", "age_max", ".0f"),
    ("CPU: own", "own_cpu", ".0%"),
    ("all", "machine_cpu", ".0%"),
    ("", "found", ""),
)
REAL: Columns = (
    ("model", "model", ""),
    ("schedule", "named", ""),
    ("s a step", "seconds", ".3f"),
    ("CPU-s / cores", "bound", ".3f"),
    ("share of that bound", "share", ".0%"),
    ("speed-up", "speed", ".2f"),
    ("CPU of the machine", "machine_cpu", ".0%"),
)
WORKERS: Columns = (
    ("cell", "cell", ""),
    ("s a step", "seconds", ".3f"),
    ("tokens/s", "rate", ".0f"),
    ("beside", "beside", ""),
    ("ratio", "ratio", ".3f"),
    ("workers idle", "idle", ".0%"),
    ("CPU: own", "own_cpu", ".0%"),
    ("all", "machine_cpu", ".0%"),
    ("", "found", ""),
)
Found = list[dict[str, Any]]


def some_of(known: Iterable[str]) -> dict[str, Any]:
    """Settings of a flag that has some of these values, with commas between them."""

    def chosen(text: str) -> list[str]:
        values = [value for value in text.split(",") if value]
        if wrong := [value for value in values if value not in known]:
            raise argparse.ArgumentTypeError(f"{wrong[0]} is unknown; choose of {', '.join(known)}")
        return values

    return {"type": chosen, "metavar": ",".join(known)}


def parse_arguments() -> argparse.Namespace:
    parser, names = parser_of(__doc__), [workload.name for workload in WORKLOADS]
    parser.add_argument("--cells", default=names, **some_of(names), help="workloads")
    parser.add_argument("--schedules", default=[*SCHEDULES], **some_of(SCHEDULES))
    parser.add_argument("--steps", type=int, default=36, help="timed steps of a run")
    parser.add_argument("--warmup", type=int, default=4, help="steps before them")
    parser.add_argument("--quick", action="store_true", help="2 steps: to see that all parts run")
    beside = "other jobs run on the machine: judge by the CPU-seconds of the run alone"
    parser.add_argument("--beside-others", action="store_true", help=beside)
    parser.add_argument("--real", default=[], **some_of(MODELS), help="instead: real models")
    parser.add_argument("--rounds", type=int, default=1, help="of --real: runs of each, in turn")
    parser.add_argument("--workers", default=[], **some_of(FAR), help="instead: workers sample")
    parser.add_argument("--json", default="", help="file for the results")
    parser.add_argument("--worker", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--far", type=int, default=-1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.steps, args.warmup = 2, 2
    args.cpu = "own_cpu" if args.beside_others else "machine_cpu"
    args.common = {"steps": args.steps, "warmup": args.warmup}
    return args


# -- jobs ------------------------------------------------------------------------------------------


def windows_of(cells: Sequence[Cell], measure: Callable[[Window], dict[str, Any]]) -> Found:
    """Makes runs in a job of processes with two devices each, with workers beside them.

    Returns what `measure` says of each. Raises RuntimeError if the job fails.
    """
    launch = ["scripts/launch_local.py", f"--processes={ENGINES}", "--devices_per_process=2", "--"]
    with tempfile.TemporaryDirectory(prefix="streaming-") as name:
        spec, log = pathlib.Path(name, "cells.json"), pathlib.Path(name, "job.log")
        spec.write_text(json.dumps([[type(cell).__name__, vars(cell)] for cell in cells]))
        command = ["benchmarks/streaming.py", f"--worker={spec}"]
        with contextlib.ExitStack() as started:
            workers = [
                started.enter_context(running([*command, f"--far={n}"], spec.with_name(f"far-{n}")))
                for n in range(max(len(getattr(cell, "speeds", ())) for cell in cells))
            ]
            job = started.enter_context(running([*launch, *command], log))
            if job.wait():
                raise RuntimeError(f"the job failed:\n{log.read_text()[-8000:]}")
            for worker in workers:
                worker.wait(FAR_SECONDS)
        return [measure(Window(cell, spec.parent)) for cell in cells]


# -- kinds of runs ---------------------------------------------------------------------------------


def simulate(args: argparse.Namespace) -> tuple[Found, bool]:
    """Prints the table of all cells; returns their numbers, and whether all pass."""
    every: Found = []
    print(titles(SIMULATED), flush=True)
    for workload in args.cells:
        chosen = []
        for schedule in (SYNCHRONOUS, *(SCHEDULES[name] for name in args.schedules)):
            _, layout = best(workload_of(workload), schedule)
            chosen.append(
                SimulatedCell(
                    workload=workload,
                    schedule=schedule.name,
                    staleness=schedule.staleness,
                    samplers=layout.samplers,
                    width=layout.width,
                    **args.common,
                )
            )
        found = windows_of(chosen, results.simulated)
        found = [results.judged(x, found[0], args.cpu) for x in found]
        show(SIMULATED, found)
        every += found
    kept = [x for x in every if not x["refused"]]
    for schedule in args.schedules:
        of_schedule = [x for x in kept if schedule_of(x) == schedule]
        if of_schedule:
            mean, model = (np.mean([x[key] for x in of_schedule]) for key in ("speed", "figure"))
            print(f"{schedule}: mean of {len(of_schedule)} {mean:.2f}x, model {model:.2f}x")
    return every, not any(x["problems"] for x in every)


def show(columns: Columns, found: Found) -> None:
    """Prints runs as lines of a table."""
    for x in found:
        own = {"named": schedule_of(x), "found": "; ".join(x.get("problems", ()))}
        print(cells(columns, x | own), flush=True)


def compute(args: argparse.Namespace) -> tuple[Found, bool]:
    """Prints the table of models that compute; returns their numbers, and whether all pass."""
    every: Found = []
    print(titles(REAL), flush=True)
    kinds = (("synchronous", 0), ("shared", 1), ("in_flight", 1))
    for model in args.real:
        chosen = [
            RealCell(model=model, schedule=name, staleness=n, round=number, **args.common)
            for number in range(args.rounds)
            for name, n in kinds
        ]
        runs = windows_of(chosen, Window.common)
        # the run of each kind whose steps took the median of the rounds' seconds
        found = [
            sorted(runs[i :: len(kinds)], key=lambda x: x["seconds"])[args.rounds // 2]
            for i in range(len(kinds))
        ]
        cores = os.cpu_count() or 1
        for x in found:
            x["share"] = x["own_cpu"] * cores / min(ENGINES, cores)
            x["bound"] = x["share"] * x["seconds"]
            x["speed"] = found[0]["seconds"] / x["seconds"]
        show(REAL, found)
        every += found
    return every, all(x["speed"] >= 1 for x in every)


def compare_workers(args: argparse.Namespace) -> tuple[Found, bool]:
    """Prints the table of runs with workers; returns their numbers, and whether they pass."""
    groups = results.far_groups(args.workers, **args.common)
    runs = iter(windows_of([cell for group in groups for cell in group], results.with_workers))
    found = []
    for group in groups:
        found += results.compared([next(runs) for _ in group], args.cpu)
    print(titles(WORKERS), flush=True)
    show(WORKERS, found)
    return found, not any(x["problems"] for x in found)


def main() -> int:
    args = parse_arguments()
    if args.worker:
        chosen = [KINDS[n](**c) for n, c in json.loads(args.worker.read_text())]
        if args.far < 0:
            run_cells(chosen, args.worker.parent)
        else:
            join_runs(chosen, args.worker.parent, args.far)
        return 0
    kind = compare_workers if args.workers else compute if args.real else simulate
    found, passed = kind(args)
    write_json(args.json, found)
    return int(not (passed or args.quick))


if __name__ == "__main__":
    sys.exit(main())
