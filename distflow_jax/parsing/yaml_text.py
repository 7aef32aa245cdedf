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


def load_yaml(text: str, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> Any:
    """The value of the one document in a YAML text.

    Raises ValueError with the reason, and yaml.YAMLError with the mark of a syntax error.
    """
    if len(text) > MOST_BYTES:
        raise ValueError(f"the text has {len(text)} characters, at most {MOST_BYTES} are read")
    open_loader = None
    try:
        open_loader = loader(text)
        root = open_loader.get_single_node()
        if root is None:
            return None
        _count(root, {}, ())
        return open_loader.construct_document(root)
    except RecursionError as error:  # in PyYAML, before anything can be counted
        raise ValueError(f"lists and maps nested deeper than {MOST_DEPTH}: flatten them") from error
    except ValueError as error:  # a date such as 2024-99-99, an integer of 5,000 digits
        raise ValueError(f"a value cannot be read ({error}): quote it") from error
    finally:
        if open_loader is not None:
            open_loader.dispose()


def _count(node: yaml.Node, known: dict[int, int], inside: tuple[int, ...]) -> int:
    """Values that a node stands for. Raises yaml.MarkedYAMLError beyond the bounds."""
    problem = None
    if id(node) in inside:
        problem = "an alias inside the value that it names: write the value out"
    elif len(inside) >= MOST_DEPTH:
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
