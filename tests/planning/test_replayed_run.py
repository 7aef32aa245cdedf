"""Replays of another run: what differs is named, with the step that was recorded otherwise."""

import pathlib
import types

import pytest

from distflow_jax.config.config_dict import config_table
from distflow_jax.config.run_config import Config
from distflow_jax.planning.partial_batches.replayed_run import (
    FREE_KEYS,
    FREE_SECTIONS,
    check_replay,
    start_of_run,
)

SETTINGS = config_table(Config())


def start(*, plan="p", weights="w", devices=2, **changes):
    assert changes.keys() <= SETTINGS.keys()
    return start_of_run(SETTINGS | changes, plan, {"actor": weights}, devices)


def check(ours, *starts):
    folder = pathlib.Path("runs/a")
    check_replay(types.SimpleNamespace(folder=folder, starts=list(starts)), ours)


def test_every_free_key_is_one():
    assert SETTINGS.keys() >= FREE_KEYS
    assert {key.split(".")[0] for key in SETTINGS} >= set(FREE_SECTIONS)


def test_settings_that_change_nothing_may_differ():
    other = {key: '"another"' for key in SETTINGS if key.split(".")[0] in FREE_SECTIONS}
    other |= dict.fromkeys(FREE_KEYS, "17")
    check(start(**other), (1, start()))
    check(start(), (1, start(**other)), (5, start()))


def test_every_other_setting_is_named():
    sections = tuple(f"{section}." for section in FREE_SECTIONS)
    bound = {key for key in SETTINGS if not key.startswith(sections)} - FREE_KEYS
    assert {"training.steps", "stream.max_staleness", "rollout.temperature", "mesh.fsdp"} <= bound
    for key in bound:
        with pytest.raises(ValueError) as found:
            check(start(), (1, start()), (4, start(**{key: '"another"'})))
        said = f"--replay='runs/a': step 4 was recorded with {key}='another', but this run has "
        assert str(found.value).startswith(said)
        assert str(found.value).endswith(": use the same value")


def test_several_settings_are_counted():
    changes = {"training.epochs": "2", "seed": "5", "dag": '"ppo"'}
    with pytest.raises(ValueError, match=r"dag='ppo'.*\(also seed, training.epochs\)"):
        check(start(), (1, start(**changes)))


def test_an_older_version_may_lack_a_key():
    old = start()
    del old["settings"]["stream.partial_batches"]
    check(start(), (1, old))
    with pytest.raises(
        ValueError, match="stream.partial_batches='off', but this run has 'nothing'"
    ):
        check(old, (1, start()))


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"devices": 4}, "step 1 was recorded on 4 devices, but this job has 2: use 4"),
        ({"weights": "x"}, "from different weights of model 'actor': restore those weights"),
        ({"plan": "x"}, 'with a different graph named "grpo": restore its file'),
    ],
)
def test_other_machines_weights_and_graphs(changed, words):
    with pytest.raises(ValueError, match=words):
        check(start(), (1, start(**changed)))
