"""Late additions of processes to a checkpoint: the checkpoint counts only with all of them."""

import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from distflow_jax.checkpoint.additions import FILE, FOLDER, additions
from distflow_jax.checkpoint.checkpointer import Checkpointer
from distflow_jax.config.upkeep_config import CheckpointConfig

STATE = {"weights": jnp.arange(6.0)}
ABSTRACT = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), STATE
)
ARRAYS = {"tokens": np.arange(5, dtype=np.int32), "none": np.zeros((0, 3), np.float32)}


@pytest.fixture
def saved(tmp_path):
    checkpointer = Checkpointer(tmp_path / "checkpoints", CheckpointConfig(keep=2))
    yield checkpointer
    checkpointer.close()


@pytest.fixture
def writer(saved):
    return saved.additions


def begin(saved, step):
    saved.save(step, STATE, {"step": step}, added_to=True)
    saved.wait()


def complete(saved, writer, *steps):
    for step in steps:
        begin(saved, step)
        writer.add(step, ARRAYS, {"of": step})
    writer.wait()


def test_a_checkpoint_counts_when_all_is_added(saved, writer):
    complete(saved, writer, 1)
    begin(saved, 2)
    assert saved.latest() == 1  # of 2 the samples are missing
    assert saved.contents(None)[0] == 2  # its weights are whole
    writer.add(2, ARRAYS, {"of": 2})
    writer.wait()
    assert saved.latest() == 2
    step, state, info = saved.restore(None, ABSTRACT)
    assert step == info["step"] == 2
    np.testing.assert_array_equal(state["weights"], STATE["weights"])
    (found,) = additions(saved.folder / "2")
    assert found.facts == {"of": 2}
    for name, wanted in ARRAYS.items():
        np.testing.assert_array_equal(found.read(name)[name], wanted)


def test_what_is_added_waits_for_the_checkpoint(saved, writer):
    writer.add(3, ARRAYS, {})
    writer.wait(0.2)
    assert not (saved.folder / "3").exists()
    begin(saved, 3)
    writer.wait()
    assert saved.latest() == 3


def test_closing_waits_for_both(tmp_path):
    """A run that ends, with an error too, has the checkpoint that it began."""
    saved = Checkpointer(tmp_path / "checkpoints", CheckpointConfig())
    saved.additions.add(1, ARRAYS, {})
    saved.additions.add(2, ARRAYS, {})  # which is never saved
    saved.save(1, STATE, {}, added_to=True)
    saved.close()
    assert additions(saved.folder / "1")[0].facts == {}
    assert [path.name for path in saved.folder.iterdir()] == ["1"]


def test_a_checkpoint_to_which_nothing_is_added(saved):
    saved.save(1, STATE, {})
    saved.wait()
    assert saved.latest() == 1 and additions(saved.folder / "1") == []


def test_the_last_complete_ones_stay(saved, writer):
    complete(saved, writer, 1, 2, 3)
    begin(saved, 4)
    begin(saved, 5)
    names = sorted(int(path.name) for path in saved.folder.iterdir())
    assert names == [2, 3, 4, 5]  # two complete ones, and those that may become complete
    writer.add(4, ARRAYS, {})
    writer.wait()
    saved.wait()
    assert sorted(int(path.name) for path in saved.folder.iterdir()) == [3, 4, 5]


def test_an_incomplete_one_is_left_out_and_removed(saved, writer, tmp_path, caplog):
    complete(saved, writer, 1)
    begin(saved, 2)
    again = Checkpointer(tmp_path / "checkpoints", CheckpointConfig())
    with caplog.at_level(logging.WARNING):
        step, *_ = again.restore(None, ABSTRACT)
        again.save(2, STATE, {})  # the run goes on, and comes to this step again
    again.close()
    assert step == 1
    first, second = [record.getMessage() for record in caplog.records]
    assert "checkpoint 2" in first and "lacks what process 0 had to add" in first
    assert "continuing from checkpoint 1" in first
    assert "checkpoint 2 is removed" in second
    assert again.latest() == 2


@pytest.mark.parametrize("what", ["a flipped bit", "missing", "table", "count"])
def test_damage_is_found(saved, writer, what):
    """The samples count as the arrays do: with damage the checkpoint before is used."""
    complete(saved, writer, 1, 2)
    place = saved.folder / "2" / FOLDER
    if what == "a flipped bit":
        data = bytearray((place / "0.npz").read_bytes())
        data[100] ^= 4
        (place / "0.npz").write_bytes(bytes(data))
    elif what == "missing":
        (place / "0.npz").unlink()
    elif what == "table":
        (place / "0.json").write_text("{}x")
    else:
        (saved.folder / "2" / FILE).unlink()
    assert saved.restore(None, ABSTRACT)[0] == 1


def test_a_wrong_number_of_processes(saved, writer):
    complete(saved, writer, 1)
    path = saved.folder / "1" / FILE
    for text in ("2", '{"processes": -1}', '{"processes": "x"}', "{", "[" * 99999):
        path.write_text(text)
        assert saved.latest() is None
    path.write_text(json.dumps({"processes": 2}))
    assert saved.latest() is None
