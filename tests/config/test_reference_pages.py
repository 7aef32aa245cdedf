"""docs/reference/ is what the code says: keys, metrics and flags."""

import importlib
import importlib.util
import re
import sys

import pytest
from support.paths import ROOT

from distflow_jax.commands.subcommands import LAUNCHERS, SUBCOMMANDS
from distflow_jax.config.key_reference import keys

SOURCE = ROOT / "scripts" / "docs" / "make_reference.py"
spec = importlib.util.spec_from_file_location("make_reference", SOURCE)
make_reference = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_reference)


def test_no_page_is_stale():
    assert not make_reference.stale(), "run python scripts/docs/make_reference.py"


def test_every_key_has_a_row():
    rows = re.findall(r"^\| `([\w.]+)` \|", make_reference.config_page(), re.MULTILINE)
    assert rows == list(keys())


COMMANDS = [*SUBCOMMANDS, *(f"launch {name}" for name in LAUNCHERS)]


def test_every_flag_has_a_meaning():
    for command in COMMANDS:
        assert make_reference.flags_of(command)
        for flag in make_reference.flags_of(command):
            assert flag.help, (command, flag.name)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_every_flag_of_a_launcher_has_a_row(name):
    """As --help prints it: default, choices and whether it must be given."""
    launcher = importlib.import_module(f"distflow_jax.commands.launch.{name}")
    printed = " ".join(launcher.make_parser().format_help().split())
    options = printed.split(" options: ")[1].split(" example: ")[0]
    flags = make_reference.flags_of(f"launch {name}")
    assert [f.name for f in flags] == [
        x for x in re.findall(r"(?<!\S)--(\w+)(?= )", options) if x != "help"
    ]
    usage = printed.split(" -- ")[0].split(" command ")[0]
    for flag in flags:
        assert flag.required == (not re.search(rf"\[--{flag.name}\b", usage))
        assert flag.help in printed
        if flag.choices:
            assert f"--{flag.name} {{{','.join(flag.choices)}}}" in options
        if flag.default not in ("", "False"):
            assert re.search(rf"\(default( {flag.default})?\)", printed), flag
    assert not {str(ROOT), sys.executable} & {f.default for f in flags}


def test_a_row_names_the_values_that_are_allowed():
    page = make_reference.flags_page()
    assert "| `--config` | required |" in page
    assert "One of float32, bfloat16, float16." in page and "From 0 to 65535." in page
    assert "| `--python` | `.venv/bin/python` |" in page
    assert "| `--directory` |  | folder to run in (default: this one) |" in page
    assert "| `--tpu` |  | TPU generation. One of tpu7x, v4, v5e, v5p, v6e. |" in page


def test_every_command_has_a_section():
    page = make_reference.flags_page()
    assert re.findall(r"^## distflow (.*)$", page, re.MULTILINE) == COMMANDS
