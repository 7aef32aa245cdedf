"""Commands that a run prints at its end, or for its workers: made from its own, and each checked.

A command is printed as it is checked: split as a shell does it, parsed by the flags of its
subcommand, and then by the checks that the subcommand itself begins with (`checked` of its module).
One that would end with a user error is left out.
"""

import dataclasses
import os
import pathlib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

from distflow_jax.cluster import job, processes
from distflow_jax.commands.launch import local
from distflow_jax.commands.parsed_command import module_of, parsed_apart
from distflow_jax.commands.subcommands import MODULE, SUBCOMMANDS
from distflow_jax.report.run_end import RunEnd

_SCRIPT = re.compile(r"(?:.*/)?(\w+)\.py")
_MOST_EXPORTS = 20  # folders of one name


@dataclasses.dataclass(frozen=True)
class PrintedCommands:
    """Commands that may follow the run of a `train` command.

    Args:
      argv: the command, as sys.argv has it. Of a program other than scripts/train.py, `distflow
        train` and `python -m distflow_jax.commands train`, there are none.
      variables: the environment variables of the process: a launcher names its own command there.
    """

    argv: Sequence[str]
    variables: Mapping[str, str] = dataclasses.field(default_factory=lambda: os.environ)

    def __call__(self, end: RunEnd) -> dict[str, str]:
        """{"evaluate": command, ...} for a run that has ended; {"resume": command} for one that was
        stopped, {"worker": command} for one that waits. A shell takes each as it is."""
        program = pathlib.PurePath(self.argv[0]) if self.argv else pathlib.PurePath()
        if program.name == "train.py":
            called = {name: f"python {program.with_name(name)}.py" for name in SUBCOMMANDS}
            given = self.argv[1:]
        elif program.name == "distflow" or program.parts[-2:] == ("commands", "__main__.py"):
            called = {name: f"distflow {name}" for name in SUBCOMMANDS}
            given = self.argv[2:]
        else:
            return {}
        candidates: dict[str, Iterable[str]]
        if end.waits:
            flags = " ".join([*_config_flags(given), f"--join={shlex.quote(end.folder)}"])
            candidates = {"worker": [f"{called['worker']} {flags}"]}
        elif end.stopped:
            candidates = {"resume": [self._start(called["train"], given)]}
        else:
            candidates = _following(called, given, end)
        good = {name: filter(is_good, commands) for name, commands in candidates.items()}
        first = {name: next(commands, None) for name, commands in good.items()}
        return {name: command for name, command in first.items() if command}

    def _start(self, train: str, given: Sequence[str]) -> str:
        """The command that starts the run again; "" if only who started its processes has it."""
        if launched := self.variables.get(job.LAUNCHED, ""):
            return launched
        if processes.process_count() > 1:
            return ""
        return " ".join([train, *map(shlex.quote, given)])


def _following(
    called: Mapping[str, str], given: Sequence[str], end: RunEnd
) -> dict[str, Iterable[str]]:
    """Commands that may follow, in the order of preference."""
    folder, flags = shlex.quote(end.folder), _config_flags(given)
    out = pathlib.PurePath("exports", pathlib.PurePath(end.folder).name)
    names = [out, *(f"{out}-{number}" for number in range(2, _MOST_EXPORTS))]
    export = [
        f"{called['export']} --workdir={folder} --out={shlex.quote(str(name))}" for name in names
    ]
    if not end.answers:
        return {"export": export}
    run = " ".join([*flags, f"--run={folder}"])
    return {
        "evaluate": [f"{called['evaluate']} {run}"],
        "generate": [f'{called["generate"]} {run} --prompt="..."'],
        "export": export,
    }


def is_good(command: str) -> bool:
    """Whether a command passes the checks that it begins with."""
    try:
        check(command)
    except (ValueError, OSError):
        return False
    return True


def check(command: str) -> None:
    """Raises ValueError or FileNotFoundError for a command that its own checks refuse.

    It begins with `distflow`, or with `python` and a script, or is the command of a launcher.
    """
    words = shlex.split(command)
    if "--" in words:
        words = _launched(words)
    if len(words) > 1 and (script := _SCRIPT.fullmatch(words[1])):
        name, arguments = script[1], words[2:]
    else:
        name, arguments = (words[1:2] or [""])[0], words[2:]
    if name not in SUBCOMMANDS:
        raise ValueError(f"{command!r} is no command of distflow")
    module_of(SUBCOMMANDS[name]).checked(parsed_apart(name, arguments))


def _launched(words: Sequence[str]) -> list[str]:
    """The command that `distflow launch local` or scripts/launch_local.py starts."""
    start = next((i for i, word in enumerate(words) if word.startswith("--")), 0)
    try:
        command = local.parse_arguments(list(words[start:])).command
    except SystemExit:  # argparse has printed why
        raise ValueError(f"wrong flags of a launcher: {shlex.join(words)}") from None
    if MODULE in command:
        return ["distflow", *command[command.index(MODULE) + 1 :]]
    return ["python", *command]


def _config_flags(arguments: Sequence[str]) -> list[str]:
    """The flags --config and --config.KEY, as a shell takes them, without those of training."""
    found, following = [], iter([*arguments[1:], ""])
    for argument in arguments:
        after = next(following)
        name = argument.lstrip("-").split("=")[0].removeprefix("no")
        if not argument.startswith("-") or name.split(".")[0] != "config":
            continue
        found.append(shlex.quote(argument))
        if "=" not in argument and not after.startswith("-") and after:
            found.append(shlex.quote(after))
    return found
