"""Files of flags, and the errors of a subcommand that are one line rather than a traceback."""

import errno
import json

import pytest

from distflow_jax.commands.command_line import MOST_FLAG_FILES, _call, with_flag_files


def test_files_of_flags_stand_where_they_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a").write_text("# first\n--config=tiny\n\n  --out=b c  \n//--no\n--flagfile=~/b\n")
    (tmp_path / "b").write_text("--config.seed=3\r\n--nocompile\n")
    inside = ["--config=tiny", "--out=b c", "--config.seed=3", "--nocompile"]
    for named in (["--flagfile=~/a"], ["-flagfile", f"{tmp_path}/a"], ["--flagfile", "$HOME/a"]):
        assert with_flag_files(["--x=1", *named, "y"]) == ["--x=1", *inside, "y"]
    kept = ["--x", "--", "--flagfile=nowhere", "--flagfile"]
    assert with_flag_files(kept) == kept
    assert with_flag_files(["--flagfiles=3", "flagfile=3"]) == ["--flagfiles=3", "flagfile=3"]


@pytest.mark.parametrize("names", [[0], [1, 0], [1, 2, 0], [*range(1, 100), 0]])
def test_a_file_of_flags_does_not_name_itself(tmp_path, names):
    for number, other in enumerate(names):
        (tmp_path / str(number)).write_text(f"--flagfile={tmp_path}/{other}\n" * 3)
    with pytest.raises(ValueError, match=f"more than {MOST_FLAG_FILES} nested flag files"):
        with_flag_files([f"--flagfile={tmp_path}/0"])


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"\xff", "not UTF-8"), (b"x" * (17 << 20), "too many for such a file"), (None, "not exist")],
)
def test_a_file_of_flags_is_short_text(tmp_path, content, words):
    path = tmp_path / "flags"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=f"flags.* {words}"):
        with_flag_files([f"--flagfile={path}"])


class Flags:
    debug = False


def ending(monkeypatch, capsys, error):
    """The lines of a subcommand that ends with an error of a library; None for a traceback."""
    monkeypatch.setattr("distflow_jax.commands.command_line.flags.FLAGS", Flags)

    def main(_):
        if isinstance(error, Exception):
            raise error
        error()

    try:
        assert _call(main, ["x"]) == 2
    except Exception as raised:
        assert not isinstance(error, Exception) or raised is error
        return None
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_what_stands_at_a_name_is_the_users(monkeypatch, capsys, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "binary").write_bytes(b"ab\xff")
    for path in (tmp_path, tmp_path / "loop", tmp_path / "no", tmp_path / "loop" / "x"):
        assert path.name in ending(monkeypatch, capsys, path.read_text)
    for path in (tmp_path / ("n" * 300), tmp_path / "binary" / "x"):
        assert "n" in ending(monkeypatch, capsys, path.read_bytes)
    # Python 3.13 looks at once where older ones look at the first entry
    for call in ((tmp_path / "binary").mkdir, lambda: next((tmp_path / "binary").iterdir())):
        assert "binary" in ending(monkeypatch, capsys, call)
    line = ending(monkeypatch, capsys, lambda: (tmp_path / "binary").read_text("utf-8"))
    assert line == (
        "error: a file is not UTF-8 text: byte 3 is 0xff; --debug shows where it is read"
    )


@pytest.mark.parametrize(
    "error",
    [
        *(OSError(number, "x", "file") for number in (errno.EIO, errno.ENOSPC, errno.EMFILE)),
        *(ConnectionResetError("x"), TimeoutError("x"), BrokenPipeError(32, "x"), OSError("x")),
        *(
            KeyError("x"),
            RuntimeError("x"),
            MemoryError(),
            lambda: json.loads("{"),
            lambda: int("x"),
        ),
    ],
)
def test_what_may_be_a_bug_or_pass_has_a_traceback(monkeypatch, capsys, error):
    """Launchers start a run again after exit code 1, and not after 2."""
    assert ending(monkeypatch, capsys, error) is None
