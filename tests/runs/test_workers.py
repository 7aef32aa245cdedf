"""Runs whose samplers are jobs of their own: versions, responses, deaths, joins, restarts.

Workers are real processes of scripts/worker.py. All is read from the files that trainers write.

Nightly: one to four workers that die and join at random moments, or outlive the trainers, change no
version, response or reward, and evaluate each version as it would be at once; without one trainers
save and end; workers stay where the last step fails; a worker joins by an address, over TLS;
workers that lie are ended and named.
"""

import contextlib
import json
import os
import random
import re
import signal
import time
import types

import numpy as np
import pytest
from support.programs import Process, certificate
from support.run_folders import await_step, records
from support.tiny_config import tiny_config
from support.tiny_sampler import assert_agree
from support.waiting import HANG, until
from support.worker_runs import (
    BOUNDARY,
    EVALUATED,
    PROMPTS,
    SAMPLES,
    SMALL,
    WORKERS,
    await_addresses,
    await_ready,
    check_account,
    check_evaluations,
    check_trained,
    saved_episodes,
    settings,
    trainers,
    worker,
)

from distflow_jax import run
from distflow_jax.coordinator.rounds import DATA_ENDED, PREEMPTED, Ended
from distflow_jax.report.run_writer import read_metrics
from distflow_jax.runtime.run_state import RunState
from distflow_jax.stream.links.buffer_addresses import read_addresses
from distflow_jax.watchdog.exit_codes import EXIT_DONE, EXIT_PREEMPTED
from distflow_jax.watchdog.supervision import StopSignal

LIMIT = 16  # tokens of a response, of configs/tiny.py
SEED = int(os.environ.get("DISTFLOW_WORKERS_SEED", "25"))  # of the moments
SEEING = (
    "data.prompts_per_step=4",
    "rollout.num_samples=4",
    "rollout.max_response_length=6",
    "algorithm.correction=token_tis",
    "eval.dataset=",
    "eval.every=0",
    "checkpoint.every=3",
    "stream.max_staleness=1",
)

REWARD = """
import pathlib, time

HOLD = pathlib.Path(__file__).with_name("hold")

def score(data_source, solution_str, ground_truth, extra_info=None, pattern=""):
    time.sleep(0.05)
    while HOLD.exists():
        time.sleep(0.05)
    # no special token, which the log has and the function does not get, has a digit
    return sum(map(str.isdigit, solution_str)) + int(ground_truth) / 1000
"""


def test_a_worker_samples_for_a_trainer_in_flight(tmp_path, started):
    folder, flags = (
        tmp_path / "run",
        (f"stream.lease_seconds={HANG}", f"stream.no_workers_seconds={HANG}"),
    )
    job = trainers(started, folder, flags)
    one = worker(started, folder, flags)
    assert job.end() == 0, job.output() + one.output()
    assert one.end() == 0, one.output()
    check_trained(folder, exact=False)
    check_account(folder)


@pytest.mark.parametrize(
    ("ends", "over"), [(None, True), (DATA_ENDED, True), (PREEMPTED, False), ("", False)]
)
def test_a_run_is_over_once_no_start_is_to_go_on(monkeypatch, ends, over):
    """Workers are told so. `ends`: how its last step does, "" by an error."""
    source = types.SimpleNamespace(stop_waiting=lambda: None)
    prepared = types.SimpleNamespace(config=tiny_config("training.steps=2"))
    made = types.SimpleNamespace(state=RunState({}), source=source, prepared=prepared)

    @contextlib.contextmanager
    def next_step(made):
        made.state.step += 1
        yield

    def step(made):
        if made.state.step == 2 and ends is not None:
            raise Ended(ends) if ends else OSError("no space left on the disk")

    code = EXIT_PREEMPTED if ends == PREEMPTED else EXIT_DONE
    monkeypatch.setattr(run.step_actions, "next_step", next_step)
    monkeypatch.setattr(run.step_actions, "end_early", lambda *_: code)
    monkeypatch.setattr(run, "after_step", lambda stop: ())
    with contextlib.nullcontext() if ends != "" else pytest.raises(OSError):
        assert run.loop(made, StopSignal(), step) == code
    assert made.state.step == 2 and made.state.over == over


@pytest.mark.slow
@pytest.mark.multiprocess
def test_workers_stay_where_the_last_step_fails(tmp_path, started, monkeypatch):
    """Its groups are taken then, but the next start needs samples: the run is not over."""
    folder, flags = tmp_path / "run", ("training.steps=2", "checkpoint.every=2")
    command = ["scripts/worker.py", "--config=configs/tiny.py", f"--join={folder}"]
    command += [f"--orphan_seconds={HANG}", *settings(flags)]
    started.append(one := Process(tmp_path / "worker.log", command, 1))
    config = tiny_config(*SMALL, *WORKERS, *flags)
    with monkeypatch.context() as patch:
        patch.setattr(run.step_actions, "save_state", fail)
        with pytest.raises(OSError, match="no space"):
            run.train_here(config, folder)
    assert read_metrics(folder / "metrics.jsonl")[-1]["training/global_step"] == 2
    assert not read_addresses(folder).ended and one.process.poll() is None, one.output()
    assert run.train_here(config, folder) == EXIT_DONE
    assert read_addresses(folder).ended and one.end() == 0, one.output()


