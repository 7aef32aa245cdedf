"""Reader of a run's folder that tolerates missing, incomplete and malformed files.

A run may have been killed in the middle of a line, resumed, or not have begun. Contents that cannot
be read are left out and named in `notes`.
"""

import dataclasses
import itertools
import json
import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

_HEAD_BYTES, _TAIL_BYTES = 8 << 20, 24 << 20  # of a trace, for its first and last steps
_MOST_LINES = 20_000  # of metrics; a tenth of it of stragglers
_MOST_RECORDS = 100  # of one file of samples
_MOST_NAMED = 12  # files of samples named in an error
_KEPT = (b'"val-', b'"NaN"', b'Infinity"')  # lines that contain one of these are always read
_EARLIER = 4  # steps whose samples are read in addition to the last
_MOST_EARLIER_BYTES = 16 << 20  # of further files, read for the same prompts
_MOST_TEXT_BYTES = 1 << 28
_MOST_EVENTS = 100_000  # a month of steps
# objectives of nodes that train a model, where their options name none
_OBJECTIVES = {"ACTOR": "policy", "CRITIC": "value", "REWARD": "reward_model"}


@dataclasses.dataclass(frozen=True)
class PlannedNode:
    """A node of the plan, or the nodes of one program, by the name of their span."""

    id: str
    role: str
    depth: int


@dataclasses.dataclass(frozen=True)
class Span:
    """A span of time; `start` and `end` are seconds since the beginning of its step."""

    name: str
    thread: str
    start: float
    end: float
    partial_batch: int = 0  # number of the partial batch that it belongs to; 0: none


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """The contents of a run's folder.

    `rows` are the metrics by step, in order; `samples` the first records of a few files by name,
    `earlier` those of other files that have the same prompts; `steps` the spans of the first and
    the last step in the trace; `stragglers` the records of RunWriter.stragglers, `groups` those of
    a run with workers (stream/resume.py), `events` those of RunWriter.event; `objectives` what the
    plan's nodes train, in their order, as "policy" or "value"; `samples_prompts` whether a node
    samples responses; `notes` the problems that were met.
    """

    name: str
    config: Mapping[str, Any]  # flat: {"training.steps": 20, ...}
    rows: Mapping[int, Mapping[str, float]]
    samples: Mapping[str, Sequence[Mapping[str, Any]]]
    earlier: Mapping[str, Sequence[Mapping[str, Any]]]
    steps: Mapping[int, Sequence[Span]]
    stragglers: Sequence[Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]]
    events: Sequence[Mapping[str, Any]]
    plan: Sequence[PlannedNode]
    objectives: Sequence[str]
    samples_prompts: bool
    plan_text: str
    plan_svg: str
    notes: Sequence[str]


