"""Cost of steps in partial batches on real processes: gather, plan and launch, and CPU-seconds of a
step.

    python benchmarks/partial_batch_cost.py                          # 64 groups, 4 and 16 processes
    python benchmarks/partial_batch_cost.py --processes=4 --steps=50
    python benchmarks/partial_batch_cost.py --models=tiny,smollm2  # a step in 8, beside one at once

A partial batch: from the moment that all of its groups are complete, until its programs are
launched. The sampler is a stand-in that takes no time (asynchronous/), all else is real, on
processes of a job that share this machine. Parts, of the process that is slowest in each partial
batch:

    gather   processes exchange the facts of their groups, and the lengths of their sequences; of
             the process that waits least, for which the others wait
    plan     which groups, which rows, which ranks
    pack     tokens and fields go to the processes of their rows, and into arrays: a step at once
             does the same, for all of its groups together
    launch   until the programs are under way
    compute  the wait for them; on other devices than CPUs no process waits there

Goals, for gather, plan and launch: 5 ms with 4 processes, 20 ms with 16.

A step: CPU-seconds of one process that trains the same groups in 8 partial batches and at once, in
turn. Partial batches leave rows partly empty: there may be more of them. Goal: per row at most
1.05 of the step at once, with SmolLM2; launching is most of the tiny model's work, which is
reported beside it.
"""

import argparse
import json
import pathlib
import sys
from typing import Any

import numpy as np
from asynchronous.partial_batch_cells import MODELS, PartialBatchCell
from streaming import run_folder, run_job

GROUPS = 64
PARTIAL_BATCH_ROWS = 64  # room for all of them
MOST_SECONDS = {4: 0.005, 16: 0.020}  # by processes
PARTIAL_BATCHES = 8  # of a step
MOST_CPU = 1.05  # per row, of the step at once
OVERHEAD = ("gather", "plan", "launch")
SHOWN = (*OVERHEAD, "pack", "compute")
PROMPTS = {"tiny": 16, "smollm2": 8}  # of a step in WAVES partial batches, by model


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", default="4,16", help="numbers, with commas between them")
    parser.add_argument("--models", default="", help=f"instead: of {', '.join(PROMPTS)}")
    parser.add_argument(
        "--steps", type=int, default=0, help="timed; 0: 100 partial batches, 4 of a model"
    )
    parser.add_argument("--rounds", type=int, default=2, help="of a model, in turn")
    parser.add_argument("--workdir", default="", help="keep the runs in this new folder")
    parser.add_argument("--json", default="", help="file for the results")
    args = parser.parse_args()
    args.processes = [int(number) for number in args.processes.split(",")]
    args.models = [name for name in args.models.split(",") if name]
    if wrong := [name for name in args.models if name not in PROMPTS]:
        parser.error(f"--models={wrong[0]} is unknown; choose of {', '.join(PROMPTS)}")
    assert PROMPTS.keys() < MODELS.keys()
    return args


def marks_of(
    cell: PartialBatchCell, folder: pathlib.Path, processes: int
) -> list[list[dict[str, Any]]]:
    """The notes of each process after each step, from the one before the first timed step on."""
    paths = [folder / cell.name / f"marks-{number}.json" for number in range(processes)]
    marks = [json.loads(path.read_text()) for path in paths]
    return [of_one[cell.warmup - 1 : cell.warmup + cell.steps] for of_one in marks]


def cost_of_a_partial_batch(args: argparse.Namespace, processes: int) -> dict[str, Any]:
    """Median and 90th percentile seconds of a partial batch's parts, over partial batches."""
    cell = PartialBatchCell("smallest", GROUPS, 1, PARTIAL_BATCH_ROWS, args.steps or 100, warmup=3)
    with run_folder(args) as place:
        folder = place / str(processes)
        folder.mkdir()
        run_job([cell], folder, processes=processes)
        marks = marks_of(cell, folder, processes)
        lines = (folder / cell.name / "partial_batches.jsonl").read_text().splitlines()
    partial_batches = [json.loads(line) for line in lines]
    assert all(len(partial_batch["counters"]) == GROUPS for partial_batch in partial_batches), (
        "a step of several partial batches"
    )
    spent = np.array(  # [processes, partial batches, parts]
        [
            [
                [after["parts"].get(part, 0.0) - before["parts"].get(part, 0.0) for part in SHOWN]
                for before, after in zip(of_one[:-1], of_one[1:], strict=True)
            ]
            for of_one in marks
        ]
    )
    by_partial_batch = {  # [partial batches]
        part: spent[:, :, i].min(axis=0) if part == "gather" else spent[:, :, i].max(axis=0)
        for i, part in enumerate(SHOWN)
    }
    overhead = sum(by_partial_batch[part] for part in OVERHEAD)
    found = {part: float(np.median(seconds)) for part, seconds in by_partial_batch.items()}
    median, late = (float(np.percentile(overhead, share)) for share in (50, 90))
    return {"processes": processes, "seconds": median, "late": late, "parts": found}


