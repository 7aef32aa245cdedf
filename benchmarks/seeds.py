"""Training runs of several seeds, and what they have learned."""

import argparse
import dataclasses
import math
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from command_line import parser_of, print_header, print_row

from distflow_jax.report.run_writer import read_metrics

ROOT = pathlib.Path(__file__).parents[1]
WINDOW = 5  # steps
MOST_ERRORS = 2.0  # standard errors of a difference: what is learned exceeds them
TITLES = ("run", "reward, first 5 steps", "last 5", "accuracy before", "after")


@dataclasses.dataclass(frozen=True)
class Result:
    """Results of one finished run. Accuracies are pairs (mean, standard error)."""

    name: str
    reward: np.ndarray  # [steps], mean of each step's batch; `first` and `last` are of 5 steps
    before: tuple[float, float]
    after: tuple[float, float]
    rows: list[dict[str, Any]]  # metrics of all steps

    @property
    def first(self) -> float:
        return float(self.reward[:WINDOW].mean())

    @property
    def last(self) -> float:
        return float(self.reward[-WINDOW:].mean())

    def mean(self, name: str) -> float:
        """Mean of a metric over the steps; it is 0 where it is missing."""
        return float(np.mean([row.get(name, 0.0) for row in self.rows]))

    def print_row(self, *more: str) -> None:
        """Prints what TITLES name, and `more`."""
        shown = [f"{mean:.3f} ± {error:.3f}" for mean, error in (self.before, self.after)]
        print_row(self.name, f"{self.first:.3f}", f"{self.last:.3f}", *shown, *more)


def print_titles(*more: str) -> None:
    """Prints the first lines of a table of results, with further columns."""
    print_header(*TITLES, *more)


def parser_of_seeds(doc: str, workdir: str) -> argparse.ArgumentParser:
    """A parser of the flags --workdir and --seeds; all others are for scripts/train.py."""
    parser = parser_of(doc)
    parser.add_argument("--workdir", default=workdir, type=pathlib.Path, help="holds all runs")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    return parser


def train(
    config: str, folder: pathlib.Path, seed: int, flags: Sequence[str], devices: int = 0
) -> Result:
    """Trains one seed, or resumes it; `devices`: of a CPU, 0: as they are.

    Raises CalledProcessError if that fails.
    """
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), f"--config={config}"]
    command += [f"--workdir={folder}", f"--config.seed={seed}", *flags]
    environment = dict(os.environ)
    if devices:
        flag = f"--xla_force_host_platform_device_count={devices}"
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {flag}".strip()
    subprocess.run(command, check=True, env=environment)
    return read_result(folder)


def read_result(folder: pathlib.Path) -> Result:
    """Reads metrics.jsonl of a finished run. Raises ValueError if it lacks an evaluation."""
    rows = read_metrics(folder / "metrics.jsonl")
    steps = [row for row in rows if row["step"] > 0]
    accuracies = []
    for row in (rows[0], rows[-1]):
        mean = [k for k in row if k.startswith("val-core/") and k.endswith("/reward/mean@1")]
        error = [k for k in row if k.startswith("val-aux/") and k.endswith("/reward/stderr@1")]
        if len(mean) != 1 or len(error) != 1:
            raise ValueError(
                f"{folder}: step {row['step']} must hold one evaluation of one data set, with one "
                f"response per prompt; it holds {mean}. Is the run finished?"
            )
        accuracies.append((float(row[mean[0]]), float(row[error[0]])))
    reward = np.array([row["critic/score/mean"] for row in steps])
    return Result(folder.name, reward, accuracies[0], accuracies[1], steps)


def apart(runs: Sequence[Result], others: Sequence[Result]) -> tuple[float, str]:
    """Standard errors between the mean accuracies after training, and both means as text.

    The errors of runs are taken as independent.
    """
    found = []
    for results in (runs, others):
        means, errors = zip(*(result.after for result in results), strict=True)
        found.append((float(np.mean(means)), math.hypot(*errors) / len(results)))
    (mean, error), (other, other_error) = found
    by = abs(mean - other) / max(math.hypot(error, other_error), 1e-12)
    text = f"{mean:.3f} ± {error:.3f}, of the others {other:.3f} ± {other_error:.3f}"
    return by, f"{text}: {by:.1f} standard errors apart"
