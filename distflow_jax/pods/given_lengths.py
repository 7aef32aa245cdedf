"""Lengths of responses that a user has: a file of them, or a run with its measured seconds."""

import csv
import dataclasses
import io
import pathlib
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from distflow_jax.config.run_config import Config
from distflow_jax.parsing.json_text import MOST_FILE_BYTES, parse_json, read_text
from distflow_jax.parsing.one_line import shown
from distflow_jax.report.read_run import read_config, read_run, read_samples
from distflow_jax.report.run_writer import read_metrics

_FLAG = "--async"
_MOST_FILES = 20  # of a run's samples, the last ones
# settings that a run's seconds depend on, which a plan must share
_SHARED = ("data.prompts_per_step", "rollout.num_samples", "mesh.rollout_tensor")


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Measured seconds of a synchronous step."""

    generation: float
    training: float  # all that is neither generation, rewards nor weights
    weight_update: float
    reward: float  # from a response's end to its score, on average


@dataclasses.dataclass(frozen=True)
class ResponseLengths:
    """Tokens of responses and how often each was seen, int [n] each."""

    tokens: np.ndarray
    counts: np.ndarray
    source: str
    measured: Seconds | None = None  # of a run

    @property
    def mean(self) -> float:
        """Tokens of the mean response."""
        return float(np.average(self.tokens, weights=self.counts))

    @property
    def longest(self) -> int:
        """Tokens of the longest response."""
        return int(self.tokens.max())

    def drawn(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Lengths of `count` responses, drawn independently, int [count]."""
        return rng.choice(self.tokens, count, p=self.counts / self.counts.sum())


def read_lengths(path: pathlib.Path, config: Config, devices: int) -> ResponseLengths:
    """Reads a folder of a run, or a file of lengths or of (length, count), in JSON or CSV.

    `config` and `devices`: of the plan, which those of a run must equal. Raises ValueError, in one
    line, for content that is no such thing.
    """
    where = f"{_FLAG}={path}"
    if path.is_dir():
        return _of_run(path, where, config, devices)
    text = read_text(path, MOST_FILE_BYTES, _FLAG)
    is_json = path.suffix.lower() == ".json" or text.lstrip()[:1] in ("[", "{")
    entries = _json_entries(text, where) if is_json else _csv_entries(text)
    return _checked(entries, where, config.rollout.max_response_length)


def _json_entries(text: str, where: str) -> Iterable[Any]:
    found = parse_json(text, where)
    if isinstance(found, Mapping):
        return [[_number(length), count] for length, count in found.items()]
    if not isinstance(found, Sequence) or isinstance(found, str):
        raise ValueError(f"{where}: expected a list of lengths, got {shown(found)}")
    return found


def _csv_entries(text: str) -> list[Any]:
    """Rows of one or two numbers; a first row of words is a header."""
    rows = [[_number(cell) for cell in row] for row in csv.reader(io.StringIO(text)) if row]
    if rows and all(isinstance(cell, str) for cell in rows[0]):
        rows = rows[1:]
    return [row[0] if len(row) == 1 else row for row in rows]


def _number(text: str) -> int | str:
    try:
        return int(text)
    except ValueError:
        return text.strip()


def _checked(entries: Iterable[Any], where: str, most: int) -> ResponseLengths:
    counts: dict[int, int] = {}
    for number, entry in enumerate(entries, 1):
        pair = entry if isinstance(entry, Sequence) and not isinstance(entry, str) else (entry, 1)
        if len(pair) != 2 or not all(type(n) is int for n in pair):
            raise ValueError(
                f"{where}: entry {number} must be a length, or a length and a count, as integers, "
                f"got {shown(entry)}"
            )
        length, count = pair
        if length < 1 or count < 0:
            raise ValueError(
                f"{where}: entry {number} must have a length of at least 1 and a count of at "
                f"least 0, got {shown(entry)}"
            )
        if length > most:
            raise ValueError(
                f"{where}: entry {number} has {length} tokens, above "
                f"rollout.max_response_length={most}: increase it, or remove the entry"
            )
        counts[length] = counts.get(length, 0) + count
    if not sum(counts.values()):
        raise ValueError(f"{where} has no lengths: write one for each observed response")
    return ResponseLengths(np.array(list(counts)), np.array(list(counts.values())), where)


def _of_run(folder: pathlib.Path, where: str, config: Config, devices: int) -> ResponseLengths:
    if not (folder / "metrics.jsonl").is_file():
        raise ValueError(f"{where} is not a run folder: it has no metrics.jsonl")
    settings = read_config(folder)
    _check_settings(settings, config, where)
    run = read_run(folder)
    start = next((e for e in reversed(run.events) if e.get("event") == "start"), {})
    had = str(start.get("devices", "")).partition(" ")[0]
    if had.isdigit() and int(had) != devices:
        raise ValueError(
            f"{where} ran on {had} devices, but --topology has {devices}: use the topology of "
            "the run"
        )
    names = [p.stem for p in (folder / "samples").glob("*.jsonl") if p.stem.isdigit()]
    found = [
        record["response_length"]
        for name in sorted(names, key=int)[-_MOST_FILES:]
        for record in read_samples(folder, name)
        if "response_length" in record
    ]
    lengths = _checked(found, where, config.rollout.max_response_length)
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "timing_s/gen" in row]
    if not rows:
        raise ValueError(f"{where} has no step with timing_s/gen: use a run that has trained")
    responses = config.data.prompts_per_step * config.rollout.num_samples
    seconds = _seconds(rows[1:] or rows, responses / start.get("processes", 1))
    return dataclasses.replace(lengths, measured=seconds)


def _check_settings(settings: Mapping[str, Any], config: Config, where: str) -> None:
    if staleness := settings.get("stream.max_staleness", 0):
        raise ValueError(
            f"{where} is a run with stream.max_staleness={staleness}, whose times overlap: use "
            "a synchronous run"
        )
    for key in _SHARED:
        section, name = key.split(".")
        wanted = getattr(getattr(config, section), name)
        if settings.get(key, wanted) != wanted:
            raise ValueError(
                f"{where} has {key}={settings[key]}, but the plan has {wanted}: use "
                f"--config.{key}={settings[key]}"
            )


def _seconds(rows: Sequence[Mapping[str, float]], responses: float) -> Seconds:
    """Medians over steps. `responses`: of a step, to one process."""

    def median(value: Callable[[Mapping[str, float]], float]) -> float:
        return float(statistics.median(map(value, rows)))

    def rest(row: Mapping[str, float]) -> float:
        # a step's time has neither its checkpoint nor what is compiled before step 1
        spent = sum(
            row.get(f"timing_s/{part}", 0.0) for part in ("gen", "reward", "update_weights")
        )
        return max(0.0, row["perf/time_per_step"] - spent)

    return Seconds(
        generation=median(lambda row: row["timing_s/gen"]),
        training=median(rest),
        weight_update=median(lambda row: row.get("timing_s/update_weights", 0.0)),
        reward=median(lambda row: row.get("timing_s/score", 0.0)) / responses,
    )
