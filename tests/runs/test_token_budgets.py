"""Runs with budgets of tokens: rollouts that end by one, and optimizer steps that weigh one.

Nightly: rollouts that end by a budget, on two processes and after restarts: no token too old, none
thrown away; C3PO's steps weigh their budget.
"""

import shutil

import pytest
from support.documented import unexplained_metrics
from support.programs import train_late
from support.run_folders import records
from support.tiny_config import SMALL_AHEAD, tiny_config

from distflow_jax import run
from distflow_jax.report.run_writer import read_metrics

PROMPTS, SAMPLES, STEPS, STALENESS, TOKENS = 8, 4, 6, 2, 300
SMALL = (
    *SMALL_AHEAD,
    "rollout.max_response_length=24",
    f"training.steps={STEPS}",
    "eval.every=3",
    "eval.num_prompts=8",
    "observe.report_every=0",
    f"stream.max_staleness={STALENESS}",
    f"stream.round_tokens={TOKENS}",
)
APART = ("mesh.devices=0:1", "mesh.roles={'ROLLOUT': {'devices': '1:2'}}")
SHARED = ("mesh.devices=0:2", "mesh.roles={'ROLLOUT': {'devices': '0:2'}}")


def trained(folder, *assignments):
    """Runs in this process; returns the rows of metrics.jsonl by step."""
    flags = [*SMALL, *SHARED, *assignments]
    assert run.train_here(tiny_config(*flags), folder) == 0
    return rows_of(folder)


def rows_of(folder):
    rows = read_metrics(folder / "metrics.jsonl")
    assert not unexplained_metrics(folder)
    return {row["step"]: row for row in rows if row["step"]}


def check(folder, rows, *, steps=STEPS):
    """Every prompt below the last trained one trains once, at most B in a step, and none too old;
    nothing that was sampled is thrown away. Returns the counters of each step."""
    found = records(folder)
    assert sorted(found) == sorted(rows) == list(range(1, steps + 1))
    counters = {
        step: sorted(c for record in of_step for c in record["counters"])
        for step, of_step in found.items()
    }
    for step, of_step in found.items():
        assert 1 <= len(counters[step]) <= PROMPTS
        uids = [tuple(uid) for record in of_step for uid in record["uid"]]
        assert sorted(uids) == [(c, i) for c in counters[step] for i in range(SAMPLES)]
        ages = [age for record in of_step for age in record["age"]]
        assert 0 <= min(ages) and max(ages) <= STALENESS
        assert all(not record["left_out"] for record in of_step)
    every = sorted(c for some in counters.values() for c in some)
    assert every == list(range(len(every)))
    last = {name: rows[steps][f"perf/tokens/{name}"] for name in ("sampled", "trained", "lost")}
    assert last["sampled"] == last["trained"] + last["lost"]
    return counters


def check_budgets(rows, counters):
    """Rollouts sample their budget, and the steps say how many groups they have."""
    for step, row in rows.items():
        assert row["training/groups"] == len(counters[step])
        beyond = row["training/rollout_tokens"] - TOKENS
        assert row["training/rollout_tokens_beyond"] == max(0, beyond)
    sampled = sum(row["training/rollout_tokens"] for row in rows.values())
    assert sampled == rows[STEPS]["perf/tokens/sampled"]


@pytest.mark.slow
def test_rollouts_end_by_a_budget(tmp_path):
    rows = trained(tmp_path)
    counters = check(tmp_path, rows)
    check_budgets(rows, counters)
    assert rows[STEPS]["perf/tokens/lost"] == 0
    assert min(map(len, counters.values())) < PROMPTS  # steps that are not full
    assert not any(row["perf/compilations"] for step, row in rows.items() if step > 1)
    assert any(row["training/off_policy/in_flight_share/1"] for row in rows.values())


@pytest.mark.slow
@pytest.mark.parametrize("before", [0, TOKENS])
def test_a_run_goes_on_from_its_middle(tmp_path, before):
    """From a checkpoint of a run with a budget, or of one whose steps have B groups each."""
    kept = ("checkpoint.every=1", f"checkpoint.keep={STEPS}")
    trained(tmp_path, *kept, f"stream.round_tokens={before}")
    for step in range(4, STEPS + 1):
        shutil.rmtree(tmp_path / "checkpoints" / str(step))
    rows = trained(tmp_path, *kept)
    check(tmp_path, rows)
    # what the first start had sampled after step 3
    assert rows[STEPS]["perf/tokens/lost"] > 0


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "flags",
    [(), ("dag=ppo", "training.mini_batches=2"), APART],
    ids=["grpo", "ppo", "apart"],
)
def test_two_processes(tmp_path, flags):
    """Samplers and trainers are late at random: both processes train the same groups."""
    devices = 2 if flags == APART else 1
    train_late(tmp_path, [*SMALL, *flags], "1", processes=2, devices=devices)
    rows = rows_of(tmp_path)
    check_budgets(rows, check(tmp_path, rows))


@pytest.mark.slow
def test_every_step_weighs_its_budget(tmp_path):
    """C3PO: at once, and in partial batches, where a carry of tokens goes from partial batch to
    partial batch."""
    apart = ("mesh.devices=0:2", "mesh.roles={'ROLLOUT': {'devices': '2:3'}}", "eval.every=0")
    budget = ("algorithm.aggregation=fixed-budget", "algorithm.token_budget=500")
    given = (
        *apart,
        *budget,
        "stream.round_tokens=0",
        "stream.weight_update=boundary",
        "training.steps=3",
    )
    partial_batches = ("stream.partial_batches=counter", "stream.partial_batch_prompts=3")
    at_once, in_partial_batches = (
        trained(tmp_path / name, *given, *more)
        for name, more in (("off", ()), ("partial_batches", partial_batches))
    )
    for step in (1, 2, 3):  # all sampled by the untrained weights
        ours, theirs = in_partial_batches[step], at_once[step]
        assert ours["actor/budget_share"] == theirs["actor/budget_share"] == 1.0
        assert ours["training/partial_batches"] == 3
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name
