"""The headline numbers of a report."""

import dataclasses
import math
from collections.abc import Mapping

from distflow_jax.programs.units import format_seconds
from distflow_jax.report.charts import format_value
from distflow_jax.report.progress import EVALUATION
from distflow_jax.report.read_run import RunFolder

# {metric that should be 0: label}
_TROUBLE = {
    "training/nonfinite": "updates skipped, not finite",
    "reward/errors": "reward errors",
    "reward/timeouts": "reward timeouts",
}
_EDGE = 0.1  # share of the steps over which first and last values are averaged


@dataclasses.dataclass(frozen=True)
class Tile:
    """A number, its name, and a remark; `bad` numbers should be 0."""

    name: str
    value: str
    more: str = ""
    bad: bool = False


def status(run: RunFolder) -> tuple[str, str]:
    """(one word, a sentence) on the progress of the run."""
    last = max(run.rows, default=0)
    total = run.config.get("training.steps")
    if not last:
        return "none", "no step yet"
    made = f"step {last} of {total}" if isinstance(total, int) else f"step {last}"
    if reason := _stop_reason(run):
        return "stopped", f"{reason}: {made}"
    if not isinstance(total, int):
        return "open", made
    return ("done", f"done: {last} steps") if last >= total else ("open", made)


def _stop_reason(run: RunFolder) -> str:
    """Why the last start of the run stopped before its end: "stopped by a signal"; "" if it did
    not, or runs."""
    last = [event for event in run.events if event.get("event") in ("start", "stop")][-1:]
    return str(last[0].get("reason", "stopped")) if last and last[0].get("unfinished") else ""


def tiles(run: RunFolder) -> list[Tile]:
    """Tiles of reward or objective, evaluation, length, speed, time, and of all that went wrong."""
    rows = run.rows
    found = []
    for name, label in (
        ("critic/score/mean", "reward"),
        ("actor/nll", "loss of demonstrations"),
        ("rewards/accuracies", "accuracy of pairs"),
        ("reward_model/accuracy", "accuracy of the reward model"),
        ("response_length/mean", "response length"),
        ("actor/entropy", "entropy"),
    ):
        points = series(rows, name)
        if points:
            first, last = edges(list(points.values()))
            found.append(Tile(label, format_value(last), f"from {format_value(first)}"))
    for name in sorted({key for row in rows.values() for key in row}):
        points = series(rows, name) if name.startswith("val-core/") else {}
        if points:
            last, best = points[max(points)], max(points.values())
            more = f"from {format_value(points[min(points)])}, best {format_value(best)}"
            label = f"{EVALUATION} {name.removeprefix('val-core/').replace('/reward/', ' ')}"
            found.append(Tile(label, format_value(last), more))
    speed = sorted(series(rows, "perf/throughput").values())
    if speed:
        median = format_value(speed[len(speed) // 2])
        found.append(Tile("tokens/s per device", median, "median of the steps"))
    found += _slots(rows)
    seconds = series(rows, "timing_s/step")
    if seconds:
        # by the mean: not every step of a long run is read
        tokens = _mean(series(rows, "perf/total_num_tokens")) * max(rows)
        more = f"{format_value(tokens)} tokens" if tokens else ""
        whole = _mean(seconds) * max(rows)
        shown = format_seconds(whole) if math.isfinite(whole) else "?"
        found.append(Tile("in steps", shown, more))
    gap = series(rows, "training/rollout_probs_diff_max")
    if gap:
        most = format_value(max(gap.values()))
        found.append(Tile("gap of probabilities", most, "sampler and trainer, at most"))
    return found + _troubles(run)


def _slots(rows: Mapping[int, Mapping[str, float]]) -> list[Tile]:
    """How busy slots are beside environments, and what responses wait for."""
    busy = series(rows, "perf/slots_busy_share")
    if not busy:
        return []
    waits = [
        f"{_mean(series(rows, f'perf/trajectories/{what}_seconds')):.3g} s for {whose}"
        for what, whose in (("tool", "its environment"), ("slot", "a slot"))
    ]
    return [Tile("slots busy", f"{_mean(busy):.0%}", f"a response waits {', '.join(waits)}")]


def _troubles(run: RunFolder) -> list[Tile]:
    rows = run.rows
    compiled = series(rows, "perf/compilations")
    starts = [event.get("step") for event in run.events if event.get("event") == "start"]
    first = {min(compiled, default=0), *(step + 1 for step in starts if isinstance(step, int))}
    late = sum(count for step, count in compiled.items() if step not in first)
    counts = {label: sum(series(rows, name).values()) for name, label in _TROUBLE.items()}
    counts["compilations after a start's first step"] = late
    infinite = sum(not math.isfinite(value) for row in rows.values() for value in row.values())
    counts["metrics not finite"] = infinite
    return [Tile(label, format_value(count), bad=True) for label, count in counts.items() if count]


def series(rows: Mapping[int, Mapping[str, float]], name: str) -> dict[int, float]:
    """{step: value} of a metric, without values that are not finite."""
    return {
        step: row[name] for step, row in rows.items() if name in row and math.isfinite(row[name])
    }


def edges(values: list[float]) -> tuple[float, float]:
    """Means of the first and of the last tenth."""
    count = max(1, int(len(values) * _EDGE))
    return sum(values[:count]) / count, sum(values[-count:]) / count


def _mean(points: Mapping[int, float]) -> float:
    return sum(points.values()) / len(points) if points else 0.0
