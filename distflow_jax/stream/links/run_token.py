"""The token of a run, which trainers and workers prove to each other and never send.

It comes from DISTFLOW_TOKEN, or from a file in the run's folder that only its owner can read.
"""

import contextlib
import os
import pathlib
import secrets
import stat
from collections.abc import Mapping

from distflow_jax.parsing.paths import reading

VARIABLE = "DISTFLOW_TOKEN"
FILE = "token"
_LEAST_BYTES, _MOST_BYTES = 16, 1024
_FIX = "write one with `openssl rand -hex 32`"


def make_run_token(
    workdir: str | os.PathLike, environment: Mapping[str, str] = os.environ
) -> bytes:
    """The token of a run, which this process writes to WORKDIR/token if nobody has."""
    if environment.get(VARIABLE):
        return find_run_token(None, environment)
    path = pathlib.Path(workdir) / FILE
    own = path.with_name(f"{FILE}-{os.getpid()}-{secrets.token_hex(4)}")
    descriptor = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
        with contextlib.suppress(FileExistsError):
            os.link(own, path)  # whole, or not at all
    finally:
        own.unlink()
    return find_run_token(workdir, environment)


def find_run_token(
    workdir: str | os.PathLike | None, environment: Mapping[str, str] = os.environ
) -> bytes:
    """The token of the environment, or of the run in a folder. ValueError if there is none.

    A file that others can read holds no secret, and is refused.
    """
    if text := environment.get(VARIABLE, ""):
        return _checked(text.strip().encode(), VARIABLE)
    if workdir is None:
        raise ValueError(
            f"the run's token is not known: set {VARIABLE} to that of the trainers, or join by the "
            f"run's folder, whose file {FILE!r} has it"
        )
    path = pathlib.Path(workdir) / FILE
    try:
        with reading(path) as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ValueError(f"{error}: set {VARIABLE}, or start the trainers first") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ValueError(
            f"{path} has mode {stat.S_IMODE(mode):o}, and others may have read it: remove it, and "
            "start the run again"
        )
    return _checked(content.strip(), str(path))


def _checked(token: bytes, where: str) -> bytes:
    if not _LEAST_BYTES <= len(token) <= _MOST_BYTES:
        raise ValueError(
            f"{where} holds {len(token)} bytes, and a token has {_LEAST_BYTES} to {_MOST_BYTES}: "
            f"{_FIX}"
        )
    return token
