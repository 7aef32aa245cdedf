"""Measures of a package's code that no renaming, moving or splitting changes.

Sources are {path from the package's root: text of the module}.
"""

import ast
import collections
import functools
import re
from collections.abc import Iterator, Mapping

Sources = Mapping[str, str]
STREAM = ("stream/", "service/", "runtime/samplers/", "environments/episode_sampler.py")
MODE_FIELDS = {"environment", "region", "in_turns"}  # beside those of the section of the stream
SECTION = "StreamConfig"
TESTS = (ast.If, ast.While, ast.IfExp, ast.Assert)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
PRIMITIVE = re.compile(
    r"(?:\b(?:int|float|bool|str|bytes|None|Any|object|Literal)\b|[\[\]|., '\"]|\w+\.)+"
)


@functools.cache
def parsed(text: str) -> ast.Module:
    """The syntax tree of a module."""
    return ast.parse(text)


@functools.cache
def nodes(tree: ast.Module) -> list[ast.AST]:
    """All nodes of a module's tree: walking it takes longer than most rules."""
    return list(ast.walk(tree))


def room_of(path: str) -> str:
    """The room that a module stands in; modules of the root are rooms of their own."""
    return path.split("/")[0]


def lines_by_room(sources: Sources) -> dict[str, int]:
    """Lines of the modules of each room."""
    found: collections.Counter[str] = collections.Counter()
    for path, text in sources.items():
        found[room_of(path)] += len(text.splitlines())
    return dict(found)


# -- conditions on a mode of streaming ---------------------------------------------------------


def mode_conditions(sources: Sources) -> dict[str, int]:
    """Conditions on a mode of streaming, by module.

    A condition is a test that reads a field of the stream's section, of the environment or of the
    region, or asks for None or for the class of an object whose class is of the stream.
    """
    fields, classes = _section_fields(sources), _stream_classes(sources)
    typed = re.compile(rf"\b(?:{'|'.join(sorted(classes)) or '(?!)'})\b")
    attributes = {
        name
        for text in sources.values()
        for name, kind in _attributes(parsed(text))
        if _optional(kind, typed)
    }
    found = {}
    for path, text in sources.items():
        tree = parsed(text)
        names = {name for name, kind in _annotated(tree) if _optional(kind, typed)}
        sections = {name for name, kind in _annotated(tree) if SECTION in kind}
        reads = _Reads(fields, sections, names, attributes | names, typed)
        if count := sum(reads.any_in(test) for test in _tests(tree)):
            found[path] = count
    return found


class _Reads:
    """Reads that count as a condition on a mode, in one module."""

    def __init__(self, fields, sections, names, attributes, typed):
        self._fields, self._sections = fields, sections
        self._names, self._attributes, self._typed = names, attributes, typed

    def any_in(self, test: ast.expr) -> bool:
        """Whether a test has such a question; a name alone asks whether it is there."""
        return any(map(self._is_one, ast.walk(test))) or any(
            map(self._is_of_stream, _operands(test))
        )

    def _is_one(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute):
            base = ast.unparse(node.value)
            of_section = base.split(".")[-1].lstrip("_") == "stream" or base in self._sections
            return node.attr in MODE_FIELDS or (of_section and node.attr in self._fields)
        if isinstance(node, ast.Compare):
            none = [getattr(one, "value", ...) is None for one in node.comparators]
            return any(none) and self._is_of_stream(node.left)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
            return bool(self._typed.search(ast.unparse(node.args[1])))
        return isinstance(node, ast.Name) and node.id in MODE_FIELDS

    def _is_of_stream(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Call):
            node = node.func
        if isinstance(node, ast.Name):
            return node.id in self._names
        return isinstance(node, ast.Attribute) and node.attr.lstrip("_") in self._attributes


def _section_fields(sources: Sources) -> set[str]:
    """Fields and properties of the stream's section, wherever it is defined."""
    return {
        getattr(getattr(member, "target", member), "id", getattr(member, "name", ""))
        for text in sources.values()
        for node in nodes(parsed(text))
        if isinstance(node, ast.ClassDef) and node.name == SECTION
        for member in node.body
        if isinstance(member, (ast.AnnAssign, *FUNCTIONS))
        and "__" not in getattr(member, "name", "")
    }


def _stream_classes(sources: Sources) -> set[str]:
    """Classes of the stream's rooms, and those elsewhere that are made of some of them."""
    classes = [
        (path, node)
        for path, text in sources.items()
        for node in nodes(parsed(text))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name != SECTION
    ]
    inside = {node.name for path, node in classes if path.startswith(STREAM)}
    made = {
        node.name
        for _, node in classes
        if inside & {word for _, kind in _constructor(node) for word in re.findall(r"\w+", kind)}
    }
    return inside | made


