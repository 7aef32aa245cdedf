"""Runs whose samplers get weights only when these matter."""

import json
import subprocess
import sys

import pytest
from support import haste
from support.documented import unexplained_metrics
from support.paths import ROOT

from configs import tiny
from distflow_jax import run
from distflow_jax.config.config_dict import from_config_dict, override
from distflow_jax.config.run_config import Config
from distflow_jax.report.run_writer import read_metrics

PROMPTS, STEPS = 8, 6
SMALL = (
    "model.source=random:llama?hidden=32&layers=2&heads=4&kv_heads=2&mlp=64&vocab=512",
    f"data.prompts_per_step={PROMPTS}",
    "rollout.num_slots=24",
    f"training.steps={STEPS}",
    "training.optimizer.lr=0.003",
    "algorithm.correction=token_tis",
    "eval.num_prompts=8",
    "observe.trackers=()",
)
SHARED = ("mesh.devices=0:2", "mesh.roles={'ROLLOUT': {'devices': '0:2'}}")
APART = ("mesh.devices=0:1", "mesh.roles={'ROLLOUT': {'devices': '1:2'}}")
NEVER = "flow.divergence=1000"  # no weights differ by so much: only what needs them gets them
WAVES = ("flow.waves=counter", "flow.wave_prompts=2", "rollout.num_slots=8")
READY = (
    *("flow.waves=ready", "flow.wave_rows=2", "rollout.num_slots=8"),
    *("data.max_prompt_length=64", "training.row_tokens=160"),
)


def checked(folder, lag):
    """Metrics by step of a run in which each prompt trains once, in its step, and not too late."""
    rows = {row["step"]: row for row in read_metrics(folder / "metrics.jsonl") if row["step"]}
    assert sorted(rows) == list(range(1, STEPS + 1))
    assert not any(row["perf/compilations"] for step, row in rows.items() if step > 1)
    for row in rows.values():
        assert row["training/off_policy/trajectory_staleness/max"] <= lag
    assert not unexplained_metrics(folder)
    return rows


def check_prompts(folder):
    """Each prompt trains once, in its step."""
    found = {}
    for path in (folder / "groups").glob("*.jsonl"):
        for record in map(json.loads, path.read_text().splitlines()):
            found.setdefault(record["step"], []).extend(record["counters"])
    for step, counters in found.items():
        assert sorted(counters) == list(range(PROMPTS * (step - 1), PROMPTS * step))
    assert len(found) == STEPS


def test_weights_move_to_samplers_that_need_them(tmp_path):
    """Nobody needs version 2: version 1 is the first after the evaluation of the untrained weights,
    and version 3 is evaluated."""
    config = override(tiny.get_config(), [*SMALL, *SHARED, NEVER, "flow.max_lag=3", "eval.every=3"])
    assert run.train_here(from_config_dict(Config, config), tmp_path) == 0
    rows = checked(tmp_path, 3)
    check_prompts(tmp_path)
    skipped = [row.get("perf/weight_swap/skipped") for row in rows.values()]
    assert skipped[0] is None and skipped[2] == skipped[5] == 0
    assert 1 in skipped
    moved = [row["perf/weight_swap/bytes"] for row in rows.values()]
    weights = max(moved)
    assert weights and set(moved) <= {0, weights}
    for row in list(rows.values())[1:]:
        assert -1e-6 < row["training/off_policy/divergence"] < 1000  # rounding
    # bytes of the weights that a step ended with are told by the next one
    for before, after in zip(skipped[1:-1], moved[2:], strict=True):
        assert before or after


def launched(folder, flags, *, processes, devices):
    """A run of configs/tiny.py on processes of their own."""
    assignments = [f"--config.{key}" for key in [*SMALL, *flags]]
    size = [f"--processes={processes}", f"--devices_per_process={devices}"]
    launch = ["scripts/launch_local.py", *size, "--", "scripts/train.py"]
    done = subprocess.run(
        [sys.executable, *launch, "--config=configs/tiny.py", f"--workdir={folder}", *assignments],
        cwd=ROOT,
        env=haste.environment(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "flags",
    [
        ("flow.max_lag=3", NEVER),
        ("flow.max_lag=3", "flow.divergence=0.0001", "eval.every=2"),
        ("flow.max_lag=2", NEVER, "dag=dapo"),
        ("flow.max_lag=3", NEVER, "eval.every=3", *APART),
        ("flow.max_lag=2", NEVER, *WAVES, *APART),
        ("flow.max_lag=3", NEVER, *READY, *APART),
        ("flow.max_lag=2", NEVER, *WAVES, "training.mini_batches=2", *APART),
    ],
    ids=" ".join,
)
def test_two_processes(tmp_path, flags):
    devices = 2 if APART[0] in flags else 1
    launched(tmp_path, ["eval.every=0", *flags], processes=2, devices=devices)
    lag = int(flags[0].partition("=")[2])
    rows = checked(tmp_path, lag)
    if "dag=dapo" not in flags:
        check_prompts(tmp_path)
    if NEVER in flags:
        assert any(row.get("perf/weight_swap/skipped") for row in rows.values())
