"""What to write instead of a name that is not known."""

import difflib
from collections.abc import Collection
from typing import Any


def hint(name: Any, choices: Collection[str]) -> str:
    """What to write instead of an unknown name: the nearest choice, and all of them if few."""
    choices = sorted(choices)
    known = ", ".join(choices) or "none"
    near = difflib.get_close_matches(str(name), choices, n=1, cutoff=0.5)
    if not near:
        return f"known: {known}"
    if len(choices) > 8:
        return f"did you mean {near[0]!r}?"
    return f"did you mean {near[0]!r}? known: {known}"
