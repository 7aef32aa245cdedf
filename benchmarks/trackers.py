"""Cost of all four trackers for a step of a run: with over without, interleaved.

pip install -r requirements-trackers.txt
python benchmarks/trackers.py --steps=41
python benchmarks/trackers.py --config=configs/tiny.py --steps=9     # a quick look

One run of the config, without evaluations and checkpoints, in which every other step is "with": the
trackers take the rows since the last such step, two of them, while it runs. In the steps "without"
their processes are stopped (SIGSTOP). So the ratio counts each row twice, and holds what the
packages do by themselves, such as sampling the machine's load. wandb is offline.

The ratio is the median over pairs of neighbouring steps, from one start of a step to the next.
Steps while the trackers start are left out. The exit code is 1 if it is above --most.
"""

import argparse
import contextlib
import os
import pathlib
import signal
import statistics
import sys
import tempfile
import time

from asynchronous.marked_run import descendants

from distflow_jax.checkpoint.checkpointer import Checkpointer
from distflow_jax.config.run_config import Config
from distflow_jax.layout import Metrics
from distflow_jax.notebook import load_config
from distflow_jax.planning.plan_run import prepare
from distflow_jax.report.terminal import Terminal
from distflow_jax.report.trackers.tracker import check_trackers
from distflow_jax.run import loop, one_step, open_run
from distflow_jax.runtime.open_run import OpenRun
from distflow_jax.watchdog.controller import Watchdog
from distflow_jax.watchdog.supervision import stop_on_signals

NAMES = ("tensorboard", "wandb", "mlflow", "trackio")
WARM_STEPS = 4  # programs compile, packages are imported, databases are made


class PairedSteps:
    """Notes when each step starts, and stops the trackers in every other one."""

    def __init__(self):
        self.starts: list[float] = []

    def step(self, run: OpenRun) -> Metrics:
        """One step."""
        self.starts.append(time.perf_counter())
        step = run.state.step
        if step > WARM_STEPS:
            signal_trackers(signal.SIGSTOP if step % 2 else signal.SIGCONT)
        row = one_step(run)
        if step == run.prepared.config.training.steps:  # stopped ones could not end
            signal_trackers(signal.SIGCONT)
        return row


def signal_trackers(number: int) -> None:
    """Signals the trackers' processes and those that they have started."""
    for pid in descendants(os.getpid()):
        command = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        if b"trackers.sender" in command:
            for member in [pid, *descendants(pid)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member, number)


def measure(config: Config, folder: pathlib.Path) -> list[float]:
    """Seconds from the start of each step to that of the next, from step 1 on."""
    check_trackers(NAMES)
    with (
        stop_on_signals(signal.SIGTERM) as stop,
        contextlib.closing(Checkpointer(folder / "checkpoints", config.checkpoint)) as saved,
    ):
        prepared = prepare(config)
        with contextlib.closing(prepared.rewards):
            quiet, watchdog = Terminal(enabled=False), Watchdog(config.health, 1)
            with open_run(prepared, folder, saved, watchdog, quiet) as run:
                paired = PairedSteps()
                try:
                    loop(run, stop, paired.step)
                finally:
                    signal_trackers(signal.SIGCONT)
    return [b - a for a, b in zip(paired.starts[:-1], paired.starts[1:], strict=True)]


def main() -> int:
    """Prints the ratio; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/grpo_smollm2.py", help="of the run")
    parser.add_argument("--steps", type=int, default=41, help="of the run, an odd number")
    parser.add_argument("--most", type=float, default=1.02, help="largest ratio that passes")
    args = parser.parse_args()
    if args.steps < WARM_STEPS + 5:
        parser.error(f"--steps={args.steps} leaves nothing to compare; at least {WARM_STEPS + 5}")
    changed = {"training.steps": args.steps, "eval.dataset": "", "checkpoint.every": args.steps}
    changed["observe.trackers"] = NAMES
    config = load_config(args.config, changed).config
    with tempfile.TemporaryDirectory(prefix="trackers-") as folder:
        os.environ |= {"WANDB_MODE": "offline", "TRACKIO_DIR": f"{folder}/trackio"}
        os.environ.pop("MLFLOW_TRACKING_URI", None)
        seconds = measure(config, pathlib.Path(folder) / "run")
    steps = dict(enumerate(seconds, 1))
    pairs = [(steps[i], steps[i + 1]) for i in range(WARM_STEPS + 1, len(steps), 2)]
    ratios = [on / off for off, on in pairs]
    ratio = statistics.median(ratios)
    print(f"{len(pairs)} pairs; without: {statistics.median(off for off, _ in pairs):.3f} s a step")
    print(f"with all four trackers over without: {ratio:.4f} ({min(ratios):.3f}-{max(ratios):.3f})")
    return int(ratio > args.most)


if __name__ == "__main__":
    sys.exit(main())
