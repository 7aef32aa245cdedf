"""A run's writer with trackers, without devices: python -m support.tracked_run FOLDER JSON.

Writes the steps `first` to `last` and waits then for `then` to be "close", or to be killed.
"""

import json
import math
import pathlib
import sys
import time

from distflow_jax.report.json_lines import json_line
from distflow_jax.report.run_writer import RunWriter
from distflow_jax.report.trackers.sender import Trackers


def metrics(step: int, attempt: int = 0) -> dict[str, float]:
    """Metrics of a step. Another attempt at it takes another time."""
    values = {f"group/value_{i}": math.sin(step * i) * 10.0 ** (i % 30 - 15) for i in range(40)}
    return values | {
        "critic/score/mean": step / 7,
        "actor/grad_norm": math.nan if step % 3 == 1 else 1.5,
        "critic/advantages/max": math.inf if step % 4 == 2 else 0.5,
        "critic/advantages/min": -math.inf if step % 4 == 2 else -0.5,
        "val-core/gsm8k/acc/mean@8": step / 3,
        "training/global_step": step,
        "timing_s/step": 1 + step + attempt / 16,
    }


def main() -> None:
    """Runs until it is killed, or closes."""
    folder, job = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
    first, last = job["first"], job["last"]
    trackers = Trackers(job["trackers"], folder, seconds=job.get("seconds", 600))
    writer = RunWriter(folder, resume_step=first - 1 or None, trackers=trackers)
    writer.config({"seed": 1, "training": {"steps": 20, "optimizer": {"lr": 1e-5}}})
    writer.plan("1. rollout", svg="<svg xmlns='http://www.w3.org/2000/svg'/>", tree="{}")
    for step in range(first, last + 1):
        started = time.perf_counter()
        records = [{"uid": [step, i], "prompt": "2+2", "score": i / 2} for i in range(3)]
        writer.samples(step, map(json_line, records))
        if step == 1:
            writer.samples("eval-0", map(json_line, records))
            writer.metrics(0, {"val-core/gsm8k/acc/mean@8": 0.0})
        writer.metrics(step, metrics(step, job.get("attempt", 0)))
        print("step", step, time.perf_counter() - started, flush=True)
        time.sleep(job.get("pause", 0.0))
    if job["then"] == "close":
        writer.close()
    else:
        time.sleep(600)


if __name__ == "__main__":
    main()