def fail(*args, **kwargs):
    raise OSError("no space left on the disk")


def paced(folder):
    """Settings of a reward that takes a second for a step, and is held up while a file is there."""
    (folder / "mine.py").write_text(REWARD)
    reward = f"reward.function={folder / 'mine.py'}:score"
    return (reward, "reward.num_workers=1", "reward.timeout_seconds=300")


def come_and_go(started, folder, job, flags, count, draw):
    """Starts `count` workers; another one joins and one of the first is killed, at moments drawn.

    Rewards wait for the one that joins. A single one is killed after that. Returns the workers that
    are left, the one that joined last.
    """
    first = [worker(started, folder, flags) for _ in range(count)]
    victim, hold = draw.choice(first), folder.parent / "hold"
    moments = {kind: (draw.randint(1, 3), draw.uniform(0, 1)) for kind in ("join", "kill")}
    for kind in ["join", "kill"] if count == 1 else sorted(moments, key=moments.get):
        step, delay = moments[kind]
        await_step(folder, step, job)
        time.sleep(delay)
        assert job.process.poll() is None, job.output()
        print(f"{kind} {delay:.3f} s after step {step}")
        if kind == "kill":
            victim.kill()
            continue
        hold.touch()
        joined = worker(started, folder, flags, devices=2)
        await_ready(joined)
        hold.unlink()
    return [*(one for one in first if one is not victim), joined]


def groups_of(worker):
    """Groups that a worker has answered, which has ended."""
    return int(re.search(r"ended after (\d+) groups", worker.output())[1])


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("weight_update", "count"),
    [((), 2), (BOUNDARY, 1), (BOUNDARY, 4)],
    ids=["in_flight", "one", "four"],
)
def test_workers_that_come_and_go_at_random_moments_change_no_version(
    tmp_path, started, weight_update, count
):
    draw = random.Random(seed := SEED + count)
    folder, steps = tmp_path / "run", 10
    print(f"seed {seed}")
    flags = (*weight_update, *paced(tmp_path), f"training.steps={steps}")
    job = trainers(started, folder, flags, processes=2)
    left = come_and_go(started, folder, job, flags, count, draw)
    assert job.end() == 0, job.output() + left[-1].output()
    assert [one.end() for one in left] == [0] * count, left[-1].output()
    print("groups of those that are left:", [groups_of(one) for one in left])
    assert count > 1 or groups_of(left[0]) > 0
    check_trained(folder, steps, exact=bool(weight_update))
    check_account(folder)


def saved_responses(folder):
    """{(counter, sample): response} of all processes, of every step but the first."""
    return {uid: episode.response for uid, episode in saved_episodes(folder, LIMIT).items()}