def _annotated(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(name, annotation) of parameters, variables and results in a module, and of attributes that
    are set to these."""
    kinds = {}
    for node in nodes(tree):
        if isinstance(node, ast.arg) and node.annotation:
            kinds[node.arg] = ast.unparse(node.annotation)
        elif isinstance(node, ast.AnnAssign):
            name = getattr(node.target, "id", getattr(node.target, "attr", ""))
            kinds[name.lstrip("_")] = ast.unparse(node.annotation)
        elif isinstance(node, FUNCTIONS) and node.returns:
            kinds[node.name.lstrip("_")] = ast.unparse(node.returns)
    return iter(kinds.items())


def _attributes(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(name, annotation) of the fields and properties of classes."""
    for node in nodes(tree):
        for member in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(member, ast.AnnAssign):
                yield member.target.id.lstrip("_"), ast.unparse(member.annotation)
            elif isinstance(member, FUNCTIONS) and member.returns and member.decorator_list:
                yield member.name, ast.unparse(member.returns)


def _optional(kind: str, typed: re.Pattern[str]) -> bool:
    return "None" in kind and "[" not in kind.split("|")[0] and bool(typed.search(kind))


def _operands(test: ast.expr) -> Iterator[ast.expr]:
    """The operands of a condition, without "not", "and" and "or"."""
    if isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _operands(value)
    elif isinstance(test, ast.UnaryOp):
        yield from _operands(test.operand)
    elif not isinstance(test, ast.Call):
        yield test


def _tests(tree: ast.Module) -> list[ast.expr]:
    """Tests of a module, each once: of statements and expressions, and "and" and "or" elsewhere."""
    found: list[ast.expr] = []
    for node in nodes(tree):
        if isinstance(node, TESTS):
            found.append(node.test)
        elif isinstance(node, ast.comprehension):
            found += node.ifs
        elif isinstance(node, ast.Match):
            found.append(node.subject)
    inner = {id(node) for test in found for node in ast.walk(test)}
    for node in nodes(tree):
        if isinstance(node, ast.BoolOp) and id(node) not in inner:
            found.append(node)
            inner |= {id(below) for below in ast.walk(node)}
    return found


# -- collaborators of a class --------------------------------------------------------------------


def collaborators(sources: Sources) -> dict[str, int]:
    """Collaborators of each class: names that it uses of other modules of the package, classes that
    stand beside it, and what its constructor takes beside these and plain values. Those of base
    classes in the package are its own."""
    classes: dict[str, tuple[str, ast.ClassDef]] = {}
    for path, text in sources.items():
        for node in parsed(text).body:
            if isinstance(node, ast.ClassDef):
                classes[node.name] = path, node
    own = {
        name: _own_collaborators(parsed(sources[path]), node)
        for name, (path, node) in classes.items()
    }

    def all_of(name: str, seen: frozenset[str]) -> set[str]:
        _, node = classes[name]
        bases = [getattr(base, "id", "") for base in node.bases]
        inherited = [all_of(b, seen | {b}) for b in bases if b in classes and b not in seen]
        return set().union(own[name], *inherited) - {name, *bases}

    return {f"{classes[name][0]}:{name}": len(all_of(name, frozenset({name}))) for name in classes}


def _own_collaborators(tree: ast.Module, node: ast.ClassDef) -> set[str]:
    imported = {
        alias.asname or alias.name
        for one in nodes(tree)
        if isinstance(one, ast.ImportFrom) and (one.module or "").startswith("distflow_jax")
        for alias in one.names
    }
    beside = {one.name for one in tree.body if isinstance(one, ast.ClassDef)} - {node.name}
    used = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} & (imported | beside)
    taken = set()
    for name, kind in _constructor(node):
        mentioned = set(re.findall(r"\w+", kind))
        if not mentioned & used and not PRIMITIVE.fullmatch(kind):
            taken.add(name)
    return used | taken


def _constructor(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """(name, annotation) of what a class is made of."""
    for member in node.body:
        if isinstance(member, ast.AnnAssign):
            yield getattr(member.target, "id", ""), ast.unparse(member.annotation)
        elif isinstance(member, FUNCTIONS) and member.name == "__init__":
            arguments = member.args
            for one in (*arguments.posonlyargs, *arguments.args[1:], *arguments.kwonlyargs):
                yield one.arg, ast.unparse(one.annotation) if one.annotation else ""


# -- calls -----------------------------------------------------------------------------------------


def packed_calls(sources: Sources) -> int:
    """Calls that unpack a tuple or list which stands there, as in f(*(a, b))."""
    return sum(
        isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Tuple | ast.List)
        for text in sources.values()
        for node in nodes(parsed(text))
        if isinstance(node, ast.Call)
        for argument in node.args
    )
