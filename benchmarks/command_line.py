"""Flags, tables and files of results, the same for all benchmarks."""

import argparse
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

# (title, key of a result, format) of the columns of a table
Columns = Sequence[tuple[str, str, str]]


def parser_of(doc: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """A parser whose help is a module's docstring, with the flags of others."""
    style = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=doc, formatter_class=style, parents=parents)


def row(*cells: Any) -> str:
    """A line of a table in Markdown."""
    return f"| {' | '.join(map(str, cells))} |"


def header(*titles: str) -> str:
    """The first two lines of a table in Markdown."""
    return f"{row(*titles)}\n|{'---|' * len(titles)}"


def titles(columns: Columns) -> str:
    """The first two lines of a table of results."""
    return header(*(title for title, *_ in columns))


def cells(columns: Columns, found: Mapping[str, Any]) -> str:
    """The line of a result, with "-" for what it does not have."""
    shown = [
        "-" if found.get(key) is None else format(found[key], form) for _, key, form in columns
    ]
    return row(*shown)


def print_row(*cells: Any) -> None:
    """Prints a line of a table, at once."""
    print(row(*cells), flush=True)


def print_header(*titles: str) -> None:
    """Prints the first two lines of a table, at once."""
    print(header(*titles), flush=True)


def write_json(path: str, found: Any) -> None:
    """Writes results to a file, if it has a name."""
    if path:
        pathlib.Path(path).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
