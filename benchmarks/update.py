"""Rate of an update relative to a plain matrix product, with and without shared prompts.

python benchmarks/update.py --model=135m
python benchmarks/update.py --case=shared --sides=ours,separate

One optimizer step of a policy on one CPU, float32: log-probs of all responses, clipped loss,
gradients, clipping, AdamW; random weights, prompts and responses of fixed lengths. Side "ours"
packs a prompt with its responses, "separate" gives every response its own prompt.

FLOPs are those that the work requires: six per matrix weight and distinct token, for the vocabulary
six per weight and response token, and for attention twelve per head, dim and pair of tokens that
the mask admits. Recomputed or masked products count nothing. The rate of a plain float32 product is
measured in the same process before each step.
"""

import argparse
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from device.rates import product_rate
from peers.paced import report, take_turns, wait_for_turn

from distflow_jax.batch import Placement, Rows, RowShape, Sequences, to_rows
from distflow_jax.config.algorithm_config import AlgorithmConfig
from distflow_jax.config.training_config import OptimizerConfig
from distflow_jax.models.attention import packed_mask
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.model_flops import BatchWork, training_flops
from distflow_jax.models.parameters import init_params, param_shardings
from distflow_jax.models.remat import REMATS
from distflow_jax.observe.compilations import Compilations
from distflow_jax.observe.memory import peak_memory_gb
from distflow_jax.programs.xla_options import compiler_options
from distflow_jax.training.attention_choice import AttentionSizes, row_attention
from distflow_jax.training.forward import (
    ForwardConfig,
    logits_in_memory,
    parent_segment,
)
from distflow_jax.training.objectives.policy_objective import PolicyBatch, policy_objective
from distflow_jax.training.optimizer import learning_rate, make_optimizer
from distflow_jax.training.state import init_state
from distflow_jax.training.update import UpdateShape, make_update

MODELS = {
    "5m": DecoderConfig(tie_embeddings=False),
    "135m": DecoderConfig(
        vocab_size=49_152,
        hidden_size=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        mlp_size=1536,
        rope_theta=1e5,
    ),
}
CASES = {  # samples of a prompt, tokens of a prompt and of a response
    "short": (8, 32, 64),
    "shared": (8, 256, 64),
}
SIDES = ("ours", "separate")


