"""Runs in partial batches that keep their groups, and replays: the same training, bit for bit,
unsampled.

Nightly: a replay of a recorded run has its partial batches, metrics and parameters bit for bit,
after kills and on two processes.
"""

import random
import re

import compare_checkouts
import pytest
from support.programs import LATE, Process, training
from support.replayed import check_equal, partial_batches_of
from support.run_folders import await_step
from support.tiny_config import tiny_config

from distflow_jax import run

SMALL = (
    "model.source=random:llama?hidden=32&layers=2&heads=4&kv_heads=2&mlp=64&vocab=512",
    *("data.prompts_per_step=8", "data.max_prompt_length=64", "eval.dataset="),
    *("training.steps=4", "training.optimizer.lr=0.003", "training.row_tokens=160"),
    *("algorithm.correction=token_tis", "observe.trackers=()", "rollout.num_slots=8"),
    *("stream.max_staleness=1", "stream.partial_batches=ready", "stream.partial_batch_rows=2"),
)
HERE = ("mesh.devices=0:2", "mesh.roles={'ROLLOUT': {'devices': '2:3'}}")
# on processes of two devices each
APART = ("mesh.devices=0:1", "mesh.roles={'ROLLOUT': {'devices': '1:2'}}")
RECORD = "stream.record=True"
# of a run that has no sampler, these may differ
FREE = ("rollout.num_slots=16", "stream.order=counter", "checkpoint.every=3", "checkpoint.keep=5")


def config_of(*assignments):
    return tiny_config(*SMALL, *assignments)


@pytest.mark.slow
@pytest.mark.parametrize("how", [(), ("dag=ppo",), ("dag=dapo", "training.steps=3")], ids=str)
def test_a_replay_repeats_the_training(tmp_path, how):
    recorded, replayed = tmp_path / "recorded", tmp_path / "replayed"
    assert run.train_here(config_of(*HERE, *how, RECORD), recorded) == 0
    assert run.train_here(config_of(*HERE, *how, *FREE), replayed, replay=recorded) == 0
    check_equal(recorded, replayed, 3 if "training.steps=3" in how else 4)
    assert not (replayed / "recorded").exists()
    if how:
        return
    # a replay that goes on from a checkpoint needs the records after it alone
    (replayed / "checkpoints" / "4").rename(tmp_path / "4")
    for step in (1, 2, 3):
        (recorded / "recorded" / str(step) / "0.npz").unlink()
    assert run.train_here(config_of(*HERE, *FREE), replayed, replay=recorded) == 0
    assert not list(compare_checkouts.differences(recorded, replayed, 0))
    assert partial_batches_of(recorded) == partial_batches_of(replayed)


@pytest.mark.slow
def test_another_run_is_refused_by_name(tmp_path):
    recorded = tmp_path / "recorded"
    assert run.train_here(config_of(*HERE, RECORD, "training.steps=2"), recorded) == 0

    def refused(words, *assignments, folder="replayed"):
        config = config_of(*HERE, "training.steps=2", *assignments)
        with pytest.raises(ValueError, match=words):
            run.train_here(config, tmp_path / folder, replay=recorded)

    refused(
        r"step 1 was recorded with training\.optimizer\.lr=0\.003, but this run has 0\.004: use",
        "training.optimizer.lr=0.004",
    )
    refused("--replay and --workdir both name", "training.steps=3", folder="recorded")
    with pytest.raises(ValueError, match="'.*nowhere' has no records of partial batches"):
        run.train_here(config_of(*HERE), tmp_path / "replayed", replay=tmp_path / "nowhere")
    assert not (tmp_path / "replayed" / "metrics.jsonl").exists()


def job(folder, *settings, delays="", replay=None):
    """A job of two processes of two devices each."""
    size = {"processes": 2, "devices": 2, "program": LATE}
    command = training(folder, [*SMALL, *APART, *settings], **size)
    command += [f"--replay={replay}"] if replay else []
    return Process(folder.parent / f"{folder.name}.log", command, own={"DELAYS": delays})


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_killed_run_is_repeated_on_two_processes(tmp_path):
    """Steps that were trained twice are repeated as they were trained last."""
    recorded, replayed = tmp_path / "recorded", tmp_path / "replayed"
    settings = (RECORD, "checkpoint.every=2", "training.steps=6")
    first = job(recorded, *settings, delays="1")
    await_step(recorded, 3, first)
    first.kill_one(random.Random(0))
    first.end()
    again = job(recorded, *settings, delays="2")
    assert again.end() == 0, again.output()
    files = sorted(path.name for path in (recorded / "recorded").glob("*/*"))
    assert files == ["0.npz"] * 6 + ["1.npz"] * 6
    again = job(replayed, "training.steps=6", delays="3", replay=recorded)
    assert again.end() == 0, again.output()
    check_equal(recorded, replayed, 6)
    # and one that ends with what there is
    (recorded / "recorded" / "6" / "1.npz").rename(tmp_path / "1.npz")
    short = job(tmp_path / "short", "training.steps=6", replay=recorded)
    assert short.end() == 0, short.output()
    told = "the data ended after step 5 of 6; .*recorded has no whole record"
    assert re.search(told, short.output())
    (recorded / "recorded" / "2" / "1.npz").rename(tmp_path / "2.npz")
    none = job(tmp_path / "none", "training.steps=6", replay=recorded)
    assert none.end() == 2
    assert "recorded/2/1.npz: it has records of steps 1 to 6" in none.output()
