"""A run's folder is checked before anything is made in it."""

import pathlib

import pytest

from distflow_jax.runtime.run_files import run_folder


def test_a_folder():
    assert run_folder("runs/first") == pathlib.Path("runs/first")
    assert run_folder(pathlib.Path("/shared/run")) == pathlib.Path("/shared/run")


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_not_the_current_folder(name):
    with pytest.raises(ValueError, match="--workdir is empty"):
        run_folder(name)


@pytest.mark.parametrize("name", ["gs://bucket/run", "s3://bucket/run", "hf://x"])
def test_a_url_is_not_made_a_folder(name):
    with pytest.raises(ValueError, match=f"--workdir='{name}' is no folder"):
        run_folder(name)
