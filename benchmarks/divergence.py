"""Bytes of weights that move with stream.divergence, and what is learned: tiny model, three seeds.

python benchmarks/divergence.py --workdir=runs/divergence
python benchmarks/divergence.py --workdir=runs/divergence --threshold=0.001 --seeds 0 1

Each seed trains configs/tiny.py twice with stream.max_staleness=8: with a weight update after every
step, and with stream.divergence. Finished folders are not trained again. To pass, the second runs
must move at least two times fewer bytes of weights, and the means of the rewards of held-out
prompts after training must lie within two standard errors of their difference. Prints a row per run
for docs/benchmarks.md, and exits with 1 if that fails.

Flags that are not listed below go to scripts/train.py, e.g. --config.training.steps=10.
"""

import argparse
import dataclasses
import pathlib
import sys

import numpy as np
from learning import Result, apart, header, read_run, train

from distflow_jax.report.run_writer import read_metrics

LEAST_RATIO = 2.0  # of bytes
MOST_ERRORS = 2.0  # standard errors of a difference of rewards
SETTINGS = {
    "training.steps": 20,  # before all prompts are answered well
    "training.optimizer.lr": 0.001,
    "algorithm.correction": "token_tis",
    "stream.max_staleness": 8,
    "eval.num_prompts": 256,
    "eval.temperature": 1.0,
    "checkpoint.every": 20,
}


@dataclasses.dataclass(frozen=True)
class Moved:
    """Results of a run, with the weights that moved."""

    result: Result
    megabytes: float
    skipped: float  # share of the steps
    age: tuple[float, float]  # mean of responses, most
    divergence: float  # mean of D; 0: not measured

    def row(self) -> str:
        """A row of the table."""
        return self.result.row(
            f"{self.megabytes:.1f}",
            f"{self.skipped:.0%}",
            f"{self.age[0]:.2f} / {self.age[1]:.0f}",
            f"{self.divergence:.2g}",
        )


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """(folder, seeds, threshold; flags of scripts/train.py)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workdir", default="runs/divergence", help="holds two folders per seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threshold", type=float, default=0.003, help="stream.divergence")
    return parser.parse_known_args()


def read_moved(folder: pathlib.Path) -> Moved:
    """Reads metrics.jsonl of a finished run."""
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"]]

    def mean(name: str) -> float:
        return float(np.mean([row.get(name, 0.0) for row in rows]))

    age = "training/off_policy/trajectory_staleness/"
    return Moved(
        read_run(folder),
        megabytes=sum(row["perf/weight_update/bytes"] for row in rows) / 1e6,
        skipped=mean("perf/weight_update/skipped"),
        age=(mean(age + "mean"), max(row[age + "max"] for row in rows)),
        divergence=mean("training/off_policy/divergence"),
    )


def main() -> int:
    """Trains, prints the table and returns the exit code."""
    args, flags = parse_arguments()
    common = [f"--config.{key}={value}" for key, value in SETTINGS.items()]
    every, seldom = [], []
    columns = "MB of weights | steps without a weight update | age mean / max | mean D"
    print(header(columns), flush=True)
    for seed in args.seeds:
        for runs, kind, own in (
            (every, "every-step", []),
            (seldom, "divergence", [f"--config.stream.divergence={args.threshold}"]),
        ):
            folder = pathlib.Path(args.workdir) / f"seed{seed}-{kind}"
            train("configs/tiny.py", folder, seed, [*common, *own, *flags])
            runs.append(read_moved(folder))
            print(runs[-1].row(), flush=True)
    ratio = sum(run.megabytes for run in every) / sum(run.megabytes for run in seldom)
    by, text = apart(*([run.result for run in runs] for runs in (seldom, every)))
    print(
        f"\nheld-out reward with stream.divergence={args.threshold:g} {text}; {ratio:.1f}x fewer "
        "bytes of weights"
    )
    return 0 if ratio >= LEAST_RATIO and by <= MOST_ERRORS else 1


if __name__ == "__main__":
    sys.exit(main())
