"""Weights & Biases, online or offline as WANDB_MODE says; a resumed run keeps its id.

Offline each start writes a folder of its own below the run's, `wandb sync RUN/wandb/*` sends them.
"""

import os
import pathlib
import uuid
from collections.abc import Mapping
from typing import Any

import wandb

from distflow_jax.report.trackers.tracker import Records, TrackedRun, table


class Wandb:
    """A wandb run. Charts are drawn over the metric `step`, the run's own.

    wandb takes no row for a step before its last one. A row that comes again, after a kill, gets
    the next free number there, and the same `step`.
    """

    settle_seconds = 30.0  # wandb writes its file every 15 s

    def __init__(self, run: TrackedRun):
        self.run_id = run.run_id or uuid.uuid4().hex[:8]
        self._run = wandb.init(
            project=run.project_or("WANDB_PROJECT"),
            id=self.run_id,
            name=os.environ.get("WANDB_NAME") or run.name,
            resume="allow",
            dir=os.environ.get("WANDB_DIR") or str(run.folder),
            settings=wandb.Settings(console="off", silent=True),
        )
        self.url = "" if self._run.offline else self._run.url
        self._run.config.update(dict(run.config), allow_val_change=True)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._media: dict[str, Any] = {}

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Logs one row, with the tables of its step."""
        row = {"step": step, **values, **self._media}
        self._run.log(row, step=max(step, self._run.step), commit=True)
        self._media = {}

    def samples(self, step: int, kind: str, records: Records) -> None:
        """Makes a table for the step's row."""
        columns, rows = table(records)
        # a column has one type
        rows = [[str(v) if isinstance(v, list | dict) else v for v in row] for row in rows]
        self._media[kind] = wandb.Table(columns=columns, data=rows, allow_mixed_types=True)

    def file(self, path: pathlib.Path) -> None:
        """Logs an artifact; a picture is shown in the workspace too."""
        if path.suffix == ".svg":
            self._media[path.stem] = wandb.Html(path.read_text(encoding="utf-8"), inject=False)
        artifact = wandb.Artifact(f"{path.stem}-{self.run_id}", type=path.stem)
        artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def close(self, failed: bool) -> None:
        """Finishes the run; waits until its data are sent or written."""
        self._run.finish(exit_code=int(failed))
