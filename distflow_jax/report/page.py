"""Pages of runs: report.html of one run, comparisons of several, and the live page.

    write_atomic(folder / "report.html", report(folder))

A page is one self-contained file, made from the folders of its runs: curves, timelines, the plan's
picture, samples, stragglers, provenance and the config. The page's script (web/) draws the curves
from numbers that stand in the page; a live page fetches these, and its sections, from a server.
Everything from a run (prompts, responses, names) is escaped: a response may contain a script.
"""

import json
import math
import os
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from distflow_jax.report.charts import format_value
from distflow_jax.report.headline import Tile, status, tiles
from distflow_jax.report.page_style import escaped, fill, long_text
from distflow_jax.report.read_run import RunFolder, read_run
from distflow_jax.report.sections.chart_data import chart_data
from distflow_jax.report.sections.redaction import redacted, redacted_text
from distflow_jax.report.sections.run_timeline import Attempt, attempts_of, date, run_timeline
from distflow_jax.report.sections.sample_cards import sample_cards
from distflow_jax.report.sections.step_bars import step_bars
from distflow_jax.report.sections.worker_table import worker_table

_MOST_PROCESSES = 64
_FACTS = ("host", "devices", "processes", "versions", "commit", "command", "folder")
_MOST_COMMAND = 3000  # characters that are shown word by word
_SVG_TAGS = {"svg", "g", "rect", "text", "polyline", "polygon", "path", "title"}
_ABOUT = ("model.source", "dag", "data.train")  # settings named at the top
_CURVES = """<section id="curves"><h2>Curves</h2>
<div class="toolbar">
<input id="find" type="search" placeholder="find a metric" aria-label="find a metric">
<label>smoothing <input id="smooth" type="range" min="0" max="0.98" step="0.02" value="0">
<output id="smoothness">0</output></label>
<label>over <select id="axis"><option value="step">steps</option>
<option value="seconds">time in steps</option><option value="tokens">tokens</option>
</select></label>
<label><input id="log" type="checkbox"> log scale</label>
<button id="unzoom" type="button" hidden>reset zoom</button>
</div>
<div id="legend" class="legend" hidden></div>
<div id="charts"></div>
<noscript><p class="about">the curves need JavaScript</p></noscript>
</section>"""


def report(folder: str | os.PathLike) -> str:
    """The page of a run's folder, complete or not."""
    return page(read_run(folder))


def page(run: RunFolder) -> str:
    """The page of a run's contents."""
    return compare_page({run.name: run})


def compare_page(named: Mapping[str, RunFolder]) -> str:
    """A page of one or several runs by name: the curves of all, the other sections of each."""
    names, runs = list(named), list(named.values())
    found = [run_sections(run, number) for number, run in enumerate(runs)]
    states = [status(run) for run in runs]
    data = {"live": False, "status": states, "runs": [chart_data(run) for run in runs]}
    for run, name in zip(data["runs"], names, strict=True):
        run["name"] = name
    configs = {name: run.config for name, run in named.items()}
    return _document(names, states, found, data, differences(configs))


def live_page(names: Sequence[str]) -> str:
    """The live page of runs: empty, its script fetches the runs' contents from the server."""
    data = {"live": True, "runs": [{"name": name} for name in names]}
    return _document(names, [("none", "loading")], [{} for _ in names], data, "")


def _document(
    names: Sequence[str],
    states: Sequence[tuple[str, str]],
    sections: Sequence[Mapping[str, str]],
    data: Mapping[str, Any],
    differing: str,
) -> str:
    title = names[0] if len(names) == 1 else f"{len(names)} runs"
    word, what = states[0]
    options = "".join(
        f"<option value='{i}'>{escaped(name)}</option>" for i, name in enumerate(names)
    )
    choice = (
        f"<label class='choice'>show <select id='run' aria-label='run'>{options}</select></label>"
        if len(names) > 1
        else ""
    )
    links = "<a href='#curves'>Curves</a>" + "".join(
        f"<a href='#{name}-0' data-section='{name}'{'' if name in sections[0] else ' hidden'}>"
        f"{label}</a>"
        for name, label in SECTIONS.items()
    )
    head = (
        f"<header><h1>{escaped(title)}</h1>{choice}<span id='status' class='status {word}'>"
        f"{escaped(what)}</span><nav>{links}</nav>"
        "<button id='theme' type='button' aria-label='light or dark'>light / dark</button></header>"
    )
    tops = _blocks("top", [found.get("top", "") for found in sections])
    rest = _blocks("run", ["".join(found.get(name, "") for name in SECTIONS) for found in sections])
    body = f"{head}<main>{tops}{_CURVES}<div id='differences'>{differing}</div>{rest}</main>"
    return fill(title=escaped(f"{title}: report"), body=body, data=data, live=bool(data["live"]))


def _blocks(kind: str, contents: Sequence[str]) -> str:
    return "".join(
        f"<div class='{kind}' data-run='{i}'{' hidden' if i else ''}>{content}</div>"
        for i, content in enumerate(contents)
    )


