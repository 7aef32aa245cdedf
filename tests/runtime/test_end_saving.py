"""The end of a run that was told to stop: whether its last checkpoint has all samples."""

import shutil

import jax.numpy as jnp
import pytest

from distflow_jax.checkpoint import additions
from distflow_jax.checkpoint.checkpointer import Checkpointer
from distflow_jax.cluster import processes
from distflow_jax.config.upkeep_config import CheckpointConfig
from distflow_jax.runtime.samplers.trainer_side import warn_if_incomplete

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