def partial_batches_cost(args: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """Prints the table of partial batches; returns its numbers, and whether all goals are met."""
    print(
        "| processes | gather + plan + launch, ms | 90 % below | goal | "
        + " | ".join(f"{part}, ms" for part in SHOWN)
        + " |\n|---"
        + "|---" * (3 + len(SHOWN))
        + "|"
    )
    results = []
    for processes in args.processes:
        found = cost_of_a_partial_batch(args, processes)
        most = MOST_SECONDS.get(processes)
        goal = f"{1e3 * most:.0f}" if most else "-"
        parts = " | ".join(f"{1e3 * found['parts'][part]:.2f}" for part in SHOWN)
        print(
            f"| {processes} | {1e3 * found['seconds']:.2f} | {1e3 * found['late']:.2f} | {goal} "
            f"| {parts} |",
            flush=True,
        )
        results.append(found | {"passed": most is None or found["seconds"] <= most})
    return results, all(x["passed"] for x in results)


def rows_of(cell: PartialBatchCell, folder: pathlib.Path, marks: list[dict[str, Any]]) -> float:
    """Rows of a timed step, on average."""
    if not cell.partial_batches:
        return float(np.mean([mark["rows"] for mark in marks[1:]]))
    lines = (folder / cell.name / "partial_batches.jsonl").read_text().splitlines()
    partial_batches = [json.loads(line) for line in lines]
    timed = range(cell.warmup + 1, cell.warmup + cell.steps + 1)
    return (
        sum(
            partial_batch["rows"]
            for partial_batch in partial_batches
            if partial_batch["step"] in timed
        )
        / cell.steps
    )


def step_of(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """CPU-seconds and rows of a model's step, at once and in partial batches; medians over
    rounds."""
    cells = [
        PartialBatchCell(
            model, PROMPTS[model], partial_batches, 0, args.steps or 4, warmup=2, round=number
        )
        for number in range(args.rounds)
        for partial_batches in (0, PARTIAL_BATCHES)
    ]
    found: dict[int, list[tuple[float, float]]] = {0: [], PARTIAL_BATCHES: []}
    with run_folder(args) as folder:
        run_job(cells, folder, processes=1)
        for cell in cells:
            (marks,) = marks_of(cell, folder, 1)
            spent = (marks[-1]["cpu"] - marks[0]["cpu"]) / cell.steps
            found[cell.partial_batches].append((spent, rows_of(cell, folder, marks)))
    (once, rows), (waved, partial_batch_rows) = (
        np.median(found[n], axis=0) for n in (0, PARTIAL_BATCHES)
    )
    ratio, more = waved / once, partial_batch_rows / rows
    return {
        "model": model,
        "once": once,
        "partial_batches": waved,
        "rows": rows,
        "partial_batch_rows": partial_batch_rows,
        "ratio": ratio,
        "per_row": ratio / more,
        "rounds": found,
        "passed": model != "smollm2" or bool(ratio / more <= MOST_CPU),
    }


def steps_cost(args: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """Prints the table of models; returns its numbers, and whether all goals are met."""
    print(
        f"| model | CPU-s at once | in {PARTIAL_BATCHES} partial batches | ratio | rows at once | "
        "in partial batches | ratio per row | goal |\n|---|---|---|---|---|---|---|---|"
    )
    results = []
    for model in args.models:
        x = step_of(args, model)
        goal = f"{MOST_CPU}" if model == "smollm2" else "-"
        print(
            f"| {model} | {x['once']:.3f} | {x['partial_batches']:.3f} | {x['ratio']:.3f} | "
            f"{x['rows']:.1f} | {x['partial_batch_rows']:.1f} | {x['per_row']:.3f} | {goal} |",
            flush=True,
        )
        results.append(x)
    return results, all(x["passed"] for x in results)


def main() -> int:
    """Prints a table; returns the exit code."""
    args = parse_arguments()
    results, passed = steps_cost(args) if args.models else partial_batches_cost(args)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(results, indent=1))
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