def parse_arguments() -> argparse.Namespace:
    """Flags, with sizes that follow from model and case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(MODELS), default="5m")
    parser.add_argument("--case", choices=sorted(CASES), default="short")
    parser.add_argument("--prompts", type=int, default=0, help="0: 8, or 2 of the larger model")
    parser.add_argument("--sides", default="ours", help=f"of {', '.join(SIDES)}")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--micro", type=int, default=0, help="rows at a time; 0: about 600 tokens")
    parser.add_argument("--attention", choices=("auto", "masked", "blocks"), default="auto")
    parser.add_argument("--remat", choices=REMATS, default="none")
    parser.add_argument("--logp-chunk", type=int, default=0, help="as training.logp_chunk")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.prompts = args.prompts or {"5m": 8, "135m": 2}[args.model]
    for name in args.sides.split(","):
        if name not in SIDES:
            parser.error(f"--sides: {name!r} is none of {', '.join(SIDES)}")
    return args


# -- our side ----------------------------------------------------------------------------------


def packed(model: DecoderConfig, args: argparse.Namespace, shared: bool) -> Rows:
    """Rows [1, R, L] of the case: a row for each prompt, or as many sequences as fit 640 tokens."""
    samples, prompt, response = CASES[args.case]
    rng = np.random.default_rng(0)
    number = args.prompts * samples

    def ids(*shape):
        return rng.integers(3, model.vocab_size, shape, dtype=np.int32)

    prompts = ids(args.prompts, prompt)
    each = samples if shared else max(1, 640 // (prompt + response))
    sequences = Sequences(
        group=[i // samples for i in range(number)],
        member=[i % samples for i in range(number)],
        prompt=[prompts[i // samples] for i in range(number)],
        response=list(ids(number, response)),
        response_mask=[np.ones(response, bool)] * number,
    )
    tokens = prompt + each * response if shared else each * (prompt + response)
    tokens = -(-tokens // 32) * 32
    at = tuple(tuple(range(i, min(i + each, number))) for i in range(0, number, each))
    placement = Placement(RowShape(1, len(at), tokens, each), (at,), shared)
    return to_rows(sequences, placement)


def needed_flops(model: DecoderConfig, rows: Rows) -> float:
    """FLOPs that forward and backward require; see the module."""
    first = jax.tree.map(lambda x: jnp.asarray(x[0]), rows)
    pairs = int(packed_mask(first.segment, parent_segment(first)).sum())
    tokens, scored = int((rows.segment > 0).sum()), int(rows.response_mask.sum())
    return training_flops(model, BatchWork(tokens, scored, pairs))


def forward_of(
    model: DecoderConfig, rows: Rows, micro: int, case: str, attention: str, remat: str, chunk: int
) -> ForwardConfig:
    """The forward pass that values of training.attention, remat and logp_chunk select here."""
    length, longest = rows.tokens.shape[2], sum(CASES[case][1:])
    group = model.num_heads // model.num_kv_heads
    sizes = AttentionSizes(length, longest, micro, group, model.head_dim, "float32")
    block = row_attention(attention, "cpu", sizes).block
    chunk, keep = logits_in_memory(chunk, length, rows=micro, vocab=model.vocab_size, remat=remat)
    return ForwardConfig("float32", chunk, remat, block, keep)


class Update:
    """One compiled optimizer step on rows, and its state; `micro` rows at a time."""

    def __init__(
        self,
        model: DecoderConfig,
        rows: Rows,
        forward: ForwardConfig,
        settings: OptimizerConfig,
        *,
        micro: int,
        response: int,
    ):
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tensor"))
        optimizer = make_optimizer(settings, 1000)
        update = make_update(
            optimizer,
            learning_rate(settings, 1000),
            shape=UpdateShape(mesh, micro, response),
            objective=policy_objective(model, AlgorithmConfig(), forward, max_response=response),
        )
        params = init_params(model, 0, param_shardings(model, mesh))
        self.state = init_state(params, model, optimizer, mesh)
        spread = np.random.default_rng(1).normal(size=rows.tokens.shape).astype(np.float32)
        batch = PolicyBatch(rows, np.where(rows.response_mask, spread, 0), None, None, None)
        self._inputs = jax.device_put(batch), np.int32(0), np.float32(1)
        program = update.lower(self.state, *self._inputs)
        self.program = program.compile(compiler_options=compiler_options(mesh))

    def step(self) -> tuple[float, float]:
        """(seconds, CPU-seconds) of one update."""
        wall, cpu = time.perf_counter(), time.process_time()
        self.state, _ = jax.block_until_ready(self.program(self.state, *self._inputs))
        return time.perf_counter() - wall, time.process_time() - cpu


def run_side(args: argparse.Namespace) -> None:
    """Runs one step for each line of stdin."""
    model = MODELS[args.model]
    rows = packed(model, args, args.side == "ours")
    _, count, length = rows.tokens.shape
    wanted = args.micro or max(1, 640 // length)
    micro = max(n for n in range(1, count + 1) if count % n == 0 and n <= wanted)
    forward = forward_of(model, rows, micro, args.case, args.attention, args.remat, args.logp_chunk)
    settings, response = OptimizerConfig(), CASES[args.case][2]
    update = Update(model, rows, forward, settings, micro=micro, response=response)
    flops, compilations = needed_flops(model, rows), Compilations()
    while True:
        wait_for_turn()
        rate = product_rate()
        seconds, cpu = update.step()
        record = {"seconds": seconds, "cpu_s": cpu, "product_rate": rate, "flops": flops}
        record |= {"compilations": compilations.take(), "peak_gb": peak_memory_gb()}
        report(record | {"rows": count, "row_tokens": length})


# -- taking turns ------------------------------------------------------------------------------


def command(args: argparse.Namespace, side: str) -> list[str]:
    """The command that starts a side."""
    names = ("model", "case", "prompts", "micro", "attention", "remat", "logp_chunk")
    flags = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in names]
    return [sys.executable, __file__, f"--side={side}", *flags]


def main() -> None:
    args = parse_arguments()
    if args.side:
        run_side(args)
        return
    samples, prompt, response = CASES[args.case]
    tokens = args.prompts * samples * response
    print(
        f"{args.model}: {args.prompts} prompts of {prompt} tokens, {samples} responses of "
        f"{response} to each"
    )
    print(
        "| side | seconds median (best) | response tokens/s | GFLOP/s | plain product "
        "| share median (best) | peak GiB | compilations | ours faster |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    commands = {side: command(args, side) for side in args.sides.split(",")}
    everyone = {name: steps[2:] for name, steps in take_turns(commands, args.rounds, 2).items()}
    first = everyone[next(iter(everyone))]
    for name, steps in everyone.items():
        seconds = [s["seconds"] for s in steps]
        shares = [s["flops"] / s["seconds"] / s["product_rate"] for s in steps]
        pairs = zip(steps, first, strict=True)
        cells = [
            name,
            f"{statistics.median(seconds):.3f} ({min(seconds):.3f})",
            f"{tokens / statistics.median(seconds):.0f}",
            f"{statistics.median(s['flops'] / s['seconds'] for s in steps) / 1e9:.1f}",
            f"{statistics.median(s['product_rate'] for s in steps) / 1e9:.1f}",
            f"{statistics.median(shares):.2f} ({max(shares):.2f})",
            f"{steps[-1]['peak_gb']:.2f}",
            f"{sum(s['compilations'] for s in steps):.0f}",
            f"{statistics.median(s['seconds'] / f['seconds'] for s, f in pairs):.2f}x",
        ]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
