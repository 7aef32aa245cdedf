"""Commands as text, passed through the checks that their subcommands begin with."""

import re
import shlex
import sys
from unittest import mock

from absl import flags

from distflow_jax.commands.command_line import read_flags
from distflow_jax.commands.launch import local
from distflow_jax.commands.parsed_command import define, module_of, options_of, with_config_files
from distflow_jax.commands.subcommands import MODULE, SUBCOMMANDS

_SCRIPT = re.compile(r"(?:.*/)?(\w+)\.py")


def check(command):
    """Raises ValueError or FileNotFoundError for a command that its own checks refuse.

    It begins with `distflow`, or with `python` and a script, or is the command of a launcher.
    """
    words = shlex.split(command)
    if "--" in words:
        words = launched(words)
    script = _SCRIPT.fullmatch(words[1])
    name = script[1] if script else words[1]
    if name not in SUBCOMMANDS:
        raise ValueError(f"{command!r} is no command of distflow")
    subcommand, argv = SUBCOMMANDS[name], [name, *with_config_files(words[2:])]
    values = flags.FlagValues()
    with mock.patch.object(sys, "argv", argv):
        flags.DEFINE_boolean("debug", False, "", flag_values=values)
        for flag in subcommand.flags:
            define(flag, name, values)
        rest = read_flags(argv, values, takes_arguments=bool(subcommand.arguments))
        module_of(subcommand).checked(options_of(subcommand, rest, values))


def launched(words):
    """The command that `distflow launch local` or scripts/launch_local.py starts."""
    start = next(i for i, word in enumerate(words) if word.startswith("--"))
    command = local.parse_arguments(words[start:]).command
    if MODULE in command:
        return ["distflow", *command[command.index(MODULE) + 1 :]]
    return ["python", *command]
