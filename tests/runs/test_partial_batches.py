"""Runs whose steps are trained partial batch by partial batch: the same steps as at once, from the
same samples.

Nightly: steps in partial batches have the gradients of the steps at once: mini-batches, a critic,
adapters, mixtures, pipeline, context; ready partial batches train every group once.
"""

import jax
import optax
import pytest
from support.documented import unexplained_metrics
from support.gradients import distance
from support.programs import train_late
from support.run_folders import json_lines, lasting, records
from support.tiny_config import SMALL_AHEAD, tiny_config

from distflow_jax import run
from distflow_jax.report.run_writer import read_metrics
from distflow_jax.runtime import step_actions
from distflow_jax.runtime.step_actions import measure
from distflow_jax.stream.batches.agreement import Agreement, no_workers
from distflow_jax.training.state import TrainState
from distflow_jax.watchdog.exit_codes import EXIT_PREEMPTED

SMALL = (
    *SMALL_AHEAD,
    "rollout.num_slots=16",
    "training.steps=4",
    "eval.every=0",
    "stream.max_staleness=1",
    "mesh.devices=0:2",
    "mesh.roles={'ROLLOUT': {'devices': '2:3'}}",
)
# on processes of two devices each
APART = ("mesh.devices=0:1", "mesh.roles={'ROLLOUT': {'devices': '1:2'}}")
# partial batches that hold two groups
READY = (
    *("stream.partial_batches=ready", "stream.partial_batch_rows=2", "rollout.num_slots=8"),
    *("data.max_prompt_length=64", "training.row_tokens=160"),
)
PROMPTS, STEPS = 8, 4
# the first moment is the gradient of the last optimizer step, and steps are small where that is:
# Adam's own would blow up what rounding changes in the smallest entries
PLAIN = tuple(
    f"{section}.optimizer.{value}"
    for section in ("training", "critic")
    for value in ("b1=0", "clip_norm=0", "eps=1", "lr=0.3")
)
MIXTURE = (
    "model.source=random:qwen3_moe?hidden=32&layers=2&heads=4&kv_heads=2&mlp=16&experts=4&active=2"
    "&vocab=512&max_position=512",
    "training.balance_coef=0.01",
)


def trained(folder, *assignments):
    config = tiny_config(*SMALL, *assignments)
    assert run.train_here(config, folder) == 0
    rows = read_metrics(folder / "metrics.jsonl")
    assert not any(row["perf/compilations"] for row in rows if row["step"] > 1)
    assert not unexplained_metrics(folder)
    return {row["step"]: row for row in rows}


def partial_batches_of(folder):
    return json_lines(folder / "partial_batches.jsonl")


def check_partial_batches(folder, *, steps=STEPS):
    """Every group of a step is in one partial batch, and each step has one last partial batch."""
    partial_batches = partial_batches_of(folder)
    for step in range(1, steps + 1):
        mine = [partial_batch for partial_batch in partial_batches if partial_batch["step"] == step]
        assert [partial_batch["partial_batch"] for partial_batch in mine] == list(
            range(1, len(mine) + 1)
        )
        assert [partial_batch["last"] for partial_batch in mine] == [False] * (len(mine) - 1) + [
            True
        ]
        counters = sorted(c for partial_batch in mine for c in partial_batch["counters"])
        assert counters == list(range(PROMPTS * (step - 1), PROMPTS * step))
        assert all(partial_batch["rows"] <= partial_batch["room"] for partial_batch in mine)
    return partial_batches


def gradients_of(monkeypatch, folder, *assignments):
    """({step: metrics}, [gradients of each trained model, by its state key, of each step])"""
    found = []

    def kept(run, metrics):
        """Keeps the gradients of a step."""
        states = {k: s for k, s in run.state.models.items() if isinstance(s, TrainState)}
        moments = {k: optax.tree.get(s.opt_state, "mu") for k, s in states.items()}
        found.append(jax.device_get(moments))
        measure(run, metrics)

    with monkeypatch.context() as patch:
        patch.setattr(step_actions, "measure", kept)
        return trained(folder, *assignments, *PLAIN), found


