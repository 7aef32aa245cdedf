"""Efficiency of a pod from rates measured on its chips, as benchmarks/gpu.py writes them."""

import dataclasses
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from distflow_jax.parsing.checked_fields import (
    COUNT,
    NUMBERS,
    OBJECT,
    OBJECTS,
    POSITIVE,
    TEXT,
    Kind,
    check_fields,
)
from distflow_jax.parsing.json_text import read_json_object
from distflow_jax.planning.chips import chip_of
from distflow_jax.pods.efficiency import DECODE, PREFILL, TRAINING, Efficiency, Range
from distflow_jax.pods.topology import Pod

_SPREAD = 1.1  # a run's shapes are not those of the benchmark: its slow end
_AGAIN = 4 / 3  # FLOPs of an update that computes its layers again, over those without
_TREE = {"device_kind": TEXT, "measured": OBJECT, "results": OBJECTS}
_MEASURED = {"memory_bandwidth": POSITIVE, "link_bandwidth": POSITIVE}
_UPDATE = {"mfu": POSITIVE, "remat": TEXT}
_DECODE = {
    "seconds": NUMBERS,
    "first_token_seconds": NUMBERS,
    "decoded": COUNT,
    "least_bytes_per_device": POSITIVE,
}


def calibrated(pod: Pod, path: Path) -> Pod:
    """The pod with measured rates in place of published ones, where the file has them.

    A share of several results begins a tenth below the lowest; the constant of a decode step ends a
    tenth above the highest. Models without experts only: those with experts keep what is published.
    Raises ValueError, in one line, for a file that is no such table, or of another chip.
    """
    tree = read_json_object(path, "--calibrate")
    if missing := [key for key in _TREE if key not in tree]:
        raise ValueError(
            f"--calibrate={path} has no {missing[0]!r}: use the --out of benchmarks/gpu.py"
        )
    check_fields(tree, _TREE, f"--calibrate={path}")
    chip = chip_of(tree["device_kind"])
    if chip is None or chip.name != pod.chip.name:
        raise ValueError(
            f"--calibrate={path} was measured on {tree['device_kind']!r}, but {pod.name} has "
            f"{pod.chip.name}: run benchmarks/gpu.py there, or remove --calibrate"
        )
    measured = tree["measured"]
    _check(measured, _MEASURED, ("memory_bandwidth",), f"--calibrate={path}: measured")
    copied = measured["memory_bandwidth"] / chip.memory_bandwidth
    found, memory, work = pod.efficiency, _shares([copied]), {}
    updates = _results(tree["results"], "update", _UPDATE, path)
    for kind, shares in found.work.items():
        compute = shares.compute
        if kind in (TRAINING, PREFILL) and updates:
            compute = _shares(r["mfu"] * (_AGAIN if r["remat"] == "full" else 1) for r in updates)
        own = memory if kind in (TRAINING, PREFILL, DECODE) else shares.memory
        work[kind] = dataclasses.replace(shares, compute=compute, memory=own)
    links, step = found.links, found.step
    if "link_bandwidth" in measured and not chip.dims:
        links = _shares([measured["link_bandwidth"] / chip.link_bandwidth])
    decodes = _results(tree["results"], "decode", _DECODE, path)
    for r in decodes:
        sizes = len(r["seconds"]), len(r["first_token_seconds"])
        if sizes[0] != sizes[1] or not sizes[0]:
            raise ValueError(
                f"--calibrate={path}: a result of 'decode' has {sizes[0]} seconds and {sizes[1]} "
                "first_token_seconds: use the --out of benchmarks/gpu.py"
            )
    if decodes:
        constants = [_constant(r, measured["memory_bandwidth"]) for r in decodes]
        step = Range(min(constants), max(constants) * _SPREAD)
    return dataclasses.replace(pod, measured=Efficiency(work, links, step, "measured"))


def _shares(values: Iterable[float]) -> Range:
    """The range of measured shares of a peak; at most all of it."""
    found = [min(value, 1.0) for value in values]
    return Range(min(found) / _SPREAD, max(found))


def _constant(result: Mapping[str, Any], bandwidth: float) -> float:
    """Seconds of a decode step besides reading weights and cache at `bandwidth`."""
    pairs = zip(result["seconds"], result["first_token_seconds"], strict=True)
    decoding = statistics.median(whole - first for whole, first in pairs)
    return max(0.0, decoding - result["least_bytes_per_device"] / bandwidth) / result["decoded"]


def _results(
    results: Iterable[Mapping[str, Any]], part: str, kinds: Mapping[str, Kind], path: Path
) -> list[Mapping[str, Any]]:
    """The results of a part that did not fail, checked."""
    found = [r for r in results if r.get("part") == part and "error" not in r]
    for result in found:
        _check(result, kinds, tuple(kinds), f"--calibrate={path}: a result of {part!r}")
    return found


def _check(
    values: Mapping[str, Any], kinds: Mapping[str, Kind], needed: Iterable[str], place: str
) -> None:
    """Raises ValueError unless the needed fields are there, and all have their kinds."""
    for key in needed:
        if key not in values:
            raise ValueError(f"{place} has no {key!r}: use the --out of benchmarks/gpu.py")
    check_fields(values, kinds, place)
