"""Cells with workers beside those within the job: tables and goals."""

import argparse
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from asynchronous.far_cells import FarCell
from asynchronous.simulated_run import SimulatedCell
from streaming_model import PROMPTS, SAMPLES

EQUAL = (("heavy-2", 1, 4), ("heavy-2", 2, 2), ("fixed-2", 2, 4))  # (workload, staleness, samplers)
MOST_SLOWER = 1.05  # of the in-job cell's seconds
LEAST_RATE = 0.9  # of the summed rates of a fast and a slow worker
POOL = {"workload": "mild-2", "schedule": "in_flight", "staleness": 4, "training": 32}
HEADER = (
    "| cell | s a step | tokens/s | beside | ratio | workers idle | CPU of the machine | |\n"
    "|---|---|---|---|---|---|---|---|"
)


def cells_of(args: argparse.Namespace) -> list[SimulatedCell]:
    """All runs: within the job and with equal workers, and of uneven pools."""
    common = {"steps": args.steps, "warmup": args.warmup}
    cells: list[SimulatedCell] = []
    if "equal" in args.workers:
        for workload, staleness, samplers in EQUAL:
            told = {"workload": workload, "schedule": "in_flight", "staleness": staleness}
            told |= {"samplers": samplers, **common}
            cells += [SimulatedCell(**told), FarCell(**told)]
    if "uneven" in args.workers:
        for speeds in ((2.0,), (1.0,), (2.0, 1.0)):
            told = {**POOL, **common, "samplers": len(speeds), "speeds": speeds}
            cells.append(FarCell(**told))
    return cells


def measured(cell: SimulatedCell, window: Any, folder: pathlib.Path) -> dict[str, Any]:
    """Means over the timed steps of a run; `window`: see streaming.Window."""
    found = window.common(cell)
    workers = [
        json.loads(path.read_text()) for path in sorted((folder / cell.name).glob("far-*.json"))
    ]
    tokens = window.mean("response_length/mean") * PROMPTS * SAMPLES
    idle = [1 - sum(x["busy"].values()) / x["seconds"] for x in workers]
    return found | {
        "cell": cell.name,
        "rate": tokens / found["seconds"],
        "idle": float(np.mean(idle)) if idle else None,
        "own_cpu": found["own_cpu"] + sum(x["cpu"] for x in workers) / (os.cpu_count() or 1),
    }


def compared(results: Sequence[dict[str, Any]], most_cpu: float, cpu: str) -> list[dict[str, Any]]:
    """The runs beside those that they are compared with, and what is wrong with each."""
    found, alone = [], []
    base: dict[str, Any] = {}
    for x in results:
        problems, beside, ratio = [], "", None
        far = "speeds" in x
        if far and x["workload"] == POOL["workload"] and len(x["speeds"]) == 1:
            alone.append(x)
        elif far and x["workload"] == POOL["workload"]:
            total = sum(one["rate"] for one in alone)
            beside, ratio = "sum of both alone", x["rate"] / total
            if ratio < LEAST_RATE:
                problems.append(f"below {LEAST_RATE}")
        elif far:
            beside, ratio = "within the job", base["seconds"] / x["seconds"]
            if ratio < 1 / MOST_SLOWER:
                problems.append("slower by more than 5 %")
        else:
            base = x
        if x[cpu] >= most_cpu:
            problems.append(f"refused: CPU {x[cpu]:.0%}")
        if x["compilations"]:
            problems.append("compiled")
        found.append(x | {"beside": beside, "ratio": ratio, "problems": problems})
    return found


def line(x: dict[str, Any]) -> str:
    """A row of the table."""
    ratio = "" if x["ratio"] is None else f"{x['ratio']:.3f}"
    idle = "" if x["idle"] is None else f"{x['idle']:.0%}"
    return (
        f"| {x['cell']} | {x['seconds']:.3f} | {x['rate']:.0f} | {x['beside']} | {ratio} | {idle} "
        f"| {x['own_cpu']:.0%} own, {x['machine_cpu']:.0%} | {'; '.join(x['problems'])} |"
    )
