"""Rendering of chat templates, which come with models and are a stranger's programs.

A sandbox keeps a template from files and from Python's internals, and bounds neither time nor
memory. Templates whose cost their form bounds are rendered here: one loop over messages or tools,
without assignments, calls and operators but `+`. All others are rendered in a child process with
limits (parsing/bounded_child.py).
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jinja2
from jinja2 import nodes

from distflow_jax.did_you_mean import hint
from distflow_jax.models.chat import dialect
from distflow_jax.parsing.bounded_child import BoundedChild, ChildEnded
from distflow_jax.parsing.one_line import one_line

SECONDS = 2.0  # of processor time for one conversation
MEMORY = 1 << 30  # bytes of the child's address space
MOST_TEXT = 64 << 20  # bytes of a rendered conversation, in JSON
MOST_TEMPLATE = 1 << 20  # characters; the longest that are published have some 20,000
_MOST_PLAIN = 8192  # characters of a template that is rendered here

_PLAIN = (
    *(nodes.Template, nodes.Output, nodes.TemplateData, nodes.If, nodes.For, nodes.Scope),
    *(nodes.Name, nodes.Const, nodes.Getattr, nodes.Getitem, nodes.Test, nodes.Compare),
    *(nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.Add, nodes.CondExpr, nodes.Filter),
)
_PLAIN_FILTERS = {"trim", "length", "first", "last", "string", "lower", "upper"}
_GIVEN = {"messages", "add_generation_prompt", "continue_final_message"}
_PLAIN_LOOPS = {"messages", "tools"}


def render(
    template: str, variables: Mapping[str, Any], *, date: str = "", marked: bool = False
) -> str:
    """The text of a template. Raises ValueError for one that is not valid or met a limit.

    `date`: what strftime_now writes, YYYY-MM-DD; "": the time in UTC. `marked`: with dialect.MARKS
    around what the template generates.
    """
    if is_plain(template):
        try:
            return dialect.compiled(template, marked).render(**variables)
        except (jinja2.TemplateError, TypeError) as error:  # "text" + a content that is no string
            raise _rejected(error) from error
    try:
        return _child().ask((template, dict(variables), marked, date))
    except ChildEnded as error:
        raise ValueError(
            f"the chat template {error}: give the model another chat_template, or use prompts that "
            "are strings"
        ) from error
    except ValueError as error:
        if str(error).startswith("the chat template is not valid"):
            raise ValueError(one_line(str(error))) from error
        raise _rejected(error) from error


def _rejected(error: Exception) -> ValueError:
    return ValueError(f"the chat template rejects the messages: {one_line(str(error))}")


@functools.lru_cache(maxsize=32)
def names_read(template: str) -> frozenset[str]:
    """The names that a template reads: its variables, and some that it sets itself."""
    try:
        names = dialect.environment().parse(template).find_all(nodes.Name)
        return frozenset(name.name for name in names if name.ctx == "load")
    except (jinja2.TemplateError, RecursionError):
        return frozenset()  # rendering says what is wrong


def check_names(template: str, names: Iterable[str]) -> None:
    """Raises ValueError for a variable that a template does not read, or that is none."""
    for name in names:
        if name in _GIVEN:
            raise ValueError(f"{name!r} is no variable of a chat template's own: leave it out")
        if name not in (read := names_read(template)):
            raise ValueError(
                f"the chat template does not read {name!r} ({hint(name, sorted(read - _GIVEN))}): "
                "leave it out, or use a model whose template does"
            )


@functools.cache
def _child() -> BoundedChild:
    return BoundedChild(dialect.__name__, seconds=SECONDS, memory=MEMORY, most_answer=MOST_TEXT)


@functools.lru_cache(maxsize=32)
def is_plain(template: str) -> bool:
    """Whether a template costs at most its own length times that of the conversation.

    Raises ValueError for one that is far too long.
    """
    if len(template) > MOST_TEMPLATE:
        raise ValueError(
            f"the chat template has {len(template)} characters, at most {MOST_TEMPLATE} are read"
        )
    if len(template) > _MOST_PLAIN:
        return False
    try:
        tree = dialect.environment().parse(template)
    except (jinja2.TemplateError, RecursionError):
        return False  # the child says what is wrong
    return _is_plain(tree, looped=False)


def _is_plain(node: nodes.Node, *, looped: bool) -> bool:
    if not isinstance(node, _PLAIN):
        return False
    if isinstance(node, nodes.For):
        over = isinstance(node.iter, nodes.Name) and node.iter.name in _PLAIN_LOOPS
        if looped or node.recursive or not over:
            return False
        looped = True
    if isinstance(node, nodes.Filter):
        plain = node.name in _PLAIN_FILTERS and node.node is not None
        if not plain or node.args or node.kwargs or node.dyn_args or node.dyn_kwargs:
            return False
    return all(_is_plain(child, looped=looped) for child in node.iter_child_nodes())
