"""The flags of a subcommand: their definition for absl, and their values once they are parsed."""

import importlib
import math
import types
from collections.abc import Sequence

from absl import flags

from distflow_jax.commands.command_flags import Flag
from distflow_jax.commands.command_line import chosen_keys, define_config, read_flags
from distflow_jax.commands.subcommands import MODULE, SUBCOMMANDS, Subcommand
from distflow_jax.config.shipped import config_file
from distflow_jax.parsing.paths import KINDS, checked_path

_CONFIG = ("--config", "-config")


def module_of(command: Subcommand) -> types.ModuleType:
    """The module of a subcommand, with `main` and `checked`; needs jax."""
    return importlib.import_module(f"{MODULE}.{command.module}")


def parsed_apart(name: str, arguments: Sequence[str]) -> types.SimpleNamespace:
    """The options of a subcommand, whose flags are none of this process.

    Raises ValueError or FileNotFoundError for what its command line would end with.
    """
    command, argv = SUBCOMMANDS[name], [name, *with_config_files(arguments)]
    values = flags.FlagValues()
    flags.DEFINE_boolean("debug", False, "", flag_values=values)
    for flag in command.flags:
        define(flag, name, values, argv)
    rest = read_flags(argv, values, takes_arguments=bool(command.arguments))
    return options_of(command, rest, values)


def define(
    flag: Flag, module: str, values: flags.FlagValues, argv: Sequence[str] | None = None
) -> None:
    """Defines a flag among `values`, as one of `module`; `argv` is what they parse, None: that of
    the process."""
    name, default, meaning = flag.name, flag.default, flag.meaning
    of = {"module_name": module, "flag_values": values}
    match flag.kind:
        case "config":
            define_config(meaning, values, argv)
        case "enum":
            flags.DEFINE_enum(name, default, list(flag.choices), meaning, **of)
        case "integer":
            flags.DEFINE_integer(name, default, meaning, flag.least, flag.most, **of)
        case "float":
            flags.DEFINE_float(name, default, meaning, flag.least, flag.most, **of)
            flags.register_validator(name, _is_finite, "must be a finite number", values)
        case "boolean":
            flags.DEFINE_boolean(name, default, meaning, **of)
        case "list":
            flags.DEFINE_list(name, default, meaning, **of)
        case _:
            flags.DEFINE_string(name, default, meaning, **of)
    if flag.required:
        flags.mark_flag_as_required(name, values)


def _is_finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)


def options_of(
    command: Subcommand, rest: Sequence[str], values: flags.FlagValues
) -> types.SimpleNamespace:
    """The parsed flags of a subcommand.

    Its attributes are the flags' values, `chosen`, the set of keys in --config.KEY=VALUE, and
    `arguments`, those that are not flags.
    """
    found = {flag.name: values[flag.name].value for flag in command.flags}
    for flag in command.flags:
        if flag.kind in KINDS and (path := found[flag.name]) != flag.default:
            found[flag.name] = str(checked_path(flag.kind, f"--{flag.name}", path))
    chosen = chosen_keys(values) if command.has_config else set()
    return types.SimpleNamespace(**found, chosen=chosen, arguments=tuple(rest[1:]))


def with_config_files(arguments: Sequence[str]) -> list[str]:
    """The arguments with the file of a config in place of its name, in --config=tiny."""
    found = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        name, equals, value = argument.partition("=")
        if name in _CONFIG and equals:
            found.append(f"{name}={config_file(value)}")
        else:
            found.append(config_file(argument) if before in _CONFIG else argument)
    return found
