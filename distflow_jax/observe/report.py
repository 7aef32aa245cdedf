"""A run's report.html: one file that needs nothing else, made of what the run's folder holds.

    write_atomic(folder / "report.html", report(folder))

Curves, times beside the plan, the plan's picture, samples, stragglers, the config. Charts are SVG
drawn here; the page's own script (report_page.py) only hides, shows and points at what is there.
Whatever comes from a run (prompts, responses, names) is escaped: a response may hold a script.
"""

import html
import json
import math
import os
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from distflow_jax.observe import report_page
from distflow_jax.observe.charts import (
    COLORS,
    LEFT,
    PALE,
    RIGHT,
    WIDTH,
    Series,
    downsample,
    format_value,
    line_chart,
)
from distflow_jax.observe.drawing import to_svg
from distflow_jax.observe.headline import Tile, status, tiles
from distflow_jax.observe.run_folder import RunFolder, read_run
from distflow_jax.observe.timeline import timeline

# what is looked at first: metrics whose names begin so, in this order
_FIRST = (
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
_TOGETHER = ("mean", "max", "min")  # metrics that share a chart
_MOST_CHARTS = 300
_POINTS, _POINTS_PER_PAGE = 300, 100_000
_MOST_SAMPLES, _MOST_TEXT = 24, 3000  # per step; characters of a prompt or a response
_MOST_PROCESSES = 64

_SVG_TAGS = {"svg", "g", "rect", "text", "polyline", "polygon", "path", "title"}


def report(folder: str | os.PathLike) -> str:
    """The page for a run's folder, whatever of a run there is in it."""
    return page(read_run(folder))


def page(run: RunFolder) -> str:
    """The page for what was read of a run."""
    sections = [
        ("Curves", "curves", _curves(run.rows)),
        ("Where the time goes", "times", _times(run)),
        ("Plan", "plan", _plan(run)),
        ("Samples", "samples", _samples(run.samples)),
        ("Processes", "processes", _processes(run.stragglers)),
        ("Config", "config", _config(run.config)),
    ]
    shown = [(title, name, body) for title, name, body in sections if body]
    links = "".join(f"<a href='#{name}'>{_text(title)}</a>" for title, name, _ in shown)
    notes = "".join(f"<p class='note'>{_text(note)}</p>" for note in run.notes)
    word, what = status(run)
    head = (
        f"<header><h1>{_text(run.name)}</h1><span class='status {word}'>{_text(what)}</span>"
        f"<nav>{links}</nav><button id='theme' type='button'>light / dark</button></header>"
    )
    keys = ("model.source", "dag", "data.train")
    facts = [str(run.config[key]) for key in keys if key in run.config]
    about = f"<p class='about'>{_text('  |  '.join(facts))}</p>" if facts else ""
    body = "".join(
        f"<section id='{name}'><h2>{_text(title)}</h2>{body}</section>"
        for title, name, body in shown
    )
    return report_page.fill(
        title=_text(f"{run.name}: report"),
        body=f"{head}<main>{about}{_tiles(tiles(run))}{notes}{body}</main>",
        plot=(WIDTH, LEFT, RIGHT),
    )


def _text(value: Any) -> str:
    """Any text as HTML; halves of surrogate pairs, which no encoding takes, are replaced."""
    clean = str(value).encode("utf-8", "replace").decode("utf-8").replace("\0", "\ufffd")
    return html.escape(clean)


def _tiles(found: Iterable[Tile]) -> str:
    cells = "".join(
        f"<div class='tile{' bad' if tile.bad else ''}'><b>{_text(tile.value)}</b>"
        f"<span>{_text(tile.name)}</span><i>{_text(tile.more)}</i></div>"
        for tile in found
    )
    return f"<div class='tiles'>{cells}</div>" if cells else ""


# -- curves -----------------------------------------------------------------------------------


def _curves(rows: Mapping[int, Mapping[str, float]]) -> str:
    charts = _charts(rows)
    if not charts:
        return ""
    count = sum(len(names) for names in charts.values())
    most = max(40, min(_POINTS, _POINTS_PER_PAGE // count))
    first, rest = [], {}
    for title in sorted(charts, key=_rank)[:_MOST_CHARTS]:
        figure = _figure(title, charts[title], rows, most)
        if _rank(title)[0] < len(_FIRST):
            first.append(figure)
        else:
            rest.setdefault(title.split("/")[0], []).append(figure)
    groups = "".join(
        f"<details class='group'><summary>{_text(prefix)} <i>{len(figures)}</i></summary>"
        f"<div class='charts'>{''.join(figures)}</div></details>"
        for prefix, figures in sorted(rest.items())
    )
    left = len(charts) - _MOST_CHARTS
    more = f"<p class='note'>{left} more are in metrics.jsonl</p>" if left > 0 else ""
    search = "<input id='find' type='search' placeholder='find a metric' aria-label='metric'>"
    return f"{search}<div class='charts'>{''.join(first)}</div>{groups}{more}"


def _charts(rows: Mapping[int, Mapping[str, float]]) -> dict[str, list[str]]:
    """Title -> names of the metrics in that chart; mean, max and min of one thing share it."""
    charts: dict[str, list[str]] = {}
    for name in sorted({name for row in rows.values() for name in row}):
        stem, _, last = name.rpartition("/")
        title = stem if stem and last in _TOGETHER else name
        charts.setdefault(title, []).append(name)
    return charts


def _rank(title: str) -> tuple[int, str]:
    places = [i for i, start in enumerate(_FIRST) if title.startswith(start)]
    return min(places, default=len(_FIRST)), title


def _figure(
    title: str, names: Sequence[str], rows: Mapping[int, Mapping[str, float]], most: int
) -> str:
    by_word = {name.rpartition("/")[2]: name for name in names}
    if len(names) > 1:
        ordered = [word for word in _TOGETHER if word in by_word]
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
        f"<figure data-name='{_text(title)}' data-points='{_text(data)}'>"
        f"<figcaption>{_text(title)}<b>{_text(format_value(latest))}</b></figcaption>"
        f"{to_svg(drawing, title)}</figure>"
    )


def _short(value: float) -> float | str:
    return float(f"{value:.5g}") if math.isfinite(value) else str(value)


# -- times and plan ---------------------------------------------------------------------------


def _times(run: RunFolder) -> str:
    parts = []
    for step, spans in run.steps.items():
        note = "the last" if step == max(run.steps) else "the first in trace.json"
        svg = to_svg(timeline(run.plan, spans), f"times of step {step}")
        parts.append(f"<h3>Step {step} <i>{note}</i></h3><div class='wide'>{svg}</div>")
    if not parts:
        return ""
    about = (
        "<p class='about'>Numbered rows are the plan's nodes in their planned order; grey ones "
        "what else was done. Process 0; seconds on the right are sums.</p>"
    )
    return about + "".join(reversed(parts))


def _plan(run: RunFolder) -> str:
    svg = run.plan_svg
    picture = f"<div class='wide picture'>{svg}</div>" if is_plain_svg(svg) else ""
    if not run.plan_text:
        return picture
    shown = "" if picture else " open"
    table = f"<summary>as a table</summary><pre>{_text(run.plan_text)}</pre>"
    return f"{picture}<details{shown}>{table}</details>"


def is_plain_svg(text: str) -> bool:
    """Whether it is a drawing and nothing else: no script, style, link, or reference."""
    if not text.startswith("<svg ") or "<!" in text or "<?" in text:
        return False
    try:
        elements = list(ET.fromstring(text).iter())
    except ET.ParseError:
        return False
    for element in elements:
        space, _, tag = element.tag.rpartition("}")
        if space != "{http://www.w3.org/2000/svg" or tag not in _SVG_TAGS:
            return False
        for name, value in element.attrib.items():
            if name.startswith("on") or name in ("id", "style", "class") or "}" in name:
                return False
            if "href" in name or "url(" in value:
                return False
    return True


# -- samples ----------------------------------------------------------------------------------


def _samples(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    tables, options = [], []
    for number, (name, records) in enumerate(samples.items()):
        rows = [row for record in records for row in _answers(record)]
        if not rows:
            continue
        body = "".join(_sample_row(row) for row in rows[:_MOST_SAMPLES])
        more = len(rows) - _MOST_SAMPLES
        rest = f"<p class='note'>{more} more in samples/{_text(name)}.jsonl</p>" if more > 0 else ""
        hidden = " hidden" if options else ""
        tables.append(
            f"<div class='samples' data-file='{number}'{hidden}><table><thead><tr><th>score</th>"
            "<th>prompt</th><th>response</th><th>truth</th></tr></thead>"
            f"<tbody>{body}</tbody></table>{rest}</div>"
        )
        what = f"step {name}" if name.isdigit() else name
        options.append(f"<option value='{number}'>{_text(what)}</option>")
    if not tables:
        return ""
    return (
        f"<select id='file' aria-label='step'>{''.join(options)}</select> "
        "<input id='grep' type='search' placeholder='find in samples' aria-label='find in samples'>"
        + "".join(tables)
    )


def _answers(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A training step's record is one response; an evaluation's has all responses to a prompt."""
    common = {key: record.get(key, "") for key in ("prompt", "ground_truth")}
    if not isinstance(record.get("responses"), list):
        return [common | {"response": record.get("response", ""), "score": record.get("score", "")}]
    scores = record.get("scores")
    scores = scores if isinstance(scores, list) else []
    return [
        common | {"response": response, "score": scores[i] if i < len(scores) else ""}
        for i, response in enumerate(record["responses"])
    ]


def _sample_row(row: Mapping[str, Any]) -> str:
    score = row["score"]
    score = format_value(score) if isinstance(score, int | float) else str(score)
    keys = ("prompt", "response", "ground_truth")
    cells = "".join(f"<td><div>{_long(row[key])}</div></td>" for key in keys)
    return f"<tr><td>{_text(score)}</td>{cells}</tr>"


def _long(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    more = len(text) - _MOST_TEXT
    return _text(text[:_MOST_TEXT]) + (f"<i> ... {more} more characters</i>" if more > 0 else "")


# -- processes and config ---------------------------------------------------------------------


def _processes(lines: Sequence[Mapping[str, Any]]) -> str:
    """Mean seconds and idle share of each process in each node; nothing for a single process."""
    sums: dict[str, list[list[float]]] = {}
    for line in lines:
        nodes = line.get("nodes")
        for node, found in nodes.items() if isinstance(nodes, Mapping) else ():
            try:
                pairs = list(zip(found["seconds"], found["idle"], strict=True))
                pairs = [(float(seconds), float(idle)) for seconds, idle in pairs]
            except (KeyError, TypeError, ValueError):
                continue
            totals = sums.setdefault(node, [])
            totals += [[0.0, 0.0, 0] for _ in range(len(pairs) - len(totals))]
            for total, (seconds, idle) in zip(totals, pairs, strict=False):
                total[0], total[1], total[2] = total[0] + seconds, total[1] + idle, total[2] + 1
    count = max((len(totals) for totals in sums.values()), default=0)
    if count < 2:
        return ""
    shown = range(min(count, _MOST_PROCESSES))
    heads = "".join(f"<th>{process}</th>" for process in shown)
    body = "".join(
        f"<tr><td>{_text(node)}</td>{''.join(_idle_cell(totals, p) for p in shown)}</tr>"
        for node, totals in sums.items()
    )
    return (
        "<p class='about'>Mean seconds of work per step of each process; the darker, the longer it "
        "was idle while the slowest worked.</p><div class='wide'><table class='idle'><thead><tr>"
        f"<th>node</th>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _idle_cell(totals: Sequence[Sequence[float]], process: int) -> str:
    if process >= len(totals):
        return "<td></td>"
    seconds, idle, steps = totals[process]
    share = idle / steps if math.isfinite(idle) else 1.0
    shade = f"background:rgba(220,38,38,{min(max(share, 0.0), 1.0) * 0.6:.2f})"
    return f"<td style='{shade}' title='idle {share:.0%}'>{format_value(seconds / steps)}</td>"


def _config(config: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{_text(key)}</td><td>{_text(json.dumps(value, ensure_ascii=False))}</td></tr>"
        for key, value in sorted(config.items())
    )
    if not rows:
        return ""
    table = f"<table class='config'>{rows}</table>"
    return f"<details><summary>{len(config)} settings</summary>{table}</details>"
