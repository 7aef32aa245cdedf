"""JetStream is imported without seqio, and a user's own seqio stays what it is."""

import importlib.util
import subprocess
import sys

import pytest
from support.waiting import HANG

from distflow_jax.rollout import jetstream_api

OWN = """
import seqio
from distflow_jax.rollout.jetstream_api import engine_api, token_utils
assert seqio is sys.modules["seqio"] and seqio.MARK == "own"
import seqio.vocabularies, tiktoken
assert seqio.vocabularies.MARK == "own" and tiktoken.MARK == "own"
assert engine_api.Engine.__module__ == "jetstream.engine.engine_api"
"""
NONE = """
from distflow_jax.rollout.jetstream_api import engine_api, token_utils
assert not [name for name in sys.modules if name.split(".")[0] in ("seqio", "tiktoken")]
try:
    token_utils.SentencePieceVocabulary("model")
except RuntimeError as error:
    print(error)
"""


def run(code, folder):
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r}){code}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG)


@pytest.fixture
def packages(tmp_path):
    """Packages of the user's own, which JetStream could not use."""
    for name in ("seqio/__init__", "seqio/vocabularies", "tiktoken/__init__"):
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text('MARK = "own"\n')
    return tmp_path


def test_a_users_own_packages_are_neither_used_nor_replaced(packages):
    done = run(OWN, packages)
    assert done.returncode == 0, done.stderr


def test_nothing_stands_in_for_them_afterwards(tmp_path):
    done = run(NONE, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "import jetstream.engine.token_utils before distflow_jax" in done.stdout


def test_other_threads_can_look_for_them_meanwhile():
    with jetstream_api._without_tokenizers():
        for name in ("seqio", "seqio.vocabularies", "tiktoken", "tiktoken.load"):
            assert importlib.util.find_spec(name).name == name


def test_without_jetstream_the_error_has_the_command(tmp_path):
    code = "\nsys.modules['jetstream'] = None\nimport distflow_jax.rollout.jetstream_api"
    (*_, line) = run(code, tmp_path).stderr.splitlines()
    assert line == (
        "ImportError: google-jetstream is not installed: "
        "pip install --no-deps google-jetstream==0.2.2"
    )
