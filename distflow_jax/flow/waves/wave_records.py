"""Records of waves: WORKDIR/waves.jsonl, a line per wave.

"step", "wave" within it, "mini_batch", "counters" of its groups, "tokens" and "sequences", "rows"
that they take of the "room" over all data ranks, "versions" [lowest, highest] of their tokens,
"last" of the step, and "waited", the seconds that process 0 waited for it.
"""

import json
import pathlib

from distflow_jax.flow.waves.wave_planner import Wave
from distflow_jax.parallel import processes
from distflow_jax.report.json_lines import append
from distflow_jax.report.run_writer import truncate_metrics

FILE = "waves.jsonl"


class WaveRecords:
    """The file of one start of a run; process 0 writes it."""

    def __init__(self, folder: pathlib.Path, resume_step: int):
        """Waves of steps after `resume_step`, of an earlier start, are dropped."""
        self._path = folder / FILE if not processes.process_index() else None
        if self._path is not None and self._path.exists():
            truncate_metrics(self._path, resume_step)

    def write(self, wave: Wave, *, rows: int, room: int, waited: float) -> None:
        """Appends a wave, whose groups lie in so many rows of so many."""
        if self._path is None:
            return
        spans = [(group.first, group.last) for group in wave.groups]
        line = {
            "step": wave.step,
            "wave": wave.number,
            "mini_batch": wave.mini_batch,
            "counters": list(wave.counters),
            "tokens": sum(group.tokens(shared=True) for group in wave.groups),
            "sequences": sum(len(group.responses) for group in wave.groups),
            "rows": rows,
            "room": room,
            "versions": [min(a for a, _ in spans), max(b for _, b in spans)] if spans else [],
            "last": wave.last,
            "waited": round(waited, 4),
        }
        append(self._path, json.dumps(line) + "\n")