def read_run(folder: str | os.PathLike) -> RunFolder:
    """Reads a folder; a folder without a run gives an empty RunFolder.

    Symbolic links that lead out of the folder are not followed.
    """
    folder = pathlib.Path(folder)
    notes: list[str] = []
    tree = _json(folder / "plan.json", notes)
    objectives, samples_prompts = _trained(tree)
    samples = _samples(folder / "samples", notes)
    config = read_config(folder, notes)
    return RunFolder(
        name=folder.resolve().name,
        config=config,
        rows=_rows(folder / "metrics.jsonl", notes),
        samples=samples,
        earlier=_earlier(folder / "samples", samples),
        steps=_steps(folder / "trace.json", notes),
        stragglers=_thinned(folder / "stragglers.jsonl", _MOST_LINES // 10, notes),
        groups=_groups(folder, notes) if config.get("stream.workers") else (),
        events=_thinned(folder / "events.jsonl", _MOST_EVENTS, notes),
        plan=_plan(tree),
        objectives=objectives,
        samples_prompts=samples_prompts,
        plan_text=_text(folder / "plan.txt"),
        plan_svg=_text(folder / "plan.svg"),
        notes=notes,
    )


def read_config(folder: pathlib.Path, notes: list[str] | None = None) -> dict[str, Any]:
    """A run's settings by dotted path, {"training.steps": 20, ...}; appends problems to `notes`."""
    notes = [] if notes is None else notes
    try:
        return dict(_dotted(_json(folder / "config.json", notes)))
    except RecursionError:
        notes.append("config.json cannot be read")
        return {}


def inside(path: pathlib.Path, folder: pathlib.Path) -> bool:
    """Whether a path is a regular file that lies below a folder, links followed."""
    try:
        return path.is_file() and path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # a loop of links
        return False


def read_samples(folder: str | os.PathLike, name: str) -> list[dict[str, Any]]:
    """All records of one file of a run's samples, such as "5" or "eval-20".

    Lines that cannot be read are left out. Raises ValueError, with the existing names, if there is
    no such file.
    """
    samples = pathlib.Path(folder) / "samples"
    names = sorted((p.stem for p in samples.glob("*.jsonl")), key=lambda n: (len(n), n))
    if name not in names:
        last = ", ".join(names[-_MOST_NAMED:]) or "none"
        raise ValueError(f"{samples} has no samples of {name!r}; the last ones: {last}")
    with (samples / f"{name}.jsonl").open("rb") as file:
        return _objects(file, name, [])


def _text(path: pathlib.Path) -> str:
    """The first bytes of a file as text; "" without a file."""
    if not inside(path, path.parent):
        return ""
    with path.open("rb") as file:
        return file.read(_MOST_TEXT_BYTES).decode("utf-8", "replace")


def _json(path: pathlib.Path, notes: list[str]) -> Mapping[str, Any]:
    text = _text(path)
    try:
        tree = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        tree = None
    if isinstance(tree, Mapping):
        return tree
    notes.append(f"{path.name} cannot be read")
    return {}


def _dotted(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves by dotted path. Not flax's flatten_dict: reports are made without JAX."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _thinned(path: pathlib.Path, most: int, notes: list[str]) -> list[dict[str, Any]]:
    """Objects of about `most` equidistant lines, with the last one, and of all _KEPT lines."""
    if not inside(path, path.parent):
        return []
    with path.open("rb") as file:
        count = sum(1 for _ in file)
    stride = -(-count // most) or 1
    if stride > 1:
        notes.append(f"{path.name}: of {count} lines one in {stride} is read")
    with path.open("rb") as file:
        lines = (
            line
            for number, line in enumerate(file, 1)
            if number % stride == 0 or number == count or any(word in line for word in _KEPT)
        )
        return _objects(lines, path.name, notes)


def _objects(lines: Iterable[bytes], name: str, notes: list[str]) -> list[dict[str, Any]]:
    rows, wrong = [], 0
    for line in lines:
        try:
            row = json.loads(line) if line.strip() else {}
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows += [row] if row else []
        else:
            wrong += 1
    if wrong:
        notes.append(f"{name}: {wrong} lines cannot be read")
    return rows


def _rows(path: pathlib.Path, notes: list[str]) -> dict[int, dict[str, float]]:
    """Metrics by step, in the order of steps."""
    rows: dict[int, dict[str, float]] = {}
    for line in _thinned(path, _MOST_LINES, notes):
        found = metrics_of(line)
        if found is not None:
            rows[found[0]] = rows.get(found[0], {}) | found[1]
    return {step: rows[step] for step in sorted(rows)}


def metrics_of(line: Mapping[str, Any]) -> tuple[int, dict[str, float]] | None:
    """(step, metrics) of a line of metrics.jsonl; None if it has no step."""
    step = line.get("step")
    if not isinstance(step, int) or not 0 <= step < 1 << 53:
        return None
    numbers = {name: _number(value) for name, value in line.items() if name != "step"}
    return step, {name: n for name, n in numbers.items() if n is not None}


def _number(value: Any) -> float | None:
    """A metric's value; values that are not finite are words in the file, which float() parses."""
    try:
        return float(value) if isinstance(value, int | float | str) else None
    except (ValueError, OverflowError):
        return None


# -- samples ----------------------------------------------------------------------------------


def _samples(folder: pathlib.Path, notes: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Samples of the last and some earlier steps, of the first and last evaluation and failure."""
    groups: dict[str, list[tuple[int, str]]] = {"": [], "eval-": [], "nonfinite-": []}
    for path in folder.glob("*.jsonl"):
        if not inside(path, folder.parent):
            continue
        kind = path.stem.rstrip("0123456789")
        if kind in groups and path.stem != kind:
            groups[kind].append((int(path.stem[len(kind) :]), path.name))
    chosen = []
    for kind, files in groups.items():
        files.sort()
        more = _EARLIER if kind == "" else 1
        places = sorted({round(i * (len(files) - 1) / more) for i in range(more + 1)})
        chosen += [files[place][1] for place in reversed(places)] if files else []
    found = {}
    for name in chosen:
        with (folder / name).open("rb") as file:
            lines = itertools.islice(file, _MOST_RECORDS)
            found[name.removesuffix(".jsonl")] = _objects(lines, name, notes)
    return found


def prompt_key(record: Mapping[str, Any]) -> str:
    """The key by which records of the same prompt are found in several files."""
    return json.dumps([record.get("row"), record.get("prompt")], default=str)


def _earlier(
    folder: pathlib.Path, shown: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, list[dict[str, Any]]]:
    """Records of the other steps' files whose prompts are among those shown."""
    wanted = {prompt_key(r) for name, records in shown.items() for r in records if _is_step(name)}
    files = [p for p in folder.glob("*.jsonl") if _is_step(p.stem) and p.stem not in shown]
    found, size = {}, 0
    for path in sorted(files, key=lambda p: int(p.stem), reverse=True):
        if not wanted or not inside(path, folder.parent):
            continue
        size += path.stat().st_size
        if size > _MOST_EARLIER_BYTES:
            break
        with path.open("rb") as file:
            records = [r for r in _objects(file, path.name, []) if prompt_key(r) in wanted]
        if records:
            found[path.stem] = records
    return found


def _is_step(name: str) -> bool:
    return name.isascii() and name.isdigit()


# -- the plan and its times -------------------------------------------------------------------


def _plan(tree: Mapping[str, Any]) -> list[PlannedNode]:
    """The plan's nodes in order; the nodes of a segment are one, as their spans are."""
    try:
        fused = {segment[0]: ".".join(segment) for segment in tree.get("segments", ())}
        later = {name for segment in tree.get("segments", ()) for name in segment[1:]}
        return [
            PlannedNode(fused.get(name, name), str(t["node"]["role"]), int(t["depth"]))
            for t in tree.get("tasks", ())
            for name in [str(t["node"]["id"])]
            if name not in later
        ]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        return []


def _trained(tree: Mapping[str, Any]) -> tuple[list[str], bool]:
    """The objectives that a plan's nodes train, and whether a node samples responses."""
    objectives, sampled = [], False
    try:
        for task in tree.get("tasks", ()):
            node = task["node"]
            sampled |= node["role"] == "ROLLOUT"
            if node["type"] == "MODEL_TRAIN":
                default = _OBJECTIVES.get(str(node["role"]), "")
                objectives.append(str(node.get("options", {}).get("objective", default)))
    except (KeyError, TypeError, AttributeError):
        return [], False
    return list(dict.fromkeys(filter(None, objectives))), sampled


def _steps(path: pathlib.Path, notes: list[str]) -> dict[int, list[Span]]:
    """Spans of the first and last step in a trace.

    The phases of a step have its number; other spans belong to it by their time. A resumed run
    repeats steps; only the last attempt at a step counts.
    """
    events = [e for e in _joined(_events(path)) if e.get("ph") in ("X", "M")]
    attempts: list[list[dict[str, Any]]] = [[]]
    for event in events:
        if event.get("ph") == "M" and event.get("name") == "process_name":
            attempts.append([])
        attempts[-1].append(event)
    last: dict[int, tuple[int, list[dict[str, Any]]]] = {}
    for number, attempt in enumerate(attempts):
        for event in attempt:
            step = _step(event)
            if step is not None:
                if step not in last or last[step][0] != number:
                    last[step] = (number, [])
                last[step][1].append(event)
    made = sorted(step for step in last if step > 0)
    if events and not made:
        notes.append("trace.json names no steps")
    return {
        step: _spans(last[step][1], attempts[last[step][0]])
        for step in dict.fromkeys((*made[:1], *made[-1:]))
    }


def _groups(folder: pathlib.Path, notes: list[str]) -> list[dict[str, Any]]:
    """The records of groups of all processes."""
    paths = sorted((folder / "groups").glob("*.jsonl"))
    return [line for path in paths for line in _thinned(path, _MOST_LINES // 10, notes)]


def _events(path: pathlib.Path) -> Iterable[dict[str, Any]]:
    """Complete events of a trace; of a large file only those of its beginning and end."""
    if not inside(path, path.parent):
        return
    with path.open("rb") as file:
        data = file.read(_HEAD_BYTES + _TAIL_BYTES)
        size = file.seek(0, os.SEEK_END)
        if size > len(data):
            file.seek(size - _TAIL_BYTES)
            data = data[:_HEAD_BYTES] + b"\n" + file.read()
    for line in data.decode("utf-8", "replace").split("\n"):
        try:
            event = json.loads(line.strip().rstrip(",") or "null")
        except (ValueError, RecursionError):
            continue  # the brackets of the array, and lines that were cut
        if isinstance(event, dict):
            yield event


def _joined(events: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The events with pairs of asynchronous ones as complete ones, of a thread "waiting"."""
    begun: dict[str, dict[str, Any]] = {}
    for event in events:
        if event.get("ph") == "b" and isinstance(event.get("ts"), int | float):
            begun[str(event.get("id"))] = event
        elif event.get("ph") == "e" and isinstance(event.get("ts"), int | float):
            if start := begun.pop(str(event.get("id")), None):
                yield start | {"ph": "X", "tid": "waiting", "dur": event["ts"] - start["ts"]}
        else:
            yield event


def _step(event: Mapping[str, Any]) -> int | None:
    args = event.get("args")
    step = args.get("step") if isinstance(args, Mapping) else None
    return step if isinstance(step, int) and _timed(event) else None


def _partial_batch(event: Mapping[str, Any]) -> int:
    args = event.get("args")
    number = args.get("partial_batch") if isinstance(args, Mapping) else None
    return number if type(number) is int and number > 0 else 0


def _timed(event: Mapping[str, Any]) -> bool:
    times = (event.get("ts"), event.get("dur"))
    numbers = all(isinstance(t, int | float) and math.isfinite(t) for t in times)
    return event.get("ph") == "X" and numbers


def _spans(own: Iterable[dict[str, Any]], attempt: Iterable[dict[str, Any]]) -> list[Span]:
    own, attempt = list(own), list(attempt)
    begin = min(e["ts"] for e in own)
    end = max(e["ts"] + e["dur"] for e in own)
    threads = {
        e.get("tid"): str((e.get("args") or {}).get("name", ""))
        for e in attempt
        if e.get("ph") == "M" and e.get("name") == "thread_name"
    }
    main = {e.get("tid") for e in own}
    known = {id(e) for e in own}
    others = [
        e
        for e in attempt
        if _timed(e) and id(e) not in known and e["ts"] < end and e["ts"] + e["dur"] > begin
    ]
    return [
        Span(
            str(e.get("name", "")),
            "" if e.get("tid") in main else threads.get(e.get("tid")) or str(e.get("tid")),
            (e["ts"] - begin) / 1e6,
            (e["ts"] + e["dur"] - begin) / 1e6,
            _partial_batch(e),
        )
        for e in sorted([*own, *others], key=lambda e: (e["ts"], e["dur"]))
    ]
