"""Runs whose samplers run ahead: every prompt trains once, in its step, and no token is too old.

Nightly: samplers that run ahead, on two processes, in every graph and placement: no token too old,
no prompt twice; an error of a host node ends the run.
"""

import collections
import json
import random
import shutil
import threading
import time

import compare_checkouts
import numpy as np
import pytest
from support.documented import unexplained_metrics
from support.programs import train
from support.run_folders import json_lines, lasting
from support.tiny_config import SMALL_AHEAD, tiny_config

from distflow_jax import run
from distflow_jax.report.run_writer import read_metrics
from distflow_jax.stream.ahead import Ahead
from distflow_jax.stream.host_nodes import NodesAhead
from distflow_jax.stream.producer import Producer

SMALL = (
    *SMALL_AHEAD,
    "training.steps=6",
    "eval.every=3",
    "eval.num_prompts=8",
)
PROMPTS, STEPS, SAMPLES = 8, 6, 4
SHARED = ("mesh.devices=0:2", "mesh.roles={'ROLLOUT': {'devices': '0:2'}}")
PART = ("mesh.devices=0:4", "mesh.roles={'ROLLOUT': {'devices': '4:5'}}")


def config_of(*assignments):
    return tiny_config(*SMALL, *assignments)


def samples_of(folder):
    """{step: records of all processes' responses}"""
    return {int(path.stem): json_lines(path) for path in (folder / "samples").glob("[0-9]*.jsonl")}


def evaluations_of(folder):
    """{step: records of the responses of its evaluation}"""
    paths = {int(p.stem.removeprefix("eval-")): p for p in (folder / "samples").glob("eval-*")}
    return {step: paths[step].read_text() for step in sorted(paths)}


def check_ages(folder, staleness, *, steps=STEPS):
    """No token is too old, and no response trains twice; returns the ages of tokens, counted."""
    ages, uids = collections.Counter(), collections.Counter()
    samples = samples_of(folder)
    assert sorted(samples) == list(range(1, steps + 1))
    for step, records in samples.items():
        for record in records:
            versions = np.ravel(record["version"])
            assert 0 <= step - 1 - versions.max() and step - 1 - versions.min() <= staleness
            ages.update((step - 1 - versions).tolist())
            uids[tuple(record["uid"])] += 1
    assert set(uids.values()) == {1}
    return ages, uids


def check_batches(uids, *, steps=STEPS):
    """The batches are those of a synchronous run: all prompts, in their order."""
    assert {uid for uid, _ in uids} == set(range(PROMPTS * steps))
    assert len(uids) == PROMPTS * steps * SAMPLES


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [1, 3])
def test_samplers_that_share_the_trainers_devices(tmp_path, staleness):
    """Rollouts end when the step has its groups; the others go on under the next weights."""
    config = config_of(f"stream.max_staleness={staleness}", "rollout.max_response_length=24")
    assert run.train_here(config, tmp_path) == 0
    ages, uids = check_ages(tmp_path, staleness)
    check_batches(uids)
    assert set(ages) > {0}  # some are older
    rows = lasting(tmp_path)
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert not any(r["perf/compilations"] for r in read_metrics(tmp_path / "metrics.jsonl")[2:])
    for row in rows[1:]:
        steps = np.arange(staleness + 1)
        means = []
        for name in ("age", "in_flight", "waiting"):
            shares = [row[f"training/off_policy/{name}_share/{step}"] for step in steps]
            assert sum(shares) == pytest.approx(1.0)
            means.append(steps @ shares)
        assert means[0] == pytest.approx(means[1] + means[2])
        ages = [age for age in steps if row[f"training/off_policy/age_share/{age}"]]
        by_age = {age for age in steps if f"rollout_corr/kl/{age}" in row}
        assert by_age == set(ages)
        mean = sum(
            row[f"training/off_policy/age_share/{a}"] * row[f"rollout_corr/kl/{a}"] for a in ages
        )
        assert mean == pytest.approx(row["rollout_corr/kl"], abs=1e-6)
        assert row["training/off_policy/trajectory_staleness/max"] <= staleness
    assert not unexplained_metrics(tmp_path)


@pytest.mark.slow
def test_batches_of_a_region_are_cut_by_decisions(tmp_path):
    config = config_of("dag=dapo", "stream.max_staleness=2", "eval.every=0")
    assert run.train_here(config, tmp_path) == 0
    _, uids = check_ages(tmp_path, 2)
    by_step = {s: {r["uid"][0] for r in records} for s, records in samples_of(tmp_path).items()}
    for step in range(2, STEPS + 1):
        if by_step[step] and by_step[step - 1]:
            assert max(by_step[step - 1]) < min(by_step[step])
    assert all(len(counters) <= PROMPTS for counters in by_step.values())
    assert not unexplained_metrics(tmp_path)


