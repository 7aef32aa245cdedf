"""The files of functions that a user names: what processes must have alike."""

import hashlib
import importlib.util
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from distflow_jax.cluster.processes import code_table
from distflow_jax.parsing.paths import named_path


def hashes_of(functions: Iterable[str]) -> dict[str, str]:
    """{file: hash of its content} of functions, as load_objects takes them; others are left out.

    A file has the name by which it was given, whatever folder that is in on this host. A module
    counts with all of the package that it belongs to.
    """
    table: dict[str, str] = {}
    parts = [text.rpartition(":") for text in functions]
    named = {place for place, _, names in parts if place and all(map(_is_dotted, names.split(",")))}
    for place in sorted(named):
        if not place.endswith(".py"):
            table |= _module_hashes(place)
        elif (file := named_path("file", place)).is_file():
            table[place] = _digest(file)
    return table


def environment_code(name: str, kwargs: Mapping[str, Any]) -> dict[str, str]:
    """{file: hash of its content} of a run's environment and its tools."""
    return hashes_of([name, *strings_in(kwargs)])


def strings_in(value: Any) -> Iterator[str]:
    """All strings in nested mappings and sequences."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from strings_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings_in(item)


def _module_hashes(name: str) -> dict[str, str]:
    """The hashes of a module's package, or of the module itself; {} if it has no files."""
    top = name.partition(".")[0]
    if top == __package__.partition(".")[0] or not _is_dotted(name):
        return {}
    try:
        found = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return {}
    if found is None:
        return {}
    table: dict[str, str] = {}
    for folder in found.submodule_search_locations or ():
        table |= {f"{top}/{file}": digest for file, digest in code_table(folder).items()}
    if found.submodule_search_locations is None and (found.origin or "").endswith(".py"):
        table[f"{top}.py"] = _digest(pathlib.Path(str(found.origin)))
    return table


def _is_dotted(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def _digest(file: pathlib.Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
