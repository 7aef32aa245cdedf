"""Samplers on devices of their own: they sample what others sample, and depend on no timing.

Nightly: no bit of a run whose samplers have devices of their own depends on what is late, with
weight updates at the step boundary too.
"""

import os

import compare_checkouts
import pytest
from support.delayed_train import REWARD
from support.programs import train_late
from support.tiny_config import tiny_config
from support.tiny_sampler import assert_agree

from distflow_jax import run
from distflow_jax.stages import rollout

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

    config = tiny_config(*SMALL, *flags)
    with monkeypatch.context() as patch:
        patch.setattr(rollout, "written_columns", kept)
        assert run.train_here(config, folder) == 0
    return found


@pytest.mark.slow
def test_responses_are_those_of_samplers_on_the_trainers_devices(tmp_path, monkeypatch):
    """Up to each one's first near-tie, as long as nothing is learned."""
    still = ("training.optimizer.lr=0", "training.steps=2")
    part = responses_of(tmp_path / "part", monkeypatch, *still, *PART)
    whole = responses_of(tmp_path / "all", monkeypatch, *still, *SHARED)
    assert part.keys() == whole.keys() and len(part) == 2 * 8 * 4
    assert_agree(part.values(), whole.values())


def train(folder, processes, flags, delays):
    """A run of scripts/train.py on processes of three devices each."""
    reward = folder.parent / "reward.py"
    reward.write_text(REWARD)
    scored = (f"reward.function={reward}:digits", "reward.kwargs={}")
    settings = [*SMALL, *PART, *scored, *flags]
    train_late(folder, settings, delays, processes=processes, devices=3)


BOUNDARY = ("stream.weight_update=boundary", "algorithm.correction=token_tis")


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "processes, flags",
    [
        (2, ("dag=grpo",)),
        (1, ("dag=ppo",)),
        (2, ("dag=dapo",)),
        (2, ("stream.max_staleness=1", *BOUNDARY)),
        (2, ("stream.max_staleness=2", *BOUNDARY)),
        (2, ("stream.max_staleness=2", "dag=ppo", *BOUNDARY)),
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
