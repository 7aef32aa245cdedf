"""Shared code of the launchers: their arguments, and what they submit."""

import argparse
import importlib
import os
import pathlib
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from distflow_jax.cluster import job
from distflow_jax.commands.subcommands import MODULE, SUBCOMMANDS, python_arguments
from distflow_jax.config.user_error import NAME_ERRORS, user_error
from distflow_jax.did_you_mean import hint
from distflow_jax.parsing.paths import refuse_bucket
from distflow_jax.planning.chips import CHIPS

# flags of a training run that no other program with its config takes
_OF_TRAINING = ("workdir", "replay", "profile_steps", "coordinator", "num_processes", "process_id")
_WRITTEN = ("workdir", "out", "log")  # flags of files and folders that are made
_MAY_BE_BUCKETS = ("config.compilation_cache",)


class LauncherParser(argparse.ArgumentParser):
    """A parser whose errors about unknown flags name the nearest one."""

    def error(self, message: str) -> NoReturn:
        """Ends the process with a message; that of an unknown flag names the nearest."""
        if unknown := re.search(r"^unrecognized arguments: (--?[\w-]+)", message):
            known = [flag for action in self._actions for flag in action.option_strings]
            message = f"unknown flag {unknown[1]} ({hint(unknown[1], known, str)})"
        super().error(message)

    def repeated(self, flag: str, metavar: str, about: str) -> None:
        """Adds a flag that may be given several times; its value is the list of all."""
        self.add_argument(flag, action="append", default=[], metavar=metavar, help=about)


