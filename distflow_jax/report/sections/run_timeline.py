"""Timeline of a whole run: each start of it with its compilation, steps, evaluations and stop."""

import dataclasses
import datetime
import math
from collections.abc import Mapping, Sequence
from typing import Any

from distflow_jax.programs.units import format_seconds
from distflow_jax.report.page_style import escaped
from distflow_jax.report.sections.bars import Bar, BarRow, bars_html

_MOST_ATTEMPTS = 20
_MOST_BARS = 300  # of a kind in a row
_LEGEND = (
    ("setup", "start"),
    ("compile", "compile"),
    ("steps", "steps"),
    ("testing", "evaluation"),
    ("checkpoint", "checkpoint"),
    ("stop", "stop"),
)
_UNKNOWN = "no stop was recorded"


@dataclasses.dataclass(frozen=True)
class Attempt:
    """The events of one start of a run up to the next, times in seconds since 1970."""

    begin: float
    events: Sequence[Mapping[str, Any]]

    @property
    def end(self) -> float:
        """The time of the last event."""
        return max(event["time"] for event in self.events)

    def find(self, kind: str) -> list[Mapping[str, Any]]:
        """The events of a kind."""
        return [event for event in self.events if event.get("event") == kind]


def attempts_of(events: Sequence[Mapping[str, Any]]) -> list[Attempt]:
    """The starts of a run; events without a time are left out."""
    groups: list[list[Mapping[str, Any]]] = []
    for event in events:
        if not _finite(event.get("time")):
            continue
        if event.get("event") == "start":
            groups.append([])
        if groups:
            groups[-1].append(event)
    return [Attempt(group[0]["time"], group) for group in groups]


def run_timeline(events: Sequence[Mapping[str, Any]]) -> str:
    """HTML of the timeline; "" for a run that recorded no start."""
    attempts = attempts_of(events)
    shown = attempts[-_MOST_ATTEMPTS:]
    if not shown:
        return ""
    length = max(attempt.end - attempt.begin for attempt in shown)
    rows = [_row(attempt) for attempt in shown]
    kinds = {bar.kind for row in rows for bar in row.bars}
    legend = "".join(
        f"<span><i class='{kind}'></i>{word}</span>" for kind, word in _LEGEND if kind in kinds
    )
    left = len(attempts) - len(shown)
    more = f"<p class='about'>{left} earlier starts are in events.jsonl</p>" if left else ""
    gaps = [
        f"<li>{escaped(date(b.begin))}: resumed {format_seconds(max(0, b.begin - a.end))} "
        f"after the end of the start before ({escaped(_stop(a))})</li>"
        for a, b in zip(shown, shown[1:], strict=False)
    ]
    stops = f"<ul class='about'>{''.join(gaps)}</ul>" if gaps else ""
    about = "<p class='about'>A row per start of the run, from its beginning. Dates are in UTC.</p>"
    return f"{about}<div class='legend'>{legend}</div>{more}{bars_html(rows, length)}{stops}"


def date(seconds: float) -> str:
    """A time since 1970 as text, in UTC."""
    try:
        found = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    except (OverflowError, OSError, ValueError):
        return "?"
    return found.strftime("%Y-%m-%d %H:%M")


def _row(attempt: Attempt) -> BarRow:
    begin, end = attempt.begin, attempt.end
    ready = attempt.find("ready")
    trained = ready[0]["time"] if ready else end
    compiled = _seconds(ready[0]) if ready else 0.0
    made = max((_step(event) for event in attempt.events), default=0)
    first = _step(attempt.events[0])
    bars = [
        Bar(0.0, trained - begin - compiled, "setup", "start: data, model, checks"),
        Bar(trained - begin - compiled, trained - begin, "compile", f"compile: {compiled:.1f} s"),
    ]
    if ready:
        title = f"steps {first + 1} to {made}: {format_seconds(end - trained)}"
        bars.append(Bar(trained - begin, end - begin, "steps", title))
    for kind, word in (("testing", "evaluation"), ("checkpoint", "checkpoint")):
        found = attempt.find(word)
        for event in found[:: 1 + len(found) // _MOST_BARS]:
            at, seconds = event["time"] - begin, _seconds(event)
            title = f"{word} of step {_step(event)}: {seconds:.1f} s"
            bars.append(Bar(at - seconds, at, kind, title))
    if attempt.find("stop"):
        bars.append(Bar(end - begin, end - begin, "stop", _stop(attempt)))
    label = f"{date(begin)}, step {first + 1}"
    return BarRow(label, bars, f"{format_seconds(end - begin)}, to step {made}")


def _stop(attempt: Attempt) -> str:
    found = attempt.find("stop")
    return str(found[-1].get("reason", "stopped")) if found else _UNKNOWN


def _step(event: Mapping[str, Any]) -> int:
    step = event.get("step")
    return step if isinstance(step, int) else 0


def _seconds(event: Mapping[str, Any]) -> float:
    seconds = event.get("seconds")
    return float(seconds) if _finite(seconds) and seconds >= 0 else 0.0


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and abs(value) < 1e11
