"""Tables of text, as programs print them and as plan.txt has them."""

import re
import sys
import textwrap
from collections.abc import Sequence

WIDTH = 80
_GAP = "  "
_SHELL_WORD = re.compile(r"""(?:[^\s'"]|'[^']*'|"[^"]*")+""")  # with its quotes


def text_table(rows: Sequence[Sequence[str]], width: int | None = WIDTH) -> str:
    """Rows of words as a table of at most `width` columns; the first row is the header.

    Columns that are too wide together are wrapped: first lists, then the widest others at their
    spaces, then anywhere. None: nothing is wrapped.
    """
    rows = [[str(cell) for cell in row] for row in rows]
    widths = _widths(rows, sys.maxsize if width is None else width)
    lines = []
    for i, row in enumerate(rows):
        cells = [_wrapped(cell, size) for cell, size in zip(row, widths, strict=True)]
        for line in range(max(map(len, cells))):
            words = [cell[line] if line < len(cell) else "" for cell in cells]
            lines.append(_joined(words, widths))
        if not i:
            lines.append(_GAP.join("-" * size for size in widths).rstrip())
    return "\n".join(lines)


def fill_lines(text: str, width: int = WIDTH) -> str:
    """A text whose lines are wrapped at spaces where they are wider than `width` columns."""
    lines = []
    for line in text.split("\n"):
        if len(line) <= width:
            lines.append(line)
            continue
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        lines += textwrap.wrap(
            line,
            width,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def broken_command(command: str, width: int = WIDTH) -> list[str]:
    """A shell's command on lines of at most `width` columns, which a backslash joins.

    A word that is longer has a line of its own.
    """
    lines: list[str] = []
    for word in _SHELL_WORD.findall(command):
        if lines and len(lines[-1]) + 1 + len(word) <= width - 2:
            lines[-1] += f" {word}"
        else:
            lines.append(f"  {word}" if lines else word)
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def _joined(words: Sequence[str], widths: Sequence[int]) -> str:
    padded = (word.ljust(size) for word, size in zip(words, widths, strict=True))
    return _GAP.join(padded).rstrip()


def _widths(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Columns of each cell: columns give way until the table fits."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    # no column breaks words before all have given what breaks none
    whole = [max(map(_longest_word, column)) for column in columns]
    are_lists = [any(", " in cell for cell in column[1:]) for column in columns]
    lists = [
        least if is_list else size
        for is_list, least, size in zip(are_lists, whole, widths, strict=True)
    ]
    for floors in (lists, whole, [min(size, 1) for size in widths]):
        room = width - len(_GAP) * (len(widths) - 1)
        while sum(widths) > room:
            slack = [
                size if size > floor else 0 for size, floor in zip(widths, floors, strict=True)
            ]
            if not any(slack):
                break
            widths[slack.index(max(slack))] -= 1
    return widths


def _longest_word(cell: str) -> int:
    return max(map(len, cell.split()), default=0)


def _wrapped(cell: str, width: int) -> list[str]:
    return textwrap.wrap(cell, max(width, 1), break_on_hyphens=False) or [""]
