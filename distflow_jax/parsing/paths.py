"""Paths that strangers wrote."""

import os
from pathlib import Path


def names_file(path: str | os.PathLike) -> bool:
    """Whether there is a file of that name; none has a name that the system cannot look up."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):  # too long; a null character
        return False
