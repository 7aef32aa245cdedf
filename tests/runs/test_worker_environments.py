"""Runs whose environments are at work on workers: turns, rewards, images, and deaths amid them.

Workers are real processes of scripts/worker.py. All is read from the files that trainers write.

Nightly: environments at work on workers give what those on the trainers give, pictures of turns
too; a worker that dies amid episodes and trainers that are killed lose no prompt; a worker with
another environment is refused; hosts of environments, workers and trainers that die lose no prompt.
"""

import json

import numpy as np
import pytest
from support.paths import ROOT
from support.programs import Process
from support.run_folders import await_step
from support.tiny_sampler import NEAR_TIE, assert_agree
from support.waiting import HANG, until
from support.worker_runs import (
    BOUNDARY,
    EVALUATED,
    PROMPTS,
    SAMPLES,
    WORKERS,
    await_ready,
    check_account,
    check_evaluations,
    check_trained,
    saved_episodes,
    trainers,
    worker,
)

from distflow_jax.report.run_writer import read_metrics

LENGTH = 240  # tokens of a response
# a first observation of the row, and up to two further ones; its file says who is amid an episode
ENVIRONMENT = """
import asyncio, os, pathlib
from distflow_jax.environments.environment import Turn

MARKS = pathlib.Path(__file__).parent

class Again:
    def __init__(self, tokenizer):
        self.encode = tokenizer.encode_turn
        (MARKS / f"made{os.getpid()}").touch()

    def reset(self, prompt):
        self.truth, self.turns = int(prompt.ground_truth), 0
        assert prompt.data_source == "arithmetic" and prompt.text and prompt.extra_info
        return self.encode(f"It is below {self.truth + 1}.")

    async def step(self, tokens, text):
        self.turns += 1
        if self.turns == 2:  # of no trial
            (MARKS / f"amid{os.getpid()}").touch()
        await asyncio.sleep(0.1 + 0.1 * (self.truth % 7))
        reward = sum(map(str.isdigit, text)) + self.truth / 1000
        if self.turns == 3:
            return Turn(reward=reward, done=True)
        return Turn(self.encode(f"Not {self.turns}."), reward=reward, logged={"asked": 1})
"""
TURNS = (
    # of few words, so that a model of noise ends one turn in three
    "model.source=random:llama?hidden=32&layers=2&heads=4&kv_heads=2&mlp=64&vocab=259",
    "rollout.num_slots=64",
    f"rollout.max_response_length={LENGTH}",
    "rollout.turn_length=96",
    "rollout.max_turns=4",
    "reward.function=zero",
    "reward.kwargs={}",
    "training.row_tokens=512",
    "stream.lease_seconds=6",
)
SHOWN = (
    "model.source=random:smolvlm?hidden=64&layers=2&heads=4&kv_heads=2&mlp=96&vocab=272"
    "&max_position=1024&vision_hidden=32&vision_layers=2&vision_heads=2&patch=8&image=48",
    "data.prompts_per_step=4",
    "rollout.num_slots=64",
    "rollout.turn_length=32",
    "rollout.environment=test_shown_turns:AnyTurn",
    "rollout.prefill_tokens=64",
    "rollout.max_turns=3",
    "algorithm.correction=token_tis",
    "stream.max_staleness=1",
    "eval.dataset=",
    "eval.every=0",
    "training.optimizer.lr=0.0",
    "training.steps=4",
    "checkpoint.every=2",
)


def environment(folder):
    """Settings of a run with the environment, whose file is in a folder."""
    (folder / "again.py").write_text(ENVIRONMENT)
    return (*TURNS, f"rollout.environment={folder / 'again.py'}:Again")


def kill_amid(tmp_path, victim, job):
    """Kills a worker once an environment of its answers."""

    def is_amid():
        assert job.process.poll() is None, job.output()
        assert victim.process.poll() is None, victim.output()
        return (tmp_path / f"amid{victim.process.pid}").exists()

    until(is_amid, victim.output)
    victim.kill()


