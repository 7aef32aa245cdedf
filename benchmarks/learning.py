"""Learning curve of the default run: configs/grpo_smollm2.py for three seeds, checked and drawn.

python benchmarks/learning.py --workdir=runs/learning
python benchmarks/learning.py --runs runs/learning/seed0 runs/learning/seed1 runs/learning/seed2
python benchmarks/learning.py --workdir=runs/learning --ahead --partial_batches

The first form trains one seed after the other (a quarter of an hour each on two cores; finished
folders are not trained again), the second only reads finished runs. To pass, a run needs a mean
reward of the last five steps at least 0.3 above that of the first five, and an accuracy on held-out
problems above the untrained model's by more than two standard errors of the difference.
Writes docs/curves.png, prints a row per run for docs/benchmarks.md, and exits with 1 if a run
fails.

With --ahead each seed is also trained with samplers that run ahead (stream.max_staleness=1, weights
in flight, token_tis), in a folder named seedN-ahead. With --partial_batches also with steps that
train on groups as they end (stream.partial_batches=ready), which needs samplers on a part of the
devices: on a CPU that run has two devices. To pass, the mean of each kind's accuracies must also
lie within two standard errors of the mean of the synchronous runs. The picture goes to --workdir.

Flags that are not listed below go to scripts/train.py, e.g. --config.training.steps=10.
"""

import argparse
import dataclasses
import math
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np

from distflow_jax.report.run_writer import read_metrics

ROOT = pathlib.Path(__file__).parents[1]
WINDOW = 5  # steps
LEAST_GAIN = 0.3  # of the mean reward
LEAST_ERRORS = 2.0  # standard errors of a difference of accuracies: what is learned exceeds them,
# and what a staleness costs does not
AHEAD = ("--config.stream.max_staleness=1", "--config.algorithm.correction=token_tis")
APART = ("--config.mesh.devices=0:1", "--config.mesh.roles={'ROLLOUT': {'devices': '1:2'}}")
PARTIAL_BATCHES = ("--config.stream.partial_batches=ready", "--config.stream.partial_batch_rows=4")
VARIANTS = {"-ahead": AHEAD, "-partial batches": (*AHEAD, *APART, *PARTIAL_BATCHES)}
TWO_DEVICES = "--xla_force_host_platform_device_count=2"  # of a CPU; other devices are as they are
COLUMNS = "run | reward, first 5 steps | last 5 | accuracy before | after"


def header(columns: str) -> str:
    """The first two lines of a table with COLUMNS and these."""
    return f"| {COLUMNS} | {columns} |\n|{'---|' * (6 + columns.count('|'))}"


