"""Hugging Face's dialect of jinja2, sandboxed; all that a child process imports."""

import datetime
import functools
import json
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes

# before and behind what {% generation %} encloses, where it is asked for; no text has them
MARKS = ("\ufdd0", "\ufdd1")


@functools.lru_cache(maxsize=32)
def compiled(template: str, marked: bool = False) -> jinja2.Template:
    """Compiles a template; raises ValueError for one that is not valid."""
    try:
        return environment(marked).from_string(template)
    except (jinja2.TemplateError, SyntaxError) as error:
        raise ValueError(f"the chat template is not valid: {error}") from error


def answer(request: tuple[str, dict[str, Any], bool, str]) -> str:
    """The text of a template, {name: value} of its variables, whether what it generates is marked,
    and its date, see `_strftime`; the child process's part."""
    template, variables, marked, date = request
    now = functools.partial(_strftime, date)
    return compiled(template, marked).render(strftime_now=now, **variables)


@functools.cache
def environment(marked: bool = False) -> jinja2.Environment:
    """The environment of all templates; `marked`: of those whose generation is marked."""
    found = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    found.extend(marks=MARKS if marked else ("", ""))
    found.filters["tojson"] = _to_json
    found.globals["raise_exception"] = _raise_exception
    found.globals["strftime_now"] = functools.partial(_strftime, "")
    return found


class _Generation(jinja2.ext.Extension):
    """{% generation %} ... {% endgeneration %}, around what the assistant has written."""

    tags = {"generation"}

    def parse(self, parser: Any) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # a scope: variables that are set within are unknown behind it, as in transformers
        inner = nodes.Scope(body, lineno=line)
        before, behind = (
            nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in self.environment.marks
        )
        return [before, inner, behind]


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime(date: str, format: str) -> str:
    """The time in UTC, which is one in all places, or the first moment of a date YYYY-MM-DD."""
    utc = datetime.UTC
    moment = datetime.datetime.fromisoformat(date) if date else datetime.datetime.now(utc)
    return moment.replace(tzinfo=utc).strftime(format)
