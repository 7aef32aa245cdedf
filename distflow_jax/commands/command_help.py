"""Text of --help: a subcommand's flags, and the config's keys by section. Imports no jax."""

import re
import textwrap
from collections.abc import Iterator

from distflow_jax.commands.command_flags import Flag
from distflow_jax.commands.subcommands import LAUNCHERS, SUBCOMMANDS, Subcommand
from distflow_jax.config import key_reference
from distflow_jax.config.shipped import shipped_configs

WIDTH = 80


def overview() -> str:
    """The text of `distflow --help`."""
    lines = [
        "distflow: reinforcement-learning post-training of language models in JAX",
        "",
        "usage: distflow COMMAND [--FLAG=VALUE ...]",
        "",
    ]
    lines += [_entry(name, command.summary) for name, command in SUBCOMMANDS.items()]
    lines += [
        _entry("launch", "Starts several processes of one run: " + ", ".join(LAUNCHERS) + ".")
    ]
    lines += [
        "",
        "`distflow COMMAND --help` lists a command's flags and the config's keys.",
        _wrapped("shipped configs: " + ", ".join(shipped_configs()), ""),
    ]
    return "\n".join(lines) + "\n"


def launch_overview() -> str:
    """The text of `distflow launch --help`."""
    lines = [
        "distflow launch: starts several processes of one run",
        "",
        "usage: distflow launch LAUNCHER [--FLAG=VALUE ...] -- train [--FLAG=VALUE ...]",
        "",
        *(_entry(name, summary) for name, summary in LAUNCHERS.items()),
        "",
        "`distflow launch LAUNCHER --help` lists a launcher's flags.",
    ]
    return "\n".join(lines) + "\n"


def help_text(command: Subcommand, program: str) -> str:
    """The text of --help; `program` is how the subcommand was called, such as "distflow train"."""
    required = [f"--{flag.name}={flag.name.upper()}" for flag in command.flags if flag.required]
    more = ["[--config.KEY=VALUE ...]"] if command.has_config else []
    arguments = [command.arguments] if command.arguments else []
    usage = " ".join([program, *required, "[--FLAG=VALUE ...]", *more, *arguments])
    lines = [
        _wrapped(command.summary, ""),
        "",
        _wrapped(f"usage: {usage}", "  ", first=""),
        "",
        "examples:",
        *(shown(command, program)),
        "",
        command.details,
        "",
        "flags:",
    ]
    for flag in command.flags:
        lines += _flag(flag)
    lines += _item("--debug", "Show the traceback of a user error. (default: false)")
    if command.has_config:
        lines += ["", "keys of the config, set by --config.KEY=VALUE:", *_keys()]
    return "\n".join(lines) + "\n"


def shown(command: Subcommand, program: str) -> list[str]:
    """The examples as lines of a shell, indented and at most 80 columns wide."""
    found = []
    for example in command.examples:
        line = f"  {program}"
        # words of a shell with their quotes
        for word in re.findall(r"(?:[^\s\"]|\"[^\"]*\")+", example):
            if len(line) + len(word) + 3 > WIDTH and not line.endswith(program):
                found.append(f"{line} \\")
                line = f"      {word}"
            else:
                line += f" {word}"
        found.append(line)
    return found


def _entry(name: str, summary: str) -> str:
    return _wrapped(summary, " " * 12, first=f"  {name:10}")


def _flag(flag: Flag) -> list[str]:
    if flag.required:
        note = "(required)"
    elif flag.kind == "boolean":
        note = f"(default: {str(flag.default).lower()}; --no{flag.name} turns it off)"
    elif flag.default in (None, "", []):
        note = ""
    else:
        note = f"(default: {flag.default})"
    choices = f" One of {', '.join(flag.choices)}." if flag.choices else ""
    value = "" if flag.kind == "boolean" else "=" + flag.kind.removeprefix("new_").upper()
    return _item(f"--{flag.name}{value}", f"{flag.meaning}{choices} {note}".strip())


def _keys() -> Iterator[str]:
    for section in key_reference.sections():
        yield ""
        yield _wrapped(f"{section.name or 'config'}: {section.summary}", "")
        for key in section.keys:
            default = '""' if key.default == "" else str(key.default)
            yield from _item(f"{key.name} ({key.values}; {default})", key.full_meaning)


def _item(name: str, meaning: str) -> list[str]:
    return [_wrapped(name, "      ", first="  "), _wrapped(meaning, "      ")]


def _wrapped(text: str, indent: str, first: str | None = None) -> str:
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=indent if first is None else first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
