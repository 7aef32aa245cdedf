"""A run's report.html: one self-contained file, made from the run's folder.

    write_atomic(folder / "report.html", report(folder))

It has curves, times in the plan's order, the plan's picture, samples, stragglers and the config.
Charts are SVG; the page's script (report/page_style.py) only hides, shows and points at them.
Everything from a run (prompts, responses, names) is escaped: a response may contain a script.
"""

import json
import os
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping
from typing import Any

from distflow_jax.report import page_style
from distflow_jax.report.charts import LEFT, RIGHT, WIDTH
from distflow_jax.report.curves import curves
from distflow_jax.report.drawing import to_svg
from distflow_jax.report.headline import Tile, status, tiles
from distflow_jax.report.page_style import escaped
from distflow_jax.report.read_run import RunFolder, read_run
from distflow_jax.report.tables import processes, samples
from distflow_jax.report.timeline import timeline

_SVG_TAGS = {"svg", "g", "rect", "text", "polyline", "polygon", "path", "title"}


def report(folder: str | os.PathLike) -> str:
    """The page of a run's folder, complete or not."""
    return page(read_run(folder))


def page(run: RunFolder) -> str:
    """The page of a run's contents."""
    sections = [
        ("Curves", "curves", curves(run.rows)),
        ("Where the time goes", "times", _times(run)),
        ("Plan", "plan", _plan(run)),
        ("Samples", "samples", samples(run.samples)),
        ("Processes", "processes", processes(run.stragglers)),
        ("Config", "config", _config(run.config)),
    ]
    shown = [(title, name, body) for title, name, body in sections if body]
    links = "".join(f"<a href='#{name}'>{escaped(title)}</a>" for title, name, _ in shown)
    notes = "".join(f"<p class='note'>{escaped(note)}</p>" for note in run.notes)
    word, what = status(run)
    head = (
        f"<header><h1>{escaped(run.name)}</h1><span class='status {word}'>{escaped(what)}</span>"
        f"<nav>{links}</nav><button id='theme' type='button'>light / dark</button></header>"
    )
    keys = ("model.source", "dag", "data.train")
    facts = [str(run.config[key]) for key in keys if key in run.config]
    about = f"<p class='about'>{escaped('  |  '.join(facts))}</p>" if facts else ""
    body = "".join(
        f"<section id='{name}'><h2>{escaped(title)}</h2>{body}</section>"
        for title, name, body in shown
    )
    return page_style.fill(
        title=escaped(f"{run.name}: report"),
        body=f"{head}<main>{about}{_tiles(tiles(run))}{notes}{body}</main>",
        plot=(WIDTH, LEFT, RIGHT),
    )


def _tiles(found: Iterable[Tile]) -> str:
    cells = "".join(
        f"<div class='tile{' bad' if tile.bad else ''}'><b>{escaped(tile.value)}</b>"
        f"<span>{escaped(tile.name)}</span><i>{escaped(tile.more)}</i></div>"
        for tile in found
    )
    return f"<div class='tiles'>{cells}</div>" if cells else ""


def _times(run: RunFolder) -> str:
    parts = []
    for step, spans in run.steps.items():
        note = "the last" if step == max(run.steps) else "the first in trace.json"
        svg = to_svg(timeline(run.plan, spans), f"times of step {step}")
        parts.append(f"<h3>Step {step} <i>{note}</i></h3><div class='wide'>{svg}</div>")
    if not parts:
        return ""
    about = (
        "<p class='about'>Numbered rows are the plan's nodes in their planned order; grey rows are "
        "other work. Process 0; seconds on the right are sums.</p>"
    )
    return about + "".join(reversed(parts))


def _plan(run: RunFolder) -> str:
    svg = run.plan_svg
    picture = f"<div class='wide picture'>{svg}</div>" if is_plain_svg(svg) else ""
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


def _config(config: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><td>{escaped(key)}</td><td>{escaped(json.dumps(value, ensure_ascii=False))}</td></tr>"
        for key, value in sorted(config.items())
    )
    if not rows:
        return ""
    table = f"<table class='config'>{rows}</table>"
    return f"<details><summary>{len(config)} settings</summary>{table}</details>"
