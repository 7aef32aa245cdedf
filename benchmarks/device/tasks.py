"""Parts of benchmarks/gpu.py by their worth, and the results that a file already has."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from distflow_jax.parsing.json_text import read_json_object
from distflow_jax.report.json_lines import write_atomic

# part -> expected seconds for 1B parameters on an H100, compilation included; the most worth first
SECONDS = {
    "check": 70,
    "update": 70,
    "decode": 60,
    "step": 110,
    "kernels": 70,
    "batch": 110,
    "async": 90,
}
_LATER_MODEL = 1.5  # times these seconds, for models after the first
_QUICK = 0.25  # with small sizes
_OF_EVERY_MODEL = ("update", "decode", "step")
_SAME = ("device_kind", "devices", "jax", "settings")  # of all results in a file


@dataclasses.dataclass(frozen=True)
class Task:
    """A measurement. Two tasks of one name measure the same."""

    part: str
    model: str  # the end of its source
    variant: str = ""  # the setting in which it differs from others of its part

    @property
    def name(self) -> str:
        """Part, model and variant, such as "update llama32_1b micro_rows=4"."""
        return " ".join(filter(None, (self.part, self.model, self.variant)))


def ordered(
    parts: Collection[str],
    models: Sequence[str],
    micro_rows: Sequence[int],
    decode_attentions: Sequence[str],
) -> Iterator[Task]:
    """The tasks, the most worth first.

    The first model has all parts, the first of `micro_rows` before the others; further models
    follow with the fewest rows, which fit most often. Decoding by other attentions comes last.
    """
    if "check" in parts:
        yield Task("check", "small")
    first = models[0]
    for number, model in enumerate(models):
        rows = min(micro_rows) if number else micro_rows[0]
        for part in SECONDS if not number else _OF_EVERY_MODEL:
            if part in parts and part != "check":
                yield Task(part, model, f"micro_rows={rows}" if part == "update" else "")
    if "update" in parts:
        for rows in micro_rows[1:]:
            yield Task("update", first, f"micro_rows={rows}")
    if "kernels" in parts:
        for name in decode_attentions:
            yield Task("kernels", first, f"attention={name}")


def expected_seconds(task: Task, models: Sequence[str], *, quick: bool) -> float:
    """Seconds that a task may take."""
    part = "decode" if task.part == "kernels" and task.variant else task.part
    later = _LATER_MODEL if task.model in models[1:] else 1.0
    return SECONDS[part] * later * (_QUICK if quick else 1.0)


class Results:
    """Results in a file, which a later call continues.

    Raises ValueError if the file has results of another machine, jax or settings, or is no JSON.
    """

    def __init__(self, path: pathlib.Path, about: Mapping[str, Any]):
        """`about`: the machine, with all of _SAME; further keys are kept as the file has them."""
        self._path, self._tree = path, dict(about) | {"results": []}
        if path.exists():
            found = read_json_object(path, "--out")
            for key in _SAME:
                if found.get(key) != about[key]:
                    raise ValueError(
                        f"--out={path} has results with {key} {found.get(key)!r}, and here it is "
                        f"{about[key]!r}; name another file"
                    )
            self._tree = found

    def note(self, **facts: Any) -> None:
        """Adds facts about the machine, and writes the file."""
        self._tree |= facts
        self._save()

    def left(self, tasks: Iterable[Task]) -> list[Task]:
        """Tasks without a result. A failure that nobody foresaw, or a wrong number, is none."""
        done = {
            one["task"]
            for one in self._tree["results"]
            if "traceback" not in one and one.get("holds", True)
        }
        return [task for task in tasks if task.name not in done]

    def add(self, task: Task, found: Mapping[str, Any]) -> Mapping[str, Any]:
        """Adds a result in place of an earlier one of the same task, writes the file, and returns
        what it has."""
        kept = [one for one in self._tree["results"] if one["task"] != task.name]
        named = {"task": task.name, "part": task.part, "model": task.model} | found
        self._tree["results"] = [*kept, named]
        self._save()
        return named

    def all(self) -> Iterator[Mapping[str, Any]]:
        """All results, failures included."""
        return iter(self._tree["results"])

    def _save(self) -> None:
        write_atomic(self._path, json.dumps(self._tree, indent=1) + "\n")


def run_left(
    tasks: Iterable[Task],
    results: Results,
    *,
    seconds: Callable[[Task], float],
    left: Callable[[], float],
    run: Callable[[Task], dict[str, Any]],
    show: Callable[[Mapping[str, Any]], None] = lambda found: None,
) -> list[Task]:
    """Runs tasks without a result, in order, and returns those that it did not begin. Each result
    is in the file before it is shown.

    A task begins if the `seconds` that it may take are `left`; a shorter one of less worth may
    still begin after it. After a wrong number none begins.
    """
    waiting, late = results.left(tasks), []
    while waiting:
        task = waiting.pop(0)
        if seconds(task) > left():
            late.append(task)
            continue
        found = run(task)
        show(results.add(task, found))
        if not found.get("holds", True):
            return late + waiting
    return late
