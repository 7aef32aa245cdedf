"""Learning curve of the default run: configs/grpo_smollm2.py for three seeds, checked and drawn.

python benchmarks/learning.py --workdir=runs/learning
python benchmarks/learning.py --runs runs/learning/seed0 runs/learning/seed1 runs/learning/seed2

The first form trains one seed after the other (a quarter of an hour each on two cores; finished
folders are not trained again), the second only reads finished runs. To pass, a run needs a mean
reward of the last five steps at least 0.3 above that of the first five, and an accuracy on held-out
problems above the untrained model's by more than two standard errors of the difference.
Writes docs/curves.png, prints a row per run for docs/benchmarks.md, and exits with 1 if a run
fails.
"""

import argparse
import dataclasses
import math
import pathlib
import subprocess
import sys

import matplotlib.pyplot as plt
import numpy as np

from distflow_jax.report.run_writer import read_metrics

ROOT = pathlib.Path(__file__).parents[1]
WINDOW = 5  # steps
LEAST_GAIN = 0.3  # of the mean reward
LEAST_ERRORS = 2.0  # standard errors of the difference of accuracies
HEADER = (
    "| run | reward, first 5 steps | last 5 | accuracy before | after | standard errors apart "
    "| minutes | peak GiB | passes |\n|---|---|---|---|---|---|---|---|---|"
)


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

    def row(self) -> str:
        """A row of the table under HEADER."""
        cells = [
            self.name,
            f"{self.first:.3f}",
            f"{self.last:.3f}",
            *(f"{mean:.3f} ± {error:.3f}" for mean, error in (self.before, self.after)),
            f"{self.errors_apart:.1f}",
            f"{self.minutes:.1f}",
            f"{self.peak_gb:.1f}",
            "yes" if self.passes else "NO",
        ]
        return "| " + " | ".join(cells) + " |"


def parse_arguments() -> argparse.Namespace:
    """Flags: folders of runs, seeds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workdir", default="runs/learning", help="holds a folder per seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", nargs="+", default=[], help="finished runs: train nothing")
    parser.add_argument("--config", default="configs/grpo_smollm2.py")
    parser.add_argument("--picture", default=str(ROOT / "docs" / "curves.png"))
    return parser.parse_args()


def train(config: str, folder: pathlib.Path, seed: int) -> None:
    """Trains one seed, or resumes it. Raises CalledProcessError if that fails."""
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), f"--config={config}"]
    subprocess.run([*command, f"--workdir={folder}", f"--config.seed={seed}"], check=True)


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
    for i, result in enumerate(results):
        steps = np.arange(1, len(result.reward) + 1)
        left.plot(steps, result.reward, marker="o", markersize=3, color=f"C{i}", label=result.name)
        means, errors = zip(result.before, result.after, strict=True)
        right.bar(
            np.arange(2) + 0.27 * (i - (len(results) - 1) / 2),
            means,
            0.25,
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
    args = parse_arguments()
    folders = [pathlib.Path(run) for run in args.runs]
    if not folders:
        for seed in args.seeds:
            folders.append(pathlib.Path(args.workdir) / f"seed{seed}")
            train(args.config, folders[-1], seed)
    results = [read_run(folder) for folder in folders]
    draw(results, pathlib.Path(args.picture))
    print(HEADER)
    for result in results:
        print(result.row())
    return 0 if all(result.passes for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
