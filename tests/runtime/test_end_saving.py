"""The end of a run that was told to stop: whether its last checkpoint has all samples."""

import shutil
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from distflow_jax.checkpoint import additions
from distflow_jax.checkpoint.checkpointer import Checkpointer
from distflow_jax.cluster import processes
from distflow_jax.config.upkeep_config import CheckpointConfig
from distflow_jax.coordinator.rounds import NO_WORKERS, Ended
from distflow_jax.rollout.sampler import SamplerState
from distflow_jax.runtime import step_actions
from distflow_jax.runtime.samplers.trainer_side import warn_if_incomplete
from distflow_jax.runtime.step_actions import end_early
from distflow_jax.watchdog.exit_codes import EXIT_PREEMPTED

OF = additions.FOLDER


@pytest.mark.parametrize("adds", [True, False])
def test_others_may_add_their_samples_later(tmp_path, monkeypatch, caplog, adds):
    """A checkpoint is looked at when all processes have come to this point: one that is still to
    add its samples warns of nothing."""
    saved = Checkpointer(tmp_path, CheckpointConfig())
    saved.save(3, {"x": jnp.zeros(2)}, {}, added_to=True)
    saved.wait()
    additions.announce(saved.folder / "3", 2)  # as in a run of two processes
    gather = processes.all_gather_text

    def other_process(text):
        if adds:
            for kind in ("npz", "json"):
                shutil.copy(tmp_path / "3" / OF / f"0.{kind}", tmp_path / "3" / OF / f"1.{kind}")
        return gather(text)

    saved.additions.add(3, {}, {})
    saved.additions.wait()
    monkeypatch.setattr(processes, "all_gather_text", other_process)
    warn_if_incomplete(saved, 3)
    told = [text for text in caplog.messages if "step 3 needs are not complete" in text]
    assert len(told) == (not adds)
    saved.close()


@pytest.mark.parametrize("changed", [False, True])
def test_an_early_end_saves_the_last_step_unless_its_weights_are_gone(monkeypatch, caplog, changed):
    """Beside what is trained, a run's state has samplers and numbers of nodes."""
    saved, weights = [], jnp.zeros(2)
    models = {"actor": {"x": weights}, "rollout": SamplerState(None, 3, None), "node": 5}
    trained = {key: SimpleNamespace(trained=key == "actor") for key in models}
    run = SimpleNamespace(
        state=SimpleNamespace(step=3, models=models),
        prepared=SimpleNamespace(
            models=trained, config=SimpleNamespace(training=SimpleNamespace(steps=9))
        ),
        recorder=SimpleNamespace(),
        evaluating=SimpleNamespace(record_evaluations=lambda step, end=None: None),
        source=SimpleNamespace(finish_saving=lambda step, end: saved.append(("samples", step))),
        saved_step=2,
    )

    def save(run, *, goes_on):
        saved.append((goes_on, run.state.step))
        run.saved_step = run.state.step

    monkeypatch.setattr(step_actions, "_save", save)
    if changed:
        weights.delete()
    assert end_early(run, Ended(NO_WORKERS), None) == EXIT_PREEMPTED
    assert saved == ([] if changed else [(True, 3), ("samples", 3)])
    told = "step 4 had begun to train: step 2 is the last saved"
    assert (told in caplog.messages) == changed
