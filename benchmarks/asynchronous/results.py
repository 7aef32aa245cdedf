"""Numbers of runs from what they noted, and what they are compared with."""

import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import streaming_model as model
from asynchronous.cells import Cell, FarCell, SimulatedCell

from distflow_jax.pods.schedules import SYNCHRONOUS, step_seconds
from distflow_jax.report.run_writer import read_metrics

MOST_OFF = 0.05  # of the model's seconds
MOST_CPU = 0.5  # of the machine's CPU-seconds
LEAST_SPEED = 0.95  # with workers, of that within the job
LEAST_RATE = 0.9  # of the summed rates of a fast and a slow worker

EQUAL = (("heavy-2", 1, 4), ("heavy-2", 2, 2), ("fixed-2", 2, 4))  # (workload, staleness, samplers)
POOL = {"workload": "mild-2", "staleness": 4, "training": 32}


class Window:
    """The timed steps of a run: notes of all processes at their beginning and end, and metrics."""

    def __init__(self, cell: Cell, folder: pathlib.Path):
        place, first, last = folder / cell.name, cell.warmup - 1, cell.warmup + cell.steps - 1
        marks = [json.loads((place / f"marks-{p}.json").read_text()) for p in range(model.ENGINES)]
        self._spans = [(m[first], m[last]) for m in marks]
        self.cell, self.seconds = cell, self.total("time") / model.ENGINES
        self.all_rows = read_metrics(place / "metrics.jsonl")
        steps = range(cell.warmup + 1, cell.warmup + cell.steps + 1)
        self.rows = [row for row in self.all_rows if row["step"] in steps]
        self.workers = [json.loads(path.read_text()) for path in sorted(place.glob("far-*.json"))]

    def total(self, key: str) -> float:
        """Sum over all processes of what was spent under a key."""
        return sum(end[key] - start[key] for start, end in self._spans)

    def idle(self, side: str, *kinds: str) -> float:
        """Share of the time in which simulated devices did no work of these kinds."""
        spent = [
            end[side].get(kind, 0.0) - start[side].get(kind, 0.0)
            for start, end in self._spans
            for kind in kinds
        ]
        return 1 - sum(spent) / model.ENGINES / self.seconds

    def values(self, name: str, default: float = 0.0) -> list[float]:
        """A metric of each step, where it is missing the default."""
        return [row.get(name, default) for row in self.rows]

    def common(self) -> dict[str, Any]:
        """Means over the steps that all runs have."""
        cores, age = os.cpu_count(), "training/off_policy/trajectory_staleness/"
        return {
            **vars(self.cell),
            "seconds": self.seconds / self.cell.steps,
            "age_mean": float(np.mean(self.values(age + "mean"))),
            "age_max": max(self.values(age + "max")),
            "own_cpu": self.total("own_cpu") / self.seconds / cores,
            "machine_cpu": self.total("machine_cpu") / model.ENGINES / self.seconds / cores,
            "compilations": sum(row["perf/compilations"] for row in self.rows),
        }


# -- schedules beside the event model --------------------------------------------------------------


def schedule_of(x: dict[str, Any]) -> str:
    """A run's schedule, as flags name it."""
    return f"{x['schedule']}-{x['staleness']}"


def simulated(window: Window) -> dict[str, Any]:
    """Means over the timed steps of a run on simulated devices, and the event model's seconds."""
    cell = window.cell
    names = {f"{s.name}-{s.staleness}": s for s in (SYNCHRONOUS, *model.SCHEDULES.values())}
    schedule = names[f"{cell.schedule}-{cell.staleness}"]
    work = model.work_of(cell.lengths)
    kinds = ["decode", "weight_update"] + ([] if cell.own_devices else ["train"])
    return window.common() | {
        "modelled": step_seconds(work, schedule, cell.layout, cell.steps, cell.warmup),
        "idle_samplers": window.idle("sampler", *kinds),
        "idle_trainers": window.idle("trainer", "train") if cell.own_devices else None,
    }


def judged(found: dict[str, Any], base: dict[str, Any], cpu: str) -> dict[str, Any]:
    """A run's numbers beside those of the model and of the synchronous run; `cpu`: the key of the
    CPU-seconds by which it is refused."""
    ratio = found["seconds"] / found["modelled"]
    problems = flaws(found, cpu)
    problems += [f"off the model by {ratio - 1:+.0%}"] if abs(ratio - 1) > MOST_OFF else []
    return found | {
        "ratio": ratio,
        "speed": base["seconds"] / found["seconds"],
        "figure": base["modelled"] / found["modelled"],
        "problems": problems,
        "refused": found[cpu] >= MOST_CPU,
    }


def flaws(found: dict[str, Any], cpu: str) -> list[str]:
    """What makes the seconds of a run worth nothing."""
    refused = [f"refused: CPU {found[cpu]:.0%}"] if found[cpu] >= MOST_CPU else []
    return refused + (["compiled"] if found["compilations"] else [])


# -- workers beside samplers of the job ------------------------------------------------------------


def far_groups(kinds: Sequence[str], **steps: int) -> list[list[SimulatedCell]]:
    """Runs that are compared: the last one of a group with the others."""
    groups: list[list[SimulatedCell]] = []
    if "equal" in kinds:
        for workload, staleness, samplers in EQUAL:
            told = {"workload": workload, "staleness": staleness, "samplers": samplers, **steps}
            groups.append([SimulatedCell(schedule="in_flight", **told), FarCell(**told)])
    if "uneven" in kinds:
        pools = ((2.0,), (1.0,), (2.0, 1.0))
        groups.append([FarCell(**POOL, **steps, samplers=len(pool), speeds=pool) for pool in pools])
    return groups


def with_workers(window: Window) -> dict[str, Any]:
    """Means over the timed steps of a run whose samplers may be workers."""
    found, workers = window.common(), window.workers
    tokens = float(np.mean(window.values("response_length/mean"))) * model.PROMPTS * model.SAMPLES
    return found | {
        "cell": window.cell.name,
        "rate": tokens / found["seconds"],
        "idle": 1 - float(np.mean([x["busy"] for x in workers])) if workers else None,
        "own_cpu": found["own_cpu"] + sum(x["cpu"] for x in workers) / (os.cpu_count() or 1),
    }


def compared(group: Sequence[dict[str, Any]], cpu: str) -> list[dict[str, Any]]:
    """Runs of a group, the last one beside the others, and what is wrong with each; `cpu`: as of
    `judged`."""
    *alone, last = group
    if len(alone) == 1:
        beside, ratio = "within the job", alone[0]["seconds"] / last["seconds"]
    else:
        beside, ratio = "sum of both alone", last["rate"] / sum(one["rate"] for one in alone)
    least = LEAST_SPEED if len(alone) == 1 else LEAST_RATE
    found = [one | {"problems": flaws(one, cpu)} for one in group]
    found[-1] |= {"beside": beside, "ratio": ratio}
    found[-1]["problems"] += [f"below {least}"] if ratio < least else []
    return found
