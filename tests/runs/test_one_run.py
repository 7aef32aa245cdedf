"""Of two runs that start at once in one --workdir one trains; the other ends and names it.

Nightly: of two runs that start together in one folder, 20 times, one trains and the other names it.
"""

import socket
import subprocess
import sys

import pytest
from support import haste
from support.paths import ROOT
from support.waiting import until

from distflow_jax.report.run_writer import read_metrics

TIMES = 20
SETTINGS = [
    "--config.model.source=random:llama?hidden=32&layers=2&heads=4&kv_heads=2&mlp=64&vocab=512",
    "--config.data.prompts_per_step=8",
    "--config.data.overlong=truncate_left",  # spares a look at all 10,000 prompts
    "--config.rollout.num_slots=16",
    "--config.training.steps=100000",  # none ends by itself
    "--config.checkpoint.every=1",
    "--config.eval.dataset=",
]


def start(workdir, log):
    with log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, "scripts/train.py", "--config=tiny", f"--workdir={workdir}"]
            + [*SETTINGS, f"--config.compilation_cache={workdir.parent / 'programs'}"],
            cwd=ROOT,
            env={k: v for k, v in haste.environment().items() if "COMPILATION_CACHE" not in k},
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def wait(true, *details):
    until(true, lambda: details, pause=0.02)


def steps(workdir):
    path = workdir / "metrics.jsonl"
    return [row["step"] for row in read_metrics(path)] if path.exists() else []


def start_two(workdir, folder):
    """Starts two runs, checks that one trains, and kills it after its first new step."""
    before = max(steps(workdir), default=0)
    logs = [folder / "log.0", folder / "log.1"]
    runs = [start(workdir, log) for log in logs]
    try:
        wait(lambda: any(run.poll() is not None for run in runs), [log.read_text() for log in logs])
        (loser,) = [i for i, run in enumerate(runs) if run.poll() is not None]
        winner, text = runs[1 - loser], logs[loser].read_text()
        assert runs[loser].returncode == 2, text
        assert winner.poll() is None, logs[1 - loser].read_text()
        (error,) = [line for line in text.splitlines() if line.startswith("error: ")]
        holder = f"is in use by process {winner.pid} on {socket.gethostname()}, started "
        assert holder in error and "Traceback" not in text
        wait(lambda: max(steps(workdir), default=0) > before, logs[1 - loser].read_text())
        assert winner.poll() is None
    finally:
        for run in runs:
            run.kill()
            run.wait()
    return loser


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["new", "used"])
def test_of_two_runs_that_start_together_one_trains(tmp_path, folder):
    """20 times in all: in a folder of their own, and in one that a killed run had locked."""
    losers = []
    for time_ in range(TIMES // 2):
        workdir = tmp_path / (f"run{time_}" if folder == "new" else "run")
        losers.append(start_two(workdir, tmp_path))
        rows = steps(workdir)
        assert rows == list(range(1, len(rows) + 1))  # of one run alone
    print(f"losers: {losers}")
