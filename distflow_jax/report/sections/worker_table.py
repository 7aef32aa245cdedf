"""Table of a run's workers: steps and groups that each sampled, and the age of its tokens.

Of a long run not every step is read: shares of the groups stay right then, numbers would not.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from distflow_jax.report.page_style import escaped

_MOST_WORKERS = 200
_HEADS = ("worker", "first step", "last step", "share of groups", "mean age in steps")


@dataclasses.dataclass
class _WorkerShare:
    """The share of one worker in the samples of a run."""

    first: int
    last: int
    groups: int = 0
    responses: int = 0
    age: int = 0  # of the oldest token of each response, in sum

    def cells(self, groups: int) -> tuple[str, ...]:
        """The row's cells, with the share of all `groups`."""
        mean = f"{self.age / self.responses:.2f}" if self.responses else ""
        return str(self.first), str(self.last), f"{self.groups / max(groups, 1):.1%}", mean


def worker_table(lines: Iterable[Mapping[str, Any]]) -> str:
    """HTML of the workers in the lines of WORKDIR/groups, by first step; "" without any."""
    found: dict[str, _WorkerShare] = {}
    for line in lines:
        try:
            step, ages = int(line["step"]), dict[int, list[int]]()
            for uid, age in zip(line["uid"], line["age"], strict=True):
                ages.setdefault(uid[0], []).append(int(age))
            for name, counters in line["workers"].items():
                work = found.setdefault(name, _WorkerShare(step, step))
                of_worker = [age for counter in counters for age in ages.get(counter, ())]
                work.first, work.last = min(work.first, step), max(work.last, step)
                work.groups += len(counters)
                work.responses += len(of_worker)
                work.age += sum(of_worker)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            continue
    shown = sorted(found.items(), key=lambda item: item[1].first)
    groups = sum(work.groups for work in found.values())
    rows = [(name, *work.cells(groups)) for name, work in shown[-_MOST_WORKERS:]]
    if not rows:
        return ""
    head = "".join(f"<th>{name}</th>" for name in _HEADS)
    body = "".join(
        f"<tr>{''.join(f'<td>{escaped(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    left = (
        f"<p class='about'>The last {len(rows)} of {len(shown)}.</p>" if shown[len(rows) :] else ""
    )
    table = f"<table class='idle'><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"{left}<div class='wide'>{table}</div>"
