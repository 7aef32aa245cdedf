"""The metrics of a run: the meaning of each name, and of a bad value.

metric_reference.toml is the one table for the reference in docs/reference/metrics.md, which is
generated from it, and for the report's explanations.
"""

import dataclasses
import functools
import importlib.resources
import re
import tomllib

_PART = re.compile(r"\{([^{}]*)\}")


@dataclasses.dataclass(frozen=True)
class Metric:
    """Metrics that share a meaning. `bad` describes a bad value and its likely cause; "": none."""

    name: str
    meaning: str
    bad: str = ""

    @functools.cached_property
    def pattern(self) -> re.Pattern[str]:
        """The expression that matches every name this entry stands for, and no other."""
        pieces = _PART.split(self.name)  # text and the inside of braces by turns
        for i in range(0, len(pieces), 2):
            pieces[i] = re.escape(pieces[i])
        for i in range(1, len(pieces), 2):
            choices = pieces[i].split(",")
            pieces[i] = f"(?:{'|'.join(map(re.escape, choices))})" if choices[1:] else ".+"
        return re.compile("".join(pieces), re.DOTALL)


@functools.cache
def metric_table() -> dict[str, tuple[Metric, ...]]:
    """All metrics by section, in the order of the reference."""
    file = importlib.resources.files("distflow_jax.report") / "metric_reference.toml"
    sections = tomllib.loads(file.read_text(encoding="utf-8"))
    return {
        title: tuple(Metric(name, *texts) for name, texts in entries.items())
        for title, entries in sections.items()
    }


def find_metric(name: str) -> Metric | None:
    """The entry of a metric's name; None for a name that only a user's own node writes.

    Where a graph has several nodes of a kind, "NODE/" stands before the names of each; such a name
    has the entry of its rest. Of several entries that match, the first in the table is taken, and
    one without a free {word} before one with it.
    """
    entries = [metric for section in metric_table().values() for metric in section]
    fixed = [metric for metric in entries if not _free(metric.name)]
    free = [metric for metric in entries if _free(metric.name)]
    rest = name.partition("/")[2]
    for metrics, candidate in ((fixed, name), (fixed, rest), (free, name), (free, rest)):
        for metric in metrics:
            if candidate and metric.pattern.fullmatch(candidate):
                return metric
    return None


def _free(name: str) -> list[str]:
    """The free {word}s of a name."""
    return [part for part in _PART.findall(name) if "," not in part]
