"""Reading tables of text: wrapped cells are whole again."""

import itertools
import re


def cells_of(text, first, key=0):
    """The rows of the table whose header begins with the words `first`, each a list of cells.

    A line without a cell in column `key`, whose cells are not wrapped, goes on with the row above.
    The header's further lines are left out.
    """
    lines = text.splitlines()
    (head,) = [i for i, line in enumerate(lines) if line.split()[: len(first)] == first]
    (rule, *_) = [i for i in range(head, len(lines)) if set(lines[i]) == {"-", " "}]
    starts = [match.start() for match in re.finditer("-+", lines[rule])]
    rows = []
    for line in itertools.takewhile(str.strip, lines[rule + 1 :]):
        cells = [line[a:b].strip() for a, b in itertools.pairwise([*starts, None])]
        if cells[key]:
            rows.append(cells)
        else:
            rows[-1] = [" ".join(filter(None, pair)) for pair in zip(rows[-1], cells, strict=True)]
    return rows
