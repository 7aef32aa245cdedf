"""Line charts of metrics over steps, as drawings with colours that a page may set."""

import dataclasses
import math
from collections.abc import Sequence

from distflow_jax.report.drawing import Drawing, Line, Rect, Shape, Text

WIDTH, HEIGHT = 340.0, 176.0
LEFT, RIGHT, TOP, BOTTOM = 46.0, 10.0, 8.0, 22.0  # margins of the plot

INK, GRID = "var(--faint, #64748b)", "var(--grid, #e2e8f0)"
WRONG = "var(--wrong, #dc2626)"
COLORS = ("var(--line0, #1d4ed8)", "var(--line1, #ea7a0c)", "var(--line2, #0f766e)")
PALE = ("var(--pale0, #a9c0f5)", "var(--pale1, #c3cfdf)")

_MOST = 1e150  # differences of larger values could overflow
_MARKED = 40  # most points that are marked one by one


@dataclasses.dataclass(frozen=True)
class Series:
    """Values in the order of steps; NaN and infinities are gaps with a mark on the axis."""

    name: str
    points: Sequence[tuple[int, float]]
    color: str = COLORS[0]


@dataclasses.dataclass(frozen=True)
class Scale:
    """Limits of a chart's axes: first and last step, least and greatest value."""

    first: int
    last: int
    low: float
    high: float

    def x(self, step: float) -> float:
        """Pixels from the left."""
        share = (step - self.first) / (self.last - self.first) if self.last > self.first else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Pixels from the top."""
        share = (min(max(value, -_MOST), _MOST) - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def downsample(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """About `most` points: least and greatest value of each stretch, and the last point.

    The first value of a stretch that is not finite is kept too, so that it stays visible.
    """
    if len(points) <= most:
        return list(points)
    stretches = max(1, most // 2)
    kept: list[tuple[int, float]] = []
    for i in range(stretches):
        stretch = points[len(points) * i // stretches : len(points) * (i + 1) // stretches]
        finite = [point for point in stretch if math.isfinite(point[1])]
        chosen = {point[0]: point for point in stretch if not math.isfinite(point[1])}
        chosen = dict(list(chosen.items())[:1])
        if finite:
            for point in (min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])):
                chosen[point[0]] = point
        kept += [chosen[step] for step in sorted(chosen)]
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def line_chart(series: Sequence[Series]) -> tuple[Drawing, Scale]:
    """A chart of one or more series; the first is drawn on top."""
    scale = _scale(series)
    shapes = _axes(scale)
    for one in reversed(series):
        shapes += _series(one, scale)
    return Drawing(WIDTH, HEIGHT, shapes), scale


def _scale(series: Sequence[Series]) -> Scale:
    steps = [step for one in series for step, _ in one.points] or [0]
    values = [
        min(max(v, -_MOST), _MOST) for one in series for _, v in one.points if math.isfinite(v)
    ]
    low, high = min(values, default=0.0), max(values, default=1.0)
    if high - low <= 1e-12 * max(abs(low), abs(high)):  # a constant: in the middle, 0 at the bottom
        margin = abs(low) / 2
        ends = (low - margin, high + margin) if margin else (-0.04, 1.0)
        return Scale(min(steps), max(steps), *ends)
    margin = 0.04 * (high - low)
    return Scale(min(steps), max(steps), low - margin, high + margin)


def _axes(scale: Scale) -> list[Shape]:
    shapes: list[Shape] = []
    for value in ticks(scale.low, scale.high, 6):
        y = scale.y(value)
        shapes.append(Line([(LEFT, y), (WIDTH - RIGHT, y)], GRID, 1.0))
        shapes.append(Text(LEFT - 5.0, y + 3.0, format_value(value), 9.0, INK, anchor="end"))
    for step in ticks(scale.first, scale.last, 5):
        if step == int(step):
            x = scale.x(step)
            shapes.append(Line([(x, HEIGHT - BOTTOM), (x, HEIGHT - BOTTOM + 3.0)], INK, 1.0))
            word = format_value(step)
            shapes.append(Text(x, HEIGHT - BOTTOM + 13.0, word, 9.0, INK, anchor="middle"))
    bottom = HEIGHT - BOTTOM
    return [*shapes, Line([(LEFT, bottom), (WIDTH - RIGHT, bottom)], INK, 1.0)]


def _series(series: Series, scale: Scale) -> list[Shape]:
    shapes: list[Shape] = []
    run: list[tuple[float, float]] = []
    for step, value in [*series.points, (0, math.nan)]:
        if math.isfinite(value):
            run.append((scale.x(step), scale.y(value)))
        elif run:
            shapes += [Line(run, series.color, 1.5)] if len(run) > 1 else []
            if len(run) == 1 or len(series.points) <= _MARKED:
                shapes += [Rect(x - 2, y - 2, 4, 4, series.color, radius=2.0) for x, y in run]
            run = []
    for step, value in series.points:
        if not math.isfinite(value):
            x, y = scale.x(step), HEIGHT - BOTTOM
            cross = [(x - 3, y), (x + 3, y), (x, y - 6)]
            shapes.append(Line(cross, fill=WRONG, closed=True, title=f"{value} in step {step}"))
    return shapes


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers from low to high: multiples of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    raw = (high - low) / most
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * m for m in (1, 2, 5, 10) if unit * m >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, min(last, first + 2 * most) + 1)]


def format_value(value: float) -> str:
    """Formats a number briefly: 0.0000123 -> "1.23e-5", 12345.6 -> "12,346", 1250000 -> "1.25M"."""
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if 1e4 <= size < 1e6:
        return f"{value:,.0f}"
    for unit, letter in ((1e9, "G"), (1e6, "M")):
        if unit <= size < 1e4 * unit:
            return f"{value / unit:.3g}{letter}"
    text = f"{value:.4g}" if 1e-3 <= size < 1e4 else f"{value:.3g}"
    return text.replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
