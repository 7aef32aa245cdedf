"""Compares the training runs of two checkouts of this repository, bit for bit.

    python tests/compare_checkouts.py OLD NEW --out=/tmp/compare --cases=grpo,ppo --processes=1,2

Each case is configs/tiny.py with a few settings, run by both checkouts' scripts/train.py. Compared
are the rows of metrics.jsonl without times (`timing_s/`, `timing_per_token_ms/`, `perf/`), the
responses in samples/ (facts that only NEW writes do not count), and all arrays of the last
checkpoint. With `--resume` NEW continues OLD's
run from step 2, and the result must be OLD's uninterrupted run.

A change that only moves, splits or renames code changes none of these. Exits with 1 where
something differs, and prints the first difference of each case. Both checkouts run in this
interpreter's environment, which needs the dependencies of both.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

TIMES = ("timing_s/", "timing_per_token_ms/", "perf/")
RL = {"algorithm.kl_coef": 0.1, "training.mini_batches": 2}
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"dag": "grpo", **RL},
    "ppo": {"dag": "ppo", **RL},
    "dapo": {"dag": "dapo"},
    "dpo": {"dag": "dpo", "data.train": "PAIRS", "eval.dataset": ""},
    "online_dpo": {"dag": "online_dpo"},
    "sft": {"dag": "sft"},
    "environment": {
        "dag": "grpo",
        "rollout.environment": "configs/examples/second_try.py:SecondTry",
        "rollout.max_turns": 3,
        "rollout.turn_length": 8,
        "rollout.max_response_length": 32,
    },
    "lora": {"dag": "grpo", "lora.rank": 4, **RL},
    "vision": {
        "model.source": "random:smolvlm?hidden=128&layers=1&heads=4&kv_heads=2&mlp=256&vocab=272"
        "&max_position=1024&vision_hidden=96&vision_layers=2&vision_heads=4&patch=4&merge=2"
        "&image=24",
        "data.train": "task:shapes?ask=count&question=How many?",
        "eval.dataset": "task:shapes?ask=count&question=How many?&held_out=1",
        "rollout.max_response_length": 4,
        "training.row_tokens": 768,
    },
}
PAIRS = [
    {"prompt": f"Say {i}:", "chosen": str(7 * i), "rejected": "abcdefghij"[: 1 + i % 9]}
    for i in range(64)
]
# Settings under the names that an older checkout has them.
RENAMED: dict[str, str] = {}


def train(
    checkout: pathlib.Path, folder: pathlib.Path, settings: dict[str, Any], processes: int
) -> None:
    """Runs scripts/train.py of a checkout on 4 CPU devices in all."""
    flags = [f"--config.{name}={value}" for name, value in settings.items()]
    command = ["scripts/train.py", "--config=configs/tiny.py", f"--workdir={folder}", *flags]
    devices = 4 // processes
    environment = os.environ | {"PYTHONPATH": str(checkout), "JAX_PLATFORMS": "cpu"}
    if processes == 1:
        environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    else:
        job = [f"--processes={processes}", f"--devices_per_process={devices}"]
        command = ["scripts/launch_local.py", *job, "--", *command]
    done = subprocess.run(
        [sys.executable, *command], cwd=checkout, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{checkout}: {command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def metrics(folder: pathlib.Path, first: int) -> list[dict[str, Any]]:
    """The metrics of each step from `first` on, without times. Where a sampler has evaluated while
    later steps were trained, a step has two rows, and it depends on timing where these stand."""
    steps: dict[int, dict[str, Any]] = {}
    for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        if row["step"] >= first:
            lasting = {name: x for name, x in row.items() if not name.startswith(TIMES)}
            steps[row["step"]] = steps.get(row["step"], {}) | lasting
    return [steps[step] for step in sorted(steps)]


def responses(folder: pathlib.Path, first: int) -> dict[str, list[dict[str, Any]]]:
    """The records of samples/ from step `first` on, without the uid."""
    return {
        path.name: [
            {name: value for name, value in json.loads(line).items() if name != "uid"}
            for line in path.read_text().splitlines()
        ]
        for path in sorted((folder / "samples").glob("*.jsonl"))
        if int(path.stem.split("-")[-1]) >= first
    }


def arrays(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Every array of the newest checkpoint, by its name."""
    steps = [p for p in (folder / "checkpoints").iterdir() if p.name.isdigit()]
    newest = max(steps, key=lambda path: int(path.name)) / "arrays"
    handler = ocp.PyTreeCheckpointHandler()
    with ocp.Checkpointer(handler) as reader:
        tree = reader.metadata(newest).item_metadata.tree
        restore = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in tree}
        return reader.restore(newest, args=ocp.args.PyTreeRestore(restore_args=restore))


def differences(old: pathlib.Path, new: pathlib.Path, first: int) -> Iterator[str]:
    """One line for each kind of result from step `first` on in which two run folders differ."""
    before, after = metrics(old, first), metrics(new, first)
    if len(before) != len(after):
        yield f"metrics.jsonl: {len(before)} and {len(after)} rows"
    for a, b in zip(before, after, strict=False):
        names = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
        if names:
            values = f"{a.get(names[0])} -> {b.get(names[0])}"
            yield f"step {a['step']}: {names[0]} {values} ({len(names)} differ)"
            break
    before, after = responses(old, first), responses(new, first)
    if unequal := [name for name in before | after if _unequal(before.get(name), after.get(name))]:
        yield f"samples/{unequal[0]}"
    before, after = arrays(old), arrays(new)
    if before.keys() != after.keys():
        yield f"checkpoint: arrays {sorted(before.keys() ^ after.keys())[:4]} in one only"
    for name in before.keys() & after.keys():
        if before[name].tobytes() != after[name].tobytes():
            yield f"checkpoint: {name}"
            break


def _unequal(before: list[dict] | None, after: list[dict] | None) -> bool:
    """Whether a fact that OLD wrote of a response is another in NEW, or missing."""
    if before is None or after is None or len(before) != len(after):
        return True
    return any(a != {name: b.get(name) for name in a} for a, b in zip(before, after, strict=True))


def main() -> int:
    """Runs all cases; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("old", type=pathlib.Path)
    parser.add_argument("new", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="OLD's runs are kept there")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--processes", default="1,2")
    parser.add_argument("--resume", action="store_true", help="NEW continues OLD's run")
    options = parser.parse_args()
    failed = 0
    options.out.mkdir(parents=True, exist_ok=True)
    pairs = options.out.absolute() / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    for processes in map(int, options.processes.split(",")):
        for case in options.cases.split(","):
            settings = {"observe.samples_every": 1, **CASES[case]}
            if settings.get("data.train") == "PAIRS":
                settings["data.train"] = str(pairs)
            older = {RENAMED.get(name, name): value for name, value in settings.items()}
            old = options.out / f"old-{case}-{processes}"
            if not (old / "done").exists():
                train(options.old, old, older, processes)
                (old / "done").touch()
            new = options.out / f"new-{case}-{processes}"
            subprocess.run(["rm", "-rf", new], check=True)
            if options.resume:
                train(options.old, new, older | {"training.steps": 2}, processes)
            train(options.new, new, settings, processes)
            found = list(differences(old, new, 3 if options.resume else 0))
            print(case, processes, "; ".join(found) or "equal", flush=True)
            failed += bool(found)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
