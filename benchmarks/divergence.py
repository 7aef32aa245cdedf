"""Bytes of weights that move with stream.divergence, and what is learned: tiny model, three seeds.

python benchmarks/divergence.py --workdir=runs/divergence

Each seed trains configs/tiny.py twice with stream.max_staleness=8: with a weight update after every
step, and with stream.divergence. Finished folders are not trained again. To pass, the second runs
must move at least two times fewer bytes of weights, and the means of the rewards of held-out
prompts after training must lie within two standard errors of their difference. Prints a row per run
for docs/benchmarks.md, and exits with 1 if that fails.

Flags that are not listed below go to scripts/train.py, e.g. --config.training.steps=10.
"""

import sys

from seeds import MOST_ERRORS, Result, apart, parser_of_seeds, print_titles, train

LEAST_RATIO = 2.0  # of bytes
SETTINGS = {
    "training.steps": 20,  # before all prompts are answered well
    "training.optimizer.lr": 0.001,
    "algorithm.correction": "token_tis",
    "stream.max_staleness": 8,
    "eval.num_prompts": 256,
    "eval.temperature": 1.0,
    "checkpoint.every": 20,
}
KINDS = {"every-step": [], "divergence": ["--config.stream.divergence=0.003"]}
AGE = "training/off_policy/trajectory_staleness/"


def megabytes(result: Result) -> float:
    """Weights that moved in a run."""
    return sum(row["perf/weight_update/bytes"] for row in result.rows) / 1e6


def main() -> int:
    args, flags = parser_of_seeds(__doc__, "runs/divergence").parse_known_args()
    common = [f"--config.{key}={value}" for key, value in SETTINGS.items()]
    found: dict[str, list[Result]] = {kind: [] for kind in KINDS}
    print_titles("MB of weights", "steps without a weight update", "age mean / max")
    for seed in args.seeds:
        for kind, own in KINDS.items():
            folder = args.workdir / f"seed{seed}-{kind}"
            result = train("configs/tiny.py", folder, seed, [*common, *own, *flags])
            found[kind].append(result)
            oldest = max(row[f"{AGE}max"] for row in result.rows)
            result.print_row(
                f"{megabytes(result):.1f}",
                f"{result.mean('perf/weight_update/skipped'):.0%}",
                f"{result.mean(f'{AGE}mean'):.2f} / {oldest:.0f}",
            )
    every, seldom = found.values()
    ratio = sum(map(megabytes, every)) / sum(map(megabytes, seldom))
    by, text = apart(seldom, every)
    print(f"\nheld-out reward by divergence {text}; {ratio:.1f}x fewer bytes of weights")
    return 0 if ratio >= LEAST_RATIO and by <= MOST_ERRORS else 1


if __name__ == "__main__":
    sys.exit(main())
