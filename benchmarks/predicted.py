"""Seconds per segment of a run on this machine: predicted by a roofline, and measured.

    python benchmarks/predicted.py
    python benchmarks/predicted.py --model=random:configs/shapes/llama32_1b --prompts=32 \\
        --samples=16 --response=512 --row-tokens=4096

The rates are measured on this machine before and after: a plain product, memory read and written,
and with several devices (XLA_FLAGS=--xla_force_host_platform_device_count=4) an all-gather. --peaks
uses the vendor's numbers instead, if distflow_jax/planning/chips.py has them. Programs are those of
GRPO with a reference model, as scripts/train.py compiles them. The estimate is that of
docs/scaling.md, which plan.py --topology prints for pods. Random weights of SmolLM2-135M's sizes.
"""

import argparse
import json
import pathlib
import sys
import tempfile

import jax
from device.predict import beside_prediction, describe
from device.rates import between, measured_chip, this_chip
from device.segments import run_timed

from distflow_jax.algorithms.algorithm_config import AlgorithmConfig
from distflow_jax.config.run_config import Config, ModelSourceConfig
from distflow_jax.data.loader import DataConfig
from distflow_jax.rewards.pool import RewardConfig
from distflow_jax.rollout.rollout_config import RolloutConfig
from distflow_jax.training.training_config import TrainingConfig

MODEL = (
    "random:llama?hidden=576&layers=30&heads=9&kv_heads=3&mlp=1536&vocab=49152&rope_theta=1e5"
    "&max_position=8192"
)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=MODEL, help="model source, preferably random weights")
    parser.add_argument("--prompts", type=int, default=2, help="prompts per step")
    parser.add_argument("--samples", type=int, default=8, help="responses per prompt")
    parser.add_argument("--prompt", type=int, default=64, help="longest, tokens")
    parser.add_argument("--response", type=int, default=64, help="longest, tokens")
    parser.add_argument("--row-tokens", type=int, default=128, help="of a packed row")
    parser.add_argument("--micro-rows", type=int, default=0, help="at a time; 0: 1 per data rank")
    parser.add_argument("--steps", type=int, default=3, help="timed steps, after a first one")
    parser.add_argument("--peaks", action="store_true", help="use the vendor's rates")
    parser.add_argument("--json", default="", help="file for the result")
    return parser.parse_args()


def make_config(args: argparse.Namespace) -> Config:
    """GRPO on additions; with one sequence per row, the default here, every row is filled."""
    return Config(
        model=ModelSourceConfig(args.model),
        algorithm=AlgorithmConfig(kl_coef=0.04),
        data=DataConfig(prompts_per_step=args.prompts, max_prompt_length=args.prompt),
        rollout=RolloutConfig(
            num_samples=args.samples,
            max_response_length=args.response,
            num_slots=args.prompts * args.samples,
        ),
        reward=RewardConfig(function="gsm8k"),
        training=TrainingConfig(
            steps=1 + args.steps,
            row_tokens=args.row_tokens,
            micro_batch_rows=args.micro_rows,
        ),
    )


def main() -> int:
    args = parse_arguments()
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    find = this_chip if args.peaks else measured_chip
    before = find(dtype)
    with tempfile.TemporaryDirectory(prefix="distflow-predicted-") as folder:
        run, times, steps = run_timed(make_config(args), pathlib.Path(folder) / "run")
    chip = between(before, find(dtype))
    rates = f"{chip.flops / 1e9:,.4g} GFLOP/s, {chip.memory_bandwidth / 1e9:,.4g} GB/s of memory"
    if chip.link_bandwidth and jax.device_count() > 1:
        rates += f", {chip.link_bandwidth / 1e9:,.3g} GB/s and {chip.hop_seconds * 1e6:,.3g} us"
        rates += " between devices"
    print(f"{jax.device_count()} x {chip.name} ({chip.source}): {rates}")
    segments = beside_prediction(run, times, steps, chip)
    print(describe(segments))
    if args.json:
        tree = {"args": vars(args), "rates": vars(chip), "segments": segments}
        pathlib.Path(args.json).write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