SECTIONS = {
    "timeline": "Timeline",
    "times": "Where the time goes",
    "plan": "Plan",
    "samples": "Samples",
    "processes": "Processes",
    "workers": "Workers",
    "provenance": "Provenance",
    "config": "Config",
}


def run_sections(run: RunFolder, number: int) -> dict[str, str]:
    """HTML of a run's parts by name, those that have content: "top", and SECTIONS in their order.

    `number` is the run's place on the page.
    """
    bodies = {
        "timeline": run_timeline(run.events),
        "times": step_bars(run.plan, run.steps),
        "plan": _plan(run),
        "samples": sample_cards(run),
        "processes": processes(run.stragglers),
        "workers": worker_table(run.groups),
        "provenance": provenance_table(run.events),
        "config": _config(run.config),
    }
    facts = [redacted_text(str(run.config[key])) for key in _ABOUT if key in run.config]
    about = f"<p class='about'>{escaped('  |  '.join(facts))}</p>" if facts else ""
    notes = "".join(f"<p class='note'>{escaped(note)}</p>" for note in run.notes)
    top = f"{about}{_tiles(tiles(run))}{notes}"
    return {"top": top} | {
        name: f"<section id='{name}-{number}'><h2>{SECTIONS[name]}</h2>{body}</section>"
        for name, body in bodies.items()
        if body
    }


def differences(configs: Mapping[str, Mapping[str, Any]]) -> str:
    """HTML of the settings in which runs differ, by the runs' names; "" for one run.

    `configs` are flat, as in RunFolder.
    """
    if len(configs) < 2:
        return ""
    rows = []
    for key in sorted({key for config in configs.values() for key in config}):
        values = [json.dumps(c[key]) if key in c else "" for c in configs.values()]
        if len(set(values)) > 1:
            shown = [
                json.dumps(redacted(key, c[key])) if key in c else "" for c in configs.values()
            ]
            cells = "".join(f"<td>{escaped(value)}</td>" for value in shown)
            rows.append(f"<tr><td>{_key(key)}</td>{cells}</tr>")
    heads = "".join(f"<th>{escaped(name)}</th>" for name in configs)
    table = (
        f"<div class='wide'><table class='config'><thead><tr><th>setting</th>{heads}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
    equal = "<p class='about'>All settings are equal.</p>"
    return f"<section><h2>Settings that differ</h2>{table if rows else equal}</section>"


def _tiles(found: Iterable[Tile]) -> str:
    cells = "".join(
        f"<div class='tile{' bad' if tile.bad else ''}'><span>{escaped(tile.name)}</span>"
        f"<b>{escaped(tile.value)}</b><i>{escaped(tile.more)}</i></div>"
        for tile in found
    )
    return f"<div class='tiles'>{cells}</div>" if cells else ""


def _plan(run: RunFolder) -> str:
    svg = run.plan_svg
    picture = ""
    if is_plain_svg(svg):
        button = "<button class='full' type='button'>full size</button>"
        picture = f"<div class='picture'>{svg}</div><div class='toolbar'>{button}</div>"
    if not run.plan_text:
        return picture
    shown = "" if picture else " open"
    table = f"<summary>as a table</summary><pre>{escaped(run.plan_text)}</pre>"
    return f"{picture}<details{shown}>{table}</details>"


def is_plain_svg(text: str) -> bool:
    """Whether a text is an SVG drawing without script, style, link or reference."""
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


def _key(key: str) -> str:
    """A config key as HTML that breaks after dots."""
    return escaped(key).replace(".", ".<wbr>")


def _config(config: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{_key(key)}</td>"
        f"<td>{escaped(json.dumps(redacted(key, value), ensure_ascii=False))}</td></tr>"
        for key, value in sorted(config.items())
    )
    if not rows:
        return ""
    table = f"<table class='config'>{rows}</table>"
    return f"<details><summary>{len(config)} settings</summary>{table}</details>"


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


def processes(lines: Sequence[Mapping[str, Any]]) -> str:
    """HTML of each process's mean seconds and idle share per node; "" for a single process."""
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
        f"<tr><td>{escaped(node)}</td>{''.join(_idle_cell(totals, p) for p in shown)}</tr>"
        for node, totals in sums.items()
    )
    return (
        "<p class='about'>Mean seconds of work per step of each process. Darker cells: longer idle "
        "while the slowest worked.</p><div class='wide'><table class='idle'><thead><tr>"
        f"<th>node</th>{heads}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _idle_cell(totals: Sequence[Sequence[float]], process: int) -> str:
    if process >= len(totals):
        return "<td></td>"
    seconds, idle, steps = totals[process]
    share = idle / steps if math.isfinite(idle) else 1.0
    shade = f"background:rgba(220,38,38,{min(max(share, 0.0), 1.0) * 0.6:.2f})"
    return f"<td style='{shade}' title='idle {share:.0%}'>{format_value(seconds / steps)}</td>"
