"""The token of a run is one secret, in a file that only its owner reads."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from distflow_jax.stream.links.run_token import find_run_token, make_run_token


def test_processes_that_start_together_have_one_token(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: make_run_token(tmp_path, {}), range(16)))
    assert len(found) == 1 and len(found.pop()) == 64
    assert [path.name for path in tmp_path.iterdir()] == ["token"]
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert make_run_token(tmp_path, {}) == find_run_token(tmp_path, {})


def test_the_environment_has_precedence_and_no_file_is_written(tmp_path):
    environment = {"DISTFLOW_TOKEN": "a" * 32 + "\n"}
    assert make_run_token(tmp_path, environment) == b"a" * 32
    assert find_run_token(None, environment) == b"a" * 32
    assert not list(tmp_path.iterdir())


def test_what_holds_no_secret_is_refused_with_the_fix(tmp_path):
    with pytest.raises(ValueError, match="set DISTFLOW_TOKEN to that of the trainers"):
        find_run_token(None, {})
    with pytest.raises(ValueError, match="token does not exist: set .*trainers first"):
        find_run_token(tmp_path, {})
    with pytest.raises(ValueError, match="DISTFLOW_TOKEN holds 5 bytes.*openssl rand"):
        find_run_token(tmp_path, {"DISTFLOW_TOKEN": "short"})
    make_run_token(tmp_path, {})
    os.chmod(tmp_path / "token", 0o640)
    with pytest.raises(ValueError, match="token has mode 640.*remove it"):
        find_run_token(tmp_path, {})
    os.chmod(tmp_path / "token", 0o600)
    (tmp_path / "token").write_text("")
    with pytest.raises(ValueError, match="holds 0 bytes"):
        find_run_token(tmp_path, {})
