"""Speed of one checkout of this repository relative to another: step, update, decoding, start.

git worktree add /tmp/before main
python benchmarks/checkouts.py /tmp/before . --rounds=12

Both checkouts run in this interpreter's environment, as processes that stay resident and alternate,
one at a time. "grpo_step" and "update" are a step each of the benchmarks of that name, "decode"
rounds of 16 responses of 96 tokens. "start" runs one step of configs/tiny.py from a new
process and compares its CPU-seconds and its compilations.

A ratio is NEW over OLD, the median over rounds of neighbouring measurements: above 1, NEW is
slower. The order within a round alternates. The exit code is 1 if a median is above --most, or if
NEW compiles more.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable

import decode
from peers import paced

PARTS = ("grpo_step", "update", "decode", "start")
DECODE = json.dumps(decode.OPTIONS)
Record = dict[str, float]
# One measurement of a checkout; its argument is the round, and 0 is the warm-up.
Turn = Callable[[int], Record]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=pathlib.Path, help="checkout before the change")
    parser.add_argument("new", type=pathlib.Path, help="checkout with the change")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated")
    parser.add_argument("--rounds", type=int, default=12, help="measurements of each checkout")
    parser.add_argument("--most", type=float, default=1.02, help="largest ratio that passes")
    parser.add_argument("--json", default="", help="file for all records")
    args = parser.parse_args()
    if unknown := set(args.parts.split(",")) - set(PARTS):
        parser.error(f"--parts: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
    for checkout in (args.old, args.new):
        if not (checkout / "scripts" / "train.py").is_file():
            parser.error(f"{checkout} is not a checkout: it has no scripts/train.py")
    return args


def environment(checkout: pathlib.Path) -> dict[str, str]:
    """Environment variables under which a process imports the checkout's package."""
    return os.environ | {"PYTHONPATH": str(checkout.resolve()), "JAX_PLATFORMS": "cpu"}


# -- one turn of each part -----------------------------------------------------------------------


def side_of(checkout: pathlib.Path, script: str, *flags: str) -> paced.Side:
    """A benchmark of the checkout that waits for its turns."""
    command = ["env", *(f"{k}={v}" for k, v in environment(checkout).items()), sys.executable]
    return paced.Side([*command, str(checkout / "benchmarks" / script), *flags])


def paced_turn(side: paced.Side, seconds: str) -> Turn:
    """Turns of a benchmark with `--paced` steps; `seconds` is the name in its records."""

    def turn(number: int) -> Record:
        for _ in range(1 if number else 2):
            record = side.step()
        return {name: record[name] for name in ("cpu_s", "compilations")} | {"s": record[seconds]}

    return turn


def decode_turn(side: paced.Side) -> Turn:
    """Turns of decoding by the checkout's engine, with random weights."""
    side.step(json.dumps({"case": dataclasses.asdict(decode.fixed(16, 96))}))

    def turn(number: int) -> Record:
        record = side.step(json.dumps({"round": number}))
        return {name: record[name] for name in ("cpu_s", "compilations")} | {"s": record["seconds"]}

    return turn


def start_turn(checkout: pathlib.Path) -> Turn:
    """Turns of a whole run of one step. CPU time is compared: its wall time is mostly compiling."""

    def turn(number: int) -> Record:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "scripts/train.py", "--config=configs/tiny.py"]
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(
                [*command, f"--workdir={folder}/run", "--config.training.steps=1"],
                cwd=checkout,
                env=environment(checkout),
                capture_output=True,
                check=True,
            )
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            rows = pathlib.Path(folder, "run", "metrics.jsonl").read_text().splitlines()
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        compiled = sum(json.loads(row).get("perf/compilations", 0) for row in rows)
        return {"s": cpu, "cpu_s": cpu, "compilations": compiled}

    return turn


def make_turn(stack: contextlib.ExitStack, part: str, checkout: pathlib.Path, rounds: int) -> Turn:
    """The turns of a part by a checkout, with its process started."""
    if part == "start":
        return start_turn(checkout)
    if part == "decode":
        scripts = "decode_ours.py", "decode.py"  # the first one until 28 November 2026
        script = next(x for x in scripts if (checkout / "benchmarks" / x).is_file())
        return decode_turn(stack.enter_context(side_of(checkout, script, DECODE)))
    flags = ["--side=ours"]
    if part == "grpo_step":
        flags = ["--paced", "--beta=0.04", f"--steps={rounds + 3}"]
    side = stack.enter_context(side_of(checkout, f"{part}.py", *flags))
    return paced_turn(side, "step_s" if part == "grpo_step" else "seconds")


# -- results -------------------------------------------------------------------------------------


def ratios(result: dict[str, list[Record]], name: str) -> list[float]:
    """NEW over OLD of each round."""
    return [b[name] / a[name] for a, b in zip(result["old"], result["new"], strict=True)]


def run_part(
    part: str, checkouts: tuple[pathlib.Path, pathlib.Path], rounds: int
) -> dict[str, list[Record]]:
    """Records of alternating turns of both checkouts, after a warm-up of each."""
    with contextlib.ExitStack() as stack:
        turns = [make_turn(stack, part, checkout, rounds) for checkout in checkouts]
        records: tuple[list[Record], list[Record]] = ([], [])
        if part != "start":
            for turn in turns:
                turn(0)
        for number in range(1, rounds + 1):
            for side in (0, 1) if number % 2 else (1, 0):
                records[side].append(turns[side](number))
    return dict(zip(("old", "new"), records, strict=True))


def main() -> int:
    args = parse_arguments()
    checkouts = args.old.resolve(), args.new.resolve()
    print("| part | rounds | OLD s | NEW s | NEW/OLD s (quartiles) | CPU-s | compilations |")
    print("|---|---|---|---|---|---|---|")
    good, records = True, {}
    for part in args.parts.split(","):
        rounds = min(args.rounds, 5) if part == "start" else args.rounds
        result = run_part(part, checkouts, rounds)
        low, middle, high = statistics.quantiles(ratios(result, "s"), n=4)
        compiled = [round(sum(x["compilations"] for x in side)) for side in result.values()]
        seconds = [statistics.median(x["s"] for x in side) for side in result.values()]
        cpu = statistics.median(ratios(result, "cpu_s"))
        print(
            f"| {part} | {rounds} | {seconds[0]:.3f} | {seconds[1]:.3f} | {middle:.3f} ({low:.3f} "
            f"to {high:.3f}) | {cpu:.3f} | {compiled[0]} -> {compiled[1]} |",
            flush=True,
        )
        good &= middle <= args.most and compiled[1] <= compiled[0]
        records[part] = result
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(records, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
