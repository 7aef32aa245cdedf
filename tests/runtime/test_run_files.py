"""A run's folder is checked before anything is made in it."""

import json
import os
import pathlib
import stat
import subprocess

import pytest

from distflow_jax.config.config_dict import RENAMED, to_config_dict, to_json
from distflow_jax.config.run_config import Config
from distflow_jax.runtime.run_files import (
    FILES,
    FOLDERS,
    changes_named,
    check_readable,
    check_writable,
    private_files,
    run_folder,
    warn_of_changes,
)


def test_a_folder():
    assert run_folder("runs/first") == pathlib.Path("runs/first")
    assert run_folder(pathlib.Path("/shared/run")) == pathlib.Path("/shared/run")


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_not_the_current_folder(name):
    with pytest.raises(ValueError, match="--workdir is empty"):
        run_folder(name)


@pytest.mark.parametrize(
    "name, fix",
    [
        ("gs://bucket/run", "Filestore.*: gcloud storage cp --recursive FOLDER 'gs://bucket/run'$"),
        ("s3://bucket/run", "aws s3 cp --recursive FOLDER 's3://bucket/run'$"),
        ("hf://x", "is in no file system: mount"),
    ],
)
def test_a_url_is_not_made_a_folder(name, fix):
    with pytest.raises(ValueError, match=f"^--workdir={name} .*{fix}"):
        run_folder(name)


def test_a_name_that_is_not_utf8_is_refused():
    with pytest.raises(ValueError, match=r"--workdir='runs/\\udcff' is not UTF-8 \(byte 0xff at"):
        run_folder(os.fsdecode(b"runs/\xff"))


@pytest.mark.parametrize("name", [*FOLDERS, *FILES])
def test_what_is_in_the_way_is_named_before_the_run(tmp_path, name):
    check_writable(tmp_path)
    assert not list(tmp_path.iterdir())
    if name in FOLDERS:
        (tmp_path / name).touch()
    else:
        (tmp_path / name).mkdir()
    kind = "folder" if name in FOLDERS else "file"
    with pytest.raises(ValueError, match=f"{name} is no {kind}, and a run makes a {kind}"):
        check_writable(tmp_path)


def modes(folder):
    return {p.name: stat.S_IMODE(p.stat().st_mode) for p in folder.rglob("*")}


@pytest.mark.parametrize(
    "name, content, message",
    [
        (
            "metrics.jsonl",
            b'{"step": 1}\n{"ste\n{"step": 2}\n',
            "metrics.jsonl, line 2: no JSON obj",
        ),
        ("metrics.jsonl", b'{"step": null}\n', "metrics.jsonl, line 1: no JSON object with a step"),
        ("stragglers.jsonl", b"\xff\n", "stragglers.jsonl, line 1: no JSON object with a step"),
        ("config.json", b"{", "config.json"),
        ("metrics.jsonl", b'{"step": 1}\n{"ste', ""),  # a line that a kill cut off
    ],
)
def test_a_damaged_file_of_an_earlier_start_is_named_before_the_run(
    tmp_path, name, content, message
):
    (tmp_path / name).write_bytes(content)
    if not message:
        check_readable(tmp_path)
        return
    with pytest.raises(ValueError, match=message):
        check_readable(tmp_path)


def test_files_are_for_their_owner_alone(tmp_path):
    """So are files of processes that are started meanwhile."""
    before = os.umask(0o022)
    try:
        with private_files(True):
            (tmp_path / "run").mkdir()
            (tmp_path / "run" / "file").touch()
            subprocess.run(["touch", tmp_path / "run" / "child"], check=True)
        (tmp_path / "after").touch()
        with private_files(False):
            (tmp_path / "shared").touch()
    finally:
        os.umask(before)
    assert modes(tmp_path) == {
        **{"run": 0o700, "file": 0o600, "child": 0o600},
        **{"after": 0o644, "shared": 0o644},
    }


def test_keys_that_only_one_of_two_versions_knows_are_no_changes(tmp_path, caplog):
    now = json.loads(to_json(to_config_dict(Config())))
    older = json.loads(to_json(to_config_dict(Config())))
    del older["observe"]["private"], older["training"]["max_rejected"]
    older["mesh"]["stage"] = older["mesh"].pop("pipeline")
    former = {new: old for old, new in RENAMED.items()}
    names = {key: former[f"stream.{key}"].partition(".")[2] for key in older["stream"]}
    older["flow"] = {names[key]: value for key, value in older.pop("stream").items()}
    older["flow"]["stagger"] = 2  # it changed no number
    (tmp_path / "config.json").write_text(json.dumps(older))
    warn_of_changes(tmp_path / "config.json", now)
    assert not caplog.records
    now["observe"]["private"], now["training"]["steps"] = False, 7
    warn_of_changes(tmp_path / "config.json", now)
    assert "observe.private True -> False, training.steps" in caplog.text


def test_an_error_of_a_checkpoint_names_the_settings_that_changed(tmp_path):
    path, changed = tmp_path / "config.json", Config(dag="ppo", seed=3, compilation_cache="here")

    def fail():
        with changes_named(tmp_path, changed):
            raise ValueError("checkpoint 4 does not fit")

    for content in (None, "{", to_json(to_config_dict(changed))):  # nothing is known, or the same
        if content is not None:
            path.write_text(content)
        with pytest.raises(ValueError, match="^checkpoint 4 does not fit$"):
            fail()
    path.write_text(to_json(to_config_dict(Config())))
    named = "these settings changed: dag 'grpo' -> 'ppo', seed 0 -> 3$"
    with pytest.raises(ValueError, match=f"^checkpoint 4 does not fit. Since .* {named}"):
        fail()
    with changes_named(tmp_path, changed):
        pass
