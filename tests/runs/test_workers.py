"""Runs whose samplers are jobs of their own: versions, responses, deaths, joins, restarts.

Workers are real processes of scripts/worker.py. All is read from the files that trainers write.
"""

import collections
import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from support import haste
from support.paths import ROOT

from configs import tiny
from distflow_jax import run
from distflow_jax.config.config_dict import from_config_dict, override
from distflow_jax.config.run_config import Config
from distflow_jax.flow import producer
from distflow_jax.report.run_writer import read_metrics
from distflow_jax.watchdog.exit_codes import EXIT_PREEMPTED

NEAR_TIE = 1e-4  # lead of the best over the second-best perturbed logit
PROMPTS, SAMPLES, STEPS = 8, 4, 5
SMALL = (
    "model.source=random:llama?hidden=32&layers=2&heads=4&kv_heads=2&mlp=64&vocab=512",
    f"data.prompts_per_step={PROMPTS}",
    "rollout.num_slots=24",
    f"training.steps={STEPS}",
    "training.optimizer.lr=0.003",
    "algorithm.correction=token_tis",
    "eval.dataset=",
    "eval.every=0",
    "observe.trackers=()",
    "observe.report_every=0",
    "checkpoint.every=1",
    "flow.max_lag=1",
)
SEEING = (
    "data.prompts_per_step=4",
    "rollout.num_samples=4",
    "rollout.max_response_length=6",
    "algorithm.correction=token_tis",
    "eval.dataset=",
    "eval.every=0",
    "checkpoint.every=3",
    "flow.max_lag=1",
)
WORKERS = (
    "flow.workers=True",
    "flow.save_seconds=0.3",
    "flow.lease_seconds=4",
    "flow.starved_seconds=200",
)
BOUNDARY = ("flow.swap=boundary",)


class Process:
    """A process of the run, whose output goes to a file."""

    def __init__(self, log, command, devices=None):
        self.log = log
        with log.open("a") as file:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env=haste.environment(devices),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def end(self, seconds=300):
        try:
            return self.process.wait(seconds)
        finally:
            self.kill()

    def kill(self, number=signal.SIGKILL):
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def output(self):
        return self.log.read_text()[-4000:]


@pytest.fixture
def started():
    """Processes that end with the test."""
    processes = []
    yield processes
    for process in processes:  # a launcher passes SIGTERM on, and has sessions for its processes
        process.kill(signal.SIGTERM)
    for process in processes:
        process.end(90)


def settings(flags):
    return [f"--config.{flag}" for flag in (*SMALL, *WORKERS, *flags)]


def trainers(started, folder, flags=(), processes=1):
    launch = ["scripts/launch_local.py", f"--processes={processes}", "--"]
    train = ["scripts/train.py", "--config=configs/tiny.py", f"--workdir={folder}"]
    log = folder.parent / f"{folder.name}.log"
    started.append(Process(log, [*launch, *train, *settings(flags)]))
    return started[-1]


def worker(started, folder, flags=(), *, orphan=200, devices=1, own=()):
    """A worker that joins once the trainers answer."""
    end = time.monotonic() + 200
    while not (folder / "doors.json").exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    command = ["scripts/worker.py", "--config=configs/tiny.py", f"--join={folder}"]
    log = folder.parent / f"worker{len(started)}.log"
    command += [f"--orphan_seconds={orphan}", *own, *settings(flags)]
    started.append(Process(log, command, devices))
    return started[-1]


def await_step(folder, step, process):
    path, end = folder / "metrics.jsonl", time.monotonic() + 300
    while not path.exists() or max((r["step"] for r in read_metrics(path)), default=0) < step:
        assert time.monotonic() < end and process.process.poll() is None, process.output()
        time.sleep(0.02)


