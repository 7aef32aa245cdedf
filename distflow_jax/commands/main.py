"""Entry point of `distflow SUBCOMMAND` and of scripts/: help, flags, then the subcommand's module.

A subcommand's module is imported once its flags are known, so that --help needs no jax.
"""

import os
import pathlib
import pydoc
import signal
import sys
import traceback

from absl import flags

import distflow_jax
from distflow_jax.commands.command_help import help_text, launch_overview, overview
from distflow_jax.commands.command_line import run_main, with_flag_files
from distflow_jax.commands.launch import hosts
from distflow_jax.commands.parsed_command import define, module_of, options_of, with_config_files
from distflow_jax.commands.subcommands import LAUNCHERS, SUBCOMMANDS
from distflow_jax.config.user_error import EXIT_USAGE, user_error
from distflow_jax.did_you_mean import hint
from distflow_jax.watchdog.exit_codes import EXIT_PREEMPTED

JAX = "jax>=0.10,<0.13"  # as in pyproject.toml
_PLATFORMS = "https://docs.jax.dev/en/latest/installation.html"
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
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: os._exit(EXIT_PREEMPTED))
    if set(arguments) & set(_HELP):
        _show(help_text(command, program))
        sys.exit(0)
    try:
        given, arguments = len(arguments), with_flag_files(arguments)
        sys.argv[len(sys.argv) - given :] = arguments  # where ml_collections looks keys up
        for flag in command.flags:
            define(flag, program, flags.FLAGS)
        module = module_of(command)
        argv = [program, *with_config_files(arguments)]
    except (ValueError, FileNotFoundError) as error:
        sys.exit(user_error(str(error)))
    except (ImportError, RuntimeError) as error:
        if not (problem := _jax_problem(error)):
            raise
        sys.exit(user_error(problem))
    run_main(
        lambda rest: module.main(options_of(command, rest, flags.FLAGS)),
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


def _show(text: str) -> None:
    """Prints a text, page by page on a terminal."""
    if sys.stdout.isatty():
        pydoc.pager(text)
    else:
        print(text, end="")
