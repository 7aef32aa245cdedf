"""A saved state comes back on any mesh; a damaged, unfinished or foreign one never does.

Nightly: each of 200 flipped bits of a checkpoint is seen, or changes nothing.
"""

import json
import logging
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from distflow_jax.checkpoint.checkpointer import Checkpointer
from distflow_jax.config.upkeep_config import CheckpointConfig

INFO = {"loader": {"position": 12, "epoch": 0.25}, "coefficients": [1e-3, 2.0]}


def mesh(shape):
    return Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), ("fsdp", "tensor"))


def state(shape=(4, 2), *, scale=1.0, width=8):
    """Parameters and the state of a real optimizer, laid out over a mesh of `shape`."""
    params = {
        "embed": {"embedding": scale * jnp.arange(16.0 * width).reshape(16, width)},
        "norm": jnp.full((width,), scale, jnp.bfloat16),
    }
    tree = {
        "params": params,
        "optimizer": optax.adamw(1e-3).init(params),
        "count": jnp.int32(scale * 7),
    }
    sharding = {2: P("fsdp", "tensor"), 1: P("tensor"), 0: P()}
    return jax.tree.map(
        lambda x: jax.device_put(x, NamedSharding(mesh(shape), sharding[x.ndim])), tree
    )


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def assert_same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.fixture
def open_checkpointer(tmp_path):
    opened = []

    def open_one(folder=tmp_path / "checkpoints", **options):
        opened.append(Checkpointer(folder, CheckpointConfig(**options)))
        return opened[-1]

    yield open_one
    for checkpointer in opened:
        checkpointer.close()


def save_two(checkpointer):
    for step in (1, 2):
        checkpointer.save(step, state(scale=float(step)), {"step": step})
    checkpointer.wait()


def test_what_was_saved_comes_back(open_checkpointer):
    checkpointer = open_checkpointer()
    assert checkpointer.latest() is None
    tree = state()
    checkpointer.save(3, tree, INFO)
    checkpointer.wait()
    assert checkpointer.latest() == 3
    step, restored, info = open_checkpointer().restore(None, abstract(tree))
    assert (step, info) == (3, INFO)
    assert_same(restored, tree)


def checkpointer_after(checkpointer):
    checkpointer.wait()
    return checkpointer


@pytest.mark.parametrize("shape", [(1, 1), (4, 2)])
def test_arrays_may_be_donated_right_after_save(open_checkpointer, shape):
    tree = state(shape)
    want = jax.tree.map(np.array, tree)
    like = abstract(tree)
    overwrite = jax.jit(lambda t: jax.tree.map(lambda x: x * 0 - 1, t), donate_argnums=0)
    checkpointer = open_checkpointer()
    checkpointer.save(1, tree, {})
    for _ in range(4):
        tree = overwrite(tree)
    jax.block_until_ready(tree)
    _, restored, _ = checkpointer_after(checkpointer).restore(None, like)
    assert_same(restored, want)


def test_only_the_newest_stay(open_checkpointer, tmp_path):
    checkpointer = open_checkpointer(keep=2)
    for step in (5, 9, 10, 100):
        checkpointer.save(step, state(), {})
    checkpointer.wait()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["10", "100"]
    assert checkpointer.latest() == 100


def test_an_older_step_can_be_asked_for(open_checkpointer):
    checkpointer = open_checkpointer()
    save_two(checkpointer)
    step, restored, info = checkpointer.restore(1, abstract(state()))
    assert (step, info) == (1, {"step": 1})
    assert_same(restored, state(scale=1.0))
    with pytest.raises(FileNotFoundError, match=r"step 7.*\[1, 2\]"):
        checkpointer.restore(7, abstract(state()))


def test_a_step_is_saved_once(open_checkpointer):
    checkpointer = open_checkpointer()
    save_two(checkpointer)
    with pytest.raises(ValueError, match="step 2"):
        checkpointer.save(2, state(), {})


