"""Hugging Face's dialect of jinja2, sandboxed; all that a child process imports."""

import datetime
import functools
import json
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox


@functools.lru_cache(maxsize=32)
def compiled(template: str) -> jinja2.Template:
    """Compiles a template; raises ValueError for one that is not valid."""
    try:
        return environment().from_string(template)
    except (jinja2.TemplateError, SyntaxError) as error:
        raise ValueError(f"the chat template is not valid: {error}") from error


def answer(request: tuple[str, dict[str, Any]]) -> str:
    """The text of a template, {name: value} of its variables; the child process's part."""
    template, variables = request
    return compiled(template).render(**variables)


@functools.cache
def environment() -> jinja2.Environment:
    """The environment of all templates."""
    found = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    found.filters["tojson"] = _to_json
    found.globals["raise_exception"] = _raise_exception
    found.globals["strftime_now"] = _strftime_now
    return found


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
