"""A row that comes again is expected to be as long as its answers were, and loses none of them.

Nightly: a row that comes again, with samplers ahead and in partial batches, is trained on with its
own log-probs.
"""

import json

import pytest
from support.programs import train
from support.tiny_config import tiny_config

from distflow_jax import run
from distflow_jax.report.run_writer import read_metrics

STEPS, ROWS, PROMPTS = 9, 12, 4  # three epochs
SETTINGS = (
    "model.source=random:llama?hidden=32&layers=2&heads=4&kv_heads=2&mlp=64&vocab=259",
    f"data.prompts_per_step={PROMPTS}",
    "data.max_prompt_length=96",
    "rollout.num_samples=4",
    "rollout.num_slots=8",
    "rollout.max_response_length=48",  # one in six responses ends before
    "algorithm.correction=token_tis",  # reads the sampler's log-probs beside the trainer's
    "eval.dataset=",
    f"training.steps={STEPS}",
)
# with a learning rate of 0 older weights are the newest
AHEAD = (
    *("stream.max_staleness=1", "training.optimizer.lr=0.0", "training.row_tokens=592"),
    *("mesh.devices=0:2", "mesh.roles={'ROLLOUT': {'devices': '2:3'}}"),
)
PARTIAL_BATCHES = {
    "ahead": (),
    "partial batches by counter": (
        "stream.partial_batches=counter",
        "stream.partial_batch_prompts=2",
        "stream.weight_update=boundary",
    ),
    "partial batches when ready": ("stream.partial_batches=ready", "stream.partial_batch_rows=2"),
}


def rows_of(folder):
    """A data file whose prompts all have different lengths."""
    path = folder / "rows.jsonl"
    rows = [{"question": "1" + " + 1" * i, "answer": str(i + 1)} for i in range(ROWS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"data.train={path}"


def check(folder, processes):
    """Trainer and sampler agree on every token in every epoch."""
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    lengths = {(row["response_length/min"], row["response_length/max"]) for row in rows}
    assert any(least < most for least, most in lengths), "nothing to expect of a row"
    assert max(row["training/rollout_probs_diff_max"] for row in rows) < 1e-4
    orders = []
    for step in range(1, STEPS + 1):
        lines = (folder / "samples" / f"{step}.jsonl").read_text().rstrip("\n").split("\n")
        orders.append([json.loads(line)["uid"] for line in lines])
    assert processes > 1 or all(order == sorted(order) for order in orders)


def trained(folder, *flags):
    settings = [*SETTINGS, rows_of(folder), *flags]
    config = tiny_config(*settings)
    assert run.train_here(config, folder / "run") == run.EXIT_DONE
    check(folder / "run", 1)


@pytest.mark.slow
@pytest.mark.parametrize("dag", ["grpo", "dapo"])
def test_later_epochs_train_on_their_own_log_probs(tmp_path, dag):
    trained(tmp_path, f"dag={dag}")


@pytest.mark.slow
@pytest.mark.parametrize("flags", PARTIAL_BATCHES.values(), ids=PARTIAL_BATCHES)
@pytest.mark.parametrize("dag", ["grpo", "dapo"])
def test_later_epochs_of_samplers_that_run_ahead(tmp_path, dag, flags):
    trained(tmp_path, f"dag={dag}", *AHEAD, *flags)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_later_epochs_train_on_their_own_log_probs_in_two_processes(tmp_path):
    train(tmp_path / "run", [*SETTINGS, rows_of(tmp_path)], processes=2)
    check(tmp_path / "run", 2)