@pytest.mark.slow
@pytest.mark.multiprocess
def test_responses_of_workers_are_those_of_samplers_on_a_part(tmp_path, started):
    """Up to each one's first near-tie, as long as nothing is learned, whoever dies or joins."""
    draw, steps = random.Random(SEED), 20
    print(f"seed {SEED}")
    still = ("training.optimizer.lr=0", f"training.steps={steps + 1}", "checkpoint.keep=100")
    still += BOUNDARY
    part = (
        "stream.workers=False",
        "mesh.devices=0:2",
        "mesh.roles={'ROLLOUT': {'devices': '2:3'}}",
    )
    alone = trainers(started, tmp_path / "part", (*still, *part), devices=3)
    assert alone.end() == 0, alone.output()
    folder = tmp_path / "run"
    still += paced(tmp_path)
    job = trainers(started, folder, still, processes=2)
    left = come_and_go(started, folder, job, still, 2, draw)
    assert job.end() == 0, job.output() + left[-1].output()
    assert [one.end() for one in left] == [0, 0], left[-1].output()
    assert groups_of(left[-1]) > 0
    check_trained(folder, steps + 1, exact=True)
    before, after = saved_responses(tmp_path / "part"), saved_responses(folder)
    assert before.keys() == after.keys() and len(before) == steps * PROMPTS * SAMPLES
    assert_agree(after.values(), before.values())


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("flags", [(), BOUNDARY], ids=["in_flight", "boundary"])
def test_workers_go_on_with_trainers_that_were_killed_and_started_again(tmp_path, started, flags):
    folder = tmp_path / "run"
    job = trainers(started, folder, flags, processes=2)
    one, two = worker(started, folder, flags), worker(started, folder, flags)
    await_step(folder, 2, job)
    job.kill()
    job.process.wait(HANG)
    job = trainers(started, folder, flags, processes=2)
    assert job.end() == 0, job.output() + one.output()
    assert [one.end(), two.end()] == [0, 0], one.output()
    assert "started again" in one.output()
    check_trained(folder, exact=bool(flags))


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "rate"), [(20, 1e-3), (6, 0.0)], ids=["learning", "still"])
def test_a_worker_sees_the_images_of_its_prompts(tmp_path, started, steps, rate):
    """In flight. Its log-probs are those of the trainer, which sees them too: one at a rate of 0
    has the weights that all have."""
    folder = tmp_path / "run"
    folder.mkdir()
    flags = (*SEEING, *WORKERS, f"training.steps={steps}", f"training.optimizer.lr={rate}")
    common = ["--config=configs/vision_tiny.py", *(f"--config.{flag}" for flag in flags)]
    launch = ["scripts/launch_local.py", "--processes=1", "--workers=1", "--", "scripts/train.py"]
    job = Process(tmp_path / "log", [*launch, f"--workdir={folder}", *common])
    started.append(job)
    assert job.end() == 0, job.output()
    found = read_metrics(folder / "metrics.jsonl")
    assert [metrics["step"] for metrics in found] == list(range(1, steps + 1))
    assert all(metrics["data/images"] == 4 for metrics in found)
    assert all(np.isfinite(metrics["actor/grad_norm"]) for metrics in found)
    if not rate:
        assert max(metrics["rollout_corr/log_ratio_abs_max"] for metrics in found) < 1e-4


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("weight_update", "processes", "count"),
    [((), 1, 1), (BOUNDARY, 1, 1), ((), 2, 2)],
    ids=["in_flight", "boundary", "one_is_killed"],
)
def test_workers_evaluate_each_version_as_it_would_be_at_once(
    tmp_path, started, weight_update, processes, count
):
    """While the run goes on: a line of an evaluation comes before the last steps'."""
    folder, steps, reward = tmp_path / "run", 8, paced(tmp_path)
    flags = (*weight_update, *EVALUATED, *reward, f"training.steps={steps}")
    job = trainers(started, folder, flags, processes=processes)
    *others, left = [worker(started, folder, flags) for _ in range(count)]
    await_step(folder, 3, job)
    for other in others:
        other.kill()
    assert job.end() == 0, job.output() + left.output()
    assert left.end() == 0, left.output()
    check_trained(folder, steps, exact=bool(weight_update))
    check_account(folder)
    check_evaluations(folder, steps, reward)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_trainers_without_a_worker_save_and_end_and_go_on_with_one(tmp_path, started):
    folder, flags = tmp_path / "run", ("stream.no_workers_seconds=8", "stream.save_seconds=0.2")
    job = trainers(started, folder, flags, processes=2)
    one = worker(started, folder, flags, orphan=1)
    await_step(folder, 2, job)
    one.kill()
    assert job.end() == EXIT_PREEMPTED, job.output()
    assert "no worker was there for 8 s" in job.output()
    before = json.loads((folder / "task_buffers.json").read_text())["attempt"]
    job = trainers(started, folder, processes=2)
    until(
        lambda: json.loads((folder / "task_buffers.json").read_text())["attempt"] != before,
        job.output,
    )
    two = worker(started, folder)
    assert job.end() == 0, job.output()
    assert two.end() == 0, two.output()
    check_trained(folder, exact=False)


def logged(folder):
    """Responses of samples/ by uid."""
    paths = sorted((folder / "samples").glob("*.jsonl"))
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return {tuple(line["uid"]): line for line in lines}


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("weight_update", [(), BOUNDARY], ids=["in_flight", "boundary"])
def test_rewards_of_workers_are_those_of_the_function_though_one_is_killed(
    tmp_path, started, weight_update
):
    """A worker samples and two others score, of which one gets SIGKILL."""
    folder, count = tmp_path / "run", 6
    flags = (
        *weight_update,
        *paced(tmp_path),
        f"training.steps={count}",
        "stream.worker_nodes=('reward',)",
    )
    job = trainers(started, folder, flags, processes=2)
    sampler = worker(started, folder, flags[:-1])  # it need not know of the others
    one = worker(started, folder, flags, own=("--nodes=reward",))
    await_step(folder, 2, job)
    two = worker(started, folder, flags, own=("--nodes=reward",))
    one.kill()
    assert job.end() == 0, job.output() + sampler.output() + two.output()
    assert [sampler.end(), two.end()] == [0, 0], sampler.output() + two.output()
    assert int(re.search(r"ended after (\d+) nodes", two.output())[1]) > 0
    assert ": runs reward for 2 trainers" in one.output()
    check_trained(folder, count, exact=bool(weight_update))
    check_account(folder)
    responses = logged(folder)
    assert len(responses) == count * PROMPTS * SAMPLES
    for line in responses.values():
        known = sum(map(str.isdigit, line["response"])) + int(line["ground_truth"]) / 1000
        assert line["score"] == pytest.approx(known, abs=1e-4)
    measured = read_metrics(folder / "metrics.jsonl")
    assert all(metrics["reward/errors"] == 0 for metrics in measured)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_trainers_without_a_worker_for_a_node_name_it_and_end(tmp_path, started):
    folder, flags = (
        tmp_path / "run",
        ("stream.no_workers_seconds=20", "stream.worker_nodes=('reward',)"),
    )
    job = trainers(started, folder, flags, processes=2)
    worker(started, folder, flags, orphan=1)
    both = worker(started, folder, flags, own=("--nodes=rollout,reward",))
    await_step(folder, 2, job)
    both.kill(signal.SIGSTOP)
    assert job.end() == EXIT_PREEMPTED, job.output()
    both.kill()
    assert "no worker was there for 20 s for 'reward' (worker --nodes)" in job.output()


