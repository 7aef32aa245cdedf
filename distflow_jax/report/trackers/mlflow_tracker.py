"""MLflow: the server or store of MLFLOW_TRACKING_URI, or a store in the run's folder.

mlflow ui --backend-store-uri sqlite:///RUN/mlflow.db
"""

import importlib.util
import os
import pathlib
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from distflow_jax.report.trackers.tracker import Records, TrackedRun, table

_PARAM_CHARS = 500  # what older servers accept
_UNKNOWN = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")  # of an id that a store lacks


class Mlflow:
    """An MLflow run, continued by its id. Values that come again have a later time: they count."""

    def __init__(self, run: TrackedRun):
        store, artifacts = os.environ.get("MLFLOW_TRACKING_URI"), None  # the server decides
        if not store:
            store, artifacts = _own_store(run.folder), (run.folder / "mlartifacts").as_uri()
        self._client = MlflowClient(tracking_uri=store)
        self.run_id = self._continued(run) or self._new(run, artifacts)
        known = self._client.get_run(self.run_id).data.params  # they cannot be changed
        flat = {_name(key): str(value)[:_PARAM_CHARS] for key, value in _flat(run.config)}
        params = [Param(name, value) for name, value in flat.items() if name not in known]
        self._client.log_batch(self.run_id, params=params)

    def _continued(self, run: TrackedRun) -> str | None:
        """The run's id if the store has it."""
        try:
            if run.run_id:
                self._client.update_run(run.run_id, status="RUNNING")
        except MlflowException as error:
            if error.error_code not in _UNKNOWN:
                raise
            return None
        return run.run_id

    def _new(self, run: TrackedRun, artifacts: str | None) -> str:
        name = run.project_or("MLFLOW_EXPERIMENT_NAME")
        if known := self._client.get_experiment_by_name(name):
            experiment = known.experiment_id
        else:
            experiment = self._client.create_experiment(name, artifact_location=artifacts)
        return self._client.create_run(experiment, run_name=run.name).info.run_id

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Adds the metrics of a step; they are stored when this returns."""
        now = int(1000 * time.time())
        found = [Metric(_name(name), value, now, step) for name, value in values.items()]
        self._client.log_batch(self.run_id, metrics=found)

    def samples(self, step: int, kind: str, records: Records) -> None:
        """Adds a table, samples/KIND-STEP.json."""
        columns, rows = table(records)
        content = {"columns": columns, "data": rows}
        self._client.log_dict(self.run_id, content, f"samples/{kind}-{step}.json")

    def file(self, path: pathlib.Path) -> None:
        """Adds an artifact."""
        self._client.log_artifact(self.run_id, str(path))

    def close(self, failed: bool) -> None:
        """Ends the run with its status."""
        self._client.set_terminated(self.run_id, status="FAILED" if failed else "FINISHED")


def _own_store(folder: pathlib.Path) -> str:
    if not importlib.util.find_spec("sqlalchemy"):
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # mlflow-skinny has no database
        return (folder / "mlruns").as_uri()
    database, scratch = folder / "mlflow.db", folder / ".mlflow.db.tmp"
    if not database.exists():  # whole or not at all: a kill would leave tables that MLflow refuses
        scratch.unlink(missing_ok=True)
        MlflowClient(tracking_uri=f"sqlite:///{scratch}").search_experiments()
        os.replace(scratch, database)
    return f"sqlite:///{database}"


def _name(name: str) -> str:
    """A name that MLflow accepts: mean@8 becomes mean_8."""
    return re.sub(r"[^\w./\- ]", "_", name)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
