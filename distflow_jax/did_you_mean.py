"""Suggestions for unknown names of any kind, keys, flags, files and columns: the nearest known."""

import difflib
import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

CUTOFF = 0.6  # similarity from 0 to 1 that a suggestion needs
_FEW = 8  # names that a message lists in full


def nearest(name: Any, choices: Iterable[str], count: int = 1, cutoff: float = CUTOFF) -> list[str]:
    """At most `count` choices whose similarity to `name` reaches `cutoff`, the nearest first."""
    return difflib.get_close_matches(str(name), list(choices), count, cutoff)


def did_you_mean(names: Collection[str], write: Callable[[str], str] = repr) -> str:
    """ "did you mean 'a' or 'b'?", each as `write` writes it; "" without names."""
    *first, last = [write(name) for name in names] or [""]
    return f"did you mean {', '.join(first)}{' or ' * bool(first)}{last}?" if last else ""


def suggestion(
    name: Any,
    choices: Iterable[str],
    write: Callable[[str], str] = repr,
    cutoff: float = CUTOFF,
) -> str:
    """End of an error message about an unknown name: the nearest choice, "" where none is near."""
    return did_you_mean(nearest(name, choices, cutoff=cutoff), write)


def hint(name: Any, choices: Collection[str], write: Callable[[str], str] = repr) -> str:
    """The nearest choice, and all of them if they are few, or none is near."""
    choices = sorted(choices)
    near = suggestion(name, choices, write, cutoff=0.5)
    known = f"known: {', '.join(choices) or 'none'}"
    if not near:
        return known
    return near if len(choices) > _FEW else f"{near} {known}"


def near_file(path: Path) -> str:
    """End of an error message about a file that does not exist."""
    if not path.parent.is_dir():
        return f" (nor does its folder {path.parent})"
    near = suggestion(path.name, os.listdir(path.parent), lambda near: str(path.parent / near))
    return f"; {near}" if near else ""
