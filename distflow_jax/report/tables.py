"""The tables of a report: samples, and the times of each process in each node."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from distflow_jax.report.charts import format_value
from distflow_jax.report.page_style import escaped

_MOST_SAMPLES, _MOST_TEXT = 24, 3000  # per step; characters of a prompt or a response
_MOST_PROCESSES = 64


def samples(files: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """HTML of a table per file of samples, with a choice of the file to show; "" without any."""
    tables, options = [], []
    for number, (name, records) in enumerate(files.items()):
        rows = [row for record in records for row in answers(record)]
        if not rows:
            continue
        body = "".join(_sample_row(row) for row in rows[:_MOST_SAMPLES])
        note = f"<p class='about'>the others are in samples/{escaped(name)}.jsonl</p>"
        rest = note if len(rows) > _MOST_SAMPLES else ""
        hidden = " hidden" if options else ""
        tables.append(
            f"<div class='samples' data-file='{number}'{hidden}><table><thead><tr><th>score</th>"
            "<th>prompt</th><th>response</th><th>truth</th></tr></thead>"
            f"<tbody>{body}</tbody></table>{rest}</div>"
        )
        what = f"step {name}" if name.isdigit() else name
        options.append(f"<option value='{number}'>{escaped(what)}</option>")
    if not tables:
        return ""
    return (
        f"<select id='file' aria-label='step'>{''.join(options)}</select> "
        "<input id='grep' type='search' placeholder='find in samples' aria-label='find in samples'>"
        + "".join(tables)
    )


def answers(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of a record: a training step's response, or all responses to an evaluation's prompt."""
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
    cells = "".join(f"<td><div>{long_text(row[key])}</div></td>" for key in keys)
    return f"<tr><td>{escaped(score)}</td>{cells}</tr>"


def long_text(value: Any) -> str:
    """A value as HTML, with long text cut."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    more = len(text) - _MOST_TEXT
    return escaped(text[:_MOST_TEXT]) + (f"<i> ... {more} more characters</i>" if more > 0 else "")


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