def records(folder):
    """Lines of what all processes trained on."""
    paths = sorted((folder / "groups").glob("*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def check_trained(folder, steps=STEPS, *, exact, lag=1):
    """Every prompt trained once, in its step, whole, by the versions that may answer it."""
    found = collections.Counter()
    for line in records(folder):
        for counter in line["counters"]:
            assert counter // PROMPTS + 1 == line["step"]
        found.update((uid[0], uid[1]) for uid in line["uid"])
        for low, high in line["version"]:
            if exact:
                assert low == high == max(0, line["step"] - 1 - lag)
            else:
                assert line["step"] - 1 - lag <= low <= high <= line["step"] - 1
    wanted = {(c, s) for c in range(PROMPTS * steps) for s in range(SAMPLES)}
    assert set(found) == wanted and set(found.values()) == {1}


def check_ledger(folder):
    last = read_metrics(folder / "metrics.jsonl")[-1]
    names = ("sampled", "trained", "filtered", "lost", "under_way")
    sampled, *parts = (last[f"perf/tokens/{name}"] for name in names)
    assert sampled == sum(parts) > 0


def test_a_worker_samples_for_a_trainer_in_flight(tmp_path, started):
    folder = tmp_path / "run"
    job = trainers(started, folder)
    one = worker(started, folder)
    assert job.end() == 0, job.output() + one.output()
    assert one.end(30) == 0, one.output()
    check_trained(folder, exact=False)
    check_ledger(folder)


def responses_of(folder, monkeypatch, flags):
    """{(counter, sample): response} of a run in this process."""
    found, columns = {}, producer.written_columns

    def kept(node, episodes):
        found.update({(e.response.prompt.counter, e.response.sample): e.response for e in episodes})
        return columns(node, episodes)

    config = from_config_dict(Config, override(tiny.get_config(), [*SMALL, *flags]))
    with monkeypatch.context() as patch:
        patch.setattr(producer, "written_columns", kept)
        assert run.train_here(config, folder) == 0
    return found


@pytest.mark.slow
@pytest.mark.multiprocess
def test_responses_of_workers_are_those_of_samplers_on_a_part(tmp_path, monkeypatch, started):
    """Up to each one's first near-tie, as long as nothing is learned."""
    still = ("training.optimizer.lr=0", *BOUNDARY)
    part = ("mesh.devices=0:2", "mesh.roles={'ROLLOUT': {'devices': '2:3'}}")
    before = responses_of(tmp_path / "part", monkeypatch, (*still, *part))
    folder = tmp_path / "run"
    folder.mkdir()
    waiting = [
        *(sys.executable, "-c"),
        "import sys, time, pathlib, subprocess\n"
        "while not pathlib.Path(sys.argv[1], 'doors.json').exists(): time.sleep(0.1)\n"
        "sys.exit(subprocess.call([sys.executable, *sys.argv[2:]]))",
        str(folder),
        *("scripts/worker.py", "--config=configs/tiny.py", f"--join={folder}"),
        *settings((*still, "mesh.devices=0:2")),
    ]
    workers = [
        subprocess.Popen(waiting, cwd=ROOT, env=haste.environment(1), start_new_session=True)
        for _ in range(2)
    ]
    try:
        flags = (*still, *WORKERS, "mesh.devices=0:2")
        after = responses_of(folder, monkeypatch, flags)
        assert [one.wait(60) for one in workers] == [0, 0]
    finally:
        for one in workers:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)
    assert before.keys() == after.keys() and len(before) == STEPS * PROMPTS * SAMPLES
    compared = 0
    for uid, response in before.items():
        ties = np.flatnonzero(response.margin < NEAR_TIE)
        end = ties[0] if len(ties) else len(response.tokens)
        np.testing.assert_array_equal(after[uid].tokens[:end], response.tokens[:end])
        np.testing.assert_allclose(after[uid].logp[:end], response.logp[:end], atol=1e-4)
        compared += end
    assert compared > 0.8 * sum(len(r.tokens) for r in before.values())


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("flags", [(), BOUNDARY], ids=["in_flight", "boundary"])
def test_a_killed_worker_and_one_that_joins_late_change_nothing(tmp_path, started, flags):
    folder = tmp_path / "run"
    job = trainers(started, folder, (*flags, "training.steps=8"), processes=2)
    first = worker(started, folder, (*flags, "training.steps=8"))
    await_step(folder, 2, job)
    second = worker(started, folder, (*flags, "training.steps=8"), devices=2)
    first.kill()
    assert job.end() == 0, job.output() + second.output()
    assert second.end(30) == 0, second.output()
    check_trained(folder, 8, exact=bool(flags))
    check_ledger(folder)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("flags", [(), BOUNDARY], ids=["in_flight", "boundary"])
def test_workers_go_on_with_trainers_that_were_killed_and_started_again(tmp_path, started, flags):
    folder = tmp_path / "run"
    job = trainers(started, folder, flags, processes=2)
    one, two = worker(started, folder, flags), worker(started, folder, flags)
    await_step(folder, 2, job)
    job.kill()
    job.process.wait(60)
    job = trainers(started, folder, flags, processes=2)
    assert job.end() == 0, job.output() + one.output()
    assert [one.end(30), two.end(30)] == [0, 0], one.output()
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
def test_trainers_without_a_worker_save_and_end_and_go_on_with_one(tmp_path, started):
    folder, flags = tmp_path / "run", ("flow.starved_seconds=8", "flow.save_seconds=0.2")
    job = trainers(started, folder, flags, processes=2)
    one = worker(started, folder, flags, orphan=1)
    await_step(folder, 2, job)
    one.kill()
    assert job.end() == EXIT_PREEMPTED, job.output()
    assert "no worker was there for 8 s" in job.output()
    before = json.loads((folder / "doors.json").read_text())["incarnation"]
    job = trainers(started, folder, processes=2)
    end = time.monotonic() + 200
    while json.loads((folder / "doors.json").read_text())["incarnation"] == before:
        assert time.monotonic() < end, job.output()
        time.sleep(0.05)
    two = worker(started, folder)
    assert job.end() == 0, job.output()
    assert two.end(30) == 0, two.output()
    check_trained(folder, exact=False)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_workers_that_listen_get_weights_from_each_other(tmp_path, started):
    folder, listen = tmp_path / "run", ["--listen=127.0.0.1:0"]
    job = trainers(started, folder)
    two = [worker(started, folder, own=listen) for _ in range(2)]
    assert job.end() == 0, job.output() + two[0].output()
    assert [one.end(30) for one in two] == [0, 0], two[0].output() + two[1].output()
    given = [re.search(r"other workers got (\d+) bytes", one.output()) for one in two]
    assert sum(int(found[1]) for found in given) > 0
    check_trained(folder, exact=False)


REWARD = """
import time

def score(data_source, solution_str, ground_truth, extra_info=None, pattern=""):
    time.sleep(0.05)
    # no special token, which the log has and the function does not get, has a digit
    return sum(map(str.isdigit, solution_str)) + int(ground_truth) / 1000
"""


def logged(folder):
    """Responses of samples/, those of the first process, by uid."""
    paths = sorted((folder / "samples").glob("*.jsonl"))
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    return {tuple(line["uid"]): line for line in lines}


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("swap", [(), BOUNDARY], ids=["in_flight", "boundary"])
def test_rewards_of_workers_are_those_of_the_function_though_one_is_killed(tmp_path, started, swap):
    """A worker samples and two others score (flow/served_nodes/), of which one gets SIGKILL."""
    (tmp_path / "mine.py").write_text(REWARD)
    folder, count = tmp_path / "run", 6
    reward = (f"reward.function={tmp_path / 'mine.py'}:score", "reward.num_workers=1")
    flags = (*swap, *reward, f"training.steps={count}", "flow.worker_nodes=('reward',)")
    job = trainers(started, folder, flags, processes=2)
    sampler = worker(started, folder, flags[:-1])  # it need not know of the others
    one = worker(started, folder, flags, own=("--nodes=reward",))
    await_step(folder, 2, job)
    two = worker(started, folder, flags, own=("--nodes=reward",))
    one.kill()
    assert job.end() == 0, job.output() + sampler.output() + two.output()
    assert [sampler.end(30), two.end(30)] == [0, 0], sampler.output() + two.output()
    assert int(re.search(r"ended after (\d+) nodes", two.output())[1]) > 0
    assert "ready: runs reward for 2 trainers" in one.output()
    check_trained(folder, count, exact=bool(swap))
    check_ledger(folder)
    responses = logged(folder)
    assert len(responses) == count * PROMPTS * SAMPLES // 2
    for line in responses.values():
        known = sum(map(str.isdigit, line["response"])) + int(line["ground_truth"]) / 1000
        assert line["score"] == pytest.approx(known, abs=1e-4)
    measured = read_metrics(folder / "metrics.jsonl")
    assert all(metrics["reward/errors"] == 0 for metrics in measured)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_trainers_without_a_worker_for_a_node_name_it_and_end(tmp_path, started):
    folder, flags = tmp_path / "run", ("flow.starved_seconds=6", "flow.worker_nodes=('reward',)")
    job = trainers(started, folder, flags, processes=2)
    worker(started, folder, flags, orphan=1)
    both = worker(started, folder, flags, own=("--nodes=rollout,reward",))
    await_step(folder, 2, job)
    both.kill(signal.SIGSTOP)
    assert job.end() == EXIT_PREEMPTED, job.output()
    both.kill()
    assert "no worker was there for 6 s for 'reward' (worker --nodes)" in job.output()
    before = json.loads((folder / "doors.json").read_text())["incarnation"]
    job = trainers(started, folder, flags[1:], processes=2)
    end = time.monotonic() + 200
    while json.loads((folder / "doors.json").read_text())["incarnation"] == before:
        assert time.monotonic() < end, job.output()
        time.sleep(0.05)
    again = worker(started, folder, flags, own=("--nodes=rollout,reward",))
    assert job.end() == 0, job.output()
    assert again.end(30) == 0, again.output()
    check_trained(folder, exact=False)


@pytest.mark.slow
def test_a_worker_of_another_config_and_one_that_nobody_answers_are_refused(tmp_path, started):
    folder = tmp_path / "run"
    trainers(started, folder)
    other = worker(started, folder, ("rollout.temperature=0.5",))
    assert other.end() == 2
    assert "config rollout.temperature is 0.5 at this worker and 1.0" in other.output()
    (folder / "doors.json").write_text(
        json.dumps({"incarnation": "x", "homes": ["127.0.0.1:1"], "ended": False})
    )
    alone = worker(started, folder)
    assert alone.end() == EXIT_PREEMPTED
    assert "no trainer answers at 127.0.0.1:1" in alone.output()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_local_launcher_starts_workers_beside_the_trainers(tmp_path, started):
    folder = tmp_path / "run"
    launch = ["scripts/launch_local.py", "--processes=1", "--workers=2", "--"]
    train = ["scripts/train.py", "--config=configs/tiny.py", f"--workdir={folder}"]
    started.append(Process(tmp_path / "log", [*launch, *train, *settings(BOUNDARY)]))
    assert started[-1].end() == 0, started[-1].output()
    assert "[w1] ended after" in started[-1].output()
    check_trained(folder, exact=True)
