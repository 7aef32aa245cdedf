"""Samplers on devices of their own: they sample what others sample, and depend on no timing."""

import os
import subprocess
import sys

import compare_checkouts
import numpy as np
import pytest
from support import haste
from support.delayed_train import REWARD
from support.paths import ROOT

from configs import tiny
from distflow_jax import run
from distflow_jax.config.config_dict import from_config_dict, override
from distflow_jax.config.run_config import Config
from distflow_jax.stages import rollout

NEAR_TIE = 1e-4  # lead of the best over the second-best perturbed logit
SMALL = (
    "model.source=random:llama?hidden=32&layers=2&heads=4&kv_heads=2&mlp=64&vocab=512",
    "data.prompts_per_step=8",
    "rollout.num_slots=24",
    "training.steps=5",
    "training.optimizer.lr=0.003",
    "eval.every=0",
    "observe.trackers=()",
    "observe.samples_every=1",
)
SHARED = ("mesh.devices=0:2", "mesh.roles={'ROLLOUT': {'devices': '0:2'}}")
PART = ("mesh.devices=0:2", "mesh.roles={'ROLLOUT': {'devices': '2:3'}}")


def responses_of(folder, monkeypatch, *flags):
    """{(step's counter, sample): response} of all that a run's rollouts sampled."""
    found, columns = {}, rollout.written_columns

    def kept(node, episodes):
        found.update({(e.response.prompt.counter, e.response.sample): e.response for e in episodes})
        return columns(node, episodes)

    config = from_config_dict(Config, override(tiny.get_config(), [*SMALL, *flags]))
    with monkeypatch.context() as patch:
        patch.setattr(rollout, "written_columns", kept)
        assert run.train_here(config, folder) == 0
    return found


def test_responses_are_those_of_samplers_on_the_trainers_devices(tmp_path, monkeypatch):
    """Up to each one's first near-tie, as long as nothing is learned."""
    still = ("training.optimizer.lr=0", "training.steps=2")
    part = responses_of(tmp_path / "part", monkeypatch, *still, *PART)
    whole = responses_of(tmp_path / "all", monkeypatch, *still, *SHARED)
    assert part.keys() == whole.keys() and len(part) == 2 * 8 * 4
    compared = 0
    for uid, response in whole.items():
        ties = np.flatnonzero(response.margin < NEAR_TIE)
        end = ties[0] if len(ties) else len(response.tokens)
        np.testing.assert_array_equal(part[uid].tokens[:end], response.tokens[:end])
        if not len(ties):
            assert len(part[uid].tokens) == end
        np.testing.assert_allclose(part[uid].logp[:end], response.logp[:end], atol=1e-4)
        compared += end
    assert compared > 0.8 * sum(len(r.tokens) for r in whole.values())


def train(folder, processes, flags, delays):
    """A run of scripts/train.py on processes of three devices each."""
    reward = folder.parent / "reward.py"
    reward.write_text(REWARD)
    scored = (f"reward.function={reward}:digits", "reward.kwargs={}")
    assignments = [f"--config.{key}" for key in [*SMALL, *PART, *scored, *flags]]
    launch = ["scripts/launch_local.py", f"--processes={processes}", "--devices_per_process=3"]
    command = ["tests/support/delayed_train.py", "--config=configs/tiny.py"]
    done = subprocess.run(
        [sys.executable, *launch, "--", *command, f"--workdir={folder}", *assignments],
        cwd=ROOT,
        env=haste.environment() | ({"DELAYS": delays} if delays else {}),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


BOUNDARY = ("flow.swap=boundary", "algorithm.correction=token_tis")


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "processes, flags",
    [
        (2, ("dag=grpo",)),
        (1, ("dag=ppo",)),
        (2, ("dag=dapo",)),
        (2, ("flow.max_lag=1", *BOUNDARY)),
        (2, ("flow.max_lag=2", *BOUNDARY)),
        (2, ("flow.max_lag=2", "dag=ppo", *BOUNDARY)),
    ],
    ids=str,
)
def test_no_bit_depends_on_what_is_late(tmp_path, processes, flags):
    """Metrics, samples and the last parameters, whichever of sampler, reward and trainer waits."""
    assert "DELAYS" not in os.environ
    for name, delays in (("first", ""), ("second", "1")):
        train(tmp_path / name, processes, flags, delays)
    found = list(compare_checkouts.differences(tmp_path / "first", tmp_path / "second", 0))
    assert not found
    rows = compare_checkouts.metrics(tmp_path / "first", 1)
    assert sorted({row["step"] for row in rows}) == [1, 2, 3, 4, 5]
    assert compare_checkouts.responses(tmp_path / "first", 1)
