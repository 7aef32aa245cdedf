"""The interface of a tracker, and the trackers that a config names.

    observe.trackers = ("tensorboard", "wandb", "my_module:MyTracker")

A tracker receives only what the run's folder holds (follower.py). Its package is imported where it
runs: in a process of its own (sender.py), TensorBoard's writer in a thread of the run.
"""

import dataclasses
import functools
import importlib.util
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from distflow_jax.did_you_mean import nearest
from distflow_jax.user_functions import load_function, load_named

PROJECT = "distflow_jax"  # where neither the config nor the environment names one
MOST_RECORDS = 64  # responses in a table of samples
MODULES = {
    "tensorboard": "tensorboardX",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
}
_CLASSES = {
    "tensorboard": "TensorBoard",
    "wandb": "Wandb",
    "mlflow": "Mlflow",
    "trackio": "Trackio",
}
_SETTING, _EXAMPLE = "observe.trackers", "my_module:MyTracker or path/to/file.py:MyTracker"


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker is opened for."""

    folder: pathlib.Path  # of the run, absolute
    config: Mapping[str, Any]  # config.json; {} before there is one
    project: str = ""  # observe.tracker_project; "": the tracker's environment variable decides
    run_id: str | None = None  # the tracker's own, of an earlier start; None: a new run
    last_step: int = -1  # later steps are going to be given, again if the tracker has them

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.folder.name

    def project_or(self, variable: str) -> str:
        """The project of the config, of the environment variable, or PROJECT."""
        return self.project or os.environ.get(variable) or PROJECT


class Tracker(Protocol):
    """One run in a tracker; `Tracker(run: TrackedRun)` opens it. One thread calls its methods.

    `run_id` identifies the run there: the next start of the same run is opened with it. A row
    counts as stored `settle_seconds` after `metrics` returned: a process that is killed before
    that gives it again at its next start. Both may be absent ("" and 0). An exception costs a
    warning. A row is then given again after the next step, a file twice more, a table not.
    """

    run_id: str
    settle_seconds: float

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the metrics of a step, by name. The last values given for a step count.

        Metrics of an evaluation may come in a call of their own, after those of later steps.
        """

    def samples(self, step: int, kind: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Takes at most MOST_RECORDS records of samples/, before the metrics of their step.

        `kind` is "samples" of a training step, "eval" of an evaluation, or "nonfinite".
        """

    def file(self, path: pathlib.Path) -> None:
        """Takes a file of the run's folder: config.json, plan.svg, report.html."""

    def close(self, failed: bool) -> None:
        """Stores the rest. `failed`: an error, a signal or a kill ended the run before its end."""


def check_names(specs: Sequence[str]) -> None:
    """Raises ValueError for a tracker that is not known, with the nearest name, or named twice."""
    for spec in specs:
        if ":" not in spec and spec not in _CLASSES:
            near = nearest(spec, _CLASSES, 0.5) or ", ".join(_CLASSES)
            raise ValueError(
                f"unknown {_SETTING} {spec!r}; did you mean {near}? One of your own is named "
                f"{_EXAMPLE}"
            )
    if len(set(specs)) < len(specs):
        raise ValueError(f"{_SETTING} {tuple(specs)!r} names a tracker twice")


def check_trackers(specs: Sequence[str]) -> None:
    """Raises ValueError or FileNotFoundError for trackers that could not be opened.

    That are those of `check_names`, built-in ones whose package is not installed, and a user's own
    that cannot be loaded.
    """
    check_names(specs)
    for spec in specs:
        package = MODULES.get(spec)
        if package and not _is_installed(package):
            raise ValueError(
                f"{_SETTING} has {spec!r}, and its package is not installed: pip install {package}"
            )
        if not package:
            _load(spec)


def open_tracker(spec: str, run: TrackedRun) -> Tracker:
    """Opens the tracker `spec`, a built-in name or module:Class. Raises what its package does."""
    return _load(spec)(run)


def file_name(spec: str) -> str:
    """A tracker's name for its files in the run's folder, trackers/NAME.json."""
    return re.sub(r"\W+", "_", spec).strip("_")


def _load(spec: str) -> Any:
    known = {name: functools.partial(_builtin, name) for name in _CLASSES}
    return load_named(spec, known, "tracker", setting=_SETTING, example=_EXAMPLE)


def _is_installed(package: str) -> bool:
    """Whether a package can be imported; a folder of its name without code is none."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def _builtin(name: str, run: TrackedRun) -> Tracker:
    return load_function(f"{__package__}.{name}_tracker:{_CLASSES[name]}", "tracker")(run)
