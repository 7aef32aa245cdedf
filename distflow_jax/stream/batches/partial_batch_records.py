"""Records of partial batches: WORKDIR/partial_batches.jsonl, a line per partial batch.

"step", "partial_batch" within it, "mini_batch", "counters" of its groups, "tokens" and "sequences",
"rows" that they take of the "room" over all data ranks, "versions" [lowest, highest] of their
tokens, "last" of the step, and "waited", the seconds that process 0 waited for it.
"""

import json
import pathlib

from distflow_jax.parallel import processes
from distflow_jax.report.json_lines import append
from distflow_jax.report.run_writer import truncate_metrics
from distflow_jax.stream.batches.partial_batches import PartialBatch

FILE = "partial_batches.jsonl"


class PartialBatchRecords:
    """The file of one start of a run; process 0 writes it."""

    def __init__(self, folder: pathlib.Path, resume_step: int):
        """Partial batches of steps after `resume_step`, of an earlier start, are dropped."""
        self._path = folder / FILE if not processes.process_index() else None
        if self._path is not None and self._path.exists():
            truncate_metrics(self._path, resume_step)

    def write(self, partial_batch: PartialBatch, *, rows: int, room: int, waited: float) -> None:
        """Appends a partial batch, whose groups lie in so many rows of so many."""
        if self._path is None:
            return
        spans = [(group.first, group.last) for group in partial_batch.groups]
        line = {
            "step": partial_batch.step,
            "partial_batch": partial_batch.number,
            "mini_batch": partial_batch.mini_batch,
            "counters": list(partial_batch.counters),
            "tokens": sum(group.tokens(shared=True) for group in partial_batch.groups),
            "sequences": sum(len(group.responses) for group in partial_batch.groups),
            "rows": rows,
            "room": room,
            "versions": [min(a for a, _ in spans), max(b for _, b in spans)] if spans else [],
            "last": partial_batch.last,
            "waited": round(waited, 4),
        }
        append(self._path, json.dumps(line) + "\n")