@pytest.mark.slow
def test_an_error_while_a_run_starts_ends_its_sampler(tmp_path, monkeypatch):
    """Its thread has begun by then; left alone it would keep the interpreter from ending."""

    def fails(*args):
        assert [t for t in threading.enumerate() if t.name.startswith("sampler")]
        raise OSError("no space left on device")

    monkeypatch.setattr(run, "make_steps", fails)
    with pytest.raises(OSError, match="no space left"):
        run.train_here(config_of("stream.max_staleness=1", *PART), tmp_path)
    assert not [t for t in threading.enumerate() if t.name.startswith("sampler")]


@pytest.mark.slow
@pytest.mark.parametrize("lags", [(2, 0), (0, 2), (2, 1)], ids=str)
def test_a_run_goes_on_with_another_staleness(tmp_path, caplog, lags):
    """Without a staleness groups that were sampled ahead are sampled again, with a smaller one they
    are
    trained on: every prompt trains once, and the log says which it is."""
    for staleness in lags:
        flags = (f"stream.max_staleness={staleness}", "eval.every=0", "checkpoint.every=3")
        assert run.train_here(config_of(*flags, *SHARED), tmp_path) == 0
        if staleness == lags[0]:  # as if a kill had come after the checkpoint of step 3
            shutil.rmtree(tmp_path / "checkpoints" / str(STEPS))
    _, uids = check_ages(tmp_path, max(lags))
    check_batches(uids)
    check_account(tmp_path, max(lags), STEPS)
    told = "the checkpoint of step 3 holds samples that stream.max_staleness=2 began"
    said = [text for text in caplog.messages if text.startswith(told)]
    assert len(said) == (lags[0] > lags[1])
    if lags[0] > lags[1]:
        assert ("are trained on in their steps" if lags[1] else "they are dropped") in said[0]


def check_account(folder, staleness, steps):
    """A run that goes on after its last step counts on where its samplers had run ahead: what was
    trained on stays so, in a stretch without a staleness too, of which nothing is counted."""
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "perf/tokens/trained" in row]
    before = rows[-1]
    flags = (f"stream.max_staleness={staleness}", f"training.steps={steps + 1}", "eval.every=0")
    assert run.train_here(config_of(*flags, *SHARED), folder) == 0
    last = read_metrics(folder / "metrics.jsonl")[-1]
    names = ("sampled", "trained", "filtered", "lost", "under_way")
    old, new = ({n: row[f"perf/tokens/{n}"] for n in names} for row in (before, last))
    assert last["step"] == steps + 1 and new["sampled"] == sum(new[n] for n in names[1:])
    here = round(last["response_length/mean"] * PROMPTS * SAMPLES)  # tokens
    assert new["trained"] == old["trained"] + here and new["under_way"] == 0
    assert new["sampled"] >= old["sampled"] + here


def check_evaluations(folder, config):
    """Each that is due was made once, by the weights of its step."""
    rows = json_lines(folder / "metrics.jsonl")
    found = [row["step"] for row in rows if any(name.startswith("val-core/") for name in row)]
    due = [s for s in range(STEPS + 1) if s in (0, STEPS) or s % config.eval.every == 0]
    assert found == due == list(evaluations_of(folder))


def delayed(monkeypatch, seed):
    """Delays of samplers and trainers, of random lengths."""
    draw = random.Random(seed)
    rounds, begin, nodes = Producer.collect, Ahead.begin, NodesAhead.judge

    def late_round(self):
        time.sleep(draw.uniform(0, 0.05))
        return rounds(self)

    def late_step(self, step):
        time.sleep(draw.uniform(0, 0.2))
        begin(self, step)

    def late_nodes(self, group):
        time.sleep(draw.uniform(0, 0.05))
        return nodes(self, group)

    monkeypatch.setattr(NodesAhead, "judge", late_nodes)
    monkeypatch.setattr(Producer, "collect", late_round)
    monkeypatch.setattr(Ahead, "begin", late_step)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("staleness", "flags"),
    [(1, ()), (2, ("eval.every=1",)), (1, ("dag=dapo", "eval.every=2"))],
)
def test_boundary_swaps_do_not_depend_on_time(tmp_path, monkeypatch, staleness, flags):
    """Samplers on a device of their own: whatever is late, metrics and samples are the same."""
    config = config_of(
        *PART, f"stream.max_staleness={staleness}", "stream.weight_update=boundary", *flags
    )
    for name, seed in (("first", None), ("second", 1)):
        with monkeypatch.context() as patch:
            if seed is not None:
                delayed(patch, seed)
            assert run.train_here(config, tmp_path / name) == 0
    assert lasting(tmp_path / "first") == lasting(tmp_path / "second")
    assert evaluations_of(tmp_path / "first") == evaluations_of(tmp_path / "second")
    assert samples_of(tmp_path / "first") == samples_of(tmp_path / "second")
    _, uids = check_ages(tmp_path / "first", staleness)
    if not any("dapo" in flag for flag in flags):
        check_batches(uids)
    check_evaluations(tmp_path / "first", config)
    for step, records in samples_of(tmp_path / "first").items():
        assert {record["version"] for record in records} == {max(0, step - 1 - staleness)}


