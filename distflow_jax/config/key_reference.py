"""The config's keys with type, default, values and meaning, as its dataclasses have them.

The comment of a field is its meaning: the lines directly above it, the end of its own line, or
both. Nothing imported needs jax, so that `--help` and the documentation start fast.
"""

import ast
import collections
import dataclasses
import functools
import inspect
import io
import tokenize
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from distflow_jax.config.run_config import Config
from distflow_jax.parsing.checked_fields import Kind
from distflow_jax.parsing.setting_checks import listed


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of the config, as "training.optimizer.lr"."""

    name: str
    type: str  # "float", "int or None", "tuple of str"
    default: Any
    meaning: str  # the field's comment, one paragraph; "" if it has none
    kind: Kind | None = None  # its range or choices; None: any value of its type
    # {another key: the values of it with which this one has an effect; (): any but none}
    needs: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)

    @property
    def values(self) -> str:
        """Values that it may have: "int, at least 1", "keep or recompute"."""
        if self.kind is None:
            return self.type
        choices = self.kind.choices
        return _listed(choices) if choices else f"{self.type}, {self.kind.words}"

    @property
    def full_meaning(self) -> str:
        """Its meaning, and which other keys it needs."""
        needs = " and ".join(f"{k}={_listed(v)}" if v else k for k, v in self.needs.items())
        return f"{self.meaning}; only with {needs}" if needs else self.meaning


@dataclasses.dataclass(frozen=True)
class KeyTable:
    """The keys of one dataclass: those of Config itself are in the section ""."""

    name: str  # "training.optimizer"
    summary: str  # first paragraph of the dataclass's docstring
    keys: tuple[Key, ...]


def _listed(values: Iterable[Any]) -> str:
    return listed(str(value) or '""' for value in values)


@functools.cache
def sections() -> tuple[KeyTable, ...]:
    """All sections of the config in the order of its dataclasses, a nested one after its owner."""
    return tuple(_sections(Config(), ""))


def keys() -> dict[str, Key]:
    """All keys of the config by their names."""
    return {key.name: key for section in sections() for key in section.keys}


def _sections(config: Any, prefix: str) -> Iterator[KeyTable]:
    meanings = _comments(type(config))
    found, nested = [], []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            nested.append((value, f"{prefix}{field.name}."))
            continue
        kind, needs = (field.metadata.get(name) for name in ("kind", "needs"))
        needs = {f"{prefix}{other}": values for other, values in (needs or {}).items()}
        words, meaning = _describe(field.type), meanings[field.name]
        found.append(Key(f"{prefix}{field.name}", words, value, meaning, kind, needs))
    summary = (inspect.getdoc(config) or "").split("\n\n")[0].replace("\n", " ")
    yield KeyTable(prefix.rstrip("."), summary, tuple(found))
    for value, path in nested:
        yield from _sections(value, path)


def _describe(annotation: Any) -> str:
    """A type in words."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is types.UnionType:
        return " or ".join(map(_describe, args))
    if origin is tuple:
        return f"tuple of {_describe(args[0])}"
    if origin is not None:
        return "dict"
    return "None" if annotation is types.NoneType else annotation.__name__


def _comments(section: type) -> dict[str, str]:
    """{field: its comment, as one paragraph} of a dataclass."""
    source = inspect.getsource(section)
    lines = source.splitlines()
    comments: dict[int, str] = collections.defaultdict(str)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.string.lstrip("# ")
    found = {}
    for field in ast.walk(ast.parse(source)):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            above = field.lineno - 1
            while lines[above - 1].lstrip().startswith("#"):
                above -= 1
            own = range(above + 1, (field.end_lineno or field.lineno) + 1)
            found[field.target.id] = " ".join(filter(None, (comments[line] for line in own)))
    return found
