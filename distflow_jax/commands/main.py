"""Entry point of `distflow SUBCOMMAND` and of scripts/: help, flags, then the subcommand's module.

A subcommand's module is imported once its flags are known, so that --help needs no jax.
"""

import importlib
import math
import os
import pathlib
import pydoc
import signal
import sys
import traceback
import types

from absl import flags

import distflow_jax
from distflow_jax.commands.command_flags import Flag
from distflow_jax.commands.command_help import help_text, launch_overview, overview
from distflow_jax.commands.command_line import chosen_keys, define_config, run_main, with_flag_files
from distflow_jax.commands.launch import hosts
from distflow_jax.commands.subcommands import LAUNCHERS, MODULE, SUBCOMMANDS, Subcommand
from distflow_jax.config.shipped import config_file
from distflow_jax.config.user_error import EXIT_USAGE, user_error
from distflow_jax.did_you_mean import hint
from distflow_jax.parsing.paths import KINDS, checked_path
from distflow_jax.watchdog.exit_codes import EXIT_PREEMPTED

JAX = "jax>=0.10,<0.13"  # as in pyproject.toml
_PLATFORMS = "https://docs.jax.dev/en/latest/installation.html"
_CONFIG = ("--config", "-config")
_HELP = ("--help", "-help", "-h", "--helpshort", "-?")


def main() -> None:
    """Runs `distflow`; ends the process with the subcommand's exit code."""
    arguments = sys.argv[1:]
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in _HELP:
        print(overview(), end="")
        sys.exit(0 if arguments else EXIT_USAGE)
    if name == "--version":
        print(f"distflow_jax {distflow_jax.__version__}")
        sys.exit(0)
    if name == "launch":
        launch(rest, "distflow launch")
    if name not in SUBCOMMANDS:
        sys.exit(user_error(f"unknown command {name!r} ({hint(name, [*SUBCOMMANDS, 'launch'])})"))
    run_subcommand(name, rest, f"distflow {name}")


def launch(arguments: list[str], program: str) -> None:
    """Runs a launcher, "local --processes=2 -- train ..."; ends the process with its exit code."""
    name = arguments[0] if arguments else "--help"
    if name in _HELP:
        print(launch_overview(), end="")
        sys.exit(0 if arguments else EXIT_USAGE)
    if name not in LAUNCHERS:
        sys.exit(user_error(f"unknown launcher {name!r} ({hint(name, LAUNCHERS)})"))
    hosts.run_launcher(name, arguments[1:], f"{program} {name}")


def run_script(name: str) -> None:
    """Runs the subcommand of the script of that name with the process's arguments."""
    run_subcommand(name, sys.argv[1:], f"python scripts/{name}.py")


def run_subcommand(name: str, arguments: list[str], program: str) -> None:
    """Parses the flags and runs the subcommand; ends the process with its exit code.

    `program` is how it was called, for --help.
    """
    command = SUBCOMMANDS[name]
    if name == "train":  # there is nothing to lose while modules are imported
        signal.signal(signal.SIGTERM, lambda *_: os._exit(EXIT_PREEMPTED))
    if set(arguments) & set(_HELP):
        _show(help_text(command, program))
        sys.exit(0)
    try:
        given, arguments = len(arguments), with_flag_files(arguments)
        sys.argv[len(sys.argv) - given :] = arguments  # where ml_collections looks keys up
        for flag in command.flags:
            _define(flag, program)
        module = importlib.import_module(f"{MODULE}.{command.module}")
        argv = [program, *_with_config_files(arguments)]
    except (ValueError, FileNotFoundError) as error:
        sys.exit(user_error(str(error)))
    except (ImportError, RuntimeError) as error:
        if not (problem := _jax_problem(error)):
            raise
        sys.exit(user_error(problem))
    run_main(
        lambda rest: module.main(_options(command, rest)),
        argv,
        takes_arguments=bool(command.arguments),
    )


def _jax_problem(error: Exception) -> str:
    """The remedy for an error of `import jax`; "" for any other error.

    jax or jaxlib is missing, they are of different releases, or jaxlib does not load here.
    """
    files = [pathlib.PurePath(x.filename) for x in traceback.extract_tb(error.__traceback__)]
    within = any(file.parts[-2:] == ("jax", "__init__.py") for file in files)
    if not within and getattr(error, "name", "") != "jax":
        return ""
    return (
        f"jax cannot be imported: {str(error).rstrip('.')}. Install one for this platform: "
        f'pip install --force-reinstall "{JAX}"; platforms with a jaxlib: {_PLATFORMS}'
    )


def _define(flag: Flag, module: str) -> None:
    """Defines a flag for absl, as one of `module`."""
    name, default, meaning, of = flag.name, flag.default, flag.meaning, {"module_name": module}
    match flag.kind:
        case "config":
            define_config(meaning)
        case "enum":
            flags.DEFINE_enum(name, default, list(flag.choices), meaning, **of)
        case "integer":
            flags.DEFINE_integer(name, default, meaning, flag.least, flag.most, **of)
        case "float":
            flags.DEFINE_float(name, default, meaning, flag.least, flag.most, **of)
            flags.register_validator(name, _is_finite, "must be a finite number", flags.FLAGS)
        case "boolean":
            flags.DEFINE_boolean(name, default, meaning, **of)
        case "list":
            flags.DEFINE_list(name, default, meaning, **of)
        case _:
            flags.DEFINE_string(name, default, meaning, **of)
    if flag.required:
        flags.mark_flag_as_required(name)


def _is_finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)


def _options(command: Subcommand, rest: list[str]) -> types.SimpleNamespace:
    """The parsed flags of a subcommand.

    Its attributes are the flags' values, `chosen`, the set of keys in --config.KEY=VALUE, and
    `arguments`, those that are not flags.
    """
    values = {flag.name: flags.FLAGS[flag.name].value for flag in command.flags}
    for flag in command.flags:
        if flag.kind in KINDS and (path := values[flag.name]) != flag.default:
            values[flag.name] = str(checked_path(flag.kind, f"--{flag.name}", path))
    chosen = set()
    if command.has_config:
        chosen = chosen_keys()
    return types.SimpleNamespace(**values, chosen=chosen, arguments=tuple(rest[1:]))


def _with_config_files(arguments: list[str]) -> list[str]:
    """The arguments with the file of a config in place of its name, in --config=tiny."""
    found = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        name, equals, value = argument.partition("=")
        if name in _CONFIG and equals:
            found.append(f"{name}={config_file(value)}")
        else:
            found.append(config_file(argument) if before in _CONFIG else argument)
    return found


def _show(text: str) -> None:
    """Prints a text, page by page on a terminal."""
    if sys.stdout.isatty():
        pydoc.pager(text)
    else:
        print(text, end="")
