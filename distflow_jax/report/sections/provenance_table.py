"""Provenance of a run: when, where, with which versions and by which command it was started."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from distflow_jax.report.page_style import escaped, long_text
from distflow_jax.report.sections.run_timeline import Attempt, attempts_of, date

_FACTS = ("host", "devices", "processes", "versions", "commit", "command", "folder")
_MOST_COMMAND = 3000  # characters that are shown word by word


def provenance_table(events: Sequence[Mapping[str, Any]]) -> str:
    """HTML of the last start's facts, and of those of earlier starts; "" without any."""
    attempts = attempts_of(events)
    if not attempts:
        return ""
    *earlier, last = attempts
    folded = ""
    if earlier:
        tables = "".join(_table(attempt) for attempt in reversed(earlier[-10:]))
        folded = f"<details><summary>{len(earlier)} earlier starts</summary>{tables}</details>"
    return _table(last) + folded


def _table(attempt: Attempt) -> str:
    start = attempt.events[0]
    facts = {"date": f"{date(attempt.begin)} UTC"} | {
        name: _text(start[name]) for name in _FACTS if name in start
    }
    rows = "".join(
        f"<tr><th>{name}</th><td>{_html(name, value)}</td></tr>" for name, value in facts.items()
    )
    return f"<table class='facts'>{rows}</table>"


def _html(name: str, value: str) -> str:
    """A fact; the words of a command stay whole where they fit into a line."""
    if name != "command" or len(value) > _MOST_COMMAND:
        return long_text(value)
    return " ".join(f"<span class='word'>{escaped(word)}</span>" for word in value.split(" "))


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {number}" for name, number in value.items())
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
