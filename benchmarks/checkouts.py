"""Speed of one checkout of this repository relative to another: a step, its parts, and a start.

git worktree add /tmp/before main
python benchmarks/checkouts.py /tmp/before . --rounds=12

Both checkouts run in this interpreter's environment, as processes that stay resident and alternate,
one at a time. "step" is a step of benchmarks/grpo_step.py with a KL penalty, "rollout" and "update"
are its parts. "start" runs one step of configs/tiny.py from a new process and compares its
CPU-seconds and its compilations.

A ratio is NEW over OLD, the median over rounds of neighbouring measurements: above 1, NEW is
slower. The order within a round alternates. The exit code is 1 if a median is above --most, or if
NEW compiles more.
"""

import argparse
import contextlib
import json
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile

from command_line import parser_of, print_header, print_row
from peers import paced

WARMUP, STARTS = 2, 5  # steps before those that count; starts at most
# table -> key of the records of steps
PARTS = {"step": "step_s", "step, CPU": "cpu_s", "rollout": "rollout_s", "update": "update_s"}
START = "start, CPU"
Record = dict[str, float]


def parse_arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("old", type=pathlib.Path, help="checkout before the change")
    parser.add_argument("new", type=pathlib.Path, help="checkout with the change")
    parser.add_argument("--rounds", type=int, default=12, help="measurements of each checkout")
    parser.add_argument("--most", type=float, default=1.02, help="largest ratio that passes")
    args = parser.parse_args()
    for checkout in (args.old, args.new):
        if not (checkout / "scripts" / "train.py").is_file():
            parser.error(f"{checkout} is not a checkout: it has no scripts/train.py")
    return args


def environment(checkout: pathlib.Path) -> list[str]:
    """The beginning of a command whose process imports the checkout's package."""
    return ["env", f"PYTHONPATH={checkout}", "JAX_PLATFORMS=cpu"]


def run_steps(checkouts: list[pathlib.Path], rounds: int) -> tuple[list[Record], list[Record]]:
    """Records of steps of the old and the new checkout, in turns."""
    records: tuple[list[Record], list[Record]] = ([], [])
    with contextlib.ExitStack() as stack:
        sides = []
        for checkout in checkouts:
            script = str(checkout / "benchmarks" / "grpo_step.py")
            flags = ["--paced", "--beta=0.04", f"--steps={WARMUP + 1 + rounds}"]
            command = [*environment(checkout), sys.executable, script, *flags]
            sides.append(stack.enter_context(paced.Side(command)))
            for _ in range(WARMUP):
                sides[-1].step()
        for number in range(rounds):
            for side in (1, 0) if number % 2 else (0, 1):
                records[side].append(sides[side].step())
    return records


def start(checkout: pathlib.Path) -> Record:
    """A whole run of one step. CPU time is compared: its wall time is mostly compiling."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*environment(checkout), sys.executable, "scripts/train.py"]
        flags = ["--config=configs/tiny.py", "--config.training.steps=1"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [*command, *flags, f"--workdir={folder}/run"],
            cwd=checkout,
            capture_output=True,
            check=True,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        rows = pathlib.Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    compiled = sum(json.loads(row).get("perf/compilations", 0) for row in rows)
    return {START: cpu, "compilations": compiled}


def main() -> int:
    args = parse_arguments()
    checkouts = [args.old.resolve(), args.new.resolve()]
    print_header("part", "rounds", "OLD s", "NEW s", "NEW/OLD (quartiles)", "compilations")
    good = True
    steps = run_steps(checkouts, args.rounds)
    starts = [[start(checkout) for checkout in checkouts] for _ in range(min(args.rounds, STARTS))]
    measured = [(part, key, *steps) for part, key in PARTS.items()]
    for part, key, old, new in [*measured, (START, START, *zip(*starts, strict=True))]:
        seconds = [[record[key] for record in side] for side in (old, new)]
        ratios = [b / a for a, b in zip(*seconds, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        compiled = [round(sum(record["compilations"] for record in side)) for side in (old, new)]
        print_row(
            part,
            len(ratios),
            f"{statistics.median(seconds[0]):.3f}",
            f"{statistics.median(seconds[1]):.3f}",
            f"{middle:.3f} ({low:.3f} to {high:.3f})",
            f"{compiled[0]} -> {compiled[1]}",
        )
        good &= middle <= args.most and compiled[1] <= compiled[0]
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
