"""Learning curve of the default run: configs/grpo_smollm2.py for three seeds, checked and drawn.

python benchmarks/learning.py --workdir=runs/learning
python benchmarks/learning.py --workdir=runs/learning --ahead --partial_batches

Trains one seed after the other; finished folders are not trained again. To pass, a run needs a mean
reward of the last five steps at least 0.3 above that of the first five, and an accuracy on held-out
problems above the untrained model's by more than two standard errors of the difference. Writes
docs/curves.png, prints a row per run for docs/benchmarks.md, and exits with 1 if a run fails.

With --ahead each seed is also trained with samplers that run ahead, in a folder named seedN-ahead.
With --partial_batches also with steps that train on groups as they end; on a CPU that run has two
devices, one for samplers. To pass, the mean of each kind's accuracies must also lie within two
standard errors of the mean of the synchronous runs. The picture goes to --workdir.

Flags that are not listed below go to scripts/train.py, e.g. --config.training.steps=10.
"""

import argparse
import math
import pathlib
import sys
from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
from seeds import MOST_ERRORS, ROOT, Result, apart, parser_of_seeds, print_titles, train

LEAST_GAIN = 0.3  # of the mean reward
AHEAD = ("--config.stream.max_staleness=1", "--config.algorithm.correction=token_tis")
PARTIAL_BATCHES = (
    *AHEAD,
    "--config.mesh.devices=0:1",
    "--config.mesh.roles={'ROLLOUT': {'devices': '1:2'}}",
    "--config.stream.partial_batches=ready",
    "--config.stream.partial_batch_rows=4",
)


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """(flags; those of scripts/train.py)."""
    parser = parser_of_seeds(__doc__, "runs/learning")
    parser.add_argument("--config", default="configs/grpo_smollm2.py")
    parser.add_argument("--ahead", action="store_true", help="compare with samplers that run ahead")
    parser.add_argument(
        "--partial_batches", action="store_true", help="compare with steps in partial batches"
    )
    parser.add_argument("--picture", help="default: docs/curves.png, or WORKDIR/curves.png")
    return parser.parse_known_args()


def errors_apart(result: Result) -> float:
    """Gain in accuracy over its standard error, with both evaluations taken as independent.

    Both evaluations use the same problems, so the true error of the difference is smaller.
    """
    error = math.hypot(result.before[1], result.after[1])
    return (result.after[0] - result.before[0]) / max(error, 1e-12)


def draw(results: Sequence[Result], path: pathlib.Path) -> None:
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
    kinds: dict[str, list[Result]] = {"": []}
    kinds |= {"-ahead": []} if args.ahead else {}
    kinds |= {"-partial batches": []} if args.partial_batches else {}
    settings = {"": (), "-ahead": AHEAD, "-partial batches": PARTIAL_BATCHES}
    for seed in args.seeds:
        for kind, found in kinds.items():
            folder, devices = args.workdir / f"seed{seed}{kind}", 2 * ("batches" in kind)
            found.append(train(args.config, folder, seed, [*settings[kind], *flags], devices))
    results = [result for seed in zip(*kinds.values(), strict=True) for result in seed]
    default = args.workdir if len(kinds) > 1 else ROOT / "docs"
    draw(results, pathlib.Path(args.picture or default / "curves.png"))
    print_titles("standard errors apart", "minutes", "peak GiB", "passes")
    all_pass = True
    for result in results:
        errors = errors_apart(result)
        passes = result.last >= result.first + LEAST_GAIN and errors > MOST_ERRORS
        minutes = sum(row["timing_s/step"] for row in result.rows) / 60
        peak = max(row["perf/max_memory_allocated_gb"] for row in result.rows)
        result.print_row(
            f"{errors:.1f}", f"{minutes:.1f}", f"{peak:.1f}", "yes" if passes else "NO"
        )
        all_pass &= passes
    for kind, found in list(kinds.items())[1:]:
        by, text = apart(found, kinds[""])
        print(f"\naccuracy of seedN{kind} {text}")
        all_pass &= by <= MOST_ERRORS
    return 0 if all_pass else 1


if __name__ == "__main__":
    sys.exit(main())
