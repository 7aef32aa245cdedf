"""The table of each process's times in each node."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from distflow_jax.report.charts import format_value
from distflow_jax.report.page_style import escaped

_MOST_PROCESSES = 64


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
