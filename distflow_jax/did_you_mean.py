"""Suggestions for unknown names: the nearest of the known ones."""

import difflib
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

_CUTOFF = 0.6  # similarity from 0 to 1 that a suggestion needs


def nearest(name: Any, choices: Iterable[str], cutoff: float = _CUTOFF) -> str | None:
    """The choice most similar to `name`; None where no similarity reaches `cutoff`."""
    return next(iter(several(name, choices, 1, cutoff)), None)


def several(name: Any, choices: Iterable[str], count: int, cutoff: float = _CUTOFF) -> list[str]:
    """At most `count` choices whose similarity to `name` reaches `cutoff`, the nearest first."""
    return difflib.get_close_matches(str(name), list(choices), count, cutoff)


def hint(name: Any, choices: Collection[str]) -> str:
    """End of an error message about an unknown name: the nearest choice, all of them if few."""
    choices = sorted(choices)
    known = ", ".join(choices) or "none"
    near = nearest(name, choices, 0.5)
    if not near:
        return f"known: {known}"
    if len(choices) > 8:
        return f"did you mean {near!r}?"
    return f"did you mean {near!r}? known: {known}"


def near_file(path: Path) -> str:
    """End of an error message about a file that does not exist."""
    if not path.parent.is_dir():
        return f" (nor does its folder {path.parent})"
    near = nearest(path.name, os.listdir(path.parent))
    return f"; did you mean {path.parent / near}?" if near else ""
