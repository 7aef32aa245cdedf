"""A whole GRPO step as scripts/train.py runs it, with roofline predictions of its segments."""

import pathlib
import statistics
from typing import Any

from device.predict import beside_prediction
from device.segments import run_timed
from device.work import Work, step_run

from distflow_jax.planning.chips import Chip

_SHOWN = (
    "timing_s/step",
    "timing_s/gen",
    "timing_s/update_weights",
    "perf/mfu/actor",
    "perf/throughput",
    "response_length/mean",
    "prompt_length/mean",
    "training/off_policy/trajectory_staleness/mean",
)


def time_step(
    model: str, chip: Chip, work: Work, *, micro_rows: int, folder: pathlib.Path, staleness: int = 0
) -> dict[str, Any]:
    """Medians over the steps after the first, which compiles; segments of synchronous steps only.

    Raises ValueError if sizes do not fit together, or exceed memory.
    """
    run, times, steps = run_timed(step_run(model, work, micro_rows, staleness), folder)
    segments = {} if staleness else {"segments": beside_prediction(run, times, steps, chip)}
    return segments | {
        "staleness": staleness,
        "prompts": work.prompts,
        "samples": work.samples,
        "longest_response": work.response,
        "micro_rows": micro_rows,
        "steps": len(steps),
        "medians": {
            name: statistics.median(step[name] for step in steps)
            for name in _SHOWN
            if all(name in step for step in steps)
        },
        "step_seconds": [step["timing_s/step"] for step in steps],
        "peak_gb_so_far": steps[-1]["perf/max_memory_allocated_gb"],
        "planned_gb": run.runtime.compiled.memory.fullest.total / 2**30,
        "compilations": sum(step["perf/compilations"] for step in steps),
    }
