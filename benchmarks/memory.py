"""Memory and time of an update, by rematerialisation and dtype of the moments.

    python benchmarks/memory.py
    python benchmarks/memory.py --model=135m --prompts=2 --rounds=3

Runs the update of benchmarks/update.py (packed rows with shared prompts) on the available devices,
compiled once for each setting; runs are interleaved, and the shortest time of each is reported.
Memory is the compiler's figure for the program, and the bytes of the optimizer's state; gradients
are part of the program's temporaries. Prints a Markdown table.
"""

import argparse
import time

import jax
import numpy as np
from update import CASES, MODELS, attention_of, packed

from distflow_jax.algorithms.algorithm_config import AlgorithmConfig
from distflow_jax.models.parameters import init_params, param_shardings
from distflow_jax.models.remat import REMATS
from distflow_jax.programs.units import format_bytes
from distflow_jax.training.compressed_moments import MOMENTS
from distflow_jax.training.forward import ForwardConfig
from distflow_jax.training.objectives.policy_objective import PolicyBatch, policy_objective
from distflow_jax.training.optimizer import OptimizerConfig, learning_rate, make_optimizer
from distflow_jax.training.state import init_state
from distflow_jax.training.update import UpdateShape, make_update


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="5m")
    parser.add_argument("--case", choices=sorted(CASES), default="short")
    parser.add_argument("--prompts", type=int, default=8, help="each is a row with its 8 responses")
    parser.add_argument("--micro", type=int, default=1, help="rows at a time")
    parser.add_argument("--attention", choices=("masked", "blocks"), default="blocks")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.prompts % args.micro:
        parser.error(f"--prompts={args.prompts} is not divisible by --micro={args.micro}")
    return args


class Case:
    """An update with one setting."""

    def __init__(self, args: argparse.Namespace, remat: str, moments: str):
        model, rows = MODELS[args.model], packed(MODELS[args.model], args, True)
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tensor"))
        length = rows.tokens.shape[2]
        longest = sum(CASES[args.case][1:])
        block = attention_of(args.attention, model, args.micro, length, longest).block
        forward = ForwardConfig("float32", 64, remat, block)
        settings, response = OptimizerConfig(moments=moments), CASES[args.case][2]
        optimizer = make_optimizer(settings, 1000)
        update = make_update(
            optimizer,
            learning_rate(settings, 1000),
            shape=UpdateShape(mesh, args.micro, response),
            objective=policy_objective(model, AlgorithmConfig(), forward, max_response=response),
        )
        params = init_params(model, 0, param_shardings(model, mesh))
        self.state = init_state(params, model, optimizer, mesh)
        spread = np.random.default_rng(1).normal(size=rows.tokens.shape).astype(np.float32)
        self.batch = jax.device_put(
            PolicyBatch(rows, np.where(rows.response_mask, spread, 0), None, None, None)
        )
        self.program = update.lower(self.state, self.batch, *self._numbers()).compile()
        self.seconds = float("inf")
        self.kept = sum(x.nbytes for x in jax.tree.leaves(self.state.opt_state))

    def _numbers(self):
        return np.int32(0), np.float32(1)

    def step(self) -> None:
        """Runs and times one update."""
        start = time.perf_counter()
        numbers = self._numbers()
        self.state, _ = jax.block_until_ready(self.program(self.state, self.batch, *numbers))
        self.seconds = min(self.seconds, time.perf_counter() - start)


def main() -> None:
    args = arguments()
    settings = [(remat, "float32") for remat in REMATS]
    settings += [("none", moments) for moments in MOMENTS[1:]]
    cases = {each: Case(args, *each) for each in settings}
    for _ in range(args.rounds + 1):  # the first one also touches new memory
        for case in cases.values():
            case.step()
    print("| remat | moments | temporaries | optimizer | s a step |\n|---|---|---|---|---|")
    for (remat, moments), case in cases.items():
        temporaries = case.program.memory_analysis().temp_size_in_bytes
        sizes = f"{format_bytes(temporaries)} | {format_bytes(case.kept)} | {case.seconds:.3f}"
        print(f"| {remat} | {moments} | {sizes} |")


if __name__ == "__main__":
    main()
