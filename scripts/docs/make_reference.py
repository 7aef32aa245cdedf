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
metric_reference = importlib.import_module("distflow_jax.report.metric_reference")

FOLDER = ROOT / "docs" / "reference"
MADE = "<!-- made by scripts/docs/make_reference.py: edit the code, not this page -->\n\n"
LAUNCHERS = ("slurm", "gke", "tpu_vm")
SCRIPTS = ("train", "evaluate", "generate", "plan", "report", "export", "serve", "launch_local")


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
    """A flag of a program."""

    name: str
    default: str
    help: str


def flags_page() -> str:
    """All scripts with their summary, example and flags."""
    lines = [
        "# Commands\n",
        "Run them from the root of the repository, in its virtual environment. Flags are written "
        "`--name=value`. Scripts with `--config` also take `--config.KEY=VALUE` for every "
        "[config key](config.md). Exit code 0 is success, 2 a user error with a one-line message, "
        "75 a stop by SIGTERM with a checkpoint.\n",
    ]
    paths = [ROOT / "scripts" / f"{name}.py" for name in SCRIPTS]
    paths += [ROOT / "scripts" / "launch" / f"{name}.py" for name in LAUNCHERS]
    for path in paths:
        flags = flags_of(path)
        if path.parent.name == "launch":
            flags += flags_of(path.parent / "hosts.py")
        document = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        summary, *rest = document.split("\n\n")
        examples = [part for part in rest if "python scripts/" in part]
        lines += [f"## {path.relative_to(ROOT)}\n", summary.replace("\n", " ") + "\n"]
        for example in examples:
            shown = [x.removeprefix("  ") for x in example.splitlines() if not x.startswith("Exam")]
            lines += ["```", *shown, "```\n"]
        lines += [part.replace("\n", " ") + "\n" for part in rest if part not in examples]
        rows = [(f"`--{f.name}`", f.default and f"`{f.default}`", f.help) for f in flags]
        lines += _table(("flag", "default", "meaning"), rows)
    return MADE + "\n".join(lines)


def flags_of(path: pathlib.Path) -> list[Flag]:
    """The flags that a program defines itself, or through functions that it imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = list(_defined(tree))
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module.startswith("distflow_jax"):
            module = ROOT.joinpath(*node.module.split(".")).with_suffix(".py")
            if module.is_file():
                found += _of_functions(module, {alias.name for alias in node.names})
    return list({flag.name: flag for flag in found}.values())


def _of_functions(module: pathlib.Path, names: set[str]) -> Iterator[Flag]:
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            yield from _defined(node)


def _defined(tree: ast.AST) -> Iterator[Flag]:
    """Definitions of absl.flags and of argparse in a syntax tree."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        first = node.args[0]
        if not isinstance(first, ast.Constant) or not isinstance(first.value, str):
            continue
        words = {keyword.arg: keyword.value for keyword in node.keywords}
        if ast.unparse(node.func).rpartition(".")[2].startswith("DEFINE_"):
            default = _literal(node.args[1]) if node.args[1:] else ""
            helps = [_literal(x) for x in node.args[2:] if " " in str(_literal(x))]
            text = helps[0] if helps else ""
        elif first.value.startswith("--") and "help" in words:
            text = str(_literal(words["help"])).split(" (default")[0]
            default = _literal(words.get("default"))
        else:
            continue
        shown = "" if default in (None, "") else str(default)
        yield Flag(first.value.lstrip("-"), shown, text)


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