LIES = {"ids": "refused: .* token id 1000000000,", "log-probs": "quarantined: its log-probs are "}


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("lie", LIES)
def test_a_worker_that_lies_is_ended_and_others_answer_its_prompts(lie, tmp_path, started):
    """It makes up ids, or log-probs: it is named, and every prompt is trained once."""
    folder, steps = tmp_path / "run", 200
    flags = (f"training.steps={steps}", "checkpoint.every=200")
    job = trainers(started, folder, flags, processes=2)
    honest = [worker(started, folder, flags) for _ in range(2)]
    for one in honest:  # none may join from the host of one that was ended
        await_ready(one)
    own = {"environment": {"LIE": lie}, "program": "tests/support/lying_worker.py"}
    liar = worker(started, folder, flags, **own)
    assert job.end() == 0, job.output() + honest[0].output()
    assert [one.end() for one in honest] == [0, 0], honest[0].output()
    assert liar.end() == 2 and " is ended: " in liar.output(), liar.output()
    check_trained(folder, steps, exact=False)
    check_account(folder)
    (name,) = set(re.findall(f"worker (\\S+) is {LIES[lie]}", job.log.read_text()))
    gaps = [line["gaps"] for lines in records(folder).values() for line in lines]
    of_liar = [one.pop(name) for one in gaps if name in one]
    of_others = [gap for one in gaps for gap in one.values()]
    assert bool(of_liar) == (lie == "log-probs")  # nothing of made-up ids was trained
    assert not of_liar or np.median(of_liar) > 1.0 > 10 * np.median(of_others)


@pytest.mark.slow
def test_a_worker_of_another_config_and_one_that_nobody_answers_are_refused(tmp_path, started):
    folder = tmp_path / "run"
    trainers(started, folder)
    other = worker(started, folder, ("rollout.temperature=0.5",))
    assert other.end() == 2
    assert "config rollout.temperature is 0.5 at this worker and 1.0" in other.output()
    (folder / "task_buffers.json").write_text(
        json.dumps({"attempt": "x", "buffers": ["127.0.0.1:1"], "ended": False})
    )
    alone = worker(started, folder, own=("--join_seconds=5",))
    assert alone.end() == EXIT_PREEMPTED
    assert "no trainer answers at 127.0.0.1:1" in alone.output()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_worker_joins_by_an_address_with_the_run_s_token_over_tls(tmp_path, started):
    """It knows no folder: one trainer names the other. Without the authorities nobody joins."""
    folder, cert, key = tmp_path / "run", tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate(cert, key)
    token = {"DISTFLOW_TOKEN": "the token of this run, known to all"}
    checked = token | {"DISTFLOW_TLS_CA": str(cert)}
    own = checked | {"DISTFLOW_TLS_CERT": str(cert), "DISTFLOW_TLS_KEY": str(key)}
    job = trainers(started, folder, processes=2, environment=own)
    first, _ = await_addresses(folder)
    assert not (folder / "token").exists()
    join = {"join": first, "own": ("--join_seconds=5",)}
    plain = worker(started, folder, environment=token, **join)
    assert plain.end() == EXIT_PREEMPTED, plain.output()
    assert f"no trainer answers at {first}" in plain.output()
    other = worker(started, folder, environment=checked | {"DISTFLOW_TOKEN": "x" * 32}, **join)
    assert other.end() == 2 and "the token differs" in other.output()
    one = worker(started, folder, environment=checked, join=first)
    assert job.end() == 0, job.output() + one.output()
    assert one.end() == 0, one.output()
    assert "for 2 trainers" in one.output()
    check_trained(folder, exact=False)
