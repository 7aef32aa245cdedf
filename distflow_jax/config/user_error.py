"""A user error: one line and exit code 2. Imports no package, as required by launcher flags."""

import sys

from distflow_jax.parsing.one_line import one_line

EXIT_USAGE = 2  # exit code of user errors: a flag, a file, a size
# of the system: something else is at a name than a file or folder that can be used
NAME_ERRORS = (
    FileNotFoundError,
    FileExistsError,
    NotADirectoryError,
    IsADirectoryError,
    PermissionError,
)


def user_error(message: str) -> int:
    """Prints the line of a user error; returns its exit code."""
    print(f"error: {one_line(message)}", file=sys.stderr)
    return EXIT_USAGE
