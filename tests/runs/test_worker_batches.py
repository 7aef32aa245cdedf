"""How steps take groups of workers of other jobs: in partial batches, in rounds.

Trainers and workers are real processes. All is read from the files that trainers write.

Nightly: steps that take workers' groups in partial batches, in rounds of a region, by
weights that move when a worker starves: each prompt once though two are given up, no token too old;
partial batches are the step at once; a replay without workers is equal bit for bit.
"""

import pytest
from support.programs import finished, training
from support.replayed import check_equal
from support.run_folders import json_lines, records
from support.worker_runs import (
    BOUNDARY,
    PROMPTS,
    SAMPLES,
    SMALL,
    STEPS,
    WORKERS,
    check_account,
    trainers,
    worker,
)

from distflow_jax.report.run_writer import read_metrics

FAILING = "tests/support/failing_worker.py"
FAILS = (3, 18)  # prompts that no worker can answer
SLOTS = "rollout.num_slots=8"
COUNTER = ("stream.partial_batches=counter", "stream.partial_batch_prompts=3", SLOTS)
READY = (
    *("stream.partial_batches=ready", "stream.partial_batch_rows=2", SLOTS),
    *("data.max_prompt_length=64", "training.row_tokens=160"),
)


def train(started, folder, flags, *, processes=1, environment=None):
    """A run with two workers, which ends well; returns its trainers."""
    job = trainers(started, folder, flags, processes=processes)
    program = FAILING if environment else "scripts/worker.py"
    how = {"program": program, "environment": environment}
    two = [worker(started, folder, flags, **how) for _ in range(2)]
    assert job.end() == 0, job.output() + two[0].output()
    assert [one.end() for one in two] == [0, 0], two[0].output()
    return job


def check_steps(folder, *, lost=(), exact=False, staleness=1, steps=STEPS):
    """Every prompt but those lost trained once, whole, in its step, by weights that may."""
    kept = [c for c in range(PROMPTS * steps + len(lost)) if c not in lost]
    wanted = {step: kept[PROMPTS * (step - 1) : PROMPTS * step] for step in range(1, steps + 1)}
    assert records(folder).keys() == wanted.keys()
    for step, lines in records(folder).items():
        assert sorted(c for line in lines for c in line["counters"]) == wanted[step]
        uids = sorted(tuple(uid) for line in lines for uid in line["uid"])
        assert uids == [(c, s) for c in wanted[step] for s in range(SAMPLES)]
        for low, high in (span for line in lines for span in line["version"]):
            assert step - 1 - staleness <= low <= high <= step - 1
            assert not exact or low == high == max(0, step - 1 - staleness)
    return wanted


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "flags",
    [COUNTER, READY, (*COUNTER, "training.mini_batches=2"), (*READY, *BOUNDARY)],
    ids=["counter", "ready", "mini_batches", "boundary"],
)
def test_each_group_of_workers_is_in_one_partial_batch_though_prompts_are_given_up(
    tmp_path, started, flags
):
    folder = tmp_path / "run"
    fails = {"FAILS": ",".join(map(str, FAILS))}
    job = train(started, folder, flags, processes=2, environment=fails)
    assert "prompt 18 is given up" in job.log.read_text()  # by process 0, which alone has a log
    wanted = check_steps(folder, lost=FAILS)
    check_account(folder)
    found = json_lines(folder / "partial_batches.jsonl")
    for step, counters in wanted.items():
        mine = [batch for batch in found if batch["step"] == step]
        assert sorted(c for batch in mine for c in batch["counters"]) == counters
        assert [batch["last"] for batch in mine] == [False] * (len(mine) - 1) + [True]
        assert len(mine) > 1


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_run_with_workers_is_repeated_without_them(tmp_path, started):
    """Prompts that were given up among it: the same training, bit for bit."""
    recorded, replayed = tmp_path / "run", tmp_path / "replayed"
    fails = {"FAILS": ",".join(map(str, FAILS))}
    train(started, recorded, (*READY, "stream.record=True"), processes=2, environment=fails)
    free = ("stream.lease_seconds=90", "stream.max_tries=1")  # of a run that has no worker
    command = training(replayed, (*SMALL, *WORKERS, *READY, *free), processes=2)
    finished(*command, f"--replay={recorded}")
    check_equal(recorded, replayed, STEPS)
    assert not (replayed / "task_buffers.json").exists()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_weights_move_to_workers_that_starve(tmp_path, started):
    """No weights differ by 1000 nats. While the first step compiles, workers answer all that they
    may by version 0: one says so, and they do not wait until version 4 has to move."""
    folder, most = tmp_path / "run", 3
    flags = ("stream.divergence=1000", f"stream.max_staleness={most}", "training.steps=8")
    train(started, folder, flags, processes=2)
    check_steps(folder, staleness=most, steps=8)
    check_account(folder)
    rows = {row["step"]: row for row in read_metrics(folder / "metrics.jsonl")}
    skipped = [rows[step]["perf/weight_update/skipped"] for step in sorted(rows)]
    assert set(skipped) == {0, 1}, skipped
    assert 0 in skipped[:most], skipped
    assert all(row["training/off_policy/divergence"] < 1000 for row in rows.values())


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(("most", "flags"), [(1, ()), (2, COUNTER)], ids=["at_once", "counter"])
def test_rounds_of_a_region_are_answered_by_one_version(tmp_path, started, most, flags):
    """Workers answer a step's further rounds by its version, though newer ones are there."""
    folder, steps = tmp_path / "run", 6
    flags = (*flags, *BOUNDARY, "dag=dapo", f"training.steps={steps}")
    flags += (f"stream.max_staleness={most}",)
    fails = {"FAILS": ",".join(map(str, FAILS))}
    train(started, folder, flags, processes=2, environment=fails)
    position, rounds = 0, 0
    for step, lines in sorted(records(folder).items()):
        kept = [c for line in lines for c in line["counters"]]
        left_out = [c for line in lines for c in line["left_out"]]
        looked_at = sorted([*kept, *left_out, *(c for c in FAILS if c < max(kept))])
        looked_at = [c for c in looked_at if c >= position]
        end = position + len(looked_at)
        assert looked_at == list(range(position, end))
        assert 0 < len(kept) <= PROMPTS
        rounds += bool(left_out)
        position = end
        versions = {v for line in lines for span in line["version"] for v in span}
        assert versions == {max(0, step - 1 - most)}
    assert step == steps and rounds
    check_account(folder)
