"""Picture of a pod plan: bars of memory and estimated seconds for each segment.

to_svg(draw_pod(plan))  # report/drawing.py
"""

from collections.abc import Iterator, Mapping

from distflow_jax.planning.memory_plan import MemoryPlan
from distflow_jax.pods.pod_plan import PodPlan
from distflow_jax.pods.roofline import Estimate
from distflow_jax.programs.units import format_bytes
from distflow_jax.report.drawing import Drawing, Line, Rect, Shape, Text, move, shorten, text_width

# column of the memory table -> colour
MEMORY_COLORS = {
    "parameters": "#1d4ed8",
    "optimizer": "#6d8fe8",
    "gradients": "#b9c9f5",
    "temporaries": "#ea7a0c",
    "sampler_weights": "#15803d",
    "cache": "#86c79b",
    "batch": "#94a3b8",
}
SECONDS_COLORS = {
    "compute": "#1d4ed8",
    "HBM": "#15803d",
    "links, overlapped": "#f0b67a",
    "links, exposed": "#c2410c",
}
INK, FAINT, GRID, LIMIT, PAPER = "#1f2937", "#526072", "#e2e8f0", "#dc2626", "#ffffff"

_MARGIN, _NAMES, _BARS, _FIGURES = 22.0, 150.0, 420.0, 110.0  # widths
_ROW, _THICK, _THIN = 26.0, 16.0, 4.0  # heights of a row, of one bar in it, of one of four
_TITLE, _HEAD, _SMALL = 15.0, 12.0, 10.0  # sizes of text


def draw_pod(plan: PodPlan) -> Drawing:
    """Draws the memory of a chip, then the seconds, labelled as estimates."""
    title = f"{plan.planned.plan.name} on {plan.pod.name}"
    shapes: list[Shape] = [Text(_MARGIN, _MARGIN + 12.0, title, _TITLE, INK, bold=True)]
    y = _MARGIN + 44.0
    for head, rows, colors in (
        ("memory of a chip", list(_memory(plan.memory)), MEMORY_COLORS),
        ("ESTIMATED seconds at peak rates, not measured", list(_seconds(plan)), SECONDS_COLORS),
    ):
        shapes.append(Text(_MARGIN, y, head, _HEAD, INK, bold=True))
        shapes += [move(shape, _MARGIN, y + 18.0) for shape in _legend(colors)]
        y += 26.0
        for name, bars, figure in rows:
            shapes += [move(shape, _MARGIN, y) for shape in (*_named(name, figure), *bars)]
            y += _ROW
        y += 26.0
    return Drawing(2 * _MARGIN + _NAMES + _BARS + _FIGURES, y, shapes, PAPER)


_Row = tuple[str, list[Shape], str]  # name, bars, figure


def _memory(memory: MemoryPlan) -> Iterator[_Row]:
    whole = max(memory.device, memory.fullest.total, 1)
    limit = _NAMES + _BARS * memory.device / whole
    for segment in memory.segments:
        bars, x = [], _NAMES
        for column, color in MEMORY_COLORS.items():
            size = getattr(segment, column) or 0
            width = _BARS * size / whole
            title = f"{column.replace('_', ' ')}: {format_bytes(size)}"
            bars.append(Rect(x, 4.0, width, _THICK, color, title=title))
            x += width
        if memory.device:
            line = Line(
                [(limit, 0.0), (limit, _ROW)], LIMIT, 1.5, title=format_bytes(memory.device)
            )
            bars.append(line)
        more = "" if segment.temporaries is not None else " and more"
        yield segment.name, bars, f"{format_bytes(segment.total)}{more}"


def _seconds(plan: PodPlan) -> Iterator[_Row]:
    estimates = plan.parts
    longest = max((max(_terms(e).values()) for e in estimates.values()), default=0.0) or 1.0
    for name, estimate in estimates.items():
        bars: list[Shape] = [Rect(_NAMES, 3.0, _BARS, 4 * _THIN + 3.0, GRID)]
        for i, (term, seconds) in enumerate(_terms(estimate).items()):
            width = _BARS * seconds / longest
            title = f"{term}: {seconds:.3g} s"
            y = 3.0 + i * (_THIN + 1.0)
            bars.append(Rect(_NAMES, y, width, _THIN, SECONDS_COLORS[term], title=title))
        yield name, bars, f"{estimate.total:.3g} s"


def _terms(estimate: Estimate) -> dict[str, float]:
    overlapped = sum(estimate.links.values()) - estimate.exposed
    seconds = estimate.compute, estimate.memory, overlapped, estimate.exposed
    return dict(zip(SECONDS_COLORS, seconds, strict=True))


def _named(name: str, figure: str) -> Iterator[Shape]:
    yield Text(0.0, 16.0, shorten(name, _SMALL, _NAMES - 8.0), _SMALL, INK)
    yield Text(_NAMES + _BARS + 8.0, 16.0, figure, _SMALL, FAINT)


def _legend(colors: Mapping[str, str]) -> Iterator[Shape]:
    """Colour marks with their names, in one line."""
    x = 0.0
    for name, color in colors.items():
        word = name.replace("_", " ")
        yield Rect(x, -9.0, 10.0, 10.0, color)
        yield Text(x + 14.0, 0.0, word, _SMALL, FAINT)
        x += text_width(word, _SMALL) + 28.0