def check_equal(ours, theirs):
    """Gradients of steps that trained on the same samples, and metrics but for those of time, rows
    and partial batches."""
    (metrics, gradients), (others, wanted) = ours, theirs
    assert len(gradients) == len(wanted) == len(metrics.keys() - {0})
    for found, expected in zip(gradients, wanted, strict=True):
        assert distance(found, expected) < 1e-5
    changing = ("timing", "perf/", "global_seqlen/balanced", "training/partial_batches")
    for step in metrics.keys() - {0}:
        names = {n for n in metrics[step] | others[step] if not n.startswith(changing)}
        for name in sorted(names):
            value = others[step][name]
            assert metrics[step][name] == pytest.approx(value, rel=1e-5, abs=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("waits", "how"),
    [
        ("", ()),
        (
            "",
            ("training.mini_batches=2", "algorithm.correction=none", "algorithm.proximal=rollout"),
        ),
        ("advantage", ("dag=ppo", "algorithm.correction=token_tis")),
        ("actor_train", ("training.epochs=2", "algorithm.kl_coef=0.1")),
        ("", ("lora.rank=4",)),
        ("", MIXTURE),
        (
            "",
            (
                *(*MIXTURE, "lora.rank=4", "lora.targets=('query','value')"),
                *("training.mini_batches=2", "algorithm.proximal=rollout"),
            ),
        ),
        ("", ("mesh.pipeline=2",)),
        ("", ("mesh.context=2",)),
        (
            "",
            (
                "algorithm.kl_coef=0.1",
                "mesh.roles={'ROLLOUT': {'devices': '2:3'}, 'REFERENCE': {'devices': '3:4'}}",
            ),
        ),
    ],
    ids=[
        *("grpo", "two_mini_batches", "ppo", "two_epochs", "adapters", "mixture"),
        *("adapters_of_a_mixture", "pipeline", "context", "reference_apart"),
    ],
)
def test_partial_batches_train_what_the_step_at_once_trains(tmp_path, monkeypatch, waits, how):
    """Steps 1 and 2 are sampled by the untrained weights, so both runs have the same samples."""
    common = (*how, "stream.weight_update=boundary", "training.steps=2")
    if "algorithm.proximal=rollout" in how:
        common += ("algorithm.correction=none",)
    at_once = gradients_of(monkeypatch, tmp_path / "off", *common)
    partial_batches = ("stream.partial_batches=counter", "stream.partial_batch_prompts=3")
    in_partial_batches = gradients_of(
        monkeypatch, tmp_path / "partial_batches", *common, *partial_batches
    )
    sizes = [
        len(partial_batch["counters"])
        for partial_batch in check_partial_batches(tmp_path / "partial_batches", steps=2)
    ]
    assert sizes == 2 * ([3, 1, 3, 1] if "training.mini_batches=2" in how else [3, 3, 2])
    check_equal(in_partial_batches, at_once)
    plan = " ".join((tmp_path / "partial_batches" / "plan.txt").read_text().split())
    late = "waits for the whole batch"
    assert f"{waits} {late}:" in plan if waits else late not in plan


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        READY,
        (
            "stream.partial_batches=counter",
            "stream.partial_batch_prompts=3",
            "stream.weight_update=boundary",
        ),
    ],
    ids=str,
)
def test_decisions_of_a_region_cut_steps_into_partial_batches(tmp_path, how):
    rows = trained(tmp_path, "dag=dapo", *how)
    partial_batches, before = partial_batches_of(tmp_path), -1
    for step in range(1, STEPS + 1):
        mine = [partial_batch for partial_batch in partial_batches if partial_batch["step"] == step]
        assert [partial_batch["last"] for partial_batch in mine] == [False] * (len(mine) - 1) + [
            True
        ]
        counters = [c for partial_batch in mine for c in partial_batch["counters"]]
        assert 0 < len(counters) == len(set(counters)) <= PROMPTS
        assert rows[step]["training/partial_batches"] == len(mine)
        assert min(counters) > before
        before = max(counters)


def on_two_processes(folder, flags, delays):
    """A run of two processes of two devices each, where sampler and trainer are late at random."""
    settings = [*SMALL, *APART, "observe.launches=True", *flags]
    train_late(folder, settings, delays, processes=2, devices=2)
    first, second = ((folder / "launches" / f"{p}.txt").read_text() for p in range(2))
    assert first == second and "actor_train: finish" in first
    return check_partial_batches(folder)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_counted_partial_batches_depend_on_no_timing(tmp_path):
    """Two processes, other delays: the same partial batches, and the same bits in all numbers."""
    flags = (
        "stream.weight_update=boundary",
        "stream.partial_batches=counter",
        "stream.partial_batch_prompts=3",
    )
    first = on_two_processes(tmp_path / "1", flags, "1")
    second = on_two_processes(tmp_path / "2", flags, "2")
    assert [w["counters"] for w in first] == [w["counters"] for w in second]
    assert lasting(tmp_path / "1") == lasting(tmp_path / "2")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_ready_partial_batches_on_two_processes(tmp_path):
    partial_batches = on_two_processes(tmp_path, (*READY, "training.steps=8"), "3")
    assert max(partial_batch["partial_batch"] for partial_batch in partial_batches) > 1
    found = records(tmp_path)
    for step in range(1, 9):
        counters = sorted(c for record in found[step] for c in record["counters"])
        assert counters == list(range(PROMPTS * (step - 1), PROMPTS * step))
        ages = [age for record in found[step] for age in record["age"]]
        assert 0 <= min(ages) and max(ages) <= 1


@pytest.mark.slow
def test_a_run_without_workers_within_a_step_goes_on_from_its_newest_checkpoint(
    tmp_path, monkeypatch, caplog
):
    """The first mini-batch of step 4 has changed the weights that step 3 left."""
    next_partial_batch = Agreement.next

    def without_workers(self, wait_until):
        if (self._planner.step, self._planner.mini_batch) == (4, 1):
            raise no_workers(self._config, ["rollout"])
        return next_partial_batch(self, wait_until)

    how = (
        *("stream.partial_batches=counter", "stream.partial_batch_prompts=2"),
        *("training.mini_batches=2", "algorithm.correction=none", "algorithm.proximal=rollout"),
        "checkpoint.every=2",
    )
    with monkeypatch.context() as patch:
        patch.setattr(Agreement, "next", without_workers)
        assert run.train_here(tiny_config(*SMALL, *how), tmp_path) == EXIT_PREEMPTED
    assert "step 4 had begun to train: step 2 is the last saved" in caplog.messages
    assert run.train_here(tiny_config(*SMALL, *how), tmp_path) == 0
    check_partial_batches(tmp_path)
