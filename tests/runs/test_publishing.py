"""Runs whose samplers get weights only when these matter.

Nightly: runs on two processes that publish by divergence train every prompt once, in partial
batches too, and end.
"""

import pytest
from support.documented import unexplained_metrics
from support.programs import train
from support.run_folders import records
from support.tiny_config import SMALL_AHEAD, tiny_config

from distflow_jax import run
from distflow_jax.report.run_writer import read_metrics

PROMPTS, STEPS = 8, 6
SMALL = (
    *SMALL_AHEAD,
    f"training.steps={STEPS}",
    "eval.num_prompts=8",
)
SHARED = ("mesh.devices=0:2", "mesh.roles={'ROLLOUT': {'devices': '0:2'}}")
APART = ("mesh.devices=0:1", "mesh.roles={'ROLLOUT': {'devices': '1:2'}}")
NEVER = "stream.divergence=1000"  # no weights differ by so much: only what needs them gets them
PARTIAL_BATCHES = (
    "stream.partial_batches=counter",
    "stream.partial_batch_prompts=2",
    "rollout.num_slots=8",
)
READY = (
    *("stream.partial_batches=ready", "stream.partial_batch_rows=2", "rollout.num_slots=8"),
    *("data.max_prompt_length=64", "training.row_tokens=160"),
)


def checked(folder, staleness):
    """Metrics by step of a run in which each prompt trains once, in its step, and not too late."""
    rows = {row["step"]: row for row in read_metrics(folder / "metrics.jsonl") if row["step"]}
    assert sorted(rows) == list(range(1, STEPS + 1))
    assert not any(row["perf/compilations"] for step, row in rows.items() if step > 1)
    for row in rows.values():
        assert row["training/off_policy/trajectory_staleness/max"] <= staleness
    assert not unexplained_metrics(folder)
    return rows


def check_prompts(folder):
    """Each prompt trains once, in its step."""
    found = records(folder)
    for step, of_step in found.items():
        counters = sorted(c for record in of_step for c in record["counters"])
        assert counters == list(range(PROMPTS * (step - 1), PROMPTS * step))
    assert len(found) == STEPS


@pytest.mark.slow
def test_weights_move_to_samplers_that_need_them(tmp_path):
    """Nobody needs version 2: version 1 is the first after the evaluation of the untrained weights,
    and version 3 is evaluated."""
    config = tiny_config(*SMALL, *SHARED, NEVER, "stream.max_staleness=3", "eval.every=3")
    assert run.train_here(config, tmp_path) == 0
    rows = checked(tmp_path, 3)
    check_prompts(tmp_path)
    skipped = [row.get("perf/weight_update/skipped") for row in rows.values()]
    assert skipped[0] is None and skipped[2] == skipped[5] == 0
    assert 1 in skipped
    moved = [row["perf/weight_update/bytes"] for row in rows.values()]
    weights = max(moved)
    assert weights and set(moved) <= {0, weights}
    for row in list(rows.values())[1:]:
        assert -1e-6 < row["training/off_policy/divergence"] < 1000  # rounding
    # bytes of the weights that a step ended with are told by the next one
    for before, after in zip(skipped[1:-1], moved[2:], strict=True):
        assert before or after


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "flags",
    [
        ("stream.max_staleness=3", NEVER),
        ("stream.max_staleness=3", "stream.divergence=0.0001", "eval.every=2"),
        ("stream.max_staleness=2", NEVER, "dag=dapo"),
        ("stream.max_staleness=3", NEVER, "eval.every=3", *APART),
        ("stream.max_staleness=2", NEVER, *PARTIAL_BATCHES, *APART),
        ("stream.max_staleness=3", NEVER, *READY, *APART),
        ("stream.max_staleness=2", NEVER, *PARTIAL_BATCHES, "training.mini_batches=2", *APART),
    ],
    ids=" ".join,
)
def test_two_processes(tmp_path, flags):
    devices = 2 if APART[0] in flags else 1
    train(tmp_path, [*SMALL, "eval.every=0", *flags], processes=2, devices=devices)
    staleness = int(flags[0].partition("=")[2])
    rows = checked(tmp_path, staleness)
    if "dag=dapo" not in flags:
        check_prompts(tmp_path)
    if NEVER in flags:
        assert any(row.get("perf/weight_update/skipped") for row in rows.values())
