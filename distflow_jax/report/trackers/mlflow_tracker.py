"""MLflow: the server or store of MLFLOW_TRACKING_URI, or a store in the run's folder.

mlflow ui --backend-store-uri sqlite:///RUN/mlflow.db
"""

import importlib.util
import os
import pathlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from distflow_jax.report.trackers.tracker import TrackedRun

_METRICS, _PARAMS = 1000, 100  # in a request
_PARAM_CHARS = 500  # what older servers accept
_UNKNOWN = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")  # of an id that a store lacks


class Mlflow:
    """An MLflow run, continued by its id. Values that come again have a later time: they count."""

    settle_seconds = 0.0  # requests return once the values are stored

    def __init__(self, run: TrackedRun):
        self._client, artifacts = _client(run.folder)
        self.run_id = self._continued(run) or self._new(run, artifacts)
        self._params(run.config)

    def _continued(self, run: TrackedRun) -> str | None:
        """The run's id if the store has it."""
        if run.run_id is None:
            return None
        try:
            self._client.update_run(run.run_id, status="RUNNING")
        except MlflowException as error:
            if error.error_code not in _UNKNOWN:
                raise
            return None
        return run.run_id

    def _new(self, run: TrackedRun, artifacts: str | None) -> str:
        name = run.project_or("MLFLOW_EXPERIMENT_NAME")
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else None
        if experiment is None:
            experiment = self._client.create_experiment(name, artifact_location=artifacts)
        return self._client.create_run(experiment, run_name=run.name).info.run_id

    def _params(self, config: Mapping[str, Any]) -> None:
        """Adds the config's settings; those of an earlier start cannot be changed."""
        known = self._client.get_run(self.run_id).data.params
        flat = {_name(key): str(value)[:_PARAM_CHARS] for key, value in _flat(config)}
        params = [Param(key, value) for key, value in flat.items() if key not in known]
        for i in range(0, len(params), _PARAMS):
            self._client.log_batch(self.run_id, params=params[i : i + _PARAMS])

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Adds the metrics of a step."""
        now = int(1000 * time.time())
        batch = [Metric(_name(name), value, now, step) for name, value in values.items()]
        for i in range(0, len(batch), _METRICS):
            self._client.log_batch(self.run_id, metrics=batch[i : i + _METRICS])

    def samples(self, step: int, kind: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Adds a table, samples/KIND-STEP.json."""
        columns = list(dict.fromkeys(key for record in records for key in record))
        rows = [[record.get(key) for key in columns] for record in records]
        table = {"columns": columns, "data": rows}
        self._client.log_dict(self.run_id, table, f"samples/{kind}-{step}.json")

    def file(self, path: pathlib.Path) -> None:
        """Adds an artifact."""
        self._client.log_artifact(self.run_id, str(path))

    def close(self, failed: bool) -> None:
        """Ends the run with its status."""
        self._client.set_terminated(self.run_id, status="FAILED" if failed else "FINISHED")


def _client(folder: pathlib.Path) -> tuple[MlflowClient, str | None]:
    """The client, and where a new experiment keeps files; None: the server decides."""
    if uri := os.environ.get("MLFLOW_TRACKING_URI"):
        return MlflowClient(tracking_uri=uri), None
    if importlib.util.find_spec("sqlalchemy"):
        store = f"sqlite:///{folder / 'mlflow.db'}"
    else:  # mlflow-skinny has no database
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        store = (folder / "mlruns").as_uri()
    return MlflowClient(tracking_uri=store), (folder / "mlartifacts").as_uri()


def _name(name: str) -> str:
    """A name that MLflow accepts: mean@8 becomes mean_8."""
    return re.sub(r"[^\w./\- ]", "_", name)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
