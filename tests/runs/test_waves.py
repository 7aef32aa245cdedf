"""Runs whose steps are trained wave by wave: the same steps as at once, from the same samples."""

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

SMALL = (
    "model.source=random:llama?hidden=32&layers=2&heads=4&kv_heads=2&mlp=64&vocab=512",
    "data.prompts_per_step=8",
    "rollout.num_slots=16",
    "training.steps=4",
    "training.optimizer.lr=0.003",
    "algorithm.correction=token_tis",
    "eval.every=0",
    "observe.trackers=()",
    "flow.max_lag=1",
    "mesh.devices=0:2",
    "mesh.roles={'ROLLOUT': {'devices': '2:3'}}",
)
# on processes of two devices each
APART = ("mesh.devices=0:1", "mesh.roles={'ROLLOUT': {'devices': '1:2'}}")
# waves that hold two groups
READY = (
    *("flow.waves=ready", "flow.wave_rows=2", "rollout.num_slots=8"),
    *("data.max_prompt_length=64", "training.row_tokens=160"),
)
PROMPTS, STEPS, SAMPLES = 8, 4, 4


def trained(folder, *assignments):
    config = from_config_dict(Config, override(tiny.get_config(), [*SMALL, *assignments]))
    assert run.train_here(config, folder) == 0
    rows = read_metrics(folder / "metrics.jsonl")
    assert not any(row["perf/compilations"] for row in rows if row["step"] > 1)
    assert not unexplained_metrics(folder)
    return {row["step"]: row for row in rows}


def waves_of(folder):
    return [json.loads(line) for line in (folder / "waves.jsonl").read_text().splitlines()]


def check_waves(folder, *, steps=STEPS):
    """Every group of a step is in one wave, and each step has one last wave."""
    waves = waves_of(folder)
    for step in range(1, steps + 1):
        mine = [wave for wave in waves if wave["step"] == step]
        assert [wave["wave"] for wave in mine] == list(range(1, len(mine) + 1))
        assert [wave["last"] for wave in mine] == [False] * (len(mine) - 1) + [True]
        counters = sorted(c for wave in mine for c in wave["counters"])
        assert counters == list(range(PROMPTS * (step - 1), PROMPTS * step))
        assert all(wave["rows"] <= wave["room"] for wave in mine)
    return waves


def check_equal(ours, theirs, *, steps):
    """Metrics of steps that trained on the same samples, but for those of time, rows and waves."""
    changing = ("timing", "perf/", "global_seqlen/balanced", "training/waves")
    for step in steps:
        names = {name for name in ours[step] | theirs[step] if not name.startswith(changing)}
        for name in sorted(names):
            assert ours[step][name] == pytest.approx(theirs[step][name], rel=1e-4, abs=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        (),
        ("training.mini_batches=2", "algorithm.correction=none", "algorithm.proximal=rollout"),
        ("dag=ppo", "algorithm.correction=token_tis"),
        ("training.epochs=2", "algorithm.kl_coef=0.1"),
    ],
    ids=["grpo", "two_mini_batches", "ppo", "two_epochs"],
)
def test_waves_train_what_the_step_at_once_trains(tmp_path, how):
    """Steps 1 and 2 are sampled by the untrained weights, so both runs have the same samples."""
    at_once = trained(tmp_path / "off", *how, "flow.swap=boundary", "training.steps=2")
    in_waves = trained(
        tmp_path / "waves",
        *(*how, "flow.swap=boundary", "training.steps=2", "flow.waves=counter"),
        "flow.wave_prompts=3",
    )
    waves = check_waves(tmp_path / "waves", steps=2)
    sizes = [2, 2] if "mini_batches" in "".join(how) else [3, 3, 2]
    assert [len(wave["counters"]) for wave in waves][: len(sizes)] == (
        [3, 1, 3, 1][: len(sizes)] if len(sizes) == 2 else sizes
    )
    check_equal(in_waves, at_once, steps=(1, 2))


@pytest.mark.slow
def test_ready_waves_train_every_group_once(tmp_path):
    trained(tmp_path, *READY)
    waves = check_waves(tmp_path)
    assert max(wave["wave"] for wave in waves) > 1
    assert "waves" in (tmp_path / "plan.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [READY, ("flow.waves=counter", "flow.wave_prompts=3", "flow.swap=boundary")], ids=str
)
def test_verdicts_of_a_region_cut_steps_into_waves(tmp_path, how):
    rows = trained(tmp_path, "dag=dapo", *how)
    waves, before = waves_of(tmp_path), -1
    for step in range(1, STEPS + 1):
        mine = [wave for wave in waves if wave["step"] == step]
        assert [wave["last"] for wave in mine] == [False] * (len(mine) - 1) + [True]
        counters = [c for wave in mine for c in wave["counters"]]
        assert 0 < len(counters) == len(set(counters)) <= PROMPTS
        assert rows[step]["training/waves"] == len(mine)
        assert min(counters) > before
        before = max(counters)


def on_two_processes(folder, flags, delays):
    """A run of two processes of two devices each, where sampler and trainer are late at random."""
    assignments = [f"--config.{key}" for key in [*SMALL, *APART, *flags]]
    launch = ["scripts/launch_local.py", "--processes=2", "--devices_per_process=2", "--"]
    train = ["tests/support/delayed_train.py", "--config=configs/tiny.py", f"--workdir={folder}"]
    done = subprocess.run(
        [sys.executable, *launch, *train, *assignments],
        cwd=ROOT,
        env=haste.environment() | {"DELAYS": delays},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return check_waves(folder)


def lasting(folder):
    """Metrics of a run but those of time, memory and machines."""
    changing = ("timing", "perf/")
    return [
        {name: value for name, value in row.items() if not name.startswith(changing)}
        for row in read_metrics(folder / "metrics.jsonl")
    ]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_counted_waves_depend_on_no_timing(tmp_path):
    """Two processes, other delays: the same waves, and the same bits in all numbers."""
    flags = ("flow.swap=boundary", "flow.waves=counter", "flow.wave_prompts=3")
    first = on_two_processes(tmp_path / "1", flags, "1")
    second = on_two_processes(tmp_path / "2", flags, "2")
    assert [w["counters"] for w in first] == [w["counters"] for w in second]
    assert lasting(tmp_path / "1") == lasting(tmp_path / "2")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_ready_waves_on_two_processes(tmp_path):
    waves = on_two_processes(tmp_path, (*READY, "training.steps=8"), "3")
    assert max(wave["wave"] for wave in waves) > 1
    records = [json.loads(line) for p in range(2) for line in groups_of(tmp_path, p)]
    for step in range(1, 9):
        counters = sorted(c for r in records if r["step"] == step for c in r["counters"])
        assert counters == list(range(PROMPTS * (step - 1), PROMPTS * step))
        ages = [age for r in records if r["step"] == step for age in r["age"]]
        assert 0 <= min(ages) and max(ages) <= 1


def groups_of(folder, process):
    return (folder / "groups" / f"{process}.jsonl").read_text().splitlines()
