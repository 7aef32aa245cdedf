"""docs/reference/ is what the code says: keys, metrics and flags."""

import importlib.util
import re

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


def test_every_command_has_a_section():
    page = make_reference.flags_page()
    assert re.findall(r"^## distflow (.*)$", page, re.MULTILINE) == COMMANDS
