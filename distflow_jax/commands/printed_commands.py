"""Commands that a run prints at its end, or for its workers: made from its own.

A shell takes each as it is. tests/commands/test_printed_commands.py passes them through the checks
that their subcommands begin with.
"""

import pathlib
import shlex
from collections.abc import Mapping, Sequence

from distflow_jax.cluster import job, processes
from distflow_jax.commands.subcommands import SUBCOMMANDS
from distflow_jax.report.run_end import RunEnd

_MOST_EXPORTS = 20  # folders of one name


def printed_commands(
    argv: Sequence[str], variables: Mapping[str, str], end: RunEnd
) -> dict[str, str]:
    """Commands that may follow the run of a `train` command.

    Args:
      argv: the command, as sys.argv has it. Of a program other than scripts/train.py, `distflow
        train` and `python -m distflow_jax.commands train`, there are none.
      variables: the environment variables of the process: a launcher names its own command there.
      end: the run.

    Returns:
      {"evaluate": command, ...} for a run that has ended; {"resume": command} for one that was
      stopped, {"worker": command} for one that waits.
    """
    program = pathlib.PurePath(argv[0]) if argv else pathlib.PurePath()
    if program.name == "train.py":
        called = {name: f"python {program.with_name(name)}.py" for name in SUBCOMMANDS}
        given = argv[1:]
    elif program.name == "distflow" or program.parts[-2:] == ("commands", "__main__.py"):
        called = {name: f"distflow {name}" for name in SUBCOMMANDS}
        given = argv[2:]
    else:
        return {}
    flags, folder = _config_flags(given), shlex.quote(end.folder)
    if end.waits:
        return {"worker": " ".join([called["worker"], *flags, f"--join={folder}"])}
    if end.stopped:
        if launched := variables.get(job.LAUNCHED, ""):
            return {"resume": launched}
        if processes.process_count() > 1:  # only who started the processes has the command
            return {}
        return {"resume": " ".join([called["train"], *map(shlex.quote, given)])}
    run, found = " ".join([*flags, f"--run={folder}"]), {}
    if end.evaluates:
        found["evaluate"] = f"{called['evaluate']} {run}"
    if end.answers:
        found["generate"] = f'{called["generate"]} {run} --prompt="..."'
    if out := _new_export(pathlib.PurePath(end.folder).name):
        found["export"] = f"{called['export']} --workdir={folder} --out={shlex.quote(out)}"
    return found


def _new_export(name: str) -> str:
    """A folder for an export that does not exist; "" if all that are tried do."""
    numbered = (f"exports/{name}-{number}" for number in range(2, _MOST_EXPORTS))
    names = (f"exports/{name}", *numbered)
    return next((path for path in names if not pathlib.Path(path).exists()), "")


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
