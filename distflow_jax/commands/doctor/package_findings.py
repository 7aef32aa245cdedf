"""Versions of Python and of the packages, against the bounds of the packages' own metadata."""

import importlib.metadata
import pathlib
import platform
import sys
from collections.abc import Iterator

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import distflow_jax
from distflow_jax.commands.doctor.finding import NOTE, OK, PROBLEM, Finding
from distflow_jax.rollout.jetstream_install import INSTALL, REQUIREMENT

SHOWN = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")  # whatever their versions are


def package_findings() -> Iterator[Finding]:
    """Python, this package, and every package that it needs, those within bounds in one line."""
    folder = pathlib.Path(distflow_jax.__file__).parent
    own = f"{distflow_jax.__version__}, {folder}"
    try:
        metadata = importlib.metadata.metadata("distflow_jax")
    except importlib.metadata.PackageNotFoundError:
        yield Finding(OK, "python", f"{platform.python_version()}, {sys.executable}")
        text = f"{own}, is not installed, so required package versions are unknown"
        yield Finding(NOTE, "distflow_jax", text, f"pip install -e {folder.parent}")
        return
    yield python_finding(platform.python_version(), metadata["Requires-Python"] or "")
    yield Finding(OK, "distflow_jax", own)
    within = 0
    for requirement, optional in needed():
        version = installed(requirement.name)
        if optional and version is None:
            continue
        found = package_finding(requirement, version)
        if found.level != OK or requirement.name in SHOWN:
            yield found
        else:
            within += 1
    yield package_finding(Requirement(REQUIREMENT), installed("google-jetstream"), INSTALL)
    yield Finding(OK, "other packages", f"{within} have the required versions")


def python_finding(version: str, bounds: str) -> Finding:
    """Python's version against the bounds in the metadata, such as ">=3.11"."""
    if SpecifierSet(bounds).contains(version, prereleases=True):
        return Finding(OK, "python", f"{version}, {sys.executable}")
    fix = f"create an environment with Python {bounds}"
    return Finding(PROBLEM, "python", f"{version}, {sys.executable}; {bounds} is required", fix)


def package_finding(requirement: Requirement, version: str | None, install: str = "") -> Finding:
    """A package's version, None: it is not installed, against its bounds.

    `install` mends it, by default the pip line of the requirement. A version above all bounds is a
    note: it may be newer than what this release was tested with.
    """
    bounds = requirement.specifier
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    fix = install or f"pip install '{requirement.name}{extras}{bounds}'"
    if version is None:
        return Finding(PROBLEM, requirement.name, "is not installed", fix)
    if bounds.contains(version, prereleases=True):
        return Finding(OK, requirement.name, version)
    broken = [one for one in bounds if not one.contains(version, prereleases=True)]
    newer = all(one.operator in ("<", "<=") for one in broken)
    return Finding(
        NOTE if newer else PROBLEM, requirement.name, f"{version}; {bounds} is required", fix
    )


def needed() -> list[tuple[Requirement, bool]]:
    """(requirement, whether it counts only where it is installed) of this package and of jax.

    Those of jax are its jaxlib and its plugins, whose versions must be jax's.
    """
    found = [
        (one, optional)
        for one, optional in requirements("distflow_jax")
        if not (optional and not one.specifier)
    ]
    seen = {one.name for one, _ in found}
    for one, optional in requirements("jax"):
        name = canonicalize_name(one.name)
        plugin = optional and (name.endswith("-plugin") or name == "libtpu")
        if name not in seen and (plugin or (name == "jaxlib" and not optional)):
            found.append((one, optional))
            seen.add(name)
    return sorted(found, key=lambda pair: _place(pair[0].name))


def requirements(distribution: str) -> Iterator[tuple[Requirement, bool]]:
    """(requirement, whether only an extra has it) of an installed distribution; none of another."""
    try:
        lines = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        if marker is None or marker.evaluate({"extra": ""}):
            yield requirement, False
        elif "extra" in str(marker):
            yield requirement, True


def installed(name: str) -> str | None:
    """The version of an installed distribution; None for one that is not."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _place(name: str) -> tuple[int, str]:
    return (SHOWN.index(name) if name in SHOWN else len(SHOWN)), name
