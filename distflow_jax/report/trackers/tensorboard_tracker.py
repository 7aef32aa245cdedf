"""TensorBoard: event files in the run's folder, tensorboard/.

TensorBoard has neither files nor SVG: the plan comes as text, the report lies beside the events.
"""

import json
import logging
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import tensorboardX

from distflow_jax.report.trackers.tracker import TrackedRun

_CHARS = 400  # of a text in a table


class TensorBoard:
    """Scalars by name, tables and the plan as text; numbers are float32."""

    run_id = "tensorboard"
    settle_seconds = 0.0  # a flush reaches the file

    def __init__(self, run: TrackedRun):
        # it warns of every NaN, without the name
        logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)
        # TensorBoard drops what an earlier start wrote from purge_step on
        self._writer = tensorboardX.SummaryWriter(
            str(run.folder / "tensorboard"), purge_step=run.last_step + 1, flush_secs=10
        )

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a scalar for each metric."""
        for name, value in values.items():
            # TensorBoard allows no @: mean@8 becomes mean_8
            self._writer.add_scalar(name.replace("@", "_"), value, step)
        self._writer.flush()

    def samples(self, step: int, kind: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Adds a table in Markdown."""
        columns = list(dict.fromkeys(key for record in records for key in record))
        rows = [columns, ["---"] * len(columns)]
        rows += [[_cell(record.get(key, "")) for key in columns] for record in records]
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        self._writer.add_text(kind, "\n".join(lines), step)

    def file(self, path: pathlib.Path) -> None:
        """Adds config.json and the plan as text; other files only by their path."""
        if path.name == "config.json":
            config = json.dumps(json.loads(path.read_text(encoding="utf-8")), indent=1)
            self._writer.add_text("config", _indented(config), 0)
        elif path.name == "plan.svg":
            plan = path.with_suffix(".txt").read_text(encoding="utf-8")
            self._writer.add_text("plan", _indented(plan), 0)
        else:
            self._writer.add_text(path.stem, str(path), 0)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        """Closes the event file."""
        self._writer.close()


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = text if len(text) <= _CHARS else text[:_CHARS] + " ..."
    return text.replace("|", "\\|").replace("\n", "<br>")


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())
