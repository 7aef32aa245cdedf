"""Flags of the subcommands as data, for the parser, for --help and for the reference.

Only the standard library is imported: --help must be quick.
"""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag of a subcommand, --name=value."""

    name: str
    kind: (
        str  # string, integer, float, boolean, list, enum, config, or of a path (parsing/paths.py)
    )
    default: Any
    meaning: str
    required: bool = False
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()  # of an enum


def string(name: str, default: str | None, meaning: str, *, required: bool = False) -> Flag:
    """A flag whose value is text."""
    return Flag(name, "string", default, meaning, required)


def number(
    name: str,
    default: float | None,
    meaning: str,
    least: float | None = None,
    most: float | None = None,
) -> Flag:
    """A flag whose value is a float."""
    return Flag(name, "float", default, meaning, least=least, most=most)


def integer(
    name: str,
    default: int | None,
    meaning: str,
    least: int | None = None,
    most: int | None = None,
) -> Flag:
    """A flag whose value is an integer."""
    return Flag(name, "integer", default, meaning, least=least, most=most)


def switch(name: str, default: bool, meaning: str) -> Flag:
    """A flag that is on or off: --name, --noname."""
    return Flag(name, "boolean", default, meaning)


CONFIG = Flag(
    "config",
    "config",
    None,
    "The run's configuration: the name of a shipped config or a .py file, with an optional "
    "argument after a colon.",
    required=True,
)
RUN = Flag("run", "folder", "", "Folder of a run: use its newest weights.")
JOB = (
    string("coordinator", None, "HOST:PORT of process 0, if the job is not detected."),
    integer("num_processes", None, "Number of processes of the job.", 1),
    integer("process_id", None, "Number of this process, from 0.", 0),
)
