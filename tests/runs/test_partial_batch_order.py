"""Ready partial batches of four processes for many steps, whatever is late: one order of
programs.

Nightly: 200 steps of ready partial batches on four processes, each late by itself: all launch the
same programs in the same order.
"""

import collections

import pytest
from support import haste
from support.programs import train
from support.run_folders import json_lines

PROCESSES, STEPS, PROMPTS = 4, 200, 12
SETTINGS = (
    "model.source=random:llama?hidden=32&layers=1&heads=2&kv_heads=1&mlp=64&vocab=512",
    "data.max_prompt_length=64",
    f"data.prompts_per_step={PROMPTS}",
    "rollout.num_samples=2",
    "rollout.num_slots=16",
    f"training.steps={STEPS}",
    "training.row_tokens=128",  # a group
    "algorithm.correction=token_tis",
    "stream.max_staleness=2",
    "stream.partial_batches=ready",
    "stream.partial_batch_rows=4",
    "mesh.devices=0:1",
    "mesh.roles={'ROLLOUT': {'devices': '1:2'}}",
    "eval.every=0",
    "checkpoint.every=100",
    "observe.launches=True",
    "observe.samples_every=0",
    "observe.trace=False",
    "observe.trackers=()",
)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_all_processes_launch_the_same_programs_in_the_same_order(tmp_path):
    """200 steps, each sampler late by up to 0.1 seconds a decode call, one by five times that, and
    another PYTHONHASHSEED in each process: the run ends, and every group is in one partial batch.
    """
    late = {"program": "tests/support/late_samplers.py", "env": haste.environment() | {"LATE": "1"}}
    train(tmp_path, SETTINGS, processes=PROCESSES, devices=2, seconds=3000, **late)
    partial_batches = json_lines(tmp_path / "partial_batches.jsonl")
    by_step = collections.defaultdict(list)
    for partial_batch in partial_batches:
        by_step[partial_batch["step"]] += partial_batch["counters"]
    assert sorted(by_step) == list(range(1, STEPS + 1))
    for step, counters in by_step.items():
        assert sorted(counters) == list(range(PROMPTS * (step - 1), PROMPTS * step))
    assert len(partial_batches) > 2 * STEPS
    assert any(counters != sorted(counters) for counters in by_step.values())
    first, *others = [
        (tmp_path / "launches" / f"{process}.txt").read_text().splitlines()
        for process in range(PROCESSES)
    ]
    assert all(other == first for other in others)
    counts = collections.Counter(first)
    assert counts["actor_train: begin"] == counts["actor_train: finish"] == STEPS
    assert counts["partial batch size"] == len(partial_batches)
    assert counts["weight sync: leave"] >= STEPS
