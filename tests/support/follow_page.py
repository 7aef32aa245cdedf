"""A page followed to the letter: its files are written, its Python and its commands are run."""

import os
import pathlib
from collections.abc import Iterable, Mapping

from support import haste
from support.doc_blocks import Block, commands
from support.paths import ROOT
from support.programs import finished

SHELL = ("", "bash")  # languages of blocks with commands
SECONDS = 1800


def place(folder: pathlib.Path) -> pathlib.Path:
    """A folder in which commands find scripts/ and configs/, as in the repository's root."""
    for name in ("scripts", "configs"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def environment(folder: pathlib.Path, *, hurried: bool = True) -> dict[str, str]:
    """The environment of a command, with one device.

    `hurried`: programs are compiled without optimization.
    """
    env = haste.environment() if hurried else os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    return env | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}


def run(folder: pathlib.Path, command: list[str], env: Mapping[str, str] | None = None) -> str:
    """Output of a command as it stands, with this interpreter for `python`; fails if it fails."""
    assert command[0] == "python", command
    env = environment(folder) if env is None else env
    return finished(*command[1:], cwd=folder, env=env, seconds=SECONDS).stdout


def follow(
    shown: Iterable[Block], folder: pathlib.Path, env: Mapping[str, str] | None = None
) -> list[str]:
    """Writes files and runs commands of blocks, in their order; returns what was printed."""
    printed = []
    for block in shown:
        if block.title:
            (folder / block.title).write_text(block.text)
        elif block.language == "python":
            printed.append(run(folder, ["python", "-c", block.text], env))
        else:
            assert block.language in SHELL, block
            printed += [run(folder, command, env) for command in commands(block.text)]
    return printed
