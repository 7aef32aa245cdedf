"""Records of what each process trained on, where samplers run ahead: WORKDIR/groups/PROCESS.jsonl.

A line per step: "counters" of the prompts that the step trains, "left_out" by the filter decision
of a region, "uid" [counter, number] of each response with "version" [lowest, highest] of its tokens
and "age", the steps that its oldest token is behind; "tokens", this process's token account. Every
process writes its own, so that the whole run can be checked from its files.
WORKDIR/groups/start.json has the last "step" before the newest start, and the tokens that were
"sampled" by all starts before it.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distflow_jax.batch import Samples
from distflow_jax.layout import VERSION
from distflow_jax.parallel import processes
from distflow_jax.report.json_lines import append, complete_lines, write_atomic
from distflow_jax.report.run_writer import truncate_metrics

FOLDER, START = "groups", "start.json"


class GroupRecords:
    """This process's file of one start of a run.

    Attributes:
      known: tokens that all processes together had sampled by their last records.
    """

    def __init__(self, folder: pathlib.Path, resume_step: int):
        """Collective. Of all files, of earlier starts with more processes too, the steps after
        `resume_step` are dropped."""
        place = folder / FOLDER
        index = processes.process_index()
        known = 0
        if index == 0:
            place.mkdir(exist_ok=True)
            known = _known(place)
            # first: a start that is killed before the files are cut changes nothing
            write_atomic(place / START, json.dumps({"step": resume_step, "sampled": known}))
            for path in place.glob("*.jsonl"):
                truncate_metrics(path, resume_step)
        self.known = int(processes.all_gather_ints(np.int64(known))[0])  # and the files are cut
        self._path = place / f"{index}.jsonl"

    def write(
        self,
        samples: Samples,
        *,
        step: int,
        counters: Sequence[int],
        left_out: Sequence[int],
        tokens: Mapping[str, int],
    ) -> None:
        """Appends a step that trained on this process's `samples`."""
        rows: dict[str, list[Any]] = {"uid": samples.uid.tolist(), "version": [], "age": []}
        columns = zip(samples.fields[VERSION], samples.response_mask, strict=True)
        for version, mask in columns:
            found = np.broadcast_to(version, mask.shape)[mask]
            span = [int(found.min()), int(found.max())] if found.size else []
            rows["version"].append(span)
            rows["age"].append(step - 1 - span[0] if span else 0)
        line = {"step": step, "counters": list(counters), "left_out": list(left_out), **rows}
        append(self._path, json.dumps(line | {"tokens": dict(tokens)}) + "\n")


def _known(place: pathlib.Path) -> int:
    """Tokens that all processes had sampled by the last records of the newest start.

    Its process 0 counts those of earlier starts too, so that their lines do not count again: of
    processes that the newest start no longer has, or that have recorded no step in it.
    """
    start = {"step": 0, "sampled": 0}
    if (place / START).exists():
        start = json.loads((place / START).read_text())
    sampled = {}
    for path in place.glob("*.jsonl"):
        if lines := complete_lines(path.read_text()):
            last = json.loads(lines[-1])
            if last["step"] > start["step"]:
                sampled[path.stem] = last["tokens"]["sampled"]
    return sum(sampled.values()) + (0 if "0" in sampled else start["sampled"])
