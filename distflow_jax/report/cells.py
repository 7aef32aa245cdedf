"""Output of notebook cells: charts, tables, pages, and the progress of a run.

Each object has an HTML form for notebooks and a plain-text form for other shells. A model's text is
not trusted: it is escaped in HTML, and printed without control characters as text.
"""

import dataclasses
import importlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from distflow_jax.report.charts import COLORS, Series, downsample, format_value, line_chart
from distflow_jax.report.drawing import Drawing, to_svg
from distflow_jax.report.page_style import escaped, long_text

# colours of compared runs; the first are the report's
LINES = (*COLORS, "#7e22ce", "#be123c", "#4d7c0f", "#0891b2", "#78716c")

_FONT = "font:13px/1.45 system-ui,sans-serif"
_MOST_POINTS = 400  # per line
SHOWN_ROWS = 12  # rows of a table
_SHOWN_TEXT = 60  # characters of a table's cell, as text
_CELL = "text-align:left;vertical-align:top;padding:3px 10px;border-bottom:1px solid #94a3b866"
_LONG = "white-space:pre-wrap;overflow-wrap:anywhere;max-height:12em;overflow-y:auto"


@dataclasses.dataclass(frozen=True)
class Charts:
    """Line charts over steps, (title, lines) each; the first line is drawn on top."""

    charts: Sequence[tuple[str, Sequence[Series]]]

    def _repr_html_(self) -> str:
        figures = "".join(
            f"<figure style='margin:0'><figcaption>{_caption(title, lines)}</figcaption>"
            f"{to_svg(_chart(lines), title)}</figure>"
            for title, lines in self.charts
        )
        return f"<div style='{_FONT};display:flex;flex-wrap:wrap;gap:14px'>{figures}</div>"

    def __repr__(self) -> str:
        """A line per curve: its first and its last value."""
        return "\n".join(
            f"{plain(title if len(lines) == 1 else f'{title} {line.name}')}: {_ends(line)}"
            for title, lines in self.charts
            for line in lines
        )


def _chart(lines: Sequence[Series]) -> Drawing:
    thin = [dataclasses.replace(s, points=downsample(s.points, _MOST_POINTS)) for s in lines]
    return line_chart(thin)[0]


def _caption(title: str, lines: Sequence[Series]) -> str:
    keys = "".join(
        f" <span style='color:{escaped(line.color)}'>{escaped(line.name)}</span>"
        f" {escaped(format_value(line.points[-1][1]))}"
        for line in lines
        if line.points
    )
    return f"<b>{escaped(title)}</b>{keys}"


def _ends(line: Series) -> str:
    if not line.points:
        return "no value"
    (first, start), (last, end) = line.points[0], line.points[-1]
    return f"{format_value(start)} in step {first}, {format_value(end)} in step {last}"


@dataclasses.dataclass(frozen=True)
class Pictures:
    """A table's cell with pictures, `uris`: checked data URIs."""

    uris: Sequence[str]

    def _repr_html_(self) -> str:
        return "".join(f"<img src='{escaped(uri)}' alt='picture'>" for uri in self.uris)

    def __repr__(self) -> str:
        count = len(self.uris)
        return f"{count} picture{'' if count == 1 else 's'}" if count else ""


class Table(Sequence[Mapping[str, Any]]):
    """A sequence of rows. A cell shows the named columns of the first rows."""

    def __init__(
        self,
        rows: Iterable[Mapping[str, Any]],
        columns: Sequence[str],
        title: str = "",
        *,
        shown: int = SHOWN_ROWS,
    ) -> None:
        self._rows, self.columns, self.title = list(rows), list(columns), title
        self._shown = shown

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return Table(self._rows[index], self.columns, self.title, shown=self._shown)
        return self._rows[index]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self._rows)

    def _repr_html_(self) -> str:
        head = "".join(f"<th style='{_CELL}'>{escaped(name)}</th>" for name in self.columns)
        body = "".join(
            "<tr>" + "".join(_cell(row.get(name, "")) for name in self.columns) + "</tr>"
            for row in self._rows[: self._shown]
        )
        about = f"<div><b>{escaped(self.title)}</b>{escaped(self._more())}</div>"
        return (
            f"<div style='{_FONT}'>{about}<table style='border-collapse:collapse'>"
            f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )

    def __repr__(self) -> str:
        rows = [self.columns]
        rows += [
            [_word(r.get(name, "")) for name in self.columns] for r in self._rows[: self._shown]
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        title = plain(self.title) + self._more()
        return "\n".join([title, *lines] if title else lines)

    def _more(self) -> str:
        count = len(self._rows)
        return f" ({self._shown} of {count} rows)" if count > self._shown else ""


def _cell(value: Any) -> str:
    if isinstance(value, Pictures):
        return f"<td style='{_CELL}'>{value._repr_html_()}</td>"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"<td style='{_CELL}'>{escaped(format_value(value))}</td>"
    return f"<td style='{_CELL}'><div style='{_LONG}'>{long_text(value)}</div></td>"


def _word(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return format_value(value)
    text = str(value)
    if not text.isprintable() or text != text.strip():
        text = repr(value) if isinstance(value, str) else plain(text)
    return text if len(text) <= _SHOWN_TEXT else text[: _SHOWN_TEXT - 1] + "…"


@dataclasses.dataclass(frozen=True)
class Page:
    """A whole HTML page, shown in a sandboxed frame."""

    html: str
    text: str
    height: int = 760  # pixels

    def _repr_html_(self) -> str:
        return (
            f"<iframe sandbox='allow-scripts' srcdoc='{escaped(self.html)}' "
            f"style='width:100%;height:{self.height}px;border:1px solid #94a3b8'></iframe>"
        )

    def __repr__(self) -> str:
        return self.text


def size_table(rows: Iterable[tuple[str, object, str]]) -> Table:
    """A run's derived sizes, (name, value, meaning) each."""
    named = [
        {"size": name, "": f"{value:,}" if isinstance(value, int) else str(value), "meaning": what}
        for name, value, what in rows
    ]
    return Table(named, ("size", "", "meaning"), shown=len(named))


def plain(text: str) -> str:
    """Replaces control characters, which could steer a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def details(summary: str, body: str) -> str:
    """HTML that unfolds below its summary. `body` is HTML, `summary` is text."""
    return (
        f"<details style='{_FONT}'><summary style='cursor:pointer'>{escaped(summary)}</summary>"
        f"{body}</details>"
    )


def preformatted(text: str) -> str:
    """Text as HTML with its columns aligned."""
    return f"<pre style='overflow-x:auto;font-size:12px;line-height:1.35'>{escaped(text)}</pre>"


class LiveOutput:
    """One output of the running cell, which later calls replace."""

    def __init__(self) -> None:
        # installed in every notebook, and only needed there
        self._ipython = importlib.import_module("IPython.display")
        self._handle: Any = None

    def show(self, html: str, text: str) -> None:
        """Displays the output, or replaces it."""
        data = {"text/html": html, "text/plain": text}
        if self._handle is None:
            self._handle = self._ipython.display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def progress_html(words: str, step: int, total: int, rewards: Sequence[tuple[int, float]]) -> str:
    """HTML of a progress bar, the step's values, and the curve of rewards (step, value)."""
    bar = f"<progress value='{step}' max='{total}' style='vertical-align:middle'></progress>"
    finite = [point for point in rewards if math.isfinite(point[1])]
    chart = f"<br>{to_svg(_chart([Series('reward', finite)]), 'reward')}" if finite[1:] else ""
    return f"<div style='{_FONT}'>{bar} {escaped(words)}{chart}</div>"
