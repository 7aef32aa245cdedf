"""Long runs whose samplers run ahead: they learn, in turns too, and their memory stays flat.

Nightly: runs whose samplers are four steps ahead learn; responses in turns keep their slots while
weights change.
"""

import os
import pathlib
import statistics
import sys

import numpy as np
import pytest
from support import haste, programs
from support.documented import unexplained_metrics

from distflow_jax.report.run_writer import read_metrics

AHEAD = ("algorithm.correction=token_tis", "observe.trackers=()")
PART = ("mesh.devices=0:2", "mesh.roles={'ROLLOUT': {'devices': '2:3'}}")
SMALL = (
    "model.source=random:llama?hidden=32&layers=2&heads=4&kv_heads=2&mlp=64&vocab=259",
    "data.prompts_per_step=8",
    "rollout.num_slots=24",
)
TURNS = (
    "rollout.environment=configs/examples/second_try.py:SecondTry",
    "rollout.max_response_length=96",
    "rollout.turn_length=24",
    "rollout.max_turns=3",
    "reward.function=zero",
    "reward.kwargs={}",
    "eval.temperature=1.0",
)
SOAK_STEPS = int(os.environ.get("DISTFLOW_SOAK_STEPS", "1000"))
MOST_GROWTH = 0.02  # of resident memory


def train(folder, flags, *, env=None, **how):
    """A run of configs/tiny.py; returns its rows of metrics, from step 1 on."""
    env = env or {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    programs.train(folder, [*AHEAD, *flags], env=env, **how)
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"]]
    assert not any(row["perf/compilations"] for row in rows[1:])
    return rows


def check_ages(rows, staleness):
    """No token is older than the staleness, and some are older than one step."""
    for row in rows:
        shares = [row[f"training/off_policy/age_share/{age}"] for age in range(staleness + 1)]
        assert sum(shares) == pytest.approx(1.0)
        assert row["training/off_policy/trajectory_staleness/max"] <= staleness
    assert max(row["training/off_policy/trajectory_staleness/max"] for row in rows) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "graph, others",
    [("grpo", ()), ("ppo", ("algorithm.correction=none", "algorithm.proximal=a3po"))],
)
def test_rewards_rise_on_old_tokens(tmp_path, graph, others):
    """As tests/runs/test_learning.py has it, with tokens that are up to four steps old."""
    flags = (
        f"dag={graph}",
        *others,
        "stream.max_staleness=4",
        "rollout.num_slots=256",  # of four steps, so that samplers are as far ahead
        "training.steps=40",
        "eval.dataset=",
        "checkpoint.every=40",
        "reward.function=tests/support/user_rewards.py:digits",
        "reward.kwargs={}",
        "data.train=task:arithmetic?operands=2&operators=+&digits=1-9",
    )
    rows = train(tmp_path / "run", flags)
    check_ages(rows, 4)
    scores = [row["critic/score/mean"] for row in rows]
    assert np.mean(scores[-5:]) - scores[0] >= 0.05, scores


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("devices, place", [(1, ()), (3, PART)], ids=["shared", "part"])
def test_responses_in_turns_keep_their_slots(tmp_path, devices, place):
    """Weights change between and within turns of two processes; evaluations wait for their end."""
    steps = ("training.steps=6", "eval.every=3", "eval.num_prompts=8", "checkpoint.every=6")
    flags = (*SMALL, *TURNS, *place, *steps, "stream.max_staleness=2")
    rows = train(tmp_path, flags, processes=2, devices=devices, env=haste.environment())
    check_ages(rows, 2)
    assert len(rows) == 6
    for row in rows:
        assert 1 < row["environment/turns/mean"] <= row["environment/turns/max"] <= 3
        assert row["environment/infra/raised"] == row["environment/infra/timed_out"] == 0
    assert sum("val-core/arithmetic/reward/mean@1" in row for row in rows) == 2
    assert unexplained_metrics(tmp_path) <= {"environment/wrong"}


@pytest.mark.soak
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
def test_memory_stays_flat_over_a_thousand_steps(tmp_path):
    """Or over as many steps as DISTFLOW_SOAK_STEPS says; nothing compiles after step 1."""
    resident = tmp_path / "resident"
    flags = ("stream.max_staleness=2", f"training.steps={SOAK_STEPS}", "eval.every=10")
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    how = {"program": "tests/support/measured_train.py", "seconds": 20 * SOAK_STEPS}
    # glibc gives threads arenas of their own, which checkpoints' threads fill one by one: 5 % more
    # resident memory in 250 steps with or without a staleness, 1.4 % with two arenas
    env |= {"RESIDENT": str(resident), "MALLOC_ARENA_MAX": "2"}
    rows = train(tmp_path / "run", flags, env=env, **how)
    assert len(rows) == SOAK_STEPS
    sizes = list(map(int, pathlib.Path(resident).read_text().split()))
    tenth = SOAK_STEPS // 10
    early = statistics.median(sizes[2 * tenth : 4 * tenth])
    late = statistics.median(sizes[8 * tenth :])
    print(f"resident {early / 2**20:.1f} MiB, then {late / 2**20:.1f} MiB")
    assert late <= early * (1 + MOST_GROWTH), [sizes[i] for i in range(0, SOAK_STEPS, tenth)]
