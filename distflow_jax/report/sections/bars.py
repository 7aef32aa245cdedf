"""Rows of bars over seconds, as HTML that fits the width of its page."""

import dataclasses
from collections.abc import Sequence

from distflow_jax.report.charts import format_value, ticks
from distflow_jax.report.page_style import escaped

_UNITS = ((3600.0, "h"), (60.0, "min"), (1.0, "s"))  # of an axis, in seconds


@dataclasses.dataclass(frozen=True)
class Bar:
    """A stretch of time, in seconds; `kind` is a class of the page's style, `title` a tooltip."""

    start: float
    end: float
    kind: str
    title: str


@dataclasses.dataclass(frozen=True)
class BarRow:
    """Bars with a label on their left and a remark on their right."""

    label: str
    bars: Sequence[Bar]
    remark: str


def bars_html(rows: Sequence[BarRow], end: float) -> str:
    """HTML of rows over an axis from 0 to `end` seconds; "" without rows."""
    if not rows:
        return ""
    end = end if end > 0 else 1.0
    unit, word = next(found for found in _UNITS if end >= 2 * found[0] or found[0] == 1.0)
    labels = "".join(
        f"<i style='left:{_percent(value * unit, end)}'>{escaped(format_value(value))} {word}</i>"
        for value in ticks(0.0, end / unit, 5)
        if value * unit <= 0.92 * end  # a label at the edge would leave the page
    )
    body = "".join(
        f"<div class='row'><div class='label' title='{escaped(row.label)}'>{escaped(row.label)}"
        f"</div><div class='track'>{''.join(_bar(bar, end) for bar in row.bars)}</div>"
        f"<div class='sum'>{escaped(row.remark)}</div></div>"
        for row in rows
    )
    return f"<div class='bars'><div class='axis'>{labels}</div>{body}</div>"


def _bar(bar: Bar, end: float) -> str:
    left, width = _percent(bar.start, end), _percent(bar.end - bar.start, end)
    return (
        f"<i class='{bar.kind}' style='left:{left};width:{width}' title='{escaped(bar.title)}'></i>"
    )


def _percent(value: float, end: float) -> str:
    return f"{100 * min(max(value / end, 0.0), 1.0):.2f}%"