def check_turns(folder, steps):
    """Checks the metrics of turns of every step, and that each response has the score of its
    environment."""
    found = {row["step"]: row for row in read_metrics(folder / "metrics.jsonl")}
    assert set(found) == set(range(1, steps + 1))
    assert any(0 < row.get("perf/slots_busy_share", 0) <= 1 for row in found.values())
    for row in found.values():
        assert 1 < row["environment/turns/mean"] <= row["environment/turns/max"] <= 3
        assert row["environment/asked"] > 0 and row["environment/observation_tokens"] > 0
        assert row["environment/infra/raised"] == row["environment/infra/timed_out"] == 0
        assert row["training/rollout_probs_diff_max"] < 0.05
    for step in found:
        text = (folder / "samples" / f"{step}.jsonl").read_text()
        for line in map(json.loads, text.strip().split("\n")):
            assert line["score"] == pytest.approx(line["environment_reward"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_worker_that_dies_amid_its_episodes_and_trainers_that_are_killed_lose_no_prompt(
    tmp_path, started
):
    """In flight, and rewards on a worker, too."""
    folder, steps = tmp_path / "run", 6
    flags = (*environment(tmp_path), f"training.steps={steps}", "stream.worker_nodes=('reward',)")
    job = trainers(started, folder, flags, processes=2)
    victim = worker(started, folder, flags)
    kill_amid(tmp_path, victim, job)
    left = worker(started, folder, flags, own=("--nodes=rollout,reward",))
    await_step(folder, 3, job)
    job.kill()
    job.process.wait(HANG)
    job = trainers(started, folder, flags, processes=2)
    assert job.end() == 0, job.output() + left.output()
    assert left.end() == 0, left.output()
    assert "started again" in left.output()
    check_trained(folder, steps, exact=False)
    check_account(folder)
    check_turns(folder, steps)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_environments_of_other_hosts_outlive_these_and_workers_and_trainers(tmp_path, started):
    """A worker and the host of its environments are killed amid episodes, others join, and the
    trainers are killed and started again. Hosts alone make an environment."""
    folder, steps = tmp_path / "run", 6
    flags = (*environment(tmp_path), f"training.steps={steps}")
    flags += ("stream.worker_nodes=('environment',)", "rollout.num_slots=16")
    job = trainers(started, folder, flags)
    samplers = [worker(started, folder, flags) for _ in range(2)]
    for one in samplers:
        await_ready(one)
    hosts = [worker(started, folder, flags, own=("--nodes=environment",))]
    kill_amid(tmp_path, hosts[0], job)
    until(lambda: any("is lost, its responses" in one.output() for one in samplers), job.output)
    samplers.sort(key=lambda one: "is lost, its responses" in one.output())
    samplers[0].kill()  # the other one tells of its loss
    hosts.append(worker(started, folder, flags, own=("--nodes=environment",)))
    samplers.append(worker(started, folder, flags))
    await_step(folder, 3, job)
    job.kill()
    job.process.wait(HANG)
    job = trainers(started, folder, flags)
    assert job.end() == 0, job.output() + samplers[1].output() + hosts[1].output()
    for one in (*samplers[1:], hosts[1]):
        assert one.end() == 0, one.output()
        assert "started again" in one.output()
    made = {path.name for path in tmp_path.glob("made*")}
    assert made == {f"made{one.process.pid}" for one in hosts}
    assert (tmp_path / f"amid{hosts[1].process.pid}").exists()
    check_trained(folder, steps, exact=False)
    check_account(folder)
    check_turns(folder, steps)
    rows = read_metrics(folder / "metrics.jsonl")
    assert any(row["environment/infra/host_lost"] for row in rows if row["step"])


@pytest.mark.slow
def test_a_host_of_environments_without_work_is_refused(tmp_path, started):
    """By a run whose samplers run them."""
    folder = tmp_path / "run"
    flags = environment(tmp_path)
    job = trainers(started, folder, flags)
    host = worker(started, folder, flags, own=("--nodes=environment",))
    assert host.end() == 2, job.output() + host.output()
    assert "the trainers run node 'environment' themselves" in host.output()
    assert "Traceback" not in host.output()


def facts_of(episode):
    """Facts of a response that its environment gave, or its limits."""
    return episode.reward, episode.turns, episode.reason, episode.logged


@pytest.mark.slow
@pytest.mark.multiprocess
def test_turns_of_workers_are_those_of_samplers_on_a_part(tmp_path, started):
    """At boundaries, as long as nothing is learned, though one worker dies amid its episodes: up to
    each response's first near-tie, and all that the environment gave where there is none."""
    steps = 5
    still = (*environment(tmp_path), *BOUNDARY, "training.optimizer.lr=0", "checkpoint.keep=100")
    still += (f"training.steps={steps + 1}",)
    part = (
        "stream.workers=False",
        "mesh.devices=0:1",
        "mesh.roles={'ROLLOUT': {'devices': '1:2'}}",
    )
    alone = trainers(started, tmp_path / "part", (*still, *part), devices=2)
    assert alone.end() == 0, alone.output()
    folder = tmp_path / "run"
    job = trainers(started, folder, still)
    victim = worker(started, folder, still)
    kill_amid(tmp_path, victim, job)
    left = worker(started, folder, still, devices=2)
    assert job.end() == 0, job.output() + left.output()
    assert left.end() == 0, left.output()
    check_trained(folder, steps + 1, exact=True)
    check_turns(folder, steps + 1)
    before, after = (saved_episodes(tmp_path / place, LENGTH) for place in ("part", "run"))
    assert before.keys() == after.keys() and len(before) == steps * PROMPTS * SAMPLES
    assert_agree([e.response for e in after.values()], [e.response for e in before.values()])
    alike = [uid for uid, e in before.items() if e.response.margin.min() >= NEAR_TIE]
    assert len(alike) > 0.8 * len(before)
    assert max(before[uid].turns for uid in alike) == 3
    for uid in alike:
        np.testing.assert_array_equal(before[uid].mask, after[uid].mask)
        assert facts_of(before[uid]) == facts_of(after[uid])


@pytest.mark.slow
@pytest.mark.multiprocess
def test_workers_evaluate_in_turns_as_it_would_be_at_once(tmp_path, started):
    """One is killed."""
    folder, steps = tmp_path / "run", 8
    turns = environment(tmp_path)
    flags = (*turns, *EVALUATED, f"training.steps={steps}")
    job = trainers(started, folder, flags)
    victim, left = (worker(started, folder, flags) for _ in range(2))
    await_step(folder, 3, job)
    victim.kill()
    assert job.end() == 0, job.output() + left.output()
    assert left.end() == 0, left.output()
    check_trained(folder, steps, exact=False)
    check_account(folder)
    check_evaluations(folder, steps, (*WORKERS, *turns))


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [(), ("environment",)], ids=["worker", "other host"])
def test_pictures_that_an_environment_shows_are_trained_on(nodes, tmp_path, started):
    """The trainer's log-probs are those of the worker, which saw the pictures of all turns."""
    folder = tmp_path / "run"
    folder.mkdir()
    flags = (*SHOWN, *WORKERS, f"stream.worker_nodes={nodes}")
    common = ["--config=configs/examples/grid_walk.py", *(f"--config.{flag}" for flag in flags)]
    launch = ["scripts/launch_local.py", "--processes=1", "--workers=1", "--", "scripts/train.py"]
    own = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'runs'}:{ROOT / 'tests'}"}
    job = Process(tmp_path / "log", [*launch, f"--workdir={folder}", *common], None, own)
    started.append(job)
    if nodes:
        serve = [
            "scripts/worker.py",
            f"--join={folder}",
            "--nodes=environment",
            "--join_seconds=200",
        ]
        started.append(Process(tmp_path / "host", [*serve, *common], None, own))
    for one in started:
        assert one.end() == 0, one.output() + job.output()
    found = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"]]
    assert [metrics["step"] for metrics in found] == [1, 2, 3, 4]
    for metrics in found:
        assert metrics["environment/infra/raised"] == metrics["environment/infra/timed_out"] == 0
        assert metrics["environment/steps"] > 0
        assert metrics["perf/images_encoded"] > metrics["data/images"] == 4
        assert metrics["rollout_corr/log_ratio_abs_max"] < 1e-4


@pytest.mark.slow
def test_a_worker_of_another_environment_and_one_without_it_are_refused(tmp_path, started):
    """The module has the same name, and other code in the worker's PYTHONPATH, or none."""
    places = [tmp_path / name for name in ("trainer", "other", "none")]
    for place, text in zip(places, (ENVIRONMENT, ENVIRONMENT + "\nMORE = 1\n", None), strict=True):
        place.mkdir()
        if text is not None:
            (place / "asked_again.py").write_text(text)
    flags = (*TURNS, "rollout.environment=asked_again:Again")
    paths = [{"PYTHONPATH": f"{place}:{ROOT}"} for place in places]
    folder = tmp_path / "run"
    job = trainers(started, folder, flags, environment=paths[0])
    other = worker(started, folder, flags, environment=paths[1])
    without = worker(started, folder, flags, environment=paths[2])
    assert [other.end(), without.end()] == [2, 2], job.output()
    print(other.output(), without.output())
    assert "asked_again" in other.output() and "asked_again" in without.output()
