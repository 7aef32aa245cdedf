"""YAML of strangers, with bounds on what a short text can stand for.

An alias (`*a`) repeats a part of a document: nine levels of nine aliases are a billion values, and
one inside the part that it names has no end. The composed document is therefore counted, with all
repetitions, before any value is made of it.
"""

from typing import Any

import yaml

MOST_BYTES = 1 << 20  # of a text; the largest graph that ships has 4 KiB
MOST_VALUES = 100_000  # of a document, repetitions included
MOST_DEPTH = 64  # of lists and maps in each other


class BoundedLoader(yaml.SafeLoader):
    """Safe YAML loader that counts nodes as they are composed, before the text behind is read."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node | None:
        """Composes one node. Raises yaml.MarkedYAMLError where it is nested too deeply."""
        if self._depth >= MOST_DEPTH:
            problem = f"lists and maps nested deeper than {MOST_DEPTH}: flatten them"
            raise yaml.MarkedYAMLError(None, None, problem, self.peek_event().start_mark)
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


def load_yaml(text: str, loader: type[BoundedLoader] = BoundedLoader) -> Any:
    """The value of the one document in a YAML text.

    Raises ValueError with the reason, and yaml.YAMLError with the mark of a syntax error.
    """
    if len(text) > MOST_BYTES:
        raise ValueError(f"the text has {len(text)} characters, at most {MOST_BYTES} are read")
    source = loader(text)
    try:
        root = source.get_single_node()
        if root is None:
            return None
        _count(root, {}, ())
        return source.construct_document(root)
    except ValueError as error:  # a date such as 2024-99-99, an integer of 5,000 digits
        raise ValueError(f"a value cannot be read ({error}): quote it") from error
    finally:
        source.dispose()


def _count(node: yaml.Node, known: dict[int, int], inside: tuple[int, ...]) -> int:
    """Values that a node stands for. Raises yaml.MarkedYAMLError beyond the bound."""
    problem = None
    if id(node) in inside:
        problem = "an alias inside the value that it names: write the value out"
    elif len(inside) >= MOST_DEPTH:  # aliases of aliases
        problem = f"lists and maps nested deeper than {MOST_DEPTH}: flatten them"
    elif id(node) not in known:
        parts = [] if isinstance(node, yaml.ScalarNode) else node.value
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in parts for part in pair]
        within = (*inside, id(node))
        known[id(node)] = 1 + sum(_count(part, known, within) for part in parts)
    if problem is None and known[id(node)] > MOST_VALUES:
        problem = f"aliases make more than {MOST_VALUES} values of it: write the values out"
    if problem is not None:
        raise yaml.MarkedYAMLError(None, None, problem, node.start_mark)
    return known[id(node)]
