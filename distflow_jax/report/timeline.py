"""Timeline of one step: bars over seconds, with a row per node in the planned order."""

from collections.abc import Sequence

from distflow_jax.report.charts import GRID, INK, format_value, ticks
from distflow_jax.report.drawing import Drawing, Line, Rect, Shape, Text, shorten, text_width
from distflow_jax.report.read_run import PlannedNode, Span

WIDTH = 900.0
_ROW, _BAR = 21.0, 13.0
_MOST_ROWS = 48
_ROLES = {
    "ROLLOUT": "var(--rollout, #15803d)",
    "REWARD": "var(--reward, #b45309)",
    "ACTOR": "var(--actor, #1d4ed8)",
    "CRITIC": "var(--critic, #7e22ce)",
    "REFERENCE": "var(--reference, #0f766e)",
}
_OTHER, _THREAD = "var(--other, #94a3b8)", "var(--thread, #cbd5e1)"


def timeline(plan: Sequence[PlannedNode], spans: Sequence[Span]) -> Drawing:
    """Draws rows of the plan's nodes, of the main thread's other spans, and of other threads."""
    rows = _rows(plan, spans)
    left = min(260.0, 24.0 + max([text_width(name, 10.5) for name, _, _ in rows], default=0.0))
    right = 74.0
    end = max([span.end for span in spans], default=0.0) or 1.0
    scale = (WIDTH - left - right) / end
    height = 26.0 + _ROW * len(rows) + 6.0
    shapes: list[Shape] = []
    for value in ticks(0.0, end, 6):
        x = left + value * scale
        shapes.append(Line([(x, 20.0), (x, height - 4.0)], GRID))
        shapes.append(Text(x, 13.0, f"{format_value(value)} s", 9.0, INK, anchor="middle"))
    for number, (name, bars, color) in enumerate(rows):
        y = 26.0 + _ROW * number
        label = shorten(name, 10.5, left - 14.0)
        shapes.append(Text(6.0, y + 11.0, label, 10.5, "var(--ink, #1f2937)"))
        for start, stop in _merged(bars, 0.75 / scale):
            width = max(1.5, (stop - start) * scale)
            title = f"{name}: {start:.3f} s to {stop:.3f} s"
            x = left + start * scale
            shapes.append(Rect(x, y + 1.0, width, _BAR, color, radius=2.0, title=title))
        seconds = sum(stop - start for start, stop in _merged(bars, 0.0))
        total = f"{format_value(seconds)} s" if bars else "not run"
        shapes.append(Text(WIDTH - 6.0, y + 11.0, total, 10.0, INK, anchor="end"))
    return Drawing(WIDTH, height, shapes)


def _rows(
    plan: Sequence[PlannedNode], spans: Sequence[Span]
) -> list[tuple[str, list[tuple[float, float]], str]]:
    bars: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for span in spans:
        bars.setdefault((span.thread, span.name), []).append((max(0.0, span.start), span.end))
    rows = [
        (f"{place}. {node.id}", bars.pop(("", node.id), []), _ROLES.get(node.role, _OTHER))
        for place, node in enumerate(plan, 1)
    ]
    main = {key: value for key, value in bars.items() if not key[0]}
    others = {key: value for key, value in bars.items() if key[0]}
    rows += [(name, value, _OTHER) for (_, name), value in main.items()]
    rows += [(f"{name} ({thread})", value, _THREAD) for (thread, name), value in others.items()]
    return rows[:_MOST_ROWS]


def _merged(bars: Sequence[tuple[float, float]], near: float) -> list[tuple[float, float]]:
    """Merges bars whose distance is at most `near`, which is not visible."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(bars):
        if merged and start <= merged[-1][1] + near:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged
