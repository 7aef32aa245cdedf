"""Recall of the longest fifth of a step's prompts, by the ranker of rows that were never answered.

    python benchmarks/length_ranking.py --data=gsm8k/train.jsonl

The file has rows with "question" and "answer". The mean length of the responses to a row is the
number of words of the row's own answer, which is real. How far responses to one prompt lie apart is
simulated: lognormal, with the sigma that the table says. Each step has 32 prompts of a shuffled
epoch, with 8 responses each; predictions know the steps before the last two.

The longest fifth is that of the groups' mean lengths. "never seen": the ranker (data/ranking/)
within the first epoch, from its second quarter on. "own history": the row's mean of the first
epoch, in the second one. "prompt length": the longest prompts. Chance has 0.22.
"""

import argparse
import json
import pathlib
import sys

import numpy as np

from distflow_jax.data.ranking.length_ranker import LengthRanker

PROMPTS, SAMPLES, LAG = 32, 8, 2
LONG = 7  # groups of a step: the longest fifth, rounded up


def recall(expected: np.ndarray, real: np.ndarray) -> float:
    """Share of the longest fifth of groups, [n], that is among the longest expected, [n]."""
    chosen, longest = (set(np.argsort(-x, kind="stable")[:LONG].tolist()) for x in (expected, real))
    return len(chosen & longest) / LONG


def measure(questions: list[str], means: np.ndarray, sigma: float, seed: int) -> dict[str, float]:
    """Recalls of one simulated run over two epochs; `means`: expected words of each row, [N]."""
    rng = np.random.default_rng(seed)

    def answered(rows: np.ndarray) -> np.ndarray:
        spread = np.exp(sigma * rng.standard_normal((len(rows), SAMPLES)) - sigma**2 / 2)
        return np.rint(np.maximum(means[rows, None] * spread, 1)).mean(1)

    prompts = np.array([len(question.split()) for question in questions])
    ranker, known = LengthRanker(prompts.tolist(), ["gsm8k"] * len(prompts)), np.zeros(len(means))
    found: dict[str, list[float]] = {"never seen": [], "prompt length": [], "own history": []}
    order = rng.permutation(len(means))
    steps = [order[i : i + PROMPTS] for i in range(0, len(order) - PROMPTS + 1, PROMPTS)]
    ended: list[tuple[np.ndarray, np.ndarray]] = []
    for step, rows in enumerate(steps):
        real = answered(rows)
        if step >= len(steps) // 4:
            found["never seen"].append(recall(ranker.expected(known, rows), real))
            found["prompt length"].append(recall(prompts[rows], real))
        ended.append((rows, real))
        if len(ended) > LAG:
            before, lengths = ended.pop(0)
            known[before] = lengths
    for before, lengths in ended:
        known[before] = lengths
    order = rng.permutation(np.concatenate(steps))
    for i in range(0, len(order), PROMPTS):
        rows = order[i : i + PROMPTS]
        found["own history"].append(recall(known[rows], answered(rows)))
    return {name: float(np.mean(values)) for name, values in found.items()}


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, help="JSON lines with question and answer")
    parser.add_argument("--sigmas", default="0,0.5,1", help="of responses to one prompt")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each sigma")
    args = parser.parse_args()
    lines = pathlib.Path(args.data).read_text().splitlines()
    rows = [json.loads(line) for line in lines if line.strip()]
    questions = [row["question"] for row in rows]
    means = np.array([max(1, len(row["answer"].split())) for row in rows], np.float64)
    print("| sigma of a row's responses | never seen | prompt length | own history |")
    print("|---|---|---|---|")
    for sigma in map(float, args.sigmas.split(",")):
        runs = [measure(questions, means, sigma, seed) for seed in range(args.seeds)]
        shown = " | ".join(f"{np.mean([run[name] for run in runs]):.3f}" for name in runs[0])
        print(f"| {sigma:g} | {shown} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
