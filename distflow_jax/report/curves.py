"""The charts of a report: the main metrics, then all others by their first word."""

import json
import math
from collections.abc import Mapping, Sequence

from distflow_jax.report.charts import COLORS, PALE, Series, downsample, format_value, line_chart
from distflow_jax.report.drawing import to_svg
from distflow_jax.report.page_style import escaped

# starts of the main metrics' names, in the order of their charts
FIRST = (
    "critic/score",
    "val-core/",
    "response_length",
    "actor/pg_loss",
    "actor/kl_loss",
    "actor/ppo_kl",
    "actor/entropy",
    "actor/grad_norm",
    "training/rollout_probs_diff",
    "perf/throughput",
    "timing_s/step",
)
TOGETHER = ("mean", "max", "min")  # metrics that share a chart
_MOST_CHARTS = 300
_POINTS, _POINTS_PER_PAGE = 300, 100_000


def curves(rows: Mapping[int, Mapping[str, float]]) -> str:
    """The HTML of the section; "" without metrics. `rows`: metrics by step."""
    charts = charts_of(rows)
    if not charts:
        return ""
    count = sum(len(names) for names in charts.values())
    most = max(40, min(_POINTS, _POINTS_PER_PAGE // count))
    first, rest = [], {}
    for title in sorted(charts, key=_rank)[:_MOST_CHARTS]:
        figure = _figure(title, charts[title], rows, most)
        if _rank(title)[0] < len(FIRST):
            first.append(figure)
        else:
            rest.setdefault(title.split("/")[0], []).append(figure)
    groups = "".join(
        f"<details class='group'><summary>{escaped(prefix)} <i>{len(figures)}</i></summary>"
        f"<div class='charts'>{''.join(figures)}</div></details>"
        for prefix, figures in sorted(rest.items())
    )
    left = len(charts) - _MOST_CHARTS
    more = f"<p class='note'>{left} more are in metrics.jsonl</p>" if left > 0 else ""
    search = "<input id='find' type='search' placeholder='find a metric' aria-label='metric'>"
    return f"{search}<div class='charts'>{''.join(first)}</div>{groups}{more}"


def charts_of(rows: Mapping[int, Mapping[str, float]]) -> dict[str, list[str]]:
    """{title: names of the metrics in that chart}; mean, max and min of a metric share one."""
    charts: dict[str, list[str]] = {}
    for name in sorted({name for row in rows.values() for name in row}):
        stem, _, last = name.rpartition("/")
        title = stem if stem and last in TOGETHER else name
        charts.setdefault(title, []).append(name)
    return charts


def _rank(title: str) -> tuple[int, str]:
    places = [i for i, start in enumerate(FIRST) if title.startswith(start)]
    return min(places, default=len(FIRST)), title


def _figure(
    title: str, names: Sequence[str], rows: Mapping[int, Mapping[str, float]], most: int
) -> str:
    by_word = {name.rpartition("/")[2]: name for name in names}
    if len(names) > 1:
        ordered = [word for word in TOGETHER if word in by_word]
        colors = {"mean": COLORS[0], "max": PALE[0], "min": PALE[1]}
    else:
        ordered, colors = list(by_word), {}
    series = []
    for word in ordered:
        points = [(step, row[by_word[word]]) for step, row in rows.items() if by_word[word] in row]
        series.append(Series(word, downsample(points, most), colors.get(word, COLORS[0])))
    drawing, scale = line_chart(series)
    data = {
        "scale": [scale.first, scale.last],
        "series": [
            [one.name, [step for step, _ in one.points], [_short(v) for _, v in one.points]]
            for one in series
        ],
    }
    latest = series[0].points[-1][1]
    data = json.dumps(data, separators=(",", ":"))
    return (
        f"<figure data-name='{escaped(title)}' data-points='{escaped(data)}'>"
        f"<figcaption>{escaped(title)}<b>{escaped(format_value(latest))}</b></figcaption>"
        f"{to_svg(drawing, title)}</figure>"
    )


def _short(value: float) -> float | str:
    return float(f"{value:.5g}") if math.isfinite(value) else str(value)
