"""Tables of results, for docs/benchmarks.md."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from device.check import Comparison, describe
from device.predict import describe as describe_segments

TITLES = {
    "update": ("model", "rows at a time", "remat", "s a step", "tokens/s", "MFU", "program GiB",
               "compilations"),
    "decode": ("model", "attention", "slots", "tokens/s", "of these decoding",
               "share of bandwidth", "compilations"),
    "step": ("model", "staleness", "s a step", "rollout s", "update MFU", "tokens/s",
             "response tokens, mean", "compilations"),
    "kernels": ("place", "attention", "ms of a call", "times the fastest"),
}  # fmt: skip
TABLE_OF = {"batch": "update", "async": "step"}


def tables(results: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """The results as text: a table per part, in the order in which parts occur."""
    rows: dict[str, list[str]] = {}
    for one in results:
        rows.setdefault(table_of(one), []).extend(lines(one))
    for title, found in rows.items():
        if title in TITLES:
            found = [f"| {' | '.join(TITLES[title])} |", f"|{'---|' * len(TITLES[title])}", *found]
        yield "\n".join(found)


def table_of(found: Mapping[str, Any]) -> str:
    """The key in TITLES for a result; its part where it has lines of its own."""
    if found["part"] == "kernels" and "rows" not in found:
        return "decode"
    return TABLE_OF.get(found["part"], found["part"])


def lines(found: Mapping[str, Any]) -> list[str]:
    """The rows of a result in its table."""
    if "error" in found:
        return [f"| {found['task']} | {found['error']} |"]
    table, model = table_of(found), found["model"]
    if table == "check":
        return [describe([Comparison(**one) for one in found["comparisons"]])]
    if table == "kernels":
        return _kernel_rows(found)
    make = {"update": _update_cells, "decode": _decode_cells, "step": _step_cells}[table]
    return [f"| {' | '.join([model, *make(found), str(found['compilations'])])} |"]


def segments(found: Mapping[str, Any]) -> str:
    """The segments of a step next to their predictions, "" where there are none."""
    return describe_segments(found["segments"]) if "segments" in found else ""


def _update_cells(found: Mapping[str, Any]) -> list[str]:
    return [
        f"{found['micro_rows']}",
        found["remat"],
        f"{found['median_seconds']:.3f}",
        f"{found['tokens_per_second']:,.0f}",
        f"{found['mfu']:.1%}",
        f"{found['program_gb']:.1f}",
    ]


def _decode_cells(found: Mapping[str, Any]) -> list[str]:
    return [
        found["attention"],
        f"{found['slots']}",
        f"{found['tokens_per_second']:,.0f}",
        f"{found['decode_tokens_per_second']:,.0f}",
        f"{found['bandwidth_share']:.1%}",
    ]


def _step_cells(found: Mapping[str, Any]) -> list[str]:
    of = found["medians"]
    shown = {
        "timing_s/step": ".2f",
        "timing_s/gen": ".2f",  # samplers that run ahead have none
        "perf/mfu/actor": ".1%",
        "perf/throughput": ",.0f",
        "response_length/mean": ".0f",
    }
    cells = [format(of[name], form) if name in of else "-" for name, form in shown.items()]
    return [f"{found['staleness']}", *cells]


def _kernel_rows(found: Mapping[str, Any]) -> list[str]:
    rows = []
    for place in ("rows", "prefill", "decode"):
        timed = [one["seconds"] for one in found[place].values() if one.get("seconds")]
        for name, one in found[place].items():
            if "error" in one:
                cells = [one["error"], "-"]
            elif not one["seconds"]:
                cells = ["agrees with float32; alone, so not timed", "-"]
            else:
                cells = [f"{1e3 * one['seconds']:.3g}", f"{one['seconds'] / min(timed):.2f}"]
            rows.append(f"| {' | '.join([place, name, *cells])} |")
    return rows
