"""A disk that takes no more costs what was to be written, and nothing that was there."""

import errno
import os
import pathlib

import pytest

from distflow_jax.report import json_lines
from distflow_jax.report.json_lines import append, explained_disk_errors, write_atomic
from distflow_jax.report.run_writer import RunWriter, read_metrics

FULL = pathlib.Path("/dev/full")  # of Linux: every write fails with ENOSPC
needs_full = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full")


@pytest.fixture
def limited(tmp_path):
    """A file that takes no more than 8 bytes, by a limit of the kernel's."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = tmp_path / "file"
    path.write_text("before")
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))
    yield path
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_line_that_does_not_fit_leaves_the_file_as_it_was(limited):
    with pytest.raises(OSError) as found:
        append(limited, " and after\n")
    assert found.value.errno == errno.EFBIG
    assert limited.read_text() == "before"


def test_a_text_that_does_not_fit_leaves_the_file_as_it_was(limited):
    with pytest.raises(OSError) as found:
        write_atomic(limited, "longer than before")
    assert found.value.errno == errno.EFBIG
    assert limited.read_text() == "before" and list(limited.parent.iterdir()) == [limited]


@needs_full
def test_the_error_names_file_and_fix(tmp_path):
    (tmp_path / "events.jsonl").symlink_to(FULL)
    with pytest.raises(ValueError) as found, explained_disk_errors(tmp_path):
        append(tmp_path / "events.jsonl", "{}\n")
    assert str(found.value).startswith(f"{tmp_path} cannot be written (No space left on device).")
    assert "start again" in str(found.value) and "\n" not in str(found.value)


def test_other_errors_of_the_system_stay_what_they_are(tmp_path):
    with pytest.raises(ConnectionResetError), explained_disk_errors(tmp_path):
        raise ConnectionResetError(errno.ECONNRESET, "reset")


@pytest.fixture
def failing(monkeypatch):
    """os.replace fails with a given error, so many times."""
    monkeypatch.setattr(json_lines, "PAUSES", (0.0, 0.0))
    left, replace = [], os.replace

    def fail(source, target):
        if left:
            raise OSError(left.pop(), "failed", str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    return left


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_what_a_network_file_system_recovers_from_is_repeated(tmp_path, failing, caplog, number):
    failing += [number] * 2
    write_atomic(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text"
    assert caplog.text.count("trying again") == 2


def test_it_is_repeated_a_few_times_only(tmp_path, failing):
    failing += [errno.EIO] * 9
    with pytest.raises(OSError):
        write_atomic(tmp_path / "file", "text")
    assert len(failing) == 6


def test_a_full_disk_is_not_asked_again(tmp_path, failing):
    failing += [errno.ENOSPC] * 2
    with pytest.raises(OSError):
        write_atomic(tmp_path / "file", "text")
    assert len(failing) == 1


def test_a_run_goes_on_after_its_last_row(tmp_path, limited):
    """A row that did not fit is not there in part."""
    limited.unlink()
    resource = pytest.importorskip("resource")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    writer = RunWriter(tmp_path)
    step = 0
    with pytest.raises(OSError):
        while True:
            writer.metrics(step, {"loss": 1 / (step + 3)})
            step += 1
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == list(range(step))
    resource.setrlimit(resource.RLIMIT_FSIZE, (-1, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    writer = RunWriter(tmp_path, resume_step=step - 1)
    writer.metrics(step, {"loss": 0.0})
    assert read_metrics(tmp_path / "metrics.jsonl")[-1] == {"step": step, "loss": 0.0}
