"""Rate of an update relative to a plain matrix product, with and without shared prompts.

python benchmarks/update.py --model=135m
python benchmarks/update.py --case=shared --sides=ours,separate

One optimizer step of a run's own program on one CPU, float32: log-probs of all responses, clipped
loss, gradients, clipping, AdamW; random weights, prompts and responses of fixed lengths. Side
"ours" packs a prompt with its responses, "separate" gives every response its own prompt.

FLOPs are those that the work requires: six per matrix weight and distinct token, for the vocabulary
six per weight and response token, and for attention twelve per head, dim and pair of tokens that
the mask admits. Recomputed or masked products count nothing. The rate of a plain float32 product is
measured in the same process before each step.
"""

import argparse
import statistics
import sys

import numpy as np
from command_line import parser_of, print_header, print_row
from device.rates import product_rate
from device.update import RunUpdate
from device.work import random_sequences
from peers.paced import report, take_turns, wait_for_turn
from peers.work import MODELS, source_of

from distflow_jax.config.data_config import DataConfig
from distflow_jax.config.rollout_config import RolloutConfig
from distflow_jax.config.run_config import Config, ModelSourceConfig
from distflow_jax.config.training_config import TrainingConfig
from distflow_jax.models.model_flops import BatchWork, causal_pairs, training_flops
from distflow_jax.observe.compilations import Compilations

SAMPLES, RESPONSE = 8, 64  # of a prompt; tokens of a response
CASES = {"short": 32, "shared": 256}  # tokens of a prompt
SIDES = ("ours", "separate")
ROW_TOKENS = 640  # about so many at a time
TITLES = ("side", "seconds median (best)", "response tokens/s", "GFLOP/s", "plain product",
          "share median (best)", "peak GiB", "compilations", "ours faster")  # fmt: skip


def parse_arguments() -> argparse.Namespace:
    """Flags, with sizes that follow from model and case."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="5m")
    parser.add_argument("--case", choices=sorted(CASES), default="short")
    parser.add_argument("--prompts", type=int, default=0, help="0: 8, or 2 of the larger model")
    parser.add_argument("--sides", default="ours", help=f"of {', '.join(SIDES)}")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--micro", type=int, default=0, help="rows at a time; 0: about 600 tokens")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.prompts = args.prompts or {"5m": 8, "135m": 2}[args.model]
    args.sides = args.sides.split(",")
    if unknown := set(args.sides) - set(SIDES):
        parser.error(f"--sides: {', '.join(unknown)} is none of {', '.join(SIDES)}")
    return args


def run_side(args: argparse.Namespace) -> None:
    """Runs one step for each line of stdin."""
    prompt, count = CASES[args.case], args.prompts * SAMPLES
    if shared := args.side == "ours":
        each = SAMPLES  # sequences of a row
        length = prompt + each * RESPONSE
        tokens = args.prompts * prompt + count * RESPONSE
        pairs = args.prompts * causal_pairs(prompt)
        pairs += count * (causal_pairs(prompt + RESPONSE) - causal_pairs(prompt))
    else:
        each = ROW_TOKENS // (prompt + RESPONSE)
        length = each * (prompt + RESPONSE)
        tokens, pairs = count * (prompt + RESPONSE), count * causal_pairs(prompt + RESPONSE)
    rows = [tuple(range(i, min(i + each, count))) for i in range(0, count, each)]
    length = -(-length // 32) * 32
    wanted = args.micro or max(1, ROW_TOKENS // length)
    training = TrainingConfig(
        row_tokens=length,
        row_sequences=each,
        share_prompts=shared,
        micro_batch_rows=max(
            n for n in range(1, len(rows) + 1) if len(rows) % n == 0 and n <= wanted
        ),
    )
    rollout = RolloutConfig(num_samples=SAMPLES, max_response_length=RESPONSE)
    data = DataConfig(prompts_per_step=args.prompts, max_prompt_length=prompt)
    model = ModelSourceConfig(source_of(args.model))
    update = RunUpdate(Config(model=model, data=data, rollout=rollout, training=training))
    rng, lengths = np.random.default_rng(0), np.full((args.prompts, SAMPLES), RESPONSE)
    sequences = random_sequences(rng, update.model.vocab_size, prompt, lengths)
    flops = training_flops(update.model, BatchWork(tokens, count * RESPONSE, pairs))
    steps, compilations = update.steps(sequences, rows), Compilations()
    while True:
        wait_for_turn()
        rate = product_rate()
        seconds, cpu, _ = next(steps)
        record = {"seconds": seconds, "cpu_s": cpu, "product_rate": rate, "flops": flops}
        report(record | {"compilations": compilations.take()})


def main() -> None:
    args = parse_arguments()
    if args.side:
        run_side(args)
        return
    names = ("model", "case", "prompts", "micro")
    flags = [f"--{name}={getattr(args, name)}" for name in names]
    command = [sys.executable, __file__, *flags]
    commands = {side: [*command, f"--side={side}"] for side in args.sides}
    tokens = args.prompts * SAMPLES * RESPONSE
    print(f"{args.model}: {args.prompts} prompts of {CASES[args.case]} tokens, {tokens} to answer")
    print_header(*TITLES)
    everyone = {name: steps[2:] for name, steps in take_turns(commands, args.rounds, 2).items()}
    first = everyone[args.sides[0]]
    for name, steps in everyone.items():
        seconds = [s["seconds"] for s in steps]
        rates = [s["flops"] / s["seconds"] for s in steps]
        products = [s["product_rate"] for s in steps]
        shares = [rate / product for rate, product in zip(rates, products, strict=True)]
        times = [s["seconds"] / f["seconds"] for s, f in zip(steps, first, strict=True)]
        print_row(
            name,
            f"{statistics.median(seconds):.3f} ({min(seconds):.3f})",
            f"{tokens / statistics.median(seconds):.0f}",
            f"{statistics.median(rates) / 1e9:.1f}",
            f"{statistics.median(products) / 1e9:.1f}",
            f"{statistics.median(shares):.2f} ({max(shares):.2f})",
            f"{steps[-1]['peak_gb']:.2f}",
            f"{sum(s['compilations'] for s in steps):.0f}",
            f"{statistics.median(times):.2f}x",
        )


if __name__ == "__main__":
    main()