def test_a_run_that_goes_on_from_an_older_checkpoint_ends_bit_equal(tmp_path):
    """As after a kill: the samples that older weights began are in the checkpoint."""
    config = config_of(
        *PART,
        "stream.max_staleness=1",
        "stream.weight_update=boundary",
        "training.steps=4",
        "checkpoint.every=2",
        "eval.every=0",
    )
    whole, again = tmp_path / "whole", tmp_path / "again"
    assert run.train_here(config, whole) == 0
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints" / "4")
    assert run.train_here(config, again) == 0
    check_ages(again, 1, steps=4)
    assert lasting(again) == lasting(whole)
    assert samples_of(again) == samples_of(whole)
    assert not list(compare_checkouts.differences(whole, again, 0))  # parameters too


def test_newest_weights_at_once(tmp_path, monkeypatch):
    """Samplers beside the training, which is late: what it waits for is young."""
    config = config_of(*PART, "stream.max_staleness=2", "stream.cache=recompute")
    delayed(monkeypatch, 2)
    assert run.train_here(config, tmp_path) == 0
    _, uids = check_ages(tmp_path, 2)
    check_batches(uids)
    update_times = [
        {n: row[f"perf/weight_update/{n}"] for n in ("leave", "arrive", "exposed", "hidden")}
        for row in read_metrics(tmp_path / "metrics.jsonl")[1:]
    ]
    assert sum(weight_update["arrive"] for weight_update in update_times) > 0
    for weight_update in update_times:
        seconds = weight_update["leave"] + weight_update["arrive"]
        assert (
            max(weight_update["leave"], weight_update["arrive"]) - 1e-6
            <= weight_update["exposed"] + weight_update["hidden"]
        )
        assert weight_update["exposed"] + weight_update["hidden"] <= seconds + 1e-6
    assert "run ahead of the training, at most 2 steps" in (tmp_path / "plan.txt").read_text()
    assert json.loads((tmp_path / "memory.json").read_text())["host"]["weights"]["buffers"] == 2
    page = (tmp_path / "report.html").read_text()
    assert "title='sampling'" in page and "rollout (sampler_0)" in page
    assert not unexplained_metrics(tmp_path)


@pytest.mark.slow
def test_an_error_of_a_host_node_ends_the_run(tmp_path, monkeypatch):
    """It reaches the step that needs the group, with its own message."""

    whole = NodesAhead.judge

    def broken(self, group):
        if group.counter >= PROMPTS:  # of step 2, which is sampled beside step 1
            raise RuntimeError("no filter decision today")
        whole(self, group)

    monkeypatch.setattr(NodesAhead, "judge", broken)
    with pytest.raises(RuntimeError, match="no filter decision today"):
        run.train_here(config_of("stream.max_staleness=1", "eval.every=0"), tmp_path)
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [0, 1]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "flags",
    [
        ("stream.max_staleness=2",),
        ("stream.max_staleness=1", "dag=dapo"),
        ("stream.max_staleness=2", "dag=ppo", "stream.cache=recompute"),
        ("stream.max_staleness=1", "dag=remax"),
        ("stream.max_staleness=1", "algorithm.correction=none", "algorithm.proximal=a3po"),
        ("stream.max_staleness=2", *(f.replace("0:4", "0:2").replace("4:5", "2:3") for f in PART)),
        (
            "stream.max_staleness=1",
            "stream.weight_update=boundary",
            *(f.replace("0:4", "0:2").replace("4:5", "2:3") for f in PART),
        ),
    ],
    ids=" ".join,
)
def test_two_processes(tmp_path, flags):
    devices = 3 if any("ROLLOUT" in flag for flag in flags) else 1
    train(tmp_path, [*SMALL, *flags], processes=2, devices=devices)
    staleness = int(flags[0].partition("=")[2])
    _, uids = check_ages(tmp_path, staleness)
    if "dag=dapo" not in flags:  # the files have the responses of both processes
        check_batches(uids)
    assert not unexplained_metrics(tmp_path)
