"""A process that writes a run's folder at the pace of training, with a run's own writer.

python -m support.paced_run FOLDER STEPS SECONDS_PER_STEP
"""

import math
import sys
import time

from distflow_jax.report.json_lines import json_line
from distflow_jax.report.run_writer import RunWriter

MEANS = ("critic/score", "critic/advantages", "response_length", "prompt_length", "global_seqlen")
SCALARS = (
    *("actor/pg_loss", "actor/entropy", "actor/grad_norm", "actor/lr", "actor/ppo_kl"),
    *("training/rollout_probs_diff_mean", "training/rollout_probs_diff_max", "training/epoch"),
    *("timing_s/gen", "timing_s/reward", "timing_s/update_actor", "perf/throughput"),
    *(f"perf/idle/node{i}" for i in range(8)),
    *("reward/errors", "reward/timeouts", "perf/cpu_seconds", "perf/max_memory_allocated_gb"),
)


def metrics_of(step, pace, phase=0.0):
    """Metrics of a step as GRPO writes them, with curves that move."""
    partial_batch = math.sin(step / 9 + phase)
    values = {
        f"{name}/{w}": partial_batch + k
        for name in MEANS
        for k, w in enumerate(("min", "mean", "max"))
    }
    values |= {name: math.exp(-step / 80) * (1 + 0.1 * partial_batch) for name in SCALARS}
    return values | {"timing_s/step": pace, "perf/total_num_tokens": 4096}


def write_run(folder, steps, pace, *, phase=0.0, total=None):
    """Writes steps 1 to `steps`, `pace` seconds apart; 0: at once."""
    writer = RunWriter(folder)
    writer.config({"training": {"steps": total or steps}, "seed": round(phase * 10)})
    writer.event("start", {"step": 0, "host": "here"})
    writer.event("ready", {"step": 0, "seconds": 0.1})
    for step in range(1, steps + 1):
        time.sleep(pace)
        writer.metrics(step, metrics_of(step, pace, phase))
        records = [{"row": i, "prompt": f"p{i}", "response": "r", "score": i} for i in range(4)]
        writer.samples(step, map(json_line, records))
    writer.event("stop", {"step": steps, "reason": "done"})
    writer.close()


if __name__ == "__main__":
    write_run(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