def parser(doc: str, program: str) -> LauncherParser:
    """A parser that shows a launcher's docstring: summary, an example, details.

    `program` is how the launcher was called; it takes the place of `distflow launch NAME` in the
    example.
    """
    summary, example, details = doc.split("\n\n", 2)
    example = re.sub(r"distflow launch \w+", program, example)
    return LauncherParser(
        prog=program,
        description=summary + "\n\n" + details,
        epilog="example:\n  " + example.replace("\n", "\n  "),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_command(parser: argparse.ArgumentParser) -> None:
    """Adds the command after --, which `python_command` reads."""
    parser.add_argument(
        "command",
        nargs="+",
        help="train or another subcommand, or a Python script, with its flags, after --",
    )


def python_command(options: argparse.Namespace) -> list[str]:
    """Arguments of the Python interpreter for the command after --.

    Raises ValueError for one that begins with neither a subcommand, nor a .py file, nor an option
    of the interpreter.
    """
    for name, text in vars(options).items():
        if isinstance(text, str):
            refuse_bucket(f"--{name}", text, written=name in _WRITTEN)
    command = python_arguments(options.command)
    _refuse_buckets(command)
    word = next((word for word in command if word != "distflow"), "")
    if not (word.startswith("-") or word.endswith(".py")):
        raise ValueError(
            f"unknown command {word!r} after -- ({hint(word, SUBCOMMANDS)}); or give a .py file"
        )
    return command


def _refuse_buckets(command: Sequence[str]) -> None:
    """ValueError for a flag of a subcommand, or of its script, whose value is in a bucket."""
    programs = {pathlib.PurePath(word).stem for word in command if word[:1] != "-"}
    if not programs & {*SUBCOMMANDS}:  # a script of the user's own may read buckets
        return
    for word, after in zip(command, [*command[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if word.startswith("-") and name.lstrip("-") not in _MAY_BE_BUCKETS:
            refuse_bucket(name, value if equals else after, written=name.lstrip("-") in _WRITTEN)


def train_flags(command: Sequence[str]) -> tuple[int, list[str], str] | None:
    """Of a training run among an interpreter's arguments: (place of its program, flags that all
    programs with its config take, its --workdir or ""). None for another command."""
    trains = [i for i, word in enumerate(command) if word == "train" or word.endswith("train.py")]
    if not trains:
        return None
    kept, workdir, words = [], "", iter(command[trains[0] + 1 :])
    for word in words:
        name, equals, value = word.lstrip("-").partition("=")
        if not word.startswith("-") or name not in _OF_TRAINING:
            kept.append(word)
            continue
        value = value if equals else next(words, "")
        workdir = value if name == "workdir" else workdir
    return trains[0], kept, workdir


def check_run(
    options: argparse.Namespace, processes: int, devices: int, chip: str = "", folder: str = ""
) -> None:
    """Plans the training run of a command as its processes will, before it is submitted.

    `chip`: of planning/chips.py, or "gpu"; "": a CPU. `folder`: where they run, if it is here.
    Raises ValueError with the reason for which the run would end; other commands have no plan. A
    run that needs a file that is on the hosts alone is checked as far as that file, which is named.
    """
    found = train_flags(options.command)
    if found is None or options.unchecked:
        return
    sizes = [f"--processes={processes}", f"--devices={devices}", *([f"--chip={chip}"] * bool(chip))]
    flags = ["--nocompile", *sizes, *found[1]]
    done = subprocess.run(
        [sys.executable, "-P", "-m", MODULE, "plan", *flags],
        cwd=folder or None,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        *_, last = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        if absent := _absent(last):
            print(
                f"the run is not checked further: {absent} does not exist on this machine",
                file=sys.stderr,
            )
            return
        raise ValueError(
            f"the run would fail at its start: {last.removeprefix('error: ')} (to submit it "
            "anyway, use --unchecked)"
        )


def _absent(error: str) -> str:
    """The first absolute path of a message that does not exist on this machine, "" for none."""
    paths = re.findall(r"(?<![\w.~/-])/[^\s'\",;:]+", error)
    return next((path for path in paths if not os.path.exists(path.rstrip(".)"))), "")


def cluster_parser(doc: str, program: str, *, python: str) -> LauncherParser:
    """A parser with the flags of all launchers for clusters; see `parser`.

    `python` is the default of --python; "" stands for the interpreter of this process.
    """
    result = parser(doc, program)
    result.add_argument(
        "--dry_run",
        action="store_true",
        help="print the submission, and submit nothing",
    )
    result.repeated("--env", "NAME=VALUE", "a variable of the run")
    result.add_argument(
        "--unchecked",
        action="store_true",
        help="submit without checking the run, for example if its config is not on this machine",
    )
    default = f"default {python}" if python else "default: this one"
    result.add_argument("--python", default=python, help=f"interpreter on the hosts ({default})")
    add_command(result)
    return result


def variables(pairs: Sequence[str]) -> dict[str, str]:
    """The variables of --env. Raises ValueError for the job's own, which the launcher sets."""
    result = {"PYTHONUNBUFFERED": "1"}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise ValueError(f"--env must be NAME=VALUE, got {pair!r}")
        if name in (*job.VARIABLES, job.DISTRIBUTED):
            raise ValueError(f"--env={pair}: the launcher sets {name}")
        result[name] = value
    one_line("--env", *pairs)
    return result


def one_line(what: str, *texts: str) -> None:
    """Raises ValueError for a line break: submissions consist of lines."""
    for text in texts:
        if re.search(r"[\r\n]", text):
            raise ValueError(f"{what} takes no line breaks, got {text!r}")


def assignments(environment: Mapping[str, str]) -> str:
    """NAME=VALUE for every variable, quoted for a shell."""
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())


def volumes(given: Sequence[str], kind: str) -> dict[str, str]:
    """{volume: path on the hosts} of --volume=KIND:PATH; ValueError for another form."""
    result = {}
    for volume in given:
        name, _, path = volume.partition(":")
        if not re.fullmatch(r"/[^\s:\"']+", path):
            raise ValueError(f"--volume must be {kind}:/PATH, got {volume!r}")
        result[name_of("--volume", name)] = path
    return result


def check_workdir(command: Sequence[str], mounts: Mapping[str, str]) -> None:
    """Raises ValueError for a --workdir outside the shared volumes, local to each host.

    A training run must name one: its default is local too.
    """
    remedy = "give --volume=NAME:PATH and a --workdir below PATH"
    if (found := train_flags(command)) and not found[2]:
        raise ValueError(f"--workdir is missing: {remedy}")
    named, words = [], iter(command)
    for word in words:
        name, equals, value = word.lstrip("-").partition("=")
        if word.startswith("-") and name == "workdir":
            named.append(value if equals else next(words, ""))
    for folder in map(pathlib.PurePosixPath, named):
        if not any(folder.is_relative_to(path) for path in mounts.values()):
            raise ValueError(
                f"--workdir={folder} is not on a volume: each host would write its own folder "
                "and lose it; "
                f"{remedy}"
            )


def gpu_chip(name: str) -> str:
    """The chip of planning/chips.py for a GPU type of a cloud, such as nvidia-a100-80gb or A10G.

    "gpu", one whose chip the config alone says, for a type that is none of them; "" for no type.
    """
    words = f"-{re.sub('[^a-z0-9]+', '-', name.lower())}-"
    gpus = (c for c, chip in CHIPS.items() if chip.platform == "gpu")
    found = [c for c in gpus if re.search(f"-{c.replace('_', '-')}(gb)?-", words)]
    return max(found, key=len, default="gpu" if name else "")


def at_least(least: int, **sizes: int) -> None:
    """Raises ValueError for the first of the sizes that is below `least`."""
    for name, size in sizes.items():
        if size < least:
            raise ValueError(f"--{name} must be at least {least}, got {size}")


def name_of(flag: str, text: str, *, length: int = 63) -> str:
    """Returns `text` if it is a name in Kubernetes and Google Cloud; raises ValueError if not."""
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", text) or len(text) > length:
        raise ValueError(
            f"{flag} must be lower-case letters, digits and dashes, a letter first, at most "
            f"{length} characters, got {text!r}"
        )
    return text


def submit(command: Sequence[str], text: str | None = None) -> int:
    """Runs a cluster's own program with `text` as its input; returns its exit code."""
    return submitted(command, text, stdout=None).returncode


def submitted(
    command: Sequence[str], text: str | None, stdout: int | None = subprocess.PIPE
) -> subprocess.CompletedProcess[str]:
    """The end of a cluster's own program, with its output; see `submit`."""
    try:
        return subprocess.run(command, input=text, text=True, check=False, stdout=stdout)
    except FileNotFoundError:
        raise ValueError(
            f"{command[0]} is not installed here; run this on a machine that has it, or print "
            "its input with --dry_run"
        ) from None


def run_launcher(name: str, arguments: list[str], program: str) -> None:
    """Runs the launcher of that name; ends the process with its exit code, 2 for a user error."""
    launcher = importlib.import_module(f"{MODULE}.launch.{name}")
    try:
        code = launcher.main(arguments, program)
    except (ValueError, *NAME_ERRORS) as error:
        code = user_error(str(error))
    sys.exit(code)
