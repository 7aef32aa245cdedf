"""Times of single steps: bars over seconds, with a row per node in the planned order."""

from collections.abc import Mapping, Sequence

from distflow_jax.report.progress import EVALUATION
from distflow_jax.report.read_run import PlannedNode, Span
from distflow_jax.report.sections.bars import Bar, BarRow, bars_html

_MOST_ROWS = 48
_WORDS = {"testing": EVALUATION}  # names of spans that a reader gets in other words
_WAITING = "waiting"  # the thread of times that no thread spends
_LIGHTER = " In the row training every second partial batch is lighter."
_INVISIBLE = 0.001  # share of the axis below which a gap between bars is not drawn
_ROLES = {"ROLLOUT", "REWARD", "ACTOR", "CRITIC", "REFERENCE"}


def step_bars(plan: Sequence[PlannedNode], steps: Mapping[int, Sequence[Span]]) -> str:
    """HTML of the times of steps, the last step first; "" without any."""
    parts = []
    for step, spans in reversed(steps.items()):
        note = "the last" if step == max(steps) else "the first in trace.json"
        end = max([span.end for span in spans], default=0.0)
        near = end * _INVISIBLE
        rows = _lanes(plan, spans, near) + [
            BarRow(name, _bars(name, bars, kind), sum_)
            for name, bars, kind, sum_ in _rows(plan, spans, near)
        ]
        parts.append(f"<h3>Step {step} <i>{note}</i></h3>{bars_html(rows, end)}")
    if not parts:
        return ""
    in_partial_batches = any(span.partial_batch for spans in steps.values() for span in spans)
    about = (
        "<p class='about'>Numbered rows are the plan's nodes in their planned order; grey rows are "
        "other work. Process 0; seconds on the right are sums."
        f"{_LIGHTER if in_partial_batches else ''}</p>"
    )
    return about + "".join(parts)


def _lanes(plan: Sequence[PlannedNode], spans: Sequence[Span], near: float) -> list[BarRow]:
    """Sampling and training, a row each, where samplers run in a thread beside the training, or a
    step is trained in partial batches."""
    roles = {node.id: node.role for node in plan}
    beside = [s for s in spans if s.thread and roles.get(s.name) == "ROLLOUT"]
    threads = {span.thread for span in beside}
    lanes = [("sampling", [s for s in spans if s.thread in threads])] if beside else []
    training = [s for s in spans if not s.thread and s.name in roles]
    count = max((span.partial_batch for span in training), default=0)
    if beside or count:
        lanes.append(("training", training))
    rows = []
    for label, here in lanes:
        found: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for span in here:
            key = (span.name, span.partial_batch)
            found.setdefault(key, []).append((max(0.0, span.start), span.end))
        bars = [
            bar
            for (name, partial_batch), times in found.items()
            for bar in _bars(
                f"partial batch {partial_batch} of {count}, {name}" if partial_batch else name,
                _merged(times, near),
                _kind(roles.get(name, ""))
                + (" second" if partial_batch and partial_batch % 2 == 0 else ""),
            )
        ]
        busy = [time for times in found.values() for time in times]
        remark = f" in {count} partial batches" if count and label == "training" else ""
        rows.append(BarRow(label, bars, f"{_sum(busy)}{remark}"))
    return rows


def _bars(name: str, times: Sequence[tuple[float, float]], kind: str) -> list[Bar]:
    return [Bar(a, b, kind, f"{name}: {a:.3f} s to {b:.3f} s") for a, b in times]


def _rows(
    plan: Sequence[PlannedNode], spans: Sequence[Span], near: float
) -> list[tuple[str, list[tuple[float, float]], str, str]]:
    """(label, bars, kind, sum) of the plan's nodes, of other spans, and of other threads."""
    bars: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for span in spans:
        bars.setdefault((span.thread, span.name), []).append((max(0.0, span.start), span.end))
    rows = []
    for place, node in enumerate(plan, 1):  # those that run ahead may have a thread of their own
        own = sorted(k for k in bars if k[1] == node.id and k[0] != _WAITING)[:1]
        thread = f" ({own[0][0]})" if own and own[0][0] else ""
        found = bars.pop(own[0]) if own else []
        rows.append((f"{place}. {node.id}{thread}", found, _kind(node.role)))
    bars = {(thread, _WORDS.get(name, name)): value for (thread, name), value in bars.items()}
    main = {key: value for key, value in bars.items() if not key[0]}
    others = {key: value for key, value in bars.items() if key[0]}
    rows += [(name, value, "other") for (_, name), value in main.items()]
    rows += [(f"{name} ({thread})", value, "thread") for (thread, name), value in others.items()]
    return [
        (label, _merged(found, near), kind, _sum(found)) for label, found, kind in rows[:_MOST_ROWS]
    ]


def _kind(role: str) -> str:
    return role.lower() if role in _ROLES else "other"


def _sum(bars: Sequence[tuple[float, float]]) -> str:
    seconds = sum(stop - start for start, stop in _merged(bars, 0.0))
    return f"{seconds:,.3f} s" if bars else "not run"


def _merged(bars: Sequence[tuple[float, float]], near: float) -> list[tuple[float, float]]:
    """Merges bars whose distance is at most `near`, which is not visible."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(bars):
        if merged and start <= merged[-1][1] + near:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged
