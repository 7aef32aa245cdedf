"""Every name is a usable path, or causes one line that names it."""

import os
import pathlib

import pytest
from support.graph_text import read_graph
from support.named_places import KINDS, MADE, NAMED, REFUSED, make_place

from distflow_jax.dag.graph_yaml import MOST_BASES
from distflow_jax.parsing import paths
from distflow_jax.parsing.json_text import read_json_object, read_text
from distflow_jax.parsing.paths import checked_path, named_path, reading


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SURELY_NOT_SET", raising=False)
    monkeypatch.chdir(tmp_path)


def refusal(function, *arguments):
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        function(*arguments)
    message = str(caught.value)
    assert type(caught.value) in (ValueError, FileNotFoundError)
    assert message.isprintable() and len(message) < 2000, message
    return message


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", [*MADE, *NAMED])
def test_every_place(tmp_path, kind, place):
    text = make_place(tmp_path / "x", place, ".txt")
    before = sorted(tmp_path.rglob("*"))
    if place in REFUSED[kind]:
        assert refusal(checked_path, kind, "--flag", text).startswith("--flag")
    else:
        assert checked_path(kind, "--flag", text) == pathlib.Path(os.path.expanduser(text))
    assert sorted(tmp_path.rglob("*")) == before  # a check makes nothing


@pytest.mark.parametrize("place", sorted(REFUSED["file"] - {"blank"}))
def test_readers_say_it_too(tmp_path, place):
    path = pathlib.Path(make_place(tmp_path / "x", place, ".json"))
    if place not in ("null_character", "bytes"):  # such a name has not come so far
        for reader in (read_json_object, lambda path: read_text(path, 1 << 20)):
            assert str(path)[:200] in refusal(reader, path)


def test_tildes_and_variables(tmp_path, monkeypatch):
    monkeypatch.setenv("RUNS", "/shared/runs")
    for text, path in {
        "~": tmp_path / "home",
        "~/a b": tmp_path / "home" / "a b",
        "$HOME/x": tmp_path / "home" / "x",
        "${RUNS}/first": "/shared/runs/first",
        "$RUNS/$RUNS": "/shared/runs//shared/runs",
        "a~b/~": "a~b/~",
        "./~": "./~",
        "5%/{x}": "5%/{x}",
        "5$/x$": "5$/x$",
        " x": " x",
    }.items():
        assert named_path("--flag", text) == pathlib.Path(path)
    assert named_path("base", "x.yaml", "/graphs") == pathlib.Path("/graphs/x.yaml")
    assert named_path("base", "~/x.yaml", "/graphs") == tmp_path / "home" / "x.yaml"
    # files that are called so
    for name in ("cost$.jsonl", "~draft.txt", "$UNSET_NAME"):
        (tmp_path / name).touch()
        assert named_path("--flag", name) == pathlib.Path(name)
    assert "stands for nothing" in refusal(named_path, "--flag", "$UNSET_NAME/x")
    assert "key /x/ cannot be looked up" not in refusal(named_path, "a key", "~nosuchuser")


def test_a_name_says_whose_it_is():
    assert refusal(checked_path, "file", "--file", "no") == "--file=no does not exist"
    assert refusal(checked_path, "file", "config file", "no") == "config file no does not exist"
    assert refusal(named_path, "--workdir", " ") == "--workdir is empty: name a file or a folder"


def test_a_file_is_read_as_far_as_its_bound(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 100)
    with reading(path, most=100) as file:
        assert file.read() == b"x" * 100
    assert "It has more than 99 bytes" in refusal(lambda: reading(path, most=99).__enter__())
    path.write_bytes(b"\xff")
    assert "not UTF-8 text: byte 1 is 0xff" in refusal(read_text, path, 10)


def test_errors_of_the_reader_are_its_own(tmp_path):
    """Only those of the system are said to be the path's."""
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(KeyError), reading(path):
        raise KeyError("mine")
    with pytest.raises(ValueError, match=r"file cannot be read: Stale file handle"), reading(path):
        raise OSError(116, "Stale file handle")


def test_a_folder_without_rights(tmp_path, monkeypatch):
    """Root has all rights: the system's answers are given here."""
    (tmp_path / "x").touch()
    monkeypatch.setattr(paths.os, "access", lambda *_: False)
    for kind in ("new_file", "new_folder"):
        assert "is no folder for that" in refusal(checked_path, kind, "--out", tmp_path / "a" / "b")

    def forbidden(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(paths.os, "open", forbidden)
    monkeypatch.setattr(paths.os, "scandir", forbidden)
    for kind in ("file", "folder"):
        said = refusal(checked_path, kind, "--in", tmp_path / "x")
        assert said.endswith("x cannot be read: Permission denied")
    monkeypatch.setattr(paths.os, "stat", forbidden)
    assert "cannot be looked up: Permission denied" in refusal(named_path, "--in", "x")


# -- files that name files -------------------------------------------------------------------------


def graphs(folder, bases):
    """Files of graphs; {name: its base}."""
    for name, base in bases.items():
        (folder / f"{name}.yaml").write_text(f"name: {name}\nbase: {base}\nnodes: []\n")


@pytest.mark.parametrize(
    "bases",
    [
        {"a": "a.yaml"},
        {"a": "./../{here}/a.yaml"},
        {"a": "b.yaml", "b": "a.yaml"},
        {"a": "b.yaml", "b": "c.yaml", "c": "link.yaml"},
    ],
)
def test_a_graph_does_not_start_from_itself(tmp_path, bases):
    (tmp_path / "link.yaml").symlink_to("b.yaml")
    graphs(tmp_path, {k: v.replace("{here}", tmp_path.name) for k, v in bases.items()})
    said = refusal(read_graph, tmp_path / "a.yaml")
    assert "base leads to" in said and "again" in said


def test_a_chain_of_bases_has_an_end(tmp_path):
    chain = {f"g{i}": f"g{i + 1}.yaml" for i in range(1000)}
    graphs(tmp_path, chain | {f"g{MOST_BASES - 1}": "grpo"})
    assert read_graph(tmp_path / "g0.yaml").name == "g0"
    graphs(tmp_path, chain)
    assert f"after {MOST_BASES} other bases" in refusal(read_graph, tmp_path / "g0.yaml")


@pytest.mark.parametrize("place", ["folder", "loop", "pipe", "binary", "huge", "missing", "long"])
def test_a_base_is_a_file(tmp_path, place):
    base = make_place(tmp_path / "x", place, ".yaml")
    graphs(tmp_path, {"a": base})
    assert "place.yaml" in refusal(read_graph, tmp_path / "a.yaml") or place == "long"
