"""The interface of a tracker, and the trackers that a config names.

    observe.trackers = ("tensorboard", "wandb", "my_module:MyTracker")

A tracker receives only what the run's folder holds. Its package is imported where it runs, in a
process of its own (sender.py).
"""

import importlib.util
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from distflow_jax.config.upkeep_config import check_tracker_names
from distflow_jax.user_functions import load_function

MOST_RECORDS = 64  # responses in a table of samples
BUILT_IN = {  # the package of each, and its class in the module NAME_tracker
    "tensorboard": ("tensorboardX", "TensorBoard"),
    "wandb": ("wandb", "Wandb"),
    "mlflow": ("mlflow", "Mlflow"),
    "trackio": ("trackio", "Trackio"),
}

Records = Sequence[Mapping[str, Any]]  # of samples


class TrackedRun(NamedTuple):
    """The run that a tracker is opened for."""

    folder: pathlib.Path  # of the run, absolute
    config: Mapping[str, Any]  # config.json; {} before there is one
    run_id: str | None = None  # the tracker's own, of an earlier start; None: a new run
    last_step: int = -1  # later steps are going to be given, again if the tracker has them

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def project(self) -> str:
        """observe.tracker_project; "": `project_or` a variable of the tracker's decides."""
        return self.config.get("observe", {}).get("tracker_project", "")

    def project_or(self, variable: str) -> str:
        """The project of the config, of the environment variable, or distflow_jax."""
        return self.project or os.environ.get(variable) or "distflow_jax"


class Tracker(Protocol):
    """A tracker, opened by `Tracker(run: TrackedRun)`. One thread calls its methods.

    An exception costs a warning; a row is then given again. The attributes may be absent ("", 0).
    """

    run_id: str  # the run there: the next start is opened with it
    settle_seconds: float  # after which a row is stored: before that, a kill has it given again

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Takes metrics of a step by name; the last values given for a step count. Those of an
        evaluation may come alone, after later steps."""

    def samples(self, step: int, kind: str, records: Records) -> None:
        """Takes at most MOST_RECORDS records, before the metrics of their step; `kind`: "samples"
        of a training step, "eval" of an evaluation, or "nonfinite"."""

    def file(self, path: pathlib.Path) -> None:
        """Takes a file of the run's folder: config.json, plan.svg, report.html."""

    def close(self, failed: bool) -> None:
        """Stores the rest. `failed`: an error, a signal or a kill ended the run before its end."""


def check_trackers(specs: Sequence[str]) -> None:
    """Raises ValueError or FileNotFoundError for trackers that could not be opened: those of
    `check_tracker_names`, packages that are not installed, classes that cannot be loaded."""
    check_tracker_names(specs)
    for spec in specs:
        package, _ = BUILT_IN.get(spec, ("", ""))
        if not package:
            load_function(spec, "tracker")
        # a folder of its name without code has no origin
        elif not getattr(importlib.util.find_spec(package), "origin", None):
            raise ValueError(
                f"observe.trackers has {spec!r}, and its package is not installed: pip install "
                f"{package}"
            )


def open_tracker(spec: str, run: TrackedRun) -> Tracker:
    """Opens the tracker `spec`, a built-in name or module:Class. Raises what its package does."""
    if spec in BUILT_IN:
        spec = f"{__package__}.{spec}_tracker:{BUILT_IN[spec][1]}"
    return load_function(spec, "tracker")(run)


def table(records: Records) -> tuple[list[str], list[list[Any]]]:
    """(columns, rows) of records; None where a record lacks a column."""
    columns = list(dict.fromkeys(key for record in records for key in record))
    return columns, [[record.get(key) for key in columns] for record in records]
