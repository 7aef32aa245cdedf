"""A second start compiles nothing; a cache that is full, broken or not ours harms no run."""

import os
import shutil
import types
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from distflow_jax.observe.compilations import Compilations
from distflow_jax.programs import program_cache, program_folder


@pytest.fixture(autouse=True)
def nothing_in_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv(program_folder.VARIABLE, raising=False)
    monkeypatch.setenv("DISTFLOW_CACHE", str(tmp_path / "home"))


def start(folder):
    """(compilations, of them fetched) of a program that no start before has in memory."""
    counter = Compilations()
    x = jnp.asarray(np.arange(7.0, dtype=np.float32))
    counter.take()
    jax.clear_caches()
    with program_cache.kept_programs(str(folder)):
        assert float(jax.jit(lambda x: (x * 3).sum())(x)) == 63
    counter.close()
    return counter.take(), counter.take_fetched()


def entries(folder):
    return sorted(path.name for path in folder.rglob("*-cache"))


def test_the_second_start_compiles_nothing(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    assert start(tmp_path / "new" / "folder") == (1, 0)
    assert start(tmp_path / "new" / "folder") == (1, 1)
    assert jax.config.jax_compilation_cache_dir == before
    assert start("") == (1, 0)


def test_by_default_it_is_the_users_cache_of_this_processor(tmp_path, monkeypatch):
    assert start("auto") == (1, 0)
    assert start("auto") == (1, 1)
    monkeypatch.setattr(program_folder, "_processor", lambda: "another")
    assert start("auto") == (1, 0)
    first, second = sorted((tmp_path / "home" / "programs").iterdir())
    assert len(entries(first)) == len(entries(second)) == 1


def test_jaxs_own_setting_wins(tmp_path, monkeypatch):
    monkeypatch.setenv(program_folder.VARIABLE, str(tmp_path / "theirs"))
    before = jax.config.jax_compilation_cache_dir
    for folder in (str(tmp_path / "ours"), "auto"):
        with program_cache.kept_programs(folder):
            assert jax.config.jax_compilation_cache_dir == before
    assert not (tmp_path / "ours").exists() and not (tmp_path / "home").exists()


def test_a_folder_that_cannot_be_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        ValueError, match="compilation_cache=.*below cannot be written: .*file is no folder"
    ):
        with program_cache.kept_programs(str(tmp_path / "file" / "below")):
            pass


@pytest.mark.parametrize(
    "break_it, words",
    [
        (lambda home, patch: patch.setenv("DISTFLOW_CACHE", "$NO_HOME/x"), "stands for nothing"),
        (lambda home, patch: home.touch(), "cannot be used"),
        (lambda home, patch: patch.setattr(os, "access", lambda *_: False), "cannot be written"),
        (
            lambda home, patch: patch.setattr(
                shutil, "disk_usage", lambda path: types.SimpleNamespace(free=3 << 20)
            ),
            "has 3 MiB left on its disk",
        ),
    ],
)
def test_a_home_without_room_costs_one_line(tmp_path, monkeypatch, caplog, break_it, words):
    break_it(tmp_path / "home", monkeypatch)
    caplog.set_level("INFO", "distflow_jax")
    assert start("auto") == (1, 0)
    assert [words in record.getMessage() for record in caplog.records] == [True]
    assert entries(tmp_path) == []


def test_a_chosen_folder_without_room_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=3 << 20))
    with pytest.raises(ValueError, match="compilation_cache=.* has 3 MiB left.*choose another"):
        start(tmp_path / "chosen")


def test_what_a_killed_process_left_is_compiled_again(tmp_path, caplog):
    assert start(tmp_path) == (1, 0)
    (entry,) = tmp_path.glob("*-cache")
    whole = entry.read_bytes()
    for rest in (whole[:-5], b""):
        entry.write_bytes(rest)
        assert start(tmp_path) == (1, 0)
        assert start(tmp_path) == (1, 1)
    assert caplog.records == []


def test_an_entry_that_breaks_meanwhile_is_said_once(tmp_path, caplog, recwarn):
    x = jnp.ones(3)
    with program_cache.kept_programs(str(tmp_path)):
        for factor in range(3):
            jax.jit(lambda x, factor=factor: x * factor + 1)(x)
        for entry in tmp_path.glob("*-cache"):
            entry.write_bytes(b"damaged")
        jax.clear_caches()
        for factor in range(3):
            jax.jit(lambda x, factor=factor: x * factor + 1)(x)
    assert ["the compilation cache misses programs" in r.getMessage() for r in caplog.records] == [
        True
    ]
    assert not [w for w in recwarn if "persistent compilation cache" in str(w.message)]


def test_the_least_recently_used_entries_leave_first(tmp_path):
    content = zlib.compress(b"program")
    for age, name in enumerate(("new", "used", "old", "oldest")):
        path = tmp_path / f"{name}-cache"
        path.write_bytes(content)
        os.utime(path, (1e9 - age, 1e9 - age))
    os.utime(tmp_path / "used-cache", (2e9, 1e9 - 10))
    program_folder.clean(tmp_path, 2 * len(content))
    assert entries(tmp_path) == ["new-cache", "used-cache"]
    program_folder.clean(tmp_path, 0)
    assert entries(tmp_path) == []