def damage(path, how):
    if how == "missing":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "zeros":
        path.write_bytes(bytes(path.stat().st_size))
    else:
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("how", ["missing", "empty", "half", "zeros"])
def test_damage_is_never_restored(open_checkpointer, tmp_path, caplog, how):
    """If any file of the newest checkpoint is lost, a restore gives its content or the previous
    one."""
    original = tmp_path / "original"
    checkpointer = open_checkpointer(original)
    save_two(checkpointer)
    files = sorted(p.relative_to(original) for p in (original / "2").rglob("*") if p.is_file())
    assert len(files) > 5
    fell_back = []
    for number, file in enumerate(files):
        folder = tmp_path / f"copy{number}"
        shutil.copytree(original, folder)
        damage(folder / file, how)
        caplog.clear()
        step, restored, info = open_checkpointer(folder).restore(None, abstract(state()))
        assert info == {"step": step}, file
        assert_same(restored, state(scale=float(step)))
        warnings = [r.getMessage() for r in caplog.records if r.name == "distflow_jax"]
        if step == 1:
            fell_back.append(file)
            assert len(warnings) == 1 and "checkpoint 2" in warnings[0], file
            assert "continuing from checkpoint 1" in warnings[0]
            assert file.name in warnings[0]
        else:
            assert not warnings
    contents = {file for file in files if file.parts[1] in ("arrays", "record")}
    assert contents <= set(fell_back)


