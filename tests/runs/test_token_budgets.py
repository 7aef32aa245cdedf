"""Runs with budgets of tokens: rollouts that end by one, and optimizer steps that weigh one."""

import json
import shutil
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

PROMPTS, SAMPLES, STEPS, LAG, TOKENS = 8, 4, 6, 2, 300
SMALL = (
    "model.source=random:llama?hidden=32&layers=2&heads=4&kv_heads=2&mlp=64&vocab=512",
    f"data.prompts_per_step={PROMPTS}",
    "rollout.num_slots=24",
    "rollout.max_response_length=24",
    f"training.steps={STEPS}",
    "training.optimizer.lr=0.003",
    "algorithm.correction=token_tis",
    "eval.every=3",
    "eval.num_prompts=8",
    "observe.trackers=()",
    "observe.report_every=0",
    f"flow.max_lag={LAG}",
    f"flow.round_tokens={TOKENS}",
)
SHARED = ("mesh.devices=0:2", "mesh.roles={'ROLLOUT': {'devices': '0:2'}}")


def trained(folder, *assignments):
    """Runs in this process; returns the rows of metrics.jsonl by step."""
    flags = [*SMALL, *SHARED, *assignments]
    assert run.train_here(from_config_dict(Config, override(tiny.get_config(), flags)), folder) == 0
    return rows_of(folder)


def rows_of(folder):
    rows = read_metrics(folder / "metrics.jsonl")
    assert not unexplained_metrics(folder)
    return {row["step"]: row for row in rows if row["step"]}


def records_of(folder):
    """{step: the records of all processes}"""
    found: dict[int, list] = {}
    for path in sorted((folder / "groups").glob("*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            found.setdefault(row["step"], []).append(row)
    return found


def check(folder, rows, *, steps=STEPS):
    """Every prompt below the last trained one trains once, at most B in a step, and none too old;
    nothing that was sampled is thrown away. Returns the counters of each step."""
    found = records_of(folder)
    assert sorted(found) == sorted(rows) == list(range(1, steps + 1))
    counters = {
        step: sorted(c for record in records for c in record["counters"])
        for step, records in found.items()
    }
    for step, records in found.items():
        assert 1 <= len(counters[step]) <= PROMPTS
        uids = [tuple(uid) for record in records for uid in record["uid"]]
        assert sorted(uids) == [(c, i) for c in counters[step] for i in range(SAMPLES)]
        ages = [age for record in records for age in record["age"]]
        assert 0 <= min(ages) and max(ages) <= LAG
        assert all(not record["left_out"] for record in records)
    every = sorted(c for of_step in counters.values() for c in of_step)
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
    trained(tmp_path, *kept, f"flow.round_tokens={before}")
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
    [(), ("dag=ppo", "training.mini_batches=2")],
    ids=["grpo", "ppo"],
)
def test_two_processes(tmp_path, flags):
    """Samplers and trainers are late at random: both processes train the same groups."""
    assignments = [f"--config.{key}" for key in [*SMALL, *flags]]
    launch = ["scripts/launch_local.py", "--processes=2", "--devices_per_process=1", "--"]
    train = ["tests/support/delayed_train.py", "--config=configs/tiny.py", f"--workdir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, *launch, *train, *assignments],
        cwd=ROOT,
        env=haste.environment() | {"DELAYS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    rows = rows_of(tmp_path)
    check_budgets(rows, check(tmp_path, rows))


@pytest.mark.slow
def test_every_step_weighs_its_budget(tmp_path):
    """C3PO: at once, and in waves, where a carry of tokens goes from wave to wave."""
    apart = ("mesh.devices=0:2", "mesh.roles={'ROLLOUT': {'devices': '2:3'}}", "eval.every=0")
    budget = ("algorithm.aggregation=fixed-budget", "algorithm.token_budget=500")
    given = (*apart, *budget, "flow.round_tokens=0", "flow.swap=boundary", "training.steps=3")
    waves = ("flow.waves=counter", "flow.wave_prompts=3")
    at_once, in_waves = (
        trained(tmp_path / name, *given, *more) for name, more in (("off", ()), ("waves", waves))
    )
    for step in (1, 2, 3):  # all sampled by the untrained weights
        ours, theirs = in_waves[step], at_once[step]
        assert ours["actor/budget_share"] == theirs["actor/budget_share"] == 1.0
        assert ours["training/waves"] == 3
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name
