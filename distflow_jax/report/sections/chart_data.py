"""The numbers of a run's charts, as the page's script takes them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from distflow_jax.report.chart_choice import TOGETHER, charts_of, is_flat, main_charts
from distflow_jax.report.charts import downsample
from distflow_jax.report.json_lines import json_number
from distflow_jax.report.metric_reference import find_metric
from distflow_jax.report.read_run import RunFolder

_MOST_CHARTS = 300
_POINTS, _POINTS_PER_PAGE = 300, 100_000
_CLOCK_POINTS = 200
# {axis: the metric whose sums over the steps it shows}
_AXES = {"seconds": "timing_s/step", "tokens": "perf/total_num_tokens"}


def chart_data(run: RunFolder) -> dict[str, Any]:
    """JSON values: the run's charts, flat ones last, and the points of their metrics.

    {"name", "total": planned steps or None, "last": last step, "more": charts left out,
     "charts": [{"title", "lines": [[word, metric]], "main", "about": [meaning, bad value]}],
     "grids": [[step, ...]], "metrics": {name: [grid, [value or None, ...], [[step, word], ...]]},
     "axes": {"seconds": [[step, ...], [sum, ...]], ...}}

    Metrics with the same steps share a grid. None stands for a value that is not finite; its step
    is listed with its word.
    """
    charts, main = charts_of(run.rows), main_charts(run)
    rest = sorted(charts.keys() - set(main), key=lambda t: (is_flat(run.rows, charts[t]), t))
    order = [*main, *rest]
    count = sum(len(names) for names in charts.values())
    most = max(40, min(_POINTS, _POINTS_PER_PAGE // max(count, 1)))
    shown = order[:_MOST_CHARTS]
    grids: dict[tuple[int, ...], int] = {}
    total = run.config.get("training.steps")
    return {
        "name": run.name,
        "total": total if isinstance(total, int) else None,
        "last": max(run.rows, default=0),
        "more": len(order) - len(shown),
        "charts": [_chart(title, charts[title], title in set(main)) for title in shown],
        "metrics": {
            name: _points(run.rows, name, most, grids) for title in shown for name in charts[title]
        },
        "grids": [list(grid) for grid in grids],
        "axes": {axis: _sums(run.rows, name) for axis, name in _AXES.items()},
    }


def _chart(title: str, names: Sequence[str], main: bool) -> dict[str, Any]:
    by_word = {name.rpartition("/")[2]: name for name in names}
    words = [word for word in TOGETHER if word in by_word] if len(names) > 1 else list(by_word)
    entry = find_metric(names[0])
    about = [entry.meaning, entry.bad] if entry else ["", ""]
    lines = [[word, by_word[word]] for word in words]
    return {"title": title, "lines": lines, "main": main, "about": about}


def _points(
    rows: Mapping[int, Mapping[str, float]],
    name: str,
    most: int,
    grids: dict[tuple[int, ...], int],
) -> list[Any]:
    points = downsample([(step, row[name]) for step, row in rows.items() if name in row], most)
    grid = grids.setdefault(tuple(step for step, _ in points), len(grids))
    values = [_rounded(v, 5) if math.isfinite(v) else None for _, v in points]
    odd = [[step, json_number(value)] for step, value in points if not math.isfinite(value)]
    return [grid, values, odd]


def _rounded(value: float, digits: int) -> float:
    """A finite number with few digits; the largest floats as they are, not rounded to infinity."""
    rounded = float(f"{value:.{digits}g}")
    return rounded if math.isfinite(rounded) else value


def _sums(rows: Mapping[int, Mapping[str, float]], name: str) -> list[list[float]]:
    """Steps, and the sums of a metric up to each. A row that was not read counts as the next."""
    steps, sums, total, before = [], [], 0.0, 0
    for step, row in rows.items():
        value = row.get(name, math.nan)
        longer = total + value * max(step - before, 0)
        if math.isfinite(longer):
            total, before = longer, step
            steps.append(step)
            sums.append(_rounded(total, 7))
    kept = {round(i * (len(steps) - 1) / _CLOCK_POINTS) for i in range(_CLOCK_POINTS + 1)}
    places = sorted(place for place in kept if 0 <= place < len(steps))
    return [[steps[place] for place in places], [sums[place] for place in places]]
