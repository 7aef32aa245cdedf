"""Tables and paragraphs of at most 80 columns that lose no word."""

import random
import shlex

import pytest

from distflow_jax.programs.text_table import broken_command, fill_lines, text_table


def test_a_table_that_fits_is_one_line_a_row():
    assert text_table([("node", "bytes"), ("rollout", "12 B"), ("x", "")]).splitlines() == [
        "node     bytes",
        "-------  -----",
        "rollout  12 B",
        "x",
    ]


def test_a_wide_column_is_wrapped_at_its_words():
    lines = text_table([("node", "writes"), ("rollout", "response, mask, logp")], 24).splitlines()
    assert lines == [
        "node     writes",
        "-------  ---------------",
        "rollout  response, mask,",
        "         logp",
    ]


@pytest.mark.parametrize("seed", range(30))
def test_every_table_fits_and_loses_nothing(seed):
    rng = random.Random(seed)
    columns, width = rng.randint(1, 9), rng.choice((60, 80, 120))
    rows = [
        [
            " ".join("x" * rng.randint(1, 30) for _ in range(rng.randint(0, 8)))
            for _ in range(columns)
        ]
        for _ in range(rng.randint(1, 6))
    ]
    text = text_table(rows, width)
    assert max(map(len, text.splitlines())) <= width
    assert text.count("x") == sum(cell.count("x") for row in rows for cell in row)
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_lines_are_filled_and_tables_kept():
    text = "a " * 60 + "\n  name  value\n\nend"
    filled = fill_lines(text)
    assert max(map(len, filled.splitlines())) <= 80
    assert filled.split() == text.split() and filled.endswith("\n  name  value\n\nend")
    path = "/" + "long" * 40
    assert fill_lines(f"wrote {path}") == f"wrote\n  {path}"


def test_a_broken_command_is_the_same_command():
    command = (
        'python scripts/x.py --config.reward.kwargs=\'{"a b": 1}\' --prompt="..." ' + "--y " * 30
    )
    for width in (30, 60, 80):
        lines = broken_command(command, width)
        assert shlex.split("\n".join(lines).replace("\\\n", " ")) == shlex.split(command)
        assert all(len(line) <= width for line in lines if "kwargs" not in line)
