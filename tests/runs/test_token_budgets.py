"""Optimizer steps that weigh a budget of tokens.

Nightly: C3PO's steps weigh their budget, at once and in partial batches.
"""

import pytest
from support.documented import unexplained_metrics
from support.tiny_config import SMALL_AHEAD, tiny_config

from distflow_jax import run
from distflow_jax.report.run_writer import read_metrics

SMALL = (
    *SMALL_AHEAD,
    "rollout.max_response_length=24",
    "training.steps=3",
    "observe.report_every=0",
    "eval.every=0",
    "stream.max_staleness=2",
    "stream.weight_update=boundary",
    "mesh.devices=0:2",
    "mesh.roles={'ROLLOUT': {'devices': '2:3'}}",
    "algorithm.aggregation=fixed-budget",
    "algorithm.token_budget=500",
)


def trained(folder, *assignments):
    """Runs in this process; returns the rows of metrics.jsonl by step."""
    assert run.train_here(tiny_config(*SMALL, *assignments), folder) == 0
    assert not unexplained_metrics(folder)
    return {row["step"]: row for row in read_metrics(folder / "metrics.jsonl") if row["step"]}


@pytest.mark.slow
def test_every_step_weighs_its_budget(tmp_path):
    """C3PO: at once, and in partial batches, where a carry of tokens goes from partial batch to
    partial batch."""
    partial_batches = ("stream.partial_batches=counter", "stream.partial_batch_prompts=3")
    at_once, in_partial_batches = (
        trained(tmp_path / name, *more)
        for name, more in (("off", ()), ("partial_batches", partial_batches))
    )
    for step in (1, 2, 3):  # all sampled by the untrained weights
        ours, theirs = in_partial_batches[step], at_once[step]
        assert ours["actor/budget_share"] == theirs["actor/budget_share"] == 1.0
        assert ours["training/partial_batches"] == 3
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name
