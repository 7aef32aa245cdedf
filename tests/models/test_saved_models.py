"""Models written by `save_pretrained` of the pinned and of the newest release of transformers.

Nightly: what two releases of transformers save is read, for every family and form (`make setup-
torch`).
"""

import os
import pathlib
import shutil
import subprocess

import ml_dtypes
import numpy as np
import pytest
from support.paths import ROOT
from support.rewritten import CASES, VOCAB, wider

from distflow_jax.models.families.tensors import EMBEDDING
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.models.weights.source import open_model

SCRIPT = ROOT / "scripts/golden/save_pretrained.py"
PINS = ROOT / "scripts/golden"


def pinned(name):
    lines = (PINS / name).read_text().splitlines()
    (version,) = [line.partition("==")[2] for line in lines if line.startswith("transformers==")]
    return version


def saved(out, release):
    """Runs the script in the environment of `make setup-torch`; returns transformers' version."""
    interpreter = os.environ.get("DISTFLOW_TORCH_PYTHON", ROOT / ".venv-torch/bin/python")
    newest = pathlib.Path(interpreter).parents[1] / "newest"
    found = shutil.which(interpreter)
    if found is None or (release == "newest" and not newest.is_dir()):
        pytest.skip("no environment with torch and transformers: `make setup-torch` makes one")
    paths = [ROOT, ROOT / "tests", *([newest] if release == "newest" else [])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, reversed(paths)))}
    command = [found, str(SCRIPT), f"--out={out}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=out)
    assert done.returncode == 0, done.stderr[-3000:]
    return (out / "version.txt").read_text()


def check(case, folder):
    """The folder is the case's model, bit for bit or rounded once, with its own head if it has."""
    Tokenizer.byte_level(VOCAB).backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    config, params = wider(case)
    source = open_model(str(folder))
    read = dict(source.params())
    if folder.name == "another head":
        np.testing.assert_array_equal(read.pop("head").T, np.roll(params[EMBEDDING], 1, axis=0))
    else:
        assert source.config.tie_embeddings == config.tie_embeddings
    assert read.keys() == params.keys()
    for path, array in params.items():
        if folder.name == "bfloat16":
            array = array.astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(read[path], array, err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("release", "pins"),
    [("pinned", "requirements.txt"), ("newest", "requirements-newest.txt")],
)
def test_what_transformers_writes_is_read(release, pins, tmp_path):
    """Every family and form, in names, dtypes and shards: weights/source.py and families/."""
    assert saved(tmp_path, release) == pinned(pins)
    folders = [path for path in tmp_path.glob("*/*") if path.is_dir() and path.name != "ours"]
    assert len(folders) >= 5 * len(CASES)
    for folder in folders:
        check(folder.parent.name, folder)
