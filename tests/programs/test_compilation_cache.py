"""A second start compiles nothing; the cache's folder is jax's own setting, or ours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from distflow_jax.observe.compilations import Compilations
from distflow_jax.programs import xla_options


@pytest.fixture(autouse=True)
def nothing_in_the_environment(monkeypatch):
    monkeypatch.delenv(xla_options.VARIABLE, raising=False)


def start(folder):
    """(compilations, of them fetched) of a program that no start before has in memory."""
    counter = Compilations()
    x = jnp.asarray(np.arange(7.0, dtype=np.float32))
    counter.take()
    jax.clear_caches()
    with xla_options.kept_programs(str(folder)):
        assert float(jax.jit(lambda x: (x * 3).sum())(x)) == 63
    counter.close()
    return counter.take(), counter.take_fetched()


def test_the_second_start_compiles_nothing(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    assert start(tmp_path / "new" / "folder") == (1, 0)
    assert start(tmp_path / "new" / "folder") == (1, 1)
    assert jax.config.jax_compilation_cache_dir == before
    assert start("") == (1, 0)


def test_jaxs_own_setting_wins(tmp_path, monkeypatch):
    monkeypatch.setenv(xla_options.VARIABLE, str(tmp_path / "theirs"))
    before = jax.config.jax_compilation_cache_dir
    with xla_options.kept_programs(str(tmp_path / "ours")):
        assert jax.config.jax_compilation_cache_dir == before
    assert not (tmp_path / "ours").exists()


def test_a_folder_that_cannot_be_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        ValueError, match="compilation_cache=.*below cannot be written: .*file is no folder"
    ):
        with xla_options.kept_programs(str(tmp_path / "file" / "below")):
            pass
