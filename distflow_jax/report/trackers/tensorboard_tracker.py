"""TensorBoard: event files in the run's folder, tensorboard/.

TensorBoard has neither files nor SVG: the plan comes as text, the report lies beside the events.
"""

import json
import logging
import pathlib
import textwrap
from collections.abc import Mapping
from typing import Any

import tensorboardX

from distflow_jax.report.trackers.tracker import Records, TrackedRun, table

_CHARS = 400  # of a text in a table


class TensorBoard:
    """Scalars by name, tables and the plan as text; numbers are float32."""

    run_id = "tensorboard"

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

    def samples(self, step: int, kind: str, records: Records) -> None:
        """Adds a table in Markdown."""
        columns, rows = table(records)
        cells = [["" if value is None else _cell(value) for value in row] for row in rows]
        lines = [f"| {' | '.join(row)} |" for row in [columns, ["---"] * len(columns), *cells]]
        self._writer.add_text(kind, "\n".join(lines), step)

    def file(self, path: pathlib.Path) -> None:
        """Adds config.json and the plan as text; other files only by their path."""
        name, text = path.stem, str(path)
        if path.name == "config.json":
            config = json.loads(path.read_text(encoding="utf-8"))
            text = textwrap.indent(json.dumps(config, indent=1), "    ")
        elif path.name == "plan.svg":
            text = textwrap.indent(path.with_suffix(".txt").read_text(encoding="utf-8"), "    ")
        self._writer.add_text(name, text, 0)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        """Closes the event file."""
        self._writer.close()


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = text if len(text) <= _CHARS else text[:_CHARS] + " ..."
    return text.replace("|", "\\|").replace("\n", "<br>")
