"""Flags of the subcommands as data, for absl, for --help and for the reference.

Nothing here imports jax: --help must be quick.
"""

import dataclasses
from typing import Any

from absl import flags

from distflow_jax.config.command_line import define_config


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag of a subcommand, --name=value."""

    name: str
    kind: str  # string, integer, float, boolean, list, enum or config
    default: Any
    meaning: str
    required: bool = False
    least: float | None = None
    most: float | None = None
    choices: tuple[str, ...] = ()  # of an enum

    def define(self, module: str) -> None:
        """Defines the flag for absl, as one of `module`."""
        of = {"module_name": module}
        match self.kind:
            case "config":
                define_config(self.meaning)
            case "enum":
                flags.DEFINE_enum(self.name, self.default, list(self.choices), self.meaning, **of)
            case "integer":
                bounds = self.least, self.most
                flags.DEFINE_integer(self.name, self.default, self.meaning, *bounds, **of)
            case "float":
                bounds = self.least, self.most
                flags.DEFINE_float(self.name, self.default, self.meaning, *bounds, **of)
            case "boolean":
                flags.DEFINE_boolean(self.name, self.default, self.meaning, **of)
            case "list":
                flags.DEFINE_list(self.name, self.default, self.meaning, **of)
            case _:
                flags.DEFINE_string(self.name, self.default, self.meaning, **of)
        if self.required:
            flags.mark_flag_as_required(self.name)


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
    "The run's configuration: the name of a shipped config or a .py file, each with its argument "
    "after a colon.",
    required=True,
)
RUN = string("run", "", "Folder of a run: use its newest weights.")
JOB = (
    string("coordinator", None, "HOST:PORT of process 0, for a job that is not detected."),
    integer("num_processes", None, "Number of processes of the job.", 1),
    integer("process_id", None, "Number of this process, from 0.", 0),
)
