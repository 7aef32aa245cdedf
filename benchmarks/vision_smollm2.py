"""Accuracy that GRPO adds to a cold start of configs/vision_smollm2.py, which learns to see.

python benchmarks/vision_smollm2.py --workdir=runs/vision_smollm2
python benchmarks/vision_smollm2.py --workdir=runs/vision_smollm2 --seeds 0 1 2 --cold-steps=80

For each seed the sft graph trains a new tower for SmolLM2-135M on right answers, its result is
exported, and grpo continues from the export. Finished folders are not trained again. To pass, GRPO
must add at least 0.1 to the accuracy on held-out pictures. Prints a row per seed for
docs/benchmarks.md with the losses of the cold start and the rewards of GRPO, means of ten equal
parts of the steps, and exits with 1 if a seed fails.

Flags that are not listed below go to scripts/train.py, for both runs.
"""

import argparse
import pathlib
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
from learning import ROOT, read_run, train
from vision_learning import minutes_of

from distflow_jax.report.run_writer import read_metrics

CONFIG = "configs/vision_smollm2.py"
LEAST_GAIN = 0.1  # of held-out accuracy
PARTS = 10  # of a curve
HEADER = (
    "| run | accuracy of the cold start | after GRPO | cold start minutes | GRPO minutes "
    "| loss of the cold start | reward of GRPO | passes |\n|---|---|---|---|---|---|---|---|"
)


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """(folder, seeds, settings of the cold start; flags of scripts/train.py)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workdir", default="runs/vision_smollm2")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--cold-steps", type=int, default=50, help="steps of the cold start")
    parser.add_argument("--cold-lr", type=float, default=1e-3, help="its learning rate")
    return parser.parse_known_args()


def export(run: pathlib.Path, out: pathlib.Path) -> None:
    """Exports a run's newest checkpoint, unless that is done."""
    if not out.exists():
        command = [sys.executable, str(ROOT / "scripts" / "export.py")]
        subprocess.run([*command, f"--workdir={run}", f"--out={out}"], check=True)


def curve(folder: pathlib.Path, name: str) -> str:
    """Means of a metric over PARTS equal parts of the steps."""
    rows = read_metrics(folder / "metrics.jsonl")
    values = np.array([row[name] for row in rows if row["step"] > 0])
    return " ".join(
        f"{part.mean():.2f}" for part in np.array_split(values, min(PARTS, len(values)))
    )


def row_of(cold: pathlib.Path, grpo: pathlib.Path) -> tuple[str, bool]:
    """A row of the table under HEADER, and whether GRPO adds enough."""
    result = read_run(grpo)
    passes = result.after[0] - result.before[0] >= LEAST_GAIN
    cells = [
        grpo.name,
        *(f"{mean:.3f} ± {error:.3f}" for mean, error in (result.before, result.after)),
        f"{minutes_of(cold):.1f}",
        f"{minutes_of(grpo):.1f}",
        curve(cold, "actor/nll"),
        curve(grpo, "critic/score/mean"),
        "yes" if passes else "NO",
    ]
    return "| " + " | ".join(cells) + " |", passes


def train_seed(
    args: argparse.Namespace, seed: int, flags: Sequence[str]
) -> tuple[pathlib.Path, pathlib.Path]:
    """Trains both runs of a seed; returns their folders."""
    folder = pathlib.Path(args.workdir)
    cold, grpo, out = (folder / f"seed{seed}-{part}" for part in ("cold", "grpo", "export"))
    steps = f"--config.training.steps={args.cold_steps}"
    rate = f"--config.training.optimizer.lr={args.cold_lr}"
    own = ["--config.dag=sft", "--config.eval.dataset="]
    train(CONFIG, cold, seed, [*flags, *own, steps, rate])
    export(cold, out)
    train(CONFIG, grpo, seed, [*flags, f"--config.model.source={out}", "--config.model.vision="])
    return cold, grpo


def main() -> int:
    """Trains, prints the table and returns the exit code."""
    args, flags = parse_arguments()
    rows = []
    for seed in args.seeds:
        rows.append(row_of(*train_seed(args, seed, flags)))
    print(HEADER)
    for row, _ in rows:
        print(row)
    return 0 if all(passes for _, passes in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
