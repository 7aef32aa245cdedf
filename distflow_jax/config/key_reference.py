"""The config's keys with type, default and meaning, read from the source of the dataclasses.

The comment of a field is its meaning: the lines directly above it, the end of its own line, or
both. Imports only the standard library, so that `--help` and the documentation do not need jax.
"""

import ast
import dataclasses
import functools
import io
import pathlib
import tokenize
from collections.abc import Iterator, Mapping
from typing import Any

_PACKAGE = pathlib.Path(__file__).parents[1]
_CONFIG = "distflow_jax.config.run_config"  # module of the class that has all sections


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of the config, as "training.optimizer.lr"."""

    name: str
    type: str  # "float", "int or None", "none, dots, attention or full"
    default: Any  # a Python literal
    meaning: str  # the field's comment, one paragraph; "" if it has none


@dataclasses.dataclass(frozen=True)
class Section:
    """The keys of one dataclass: those of Config itself are in the section ""."""

    name: str  # "training.optimizer"
    summary: str  # first paragraph of the dataclass's docstring
    keys: tuple[Key, ...]


@functools.cache
def sections() -> tuple[Section, ...]:
    """All sections of the config in the order of its dataclasses, a nested one after its owner."""
    return tuple(_sections(_module(_CONFIG), "Config", "", {}))


def keys() -> dict[str, Key]:
    """All keys of the config by their names."""
    return {key.name: key for section in sections() for key in section.keys}


# -- one dataclass ----------------------------------------------------------------------------


def _sections(
    module: "_Module", name: str, prefix: str, values: Mapping[str, Any]
) -> Iterator[Section]:
    """The section of a dataclass, then its nested ones; `values` replace defaults of its fields."""
    module, node = module.find(name)
    assert isinstance(node, ast.ClassDef), f"{name} is no class"
    found, nested = [], []
    for field in node.body:
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        own = field.target.id
        path = f"{prefix}.{own}".lstrip(".")
        assert field.value is not None, f"{path} has no default"
        annotation = ast.unparse(field.annotation)
        if isinstance(module.find(annotation)[1], ast.ClassDef):
            nested.append((annotation, path, module.arguments(field.value)))
            continue
        default = values.get(own, module.value(field.value))
        meaning = module.comment(field.lineno, field.end_lineno or field.lineno)
        found.append(Key(path, _describe(field.annotation), default, meaning))
    summary = (ast.get_docstring(node) or "").split("\n\n")[0].replace("\n", " ")
    yield Section(prefix, summary, tuple(found))
    for annotation, path, arguments in nested:
        yield from _sections(module, annotation, path, arguments)


def _describe(annotation: ast.expr) -> str:
    """A type in words."""
    match annotation:
        case ast.BinOp(left, ast.BitOr(), right):
            return f"{_describe(left)} or {_describe(right)}"
        case ast.Subscript(ast.Name("Literal"), ast.Tuple(choices)):
            *first, last = [str(ast.literal_eval(choice)) for choice in choices]
            return f"{', '.join(first)} or {last}"
        case ast.Subscript(ast.Name("Mapping")):
            return "dict"
        case ast.Subscript(ast.Name("tuple"), ast.Tuple([item, *_])):
            return f"tuple of {_describe(item)}"
    return ast.unparse(annotation)


# -- one file ---------------------------------------------------------------------------------


class _Module:
    """The source of a module of this package, not imported."""

    def __init__(self, dotted: str):
        path = _PACKAGE.joinpath(*dotted.split(".")[1:]).with_suffix(".py")
        source = path.read_text(encoding="utf-8")
        self._lines = source.splitlines()
        self._tree = ast.parse(source)
        self._comments = {
            token.start[0]: token.string.lstrip("# ")
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type == tokenize.COMMENT
        }
        self._imported = {
            alias.asname or alias.name: node.module or ""
            for node in self._tree.body
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("distflow_jax.")
            for alias in node.names
        }

    def find(self, name: str) -> tuple["_Module", ast.stmt | None]:
        """The module and the statement that define a class or constant; None if none does."""
        for node in self._tree.body:
            match node:
                case ast.ClassDef(name=found) | ast.Assign([ast.Name(found)]) if found == name:
                    return self, node
                case ast.AnnAssign(ast.Name(found)) if found == name:
                    return self, node
        if name in self._imported:
            return _module(self._imported[name]).find(name)
        return self, None

    def value(self, node: ast.expr) -> Any:
        """The value of a default: a literal, a constant's name, or field(default_factory=dict)."""
        if isinstance(node, ast.Name):
            module, found = self.find(node.id)
            assert isinstance(found, ast.Assign | ast.AnnAssign) and found.value is not None
            return module.value(found.value)
        if isinstance(node, ast.Call):
            factory = node.keywords[0].value
            return {"dict": {}, "tuple": (), "list": []}[ast.unparse(factory)]
        return ast.literal_eval(node)

    def arguments(self, node: ast.expr) -> dict[str, Any]:
        """The arguments of a section's default: field(default_factory=lambda: Other(lr=1e-5))."""
        if not isinstance(node, ast.Call):
            return {}
        factory = node.keywords[0].value if node.keywords else None
        if not (isinstance(factory, ast.Lambda) and isinstance(factory.body, ast.Call)):
            return {}
        given = factory.body.keywords
        return {word.arg: self.value(word.value) for word in given if word.arg is not None}

    def comment(self, first: int, last: int) -> str:
        """The comment of the field in the lines `first` to `last`, as one paragraph."""
        above = first - 1
        while self._lines[above - 1].lstrip().startswith("#"):
            above -= 1
        parts = [self._comments.get(line, "") for line in range(above + 1, last + 1)]
        return " ".join(part for part in parts if part)


@functools.cache
def _module(dotted: str) -> _Module:
    return _Module(dotted)
