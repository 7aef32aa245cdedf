"""Writes the pages of docs/reference/ that are made from the code.

    python scripts/docs/make_reference.py            writes them
    python scripts/docs/make_reference.py --check    exits with 1 and names the pages that are stale

Config keys come from the dataclasses' comments, implementations from
config/implementation_table.py, metrics from distflow_jax/report/metric_reference.toml, flags from
the table of the subcommands and the launchers' parsers, both in distflow_jax/commands/. Nothing
that is imported needs jax or a device.
"""

import argparse
import dataclasses
import importlib
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the checkout that this file belongs to

implementation_table = importlib.import_module("distflow_jax.config.implementation_table")
key_reference = importlib.import_module("distflow_jax.config.key_reference")
subcommands = importlib.import_module("distflow_jax.commands.subcommands")
metric_reference = importlib.import_module("distflow_jax.report.metric_reference")

FOLDER = ROOT / "docs" / "reference"
MADE = "<!-- made by scripts/docs/make_reference.py: edit the code, not this page -->\n\n"


# -- config -----------------------------------------------------------------------------------


def config_page() -> str:
    """All keys of the config, a table per section."""
    lines = [
        "# Config keys\n",
        "Set a key on the command line with `--config.KEY=VALUE`, in a notebook with "
        '`df.load_config("tiny", {"KEY": VALUE})`, or in a Python file with `get_config`.',
        "`configs/base.py` holds these defaults. An unknown key, or a value of another type, is "
        "an error before anything is compiled.\n",
    ]
    for section in key_reference.sections():
        lines += [f"## {section.name or 'top level'}\n", f"{section.summary}\n"]
        rows = [
            (f"`{key.name}`", key.values, f"`{key.default!r}`", key.full_meaning)
            for key in section.keys
        ]
        if rows:
            lines += _table(("key", "values", "default", "meaning"), rows)
    return MADE + "\n".join(lines)


# -- metrics ----------------------------------------------------------------------------------


def metrics_page() -> str:
    """All metrics with the meaning of a bad value."""
    lines = [
        "# Metrics\n",
        "`metrics.jsonl` has one line per step, with the same metric names as verl. An evaluation "
        "that finishes after later steps adds a second line for its step. Step 0 is the evaluation "
        'of the untrained weights. NaN and infinities are written as the strings "NaN", '
        '"Infinity" and "-Infinity".\n',
        "In the tables, `{a,b}` means a or b, and `{word}` is a placeholder for a name from your "
        "run. If a graph has several nodes of a kind, their metrics begin with `NODE/`. Your own "
        "functions can return additional metrics under any name. For the formula of MFU, see "
        "[Speed and profiles](../metrics.md).\n",
    ]
    for title, metrics in metric_reference.metric_table().items():
        rows = [(f"`{m.name}`", m.meaning, m.bad) for m in metrics]
        lines += [f"## {title}\n", *_table(("metric", "meaning", "bad values"), rows)]
    return MADE + "\n".join(lines)


# -- attention --------------------------------------------------------------------------------


def implementations_page() -> str:
    """The table of implementations."""
    table, of_products = implementation_table.IMPLEMENTATIONS, implementation_table.PRODUCTS
    lines = [
        "# Attention and grouped products\n",
        "To choose an implementation, set `training.attention`, `rollout.attention` or "
        "`model.grouped_product` to its name. If it cannot do what a run needs, the run is refused "
        "with one line that says what is missing.\n",
        "The default, `auto`, considers implementations that are installed, can do what the run "
        "needs, and have the run's platform in bold. On a CPU, it takes the first of them. On "
        "other platforms, a run tries them all before it traces its programs. Each is run on one "
        "device on a small case of its own kind, without images, and is compared with float32. "
        "An implementation that differs or raises an error is left out; one that was set by name "
        "ends the run. The fastest of the others on a row of `training.row_tokens` tokens is "
        "taken. `masked` is used for rows whose sizes no other implementation supports. Plans for "
        "other machines, servers and workers try nothing: they take the first implementation, and "
        "`masked` for prefill. plan.txt shows the choice and its reason.\n",
        "No implementation has been measured on a GPU or TPU yet; the last column shows how far "
        "each was checked. The costs of programs do not include the FLOPs of splash attention, "
        "Transformer Engine, cuDNN and tokamax's grouped products. [MFU](../metrics.md) does not "
        "depend on these costs.\n",
    ]
    for where, title in implementation_table.PLACES.items():
        rows = [
            (
                f"`{one.name}`",
                ", ".join(f"**{p}**" if p in one.auto else p for p in one.platforms),
                one.by + (f" (`{one.install}`)" if one.install else ""),
                ", ".join(one.dtypes),
                "" if where == of_products else implementation_table.shown_dims(one),
                one.checked,
            )
            for one in table
            if where in one.serves
        ]
        head = ("name", "platforms", "computed by", "dtypes", "head dims", "checked")
        lines += [f"## {title}\n", *_table(head, rows)]
    known = [one for one in table if implementation_table.ROWS in one.serves]
    shown = [
        (f"{name}: {meaning}", *("yes" if name in one.can else "" for one in known))
        for name, meaning in implementation_table.FEATURES.items()
    ]
    named = tuple(f"`{one.name}` ({', '.join(one.platforms)})" for one in known)
    lines += ["## What each can do with rows\n", *_table(("a run with", *named), shown)]
    return MADE + "\n".join(lines)


