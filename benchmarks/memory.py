"""Memory and time of an update, by rematerialisation and dtype of the moments.

    python benchmarks/memory.py
    python benchmarks/memory.py --model=135m --prompts=2 --rounds=3

Runs the update of benchmarks/update.py (packed rows with shared prompts) on the available devices,
compiled once for each setting; runs are interleaved, and the shortest time of each is reported.
Memory is the compiler's figure for the program, and the bytes of the optimizer's state; gradients
are part of the program's temporaries. Prints a Markdown table.
"""

import argparse

import jax
from update import CASES, MODELS, Update, forward_of, packed

from distflow_jax.config.training_config import MOMENTS, OptimizerConfig
from distflow_jax.models.remat import REMATS
from distflow_jax.programs.units import format_bytes


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


def update_of(args: argparse.Namespace, remat: str, moments: str) -> Update:
    """An update with one setting."""
    model, rows = MODELS[args.model], packed(MODELS[args.model], args, True)
    forward = forward_of(model, rows, args.micro, args.case, args.attention, remat, 0)
    response = CASES[args.case][2]
    settings = OptimizerConfig(moments=moments)
    return Update(model, rows, forward, settings, micro=args.micro, response=response)


def main() -> None:
    args = arguments()
    settings = [(remat, "float32") for remat in REMATS]
    settings += [("none", moments) for moments in MOMENTS[1:]]
    cases = {each: update_of(args, *each) for each in settings}
    seconds: dict[tuple[str, str], list[float]] = {each: [] for each in settings}
    for _ in range(args.rounds + 1):  # the first one also touches new memory
        for each, case in cases.items():
            seconds[each].append(case.step()[0])
    print("| remat | moments | temporaries | optimizer | s a step |\n|---|---|---|---|---|")
    for (remat, moments), case in cases.items():
        temporaries = case.program.memory_analysis().temp_size_in_bytes
        kept = sum(x.nbytes for x in jax.tree.leaves(case.state.opt_state))
        sizes = f"{format_bytes(temporaries)} | {format_bytes(kept)}"
        sizes += f" | {min(seconds[remat, moments]):.3f}"
        print(f"| {remat} | {moments} | {sizes} |")


if __name__ == "__main__":
    main()
