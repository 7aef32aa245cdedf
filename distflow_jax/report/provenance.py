"""Provenance of a run: host, devices, versions, commit and command, for events.jsonl."""

import importlib.metadata
import os
import pathlib
import platform
import shlex
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax

from distflow_jax.cluster import processes
from distflow_jax.report.sections.redaction import redacted_arguments

_PACKAGE = pathlib.Path(__file__).parents[1]
_PACKAGES = (
    "distflow_jax",
    "jax",
    "jaxlib",
    "libtpu",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "flax",
    "optax",
    "orbax-checkpoint",
    "numpy",
)
_GIT_SECONDS = 30.0


def provenance(folder: str | os.PathLike) -> dict[str, Any]:
    """JSON values about this start of the run in `folder`, as seen by this process."""
    kinds = Counter(device.device_kind for device in jax.devices())
    found = {
        "host": socket.gethostname(),
        "devices": ", ".join(f"{count} x {kind}" for kind, count in kinds.items()),
        "processes": processes.process_count(),
        "versions": versions(),
        "commit": commit(_PACKAGE),
        "command": command(sys.orig_argv),
        "folder": str(pathlib.Path(folder).resolve()),
    }
    return {name: value for name, value in found.items() if value}


def versions() -> dict[str, str]:
    """Versions of Python, of the system, and of the packages that compute."""
    found = {"python": platform.python_version(), "system": platform.system()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # an extra that is not installed
    return found


def commit(folder: pathlib.Path) -> str:
    """The commit of a folder's code, with "-dirty" after changes; "" if git does not track it."""
    # a package that is installed inside another project's checkout is none of its files
    if not _git(folder, "ls-files", "__init__.py"):
        return ""
    return _git(folder, "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")


def _git(folder: pathlib.Path, *arguments: str) -> str:
    """The output of a git command, "" if it fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=_GIT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def command(arguments: Sequence[str]) -> str:
    """A command line as a shell takes it, without the values of secrets."""
    return shlex.join(redacted_arguments(arguments))
