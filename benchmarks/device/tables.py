"""Tables of results, for docs/benchmarks.md."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from command_line import Columns, cells, row, titles
from device.check import Comparison

_MODEL, _COMPILATIONS = ("model", "model", ""), ("compilations", "compilations", "")
_COLUMNS: Mapping[str, Columns] = {
    "update": (
        _MODEL,
        ("rows at a time", "micro_rows", ""),
        ("remat", "remat", ""),
        ("s a step", "median_seconds", ".3f"),
        ("tokens/s", "tokens_per_second", ",.0f"),
        ("MFU", "mfu", ".1%"),
        ("program GiB", "program_gb", ".1f"),
        _COMPILATIONS,
    ),
    "decode": (
        _MODEL,
        ("attention", "attention", ""),
        ("slots", "slots", ""),
        ("tokens/s", "tokens_per_second", ",.0f"),
        ("of these decoding", "decode_tokens_per_second", ",.0f"),
        ("share of bandwidth", "bandwidth_share", ".1%"),
        _COMPILATIONS,
    ),
    "step": (
        _MODEL,
        ("staleness", "staleness", ""),
        ("s a step", "timing_s/step", ".2f"),
        ("rollout s", "timing_s/gen", ".2f"),  # samplers that run ahead have none
        ("update MFU", "perf/mfu/actor", ".1%"),
        ("tokens/s", "perf/throughput", ",.0f"),
        ("response tokens, mean", "response_length/mean", ".0f"),
        _COMPILATIONS,
    ),
    "kernels": (
        ("place", "place", ""),
        ("attention", "attention", ""),
        ("ms of a call", "ms", ""),
        ("times the fastest", "times", ".2f"),
    ),
    "segments": (
        ("segment", "segment", ""),
        ("rows filled", "filled", ".0%"),
        ("predicted s", "predicted_seconds", ".3g"),
        ("bound by", "bound", ""),
        ("measured s", "measured_seconds", ".3g"),
        ("ratio", "ratio", ".2f"),
    ),
}
_TABLE_OF = {"batch": "update", "async": "step"}


def tables(results: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """The results as text: a table per part, in the order in which parts occur."""
    rows: dict[str, list[str]] = {}
    for one in results:
        rows.setdefault(_table_of(one), []).extend(lines(one))
    for table, found in rows.items():
        yield "\n".join([titles(_COLUMNS[table]), *found] if table in _COLUMNS else found)


def lines(found: Mapping[str, Any]) -> list[str]:
    """The rows of a result in its table."""
    if "error" in found:
        return [row(found["task"], found["error"])]
    table = _table_of(found)
    if table == "check":
        return [str(Comparison(**one)) for one in found["comparisons"]]
    if table == "kernels":
        return [cells(_COLUMNS[table], one) for one in _kernels(found)]
    return [cells(_COLUMNS[table], found | found.get("medians", {}))]


def segments(found: Mapping[str, Any]) -> list[str]:
    """The table of the segments of a step next to their predictions; [] where there are none."""
    rows = [cells(_COLUMNS["segments"], one) for one in found.get("segments", ())]
    return rows and [titles(_COLUMNS["segments"]), *rows]


def _table_of(found: Mapping[str, Any]) -> str:
    """The key in _COLUMNS for a result; its part where it has lines of its own."""
    if found["part"] == "kernels" and "rows" not in found:
        return "decode"
    return _TABLE_OF.get(found["part"], found["part"])


def _kernels(found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What the table of kernels has of a result, attention by attention."""
    for place in ("rows", "prefill", "decode"):
        timed = [one["seconds"] for one in found[place].values() if one.get("seconds")]
        for name, one in found[place].items():
            shown = {"place": place, "attention": name}
            if "error" in one:
                yield shown | {"ms": one["error"]}
            elif not one["seconds"]:
                yield shown | {"ms": "agrees with float32; alone, so not timed"}
            else:
                times = one["seconds"] / min(timed)
                yield shown | {"ms": f"{1e3 * one['seconds']:.3g}", "times": times}