def flip(path, bit):
    """Inverts one bit of a file; its size and times of change stay."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_bytes(content)
    os.utime(path, ns=times)


def flips(folder, count, seed=0):
    """(file, bit) drawn from all files of a folder: every file once, then by their sizes."""
    draw = np.random.default_rng(seed)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sizes = np.array([path.stat().st_size for path in files], float)
    chosen = [*files, *(files[i] for i in draw.choice(len(files), count, p=sizes / sizes.sum()))]
    return [(path, int(draw.integers(8 * path.stat().st_size))) for path in chosen[:count]]


@pytest.mark.parametrize("count", [25, pytest.param(200, marks=pytest.mark.slow)])
def test_a_flipped_bit_is_seen_or_changes_nothing(open_checkpointer, tmp_path, caplog, count):
    """One bit in any file of the newest checkpoint, at any place."""
    checkpointer = open_checkpointer()
    save_two(checkpointer)
    like, seen = abstract(state()), 0
    for path, bit in flips(tmp_path / "checkpoints" / "2", count):
        before = path.read_bytes()
        flip(path, bit)
        caplog.clear()
        step, restored, info = checkpointer.restore(None, like)
        assert_same(restored, state(scale=float(step)))
        assert info == {"step": step}
        if step == 1:
            seen += 1
            assert "checkpoint 2" in caplog.text and "continuing from checkpoint 1" in caplog.text
        path.write_bytes(before)
    assert seen > 0.8 * count  # what is not seen is in files of Orbax's that nobody reads


def test_the_damaged_file_is_named(open_checkpointer, tmp_path, caplog):
    checkpointer = open_checkpointer()
    save_two(checkpointer)
    files = (tmp_path / "checkpoints" / "2").rglob("ocdbt.process_0/d/*")
    path = max(files, key=lambda path: path.stat().st_size)
    flip(path, 8 * path.stat().st_size // 2)
    checkpointer.restore(None, abstract(state()))
    damaged = f"ocdbt.process_0/d/{path.name} has another content than was written"
    assert damaged in caplog.text
    # who asks for one step gets no other
    with pytest.raises(ValueError, match=rf"checkpoint 2 in .*{damaged}.*the others are: \[1\]"):
        checkpointer.restore(2, abstract(state()))


def test_a_checkpoint_of_an_older_version_is_restored_with_one_warning(
    open_checkpointer, tmp_path, caplog
):
    """It has sizes and no checksums, and lacks what later versions wrote into its record."""
    checkpointer = open_checkpointer()
    save_two(checkpointer)
    folder = tmp_path / "checkpoints" / "2"
    table = json.loads((folder / "checksums.json").read_text())
    (folder / "checksums.json").unlink()
    (folder / "sizes.json").write_text(
        json.dumps({name: size for name, (size, *_) in table.items()})
    )
    step, restored, _ = checkpointer.restore(
        None, abstract(state()), lacking=lambda info: f"nor the keys beside {list(info)}"
    )
    assert step == 2
    assert_same(restored, state(scale=2.0))
    assert len(caplog.records) == 1
    assert "older version: it has no checksums" in caplog.text
    assert "nor the keys beside ['step']" in caplog.text
    checkpointer.restore(1, abstract(state()))  # of this version
    checkpointer.restore(2, abstract(state()), verify=False)  # a second reading of one
    assert len(caplog.records) == 1


def test_the_step_of_an_unreadable_checkpoint_can_be_saved_again(open_checkpointer, tmp_path):
    checkpointer = open_checkpointer()
    save_two(checkpointer)
    shutil.rmtree(tmp_path / "checkpoints" / "2" / "arrays")
    step, restored, _ = checkpointer.restore(None, abstract(state()))
    assert step == 1
    checkpointer = open_checkpointer()
    checkpointer.restore(None, abstract(state()))
    checkpointer.save(2, restored, {"again": True})
    checkpointer.wait()
    assert (tmp_path / "checkpoints" / "2.unreadable").exists()
    assert checkpointer.restore(None, abstract(state()))[2] == {"again": True}


def test_an_interrupted_save_is_ignored_and_removed(open_checkpointer, tmp_path):
    save_two(open_checkpointer())
    folder = tmp_path / "checkpoints"
    half = folder / "3.orbax-checkpoint-tmp"
    shutil.copytree(folder / "2", half)
    damage(half / "record" / "metadata", "missing")
    checkpointer = open_checkpointer()
    assert checkpointer.latest() == 2
    checkpointer.save(3, state(), {})
    checkpointer.wait()
    assert not half.exists()
    assert checkpointer.latest() == 3


def test_who_only_reads_changes_nothing(open_checkpointer, tmp_path):
    """Answering from the checkpoints of a live run must not touch the one it is writing."""
    folder = tmp_path / "checkpoints"
    writer = open_checkpointer(keep=3)
    for step in (1, 2, 3):
        writer.save(step, state(scale=float(step)), {"step": step})
    writer.wait()
    damage(folder / "3" / "record" / "metadata", "empty")
    shutil.copytree(folder / "2", folder / "4.orbax-checkpoint-tmp")
    before = sorted(folder.rglob("*"))
    reader = open_checkpointer(keep=1)
    assert reader.restore(None, abstract(state()))[0] == 2
    reader.wait()
    reader.close()
    assert sorted(folder.rglob("*")) == before
    assert open_checkpointer(tmp_path / "nowhere").latest() is None
    assert not (tmp_path / "nowhere").exists()


def test_nothing_readable_is_an_error_and_not_a_fresh_start(open_checkpointer, tmp_path):
    checkpointer = open_checkpointer()
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        checkpointer.restore(None, abstract(state()))
    save_two(checkpointer)
    for step in "12":
        shutil.rmtree(tmp_path / "checkpoints" / step / "arrays")
    with pytest.raises(ValueError, match=r"can be read \(step 2: .*step 1: "):
        checkpointer.restore(None, abstract(state()))


def test_a_checkpoint_of_another_model_is_an_error(open_checkpointer, tmp_path):
    checkpointer = open_checkpointer()
    save_two(checkpointer)
    with pytest.raises(ValueError, match=r"embedding \(saved float32\[16,8\], here float32\[16,4"):
        checkpointer.restore(None, abstract(state(width=4)))
    other = state()
    other["params"]["head"] = other["params"].pop("norm")
    with pytest.raises(ValueError, match=r"only in the checkpoint: params.norm; not in .*head"):
        checkpointer.restore(None, abstract(other))
    assert checkpointer.latest() == 2


def test_orbax_is_quiet_but_for_warnings(open_checkpointer, caplog):
    caplog.set_level(logging.DEBUG, logger="absl")
    save_two(open_checkpointer())
    assert not [r for r in caplog.records if "orbax" in r.pathname and r.levelno < logging.WARNING]
    logging.getLogger("absl").info("of another package")
    assert "of another package" in caplog.text


def test_sizes_that_make_no_sense_are_refused():
    with pytest.raises(ValueError, match="checkpoint.every .* 0"):
        CheckpointConfig(every=0)
    with pytest.raises(ValueError, match="checkpoint.keep .* 0"):
        CheckpointConfig(keep=0)


def test_a_part_of_a_checkpoint_can_be_read(open_checkpointer):
    checkpointer = open_checkpointer()
    both = {"actor": state(), "critic": state(scale=3.0)}
    checkpointer.save(1, both, {})
    checkpointer.wait()
    wanted = {"critic": abstract(both["critic"])}
    _, read, _ = checkpointer.restore(None, wanted, partial=True)
    assert_same(read["critic"], both["critic"])
    with pytest.raises(ValueError, match="only in the checkpoint: actor"):
        checkpointer.restore(None, wanted)
    with pytest.raises(ValueError, match="not in the checkpoint: judge"):
        checkpointer.restore(None, {"judge": wanted["critic"]}, partial=True)