# -- flags ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag of a command, as a row of a table."""

    name: str
    default: str  # "": none, or it is required
    help: str
    required: bool = False
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None

    def meaning(self) -> str:
        """The help with the values that are allowed."""
        notes = [f"One of {', '.join(self.choices)}."] if self.choices else []
        if self.least is not None and self.most is not None:
            notes.append(f"From {self.least} to {self.most}.")
        elif self.least is not None:
            notes.append(f"At least {self.least}.")
        end = "" if self.help.endswith(".") or not notes else "."
        return " ".join([self.help + end, *notes])


def flags_page() -> str:
    """All commands with their summary, examples and flags."""
    lines = [
        "# Commands\n",
        "`distflow X` and, in a checkout, `python scripts/X.py` are the same. Flags are "
        "written `--name=value`. Commands with `--config` also take `--config.KEY=VALUE` for every "
        "[config key](config.md). Exit code 0 is success, 2 a user error with a one-line message, "
        "75 a stop by SIGTERM or Ctrl-C with a checkpoint.\n",
    ]
    for name, command in subcommands.SUBCOMMANDS.items():
        examples = [f"distflow {name} {example}".rstrip() for example in command.examples]
        details = [part.replace("\n", " ") + "\n" for part in command.details.split("\n\n")]
        lines += [f"## distflow {name}\n", f"{command.summary}\n", "```", *examples, "```\n"]
        lines += [*details, *_flag_table(flags_of(name))]
    for name, summary in subcommands.LAUNCHERS.items():
        lines += [f"## distflow launch {name}\n", f"{summary}\n"]
        lines += _flag_table(flags_of(f"launch {name}"))
    return MADE + "\n".join(lines)


def flags_of(command: str) -> list[Flag]:
    """The flags of a command: "train", "launch slurm"."""
    if command in subcommands.SUBCOMMANDS:
        found = subcommands.SUBCOMMANDS[command].flags
        return [
            *(
                Flag(f.name, _shown(f.default), f.meaning, f.required, f.choices, f.least, f.most)
                for f in found
            ),
            Flag("debug", "False", "Show the traceback of a user error."),
        ]
    name = command.removeprefix("launch ")
    parser = importlib.import_module(f"{subcommands.MODULE}.launch.{name}").make_parser()
    actions = [action for action in parser._actions if action.option_strings]
    return [_of_parser(action) for action in actions if action.dest != "help"]


def _flag_table(flags: list[Flag]) -> list[str]:
    rows = [
        (f"`--{f.name}`", "required" if f.required else f.default and f"`{f.default}`", f.meaning())
        for f in flags
    ]
    return _table(("flag", "default", "meaning"), rows)


def _of_parser(action: argparse.Action) -> Flag:
    text, default = (action.help or "").replace("%%", "%"), _shown(action.default)
    # the column of defaults has it, as --help says it: 0 may stand for another number
    if said := re.search(r" \(default ([^)]+)\)$", text):
        text, default = text[: said.start()], said[1]
    text = text.removesuffix(" (default)")
    choices = tuple(map(str, action.choices or ()))
    name = action.option_strings[-1].removeprefix("--")
    return Flag(name, default, text, action.required, choices)


def _shown(default: object) -> str:
    return "" if default in (None, "", []) else str(default)


# -- pages ------------------------------------------------------------------------------------


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in [list(head), ["---"] * len(head), *cells]]
    return [*lines, ""]


PAGES = {
    "implementations.md": implementations_page,
    "config.md": config_page,
    "metrics.md": metrics_page,
    "scripts.md": flags_page,
}


def stale() -> list[str]:
    """Names of pages that differ from what the code gives."""
    return [
        name
        for name, make in PAGES.items()
        if not (FOLDER / name).is_file() or (FOLDER / name).read_text(encoding="utf-8") != make()
    ]


def main() -> int:
    """Writes or checks the pages."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    old = stale()
    if options.check:
        if old:
            print(f"stale: {', '.join(old)}; run python scripts/docs/make_reference.py")
        return bool(old)
    FOLDER.mkdir(exist_ok=True)
    for name in old:
        (FOLDER / name).write_text(PAGES[name](), encoding="utf-8")
        print(f"wrote {(FOLDER / name).relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