@dataclasses.dataclass(frozen=True)
class Result:
    """Results of one finished run. Accuracies are pairs (mean, standard error)."""

    name: str
    reward: np.ndarray  # [steps], mean of each step's batch
    before: tuple[float, float]
    after: tuple[float, float]
    minutes: float  # from the first step to the last, evaluations included
    peak_gb: float

    @property
    def first(self) -> float:
        """Mean reward of the first steps."""
        return float(self.reward[:WINDOW].mean())

    @property
    def last(self) -> float:
        """Mean reward of the last steps."""
        return float(self.reward[-WINDOW:].mean())

    @property
    def errors_apart(self) -> float:
        """Gain in accuracy over its standard error, with both evaluations taken as independent.

        Both evaluations use the same problems, so the true error of the difference is smaller.
        """
        error = math.hypot(self.before[1], self.after[1])
        return (self.after[0] - self.before[0]) / max(error, 1e-12)

    @property
    def passes(self) -> bool:
        """Whether the run passes."""
        return self.last >= self.first + LEAST_GAIN and self.errors_apart > LEAST_ERRORS

    def row(self, *more: str) -> str:
        """A row of a table: what COLUMNS names, and `more`."""
        cells = [self.name, f"{self.first:.3f}", f"{self.last:.3f}"]
        cells += [f"{mean:.3f} ± {error:.3f}" for mean, error in (self.before, self.after)]
        return f"| {' | '.join([*cells, *more])} |"


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """(folders of runs, seeds, ...; flags of scripts/train.py)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workdir", default="runs/learning", help="holds a folder per seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", nargs="+", default=[], help="finished runs: train nothing")
    parser.add_argument("--config", default="configs/grpo_smollm2.py")
    parser.add_argument("--ahead", action="store_true", help="compare with samplers that run ahead")
    parser.add_argument(
        "--partial_batches", action="store_true", help="compare with steps in partial batches"
    )
    parser.add_argument("--picture", help="default: docs/curves.png, or WORKDIR/curves.png")
    return parser.parse_known_args()


def train(config: str, folder: pathlib.Path, seed: int, flags: Sequence[str]) -> None:
    """Trains one seed, or resumes it. Raises CalledProcessError if that fails."""
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), f"--config={config}"]
    command += [f"--workdir={folder}", f"--config.seed={seed}", *flags]
    environment = dict(os.environ)
    if not set(APART).isdisjoint(flags):
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {TWO_DEVICES}".strip()
    subprocess.run(command, check=True, env=environment)


def train_all(args: argparse.Namespace, flags: Sequence[str]) -> list[pathlib.Path]:
    """Trains what is not trained; returns the folders of all runs."""
    chosen = {"-ahead": args.ahead, "-partial batches": args.partial_batches}
    variants = {"": ()} | {suffix: VARIANTS[suffix] for suffix in chosen if chosen[suffix]}
    folders = []
    for seed in args.seeds:
        for suffix, own in variants.items():
            folders.append(pathlib.Path(args.workdir) / f"seed{seed}{suffix}")
            train(args.config, folders[-1], seed, [*own, *flags])
    return folders


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


def compare(results: Sequence[Result]) -> bool:
    """Whether the variants end as synchronous runs do; prints the means. True without variants."""
    kinds = {
        suffix: [result for result in results if result.name.endswith(suffix)]
        for suffix in VARIANTS
    }
    others = [result for result in results if not result.name.endswith(tuple(VARIANTS))]
    alike = True
    for suffix, runs in kinds.items():
        if not runs or not others:
            continue
        by, text = apart(runs, others)
        print(f"\naccuracy of seedN{suffix} {text}")
        alike = alike and by <= LEAST_ERRORS
    return alike


def read_run(folder: pathlib.Path) -> Result:
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
    return Result(
        name=folder.name,
        reward=np.array([row["critic/score/mean"] for row in steps]),
        before=accuracies[0],
        after=accuracies[1],
        minutes=sum(row["timing_s/step"] for row in steps) / 60,
        peak_gb=max(row["perf/max_memory_allocated_gb"] for row in steps),
    )


def draw(results: list[Result], path: pathlib.Path) -> None:
    """Draws reward by step on the left, held-out accuracy before and after on the right."""
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(9, 3.4), width_ratios=(2, 1), layout="constrained"
    )
    width = min(0.27, 0.9 / len(results))
    for i, result in enumerate(results):
        steps = np.arange(1, len(result.reward) + 1)
        left.plot(steps, result.reward, marker="o", markersize=3, color=f"C{i}", label=result.name)
        means, errors = zip(result.before, result.after, strict=True)
        right.bar(
            np.arange(2) + width * (i - (len(results) - 1) / 2),
            means,
            0.93 * width,
            yerr=errors,
            capsize=2,
            color=f"C{i}",
        )
    left.set(xlabel="step", ylabel="mean reward", ylim=(0, 1), title="training")
    left.xaxis.get_major_locator().set_params(integer=True)
    left.legend(frameon=False, loc="upper left")
    right.set(ylabel="accuracy", ylim=(0, 1), title="held-out problems")
    right.set_xticks([0, 1], ["untrained", "trained"])
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> int:
    args, flags = parse_arguments()
    folders = [pathlib.Path(run) for run in args.runs] or train_all(args, flags)
    results = [read_run(folder) for folder in folders]
    default = pathlib.Path(args.workdir) if args.ahead or args.partial_batches else ROOT / "docs"
    draw(results, pathlib.Path(args.picture or default / "curves.png"))
    print(header("standard errors apart | minutes | peak GiB | passes"))
    for result in results:
        numbers = (f"{x:.1f}" for x in (result.errors_apart, result.minutes, result.peak_gb))
        print(result.row(*numbers, "yes" if result.passes else "NO"))
    alike = compare(results)
    return 0 if alike and all(result.passes for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
