"""Weak scaling of a whole GRPO step over processes, with fixed work per process.

python benchmarks/scaling.py --processes 1 2 4 8 --json=scaling.json

Each process has 16 prompts x 8 samples of a 4.98 M-parameter Llama (or --model). On one machine the
processes share its cores, so wall time is not meaningful. The comparison is of CPU-seconds per
process and step, over all threads: E(N) = CPU-s per process with 1 process / with N.

The speed of a core varies with its clock, other users of the host and the load of the other core. A
thread of this script therefore repeats a fixed piece of work throughout, 2 % of a core; `adjusted`
is E(N) in units of the CPU-seconds that this piece took during each run. The table also has the
cost of the coordinator: CPU-seconds of the main thread in collectives among hosts and in assigning,
packing and moving the batch.

fsdp spans the N processes (mesh.tensor=1). The reduction of gradients is part of the step, and
grows with N on any machine.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np

ROOT = pathlib.Path(__file__).parents[1]
MODEL = "random:llama?hidden=256&layers=6&heads=8&kv_heads=4&mlp=512&vocab=2048&max_position=512"
HEADER = (
    "| processes | CPU-s per process and step | efficiency | adjusted | coordination, CPU-s "
    "| share of step | idle in rollout | bytes received |\n|---|---|---|---|---|---|---|---|"
)


class Pace:
    """CPU time of a fixed piece of work while something else runs."""

    def __init__(self):
        self._stop, self._seconds = threading.Event(), []
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        square = np.random.default_rng(0).random((256, 256), np.float32)
        large = np.random.default_rng(1).random(1 << 21)  # 16 MB: includes the speed of memory
        while not self._stop.wait(0.5):
            start = time.thread_time()
            for _ in range(4):
                np.einsum("ij,ij->", square @ square, square)
            large.sum()
            self._seconds.append(time.thread_time() - start)

    def __enter__(self) -> "Pace":
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join()

    def seconds(self) -> float:
        """CPU-seconds of one piece: the median over the run."""
        return float(np.median(self._seconds))


def command(processes: int, args: argparse.Namespace, workdir: pathlib.Path) -> list[str]:
    """The run's command line."""
    settings = {
        "model.source": args.model,
        "data.prompts_per_step": 16 * processes,
        "rollout.num_samples": 8,
        "rollout.max_response_length": 32,
        "rollout.num_slots": 64 * processes,
        "training.steps": args.warmup + args.steps,
        "training.row_tokens": 256,
        "training.micro_batch_rows": 16 * processes,
        "eval.dataset": "",
        "checkpoint.every": args.warmup + args.steps,
        "health.enabled": False,
    }
    flags = [f"--config.{key}={value}" for key, value in settings.items()]
    script = ["scripts/train.py", "--config=configs/tiny.py", f"--workdir={workdir}", *flags]
    launch = ["scripts/launch_local.py", f"--processes={processes}", "--", *script]
    return [sys.executable, *launch]


def measure(processes: int, args: argparse.Namespace) -> dict[str, float]:
    """Runs once; returns means over the timed steps."""
    with tempfile.TemporaryDirectory() as folder:
        env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
        with Pace() as pace:
            subprocess.run(
                command(processes, args, pathlib.Path(folder)),
                cwd=ROOT,
                env=env,
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        lines = (pathlib.Path(folder) / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines][args.warmup : args.warmup + args.steps]

    def mean(name: str) -> float:
        values = sorted(row[name] for row in rows)
        return values[len(values) // 2]

    return {
        "processes": processes,
        "pace_s": pace.seconds(),
        "cpu_s": mean("perf/cpu_seconds"),
        "coordination_s": mean("perf/coordination_cpu_seconds"),
        "idle_rollout": mean("perf/idle/rollout"),
        "bytes": mean("perf/bytes_received"),
        "compilations": sum(row["perf/compilations"] for row in rows),
    }


def main() -> int:
    """Runs every number of processes, `rounds` times interleaved, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a run")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each number, interleaved")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    runs = [measure(n, args) for _ in range(args.rounds) for n in args.processes]
    best = {
        n: min((r for r in runs if r["processes"] == n), key=lambda r: r["cpu_s"] / r["pace_s"])
        for n in args.processes
    }
    base = best[args.processes[0]]
    print(HEADER)
    for n, run in best.items():
        assert run["compilations"] == 0, "something compiled after the warm-up"
        plain = base["cpu_s"] / run["cpu_s"]
        adjusted = plain * run["pace_s"] / base["pace_s"]
        print(
            f"| {n} | {run['cpu_s']:.2f} | {plain:.1%} | {adjusted:.1%} "
            f"| {run['coordination_s']:.3f} "
            f"| {run['coordination_s'] / run['cpu_s']:.1%} | {run['idle_rollout']:.1%} "
            f"| {run['bytes']:,.0f} |"
        )
    if args.json:
        args.json.write_text(json.dumps(runs, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
