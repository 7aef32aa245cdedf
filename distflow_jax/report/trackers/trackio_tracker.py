"""Trackio: its local database (TRACKIO_DIR), or a Space or server that its variables name."""

import pathlib
import uuid
from collections.abc import Mapping
from typing import Any

import trackio

from distflow_jax.report.trackers.tracker import Records, TrackedRun


class Trackio:
    """A trackio run, continued by its name. Of two rows for a step the later one counts."""

    settle_seconds = 10.0  # trackio writes its queue twice a second

    def __init__(self, run: TrackedRun):
        self.run_id = run.run_id or f"{run.name}-{uuid.uuid4().hex[:8]}"
        self._run = trackio.init(
            project=run.project_or("TRACKIO_PROJECT"),
            name=self.run_id,
            config=dict(run.config),
            resume="allow",
            embed=False,
        )
        self._media: dict[str, Any] = {}

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Logs one row, with the tables of its step."""
        self._run.log({**values, **self._media}, step=step)
        self._media = {}

    def samples(self, step: int, kind: str, records: Records) -> None:
        """Makes a table for the step's row."""
        self._media[kind] = trackio.Table(data=[dict(record) for record in records])

    def file(self, path: pathlib.Path) -> None:
        """Logs an artifact; a picture is shown among the media too."""
        if path.suffix == ".svg":
            self._media[path.stem] = trackio.Html(path.read_text(encoding="utf-8"))
        self._run.log_artifact(str(path), name=f"{self.run_id}-{path.stem}", type=path.stem)

    def close(self, failed: bool) -> None:
        """Waits until the queue is written, for at most 30 s."""
        self._run.finish()
