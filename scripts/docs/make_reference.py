"""Writes the pages of docs/reference/ that are made from the code.

    python scripts/docs/make_reference.py            writes them
    python scripts/docs/make_reference.py --check    exits with 1 and names the pages that are stale

Config keys come from the dataclasses' comments, metrics from the table
distflow_jax/report/metric_reference.py, flags from the scripts' definitions. Sources are read, not
imported: neither jax nor a device is needed.
"""

import argparse
import ast
import dataclasses
import importlib
import pathlib
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the checkout that this file belongs to

key_reference = importlib.import_module("distflow_jax.config.key_reference")
subcommands = importlib.import_module("distflow_jax.commands.subcommands")
metric_reference = importlib.import_module("distflow_jax.report.metric_reference")

FOLDER = ROOT / "docs" / "reference"
MADE = "<!-- made by scripts/docs/make_reference.py: edit the code, not this page -->\n\n"
LAUNCH = ROOT / "distflow_jax" / "commands" / "launch"


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
            (f"`{key.name}`", key.type, f"`{key.default!r}`", key.meaning) for key in section.keys
        ]
        if rows:
            lines += _table(("key", "type", "default", "meaning"), rows)
    return MADE + "\n".join(lines)


# -- metrics ----------------------------------------------------------------------------------


def metrics_page() -> str:
    """All metrics with the meaning of a bad value."""
    lines = [
        "# Metrics\n",
        "`metrics.jsonl` has one line per step, under verl's names. Step 0 holds the evaluation "
        'of the untrained weights. NaN and infinities are the strings "NaN", "Infinity" and '
        '"-Infinity".\n',
        "`{a,b}` stands for a or b, `{word}` for a name of the run. Where a graph has several "
        "nodes of a kind, `NODE/` stands before their names. A function of your own adds metrics "
        "under the names that it returns. [Speed and profiles](../metrics.md) has the formula of "
        "MFU.\n",
    ]
    for title, metrics in metric_reference.METRICS.items():
        rows = [(f"`{m.name}`", m.meaning, m.bad) for m in metrics]
        lines += [f"## {title}\n", *_table(("metric", "meaning", "bad values"), rows)]
    return MADE + "\n".join(lines)


# -- flags ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag of a command, as a row of a table."""

    name: str
    default: str
    help: str


def flags_page() -> str:
    """All commands with their summary, examples and flags."""
    lines = [
        "# Commands\n",
        "`distflow X` and, in a checkout, `python scripts/X.py` are the same. Flags are "
        "written `--name=value`. Commands with `--config` also take `--config.KEY=VALUE` for every "
        "[config key](config.md). Exit code 0 is success, 2 a user error with a one-line message, "
        "75 a stop by SIGTERM with a checkpoint.\n",
    ]
    for name, command in subcommands.SUBCOMMANDS.items():
        examples = [f"distflow {name} {example}" for example in command.examples]
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
            *(Flag(flag.name, _shown(flag.default), flag.meaning) for flag in found),
            Flag("debug", "False", "Show the traceback of a user error."),
        ]
    name = command.removeprefix("launch ")
    modules = [name] if name == "local" else [name, "hosts"]
    return [flag for module in modules for flag in _arguments(LAUNCH / f"{module}.py")]


def _flag_table(flags: list[Flag]) -> list[str]:
    rows = [(f"`--{f.name}`", f.default and f"`{f.default}`", f.help) for f in flags]
    return _table(("flag", "default", "meaning"), rows)


def _arguments(path: pathlib.Path) -> Iterator[Flag]:
    """The flags of a module that uses argparse, from its source."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        first, words = node.args[0], {word.arg: word.value for word in node.keywords}
        name = first.value if isinstance(first, ast.Constant) else None
        if isinstance(name, str) and name.startswith("--") and "help" in words:
            text = str(_literal(words["help"])).split(" (default")[0]
            yield Flag(name.lstrip("-"), _shown(_literal(words.get("default"))), text)


def _shown(default: object) -> str:
    return "" if default in (None, "", []) else str(default)


def _literal(node: ast.expr | None) -> object:
    """The value of a constant expression; its source where it is none."""
    if node is None:
        return ""
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node).removeprefix("f").strip("'")


# -- pages ------------------------------------------------------------------------------------


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in [list(head), ["---"] * len(head), *cells]]
    return [*lines, ""]


PAGES = {"config.md": config_page, "metrics.md": metrics_page, "scripts.md": flags_page}


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
