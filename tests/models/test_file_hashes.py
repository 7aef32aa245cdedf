"""A model folder that lists hashes of its files is read only if all are as listed."""

import functools
import re
import shutil
import subprocess

import numpy as np
import pytest
from support.model_files import SIZES, assert_params, random_params, tensors_of, write_hf

from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.weights import file_hashes
from distflow_jax.models.weights.file_hashes import FILE, stated_hashes, write_hashes
from distflow_jax.models.weights.hf_folder import Export, write_hf_folder
from distflow_jax.models.weights.source import open_model, open_shapes

TIED = DecoderConfig(**SIZES, max_position=128)


@pytest.fixture
def folder(tmp_path):
    """An export in shards, as the command writes it."""
    params = random_params(TIED)
    source = open_model(str(write_hf(tmp_path / "m", TIED, tensors_of(TIED, params))))
    write_hf_folder(
        tmp_path / "out",
        Export(source.config, source.tokenizer, source.params, source.tokenizer_folder),
        max_shard_bytes=20_000,
    )
    return tmp_path / "out"


def read(path):
    return dict(open_model(str(path)).params())


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_an_export_is_checked_by_the_standard_tool(folder):
    assert shutil.which("sha256sum"), "a tool of GNU coreutils"
    check = functools.partial(
        subprocess.run, ["sha256sum", "--check", "--strict", FILE], cwd=folder, capture_output=True
    )
    done = check(text=True)
    assert done.returncode == 0, done.stderr
    names = {path.name for path in folder.iterdir()} - {FILE}
    assert {line.partition(": ")[0] for line in done.stdout.splitlines()} == names
    assert_params(open_model(str(folder)), random_params(TIED))
    flip(folder / "generation_config.json", 3)
    assert check().returncode


def test_any_flipped_bit_of_any_file_is_named(folder):
    """In headers and settings too, where the reader alone would give another reason, or none."""
    draw = np.random.default_rng(0)
    paths = sorted(path for path in folder.iterdir() if path.name != FILE)
    assert len(paths) > 5
    for path in paths:
        before = path.read_bytes()
        for at in {0, len(before) - 1, int(draw.integers(len(before)))}:
            flip(path, at)
            named = rf"{re.escape(str(path))} is not the file that {FILE} states: wanted SHA-256 "
            with pytest.raises(ValueError, match=named) as caught:
                read(folder)
            assert "\n" not in str(caught.value)
            path.write_bytes(before)
    assert_params(open_model(str(folder)), random_params(TIED))


def test_large_weights_are_verified_when_they_are_read_once(folder, monkeypatch):
    monkeypatch.setattr(file_hashes, "_SMALL", 10_000)  # below the shards' size
    weights = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    assert weights.stat().st_size > 10_000
    source = open_model(str(folder))
    hashed = []
    sha256_of = file_hashes.sha256_of
    monkeypatch.setattr(file_hashes, "sha256_of", lambda p: hashed.append(p.name) or sha256_of(p))
    assert_params(source, random_params(TIED))
    assert hashed.count(weights.name) == 1
    assert_params(source, random_params(TIED))
    assert hashed.count(weights.name) == 1
    flip(weights, -1)
    assert open_shapes(str(folder)).config == source.config  # plans read no weights
    stream = open_model(str(folder)).params()
    with pytest.raises(ValueError, match=weights.name):
        dict(stream)


def test_a_missing_file_and_one_that_is_not_listed(folder):
    (folder / "README.md").write_text("not listed")
    assert_params(open_model(str(folder)), random_params(TIED))
    (folder / "generation_config.json").unlink()
    with pytest.raises(ValueError, match=rf"generation_config.json is missing, which {FILE} lists"):
        read(folder)


def test_a_single_file_beside_a_list_of_several_models(tmp_path):
    first = write_hf(tmp_path / "m", TIED, tensors_of(TIED, random_params(TIED)))
    (first / "other.gguf").write_bytes(b"GGUF")
    write_hashes(first)
    (first / "other.gguf").unlink()
    assert_params(open_model(str(first / "model.safetensors")), random_params(TIED))
    flip(first / "model.safetensors", -1)
    with pytest.raises(ValueError, match="model.safetensors is not the file"):
        read(first / "model.safetensors")


def test_other_ways_to_write_the_list(tmp_path):
    digest = "AB" * 32
    lines = ["# made by hand", "", f"{digest} *a.json", f"{digest}  ./b.json"]
    lines += [f"{digest}  sub/c", f"{digest}  {FILE}"]  # of other folders, and itself
    (tmp_path / FILE).write_text("\n".join(lines))
    stated = stated_hashes(tmp_path)
    assert {name: found.digest for name, found in stated.items()} == {
        "a.json": digest.lower(),
        "b.json": digest.lower(),
    }


@pytest.mark.parametrize("line", ["abc  a.json", "\\" + "0" * 64 + "  a\\nb", "0" * 64, "\0"])
def test_a_list_that_cannot_be_read(folder, line):
    (folder / FILE).write_text(line)
    with pytest.raises(ValueError, match=f"{FILE}, line 1: expected 64 hex digits"):
        read(folder)
