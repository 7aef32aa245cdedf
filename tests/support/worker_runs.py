"""Runs whose samplers are jobs of their own, as processes of scripts/, and what their files say."""

import collections
import itertools
import json
import shutil

from etils import epath

from distflow_jax.checkpoint.additions import additions
from distflow_jax.report.run_writer import read_metrics
from distflow_jax.rollout.requests import GroupRequest, SamplingParams
from distflow_jax.stream.saved_samples import SavedSamples
from support.programs import Process, finished, training
from support.run_folders import json_lines, records
from support.tiny_config import SMALL_AHEAD
from support.tiny_model import prompt_of
from support.waiting import until

PROMPTS, SAMPLES, STEPS = 8, 4, 5
SMALL = (
    *SMALL_AHEAD,
    f"training.steps={STEPS}",
    "eval.dataset=",
    "eval.every=0",
    "observe.report_every=0",
    "checkpoint.every=1",
    "stream.max_staleness=1",
)
WORKERS = (
    "stream.workers=True",
    "stream.save_seconds=0.3",
    "stream.lease_seconds=4",
    "stream.no_workers_seconds=200",
)
BOUNDARY = ("stream.weight_update=boundary",)
EVALUATED = (
    "eval.dataset=task:arithmetic?operands=2&operators=+-&digits=2&held_out=1",
    "eval.every=2",
    "eval.num_prompts=12",
    "eval.temperature=1.0",  # each response has its noise: the greedy ones are all alike
    "checkpoint.every=2",
    "checkpoint.keep=100",
)


def settings(flags):
    """Flags of a small run with workers, and further settings."""
    return [f"--config.{flag}" for flag in (*SMALL, *WORKERS, *flags)]


def trainers(started, folder, flags=(), processes=1, devices=1, environment=None):
    """The trainers, each with so many devices, under the launcher."""
    how = {"processes": processes, "devices": devices}
    command = training(folder, (*SMALL, *WORKERS, *flags), **how)
    started.append(Process(folder.parent / f"{folder.name}.log", command, None, environment))
    return started[-1]


def worker(
    started,
    folder,
    flags=(),
    *,
    orphan=200,
    devices=1,
    own=(),
    join=None,
    environment=None,
    program="scripts/worker.py",
):
    """A worker that joins once the trainers answer; `join`: by what, None: by the folder."""
    await_addresses(folder)
    command = [program, "--config=configs/tiny.py", f"--join={join or folder}"]
    log = folder.parent / f"worker{len(started)}.log"
    command += [f"--orphan_seconds={orphan}", *own, *settings(flags)]
    started.append(Process(log, command, devices, environment))
    return started[-1]


def await_addresses(folder):
    """Addresses of the trainers, once they have written them."""
    until((folder / "task_buffers.json").exists)
    return json.loads((folder / "task_buffers.json").read_text())["buffers"]


def await_ready(one):
    """Waits until this worker has joined."""

    def is_ready():
        assert one.process.poll() is None, one.output()
        return "ready as " in one.log.read_text()

    until(is_ready, one.output)


def check_trained(folder, steps=STEPS, *, exact, staleness=1):
    """Every prompt trained once, in its step, whole, by the versions that may answer it."""
    found = collections.Counter()
    for line in itertools.chain(*records(folder).values()):
        for counter in line["counters"]:
            assert counter // PROMPTS + 1 == line["step"]
        found.update((uid[0], uid[1]) for uid in line["uid"])
        for low, high in line["version"]:
            if exact:
                assert low == high == max(0, line["step"] - 1 - staleness)
            else:
                assert line["step"] - 1 - staleness <= low <= high <= line["step"] - 1
    wanted = {(c, s) for c in range(PROMPTS * steps) for s in range(SAMPLES)}
    assert set(found) == wanted and set(found.values()) == {1}


def check_account(folder):
    """All sampled tokens have an account."""
    last = read_metrics(folder / "metrics.jsonl")[-1]
    names = ("sampled", "trained", "filtered", "lost", "under_way")
    sampled, *parts = (last[f"perf/tokens/{name}"] for name in names)
    assert sampled == sum(parts) > 0


def saved_episodes(folder, limit):
    """{(counter, sample): episode} of all processes, of every step but the first.

    With weight updates at boundaries a checkpoint holds the groups of the step after it.
    """
    found = {}
    for path in (folder / "checkpoints").iterdir():
        saved = SavedSamples(additions(epath.Path(path)))
        for counter in sorted(saved._left):
            assert counter // PROMPTS == int(path.name)
            request = GroupRequest(prompt_of(counter, [1]), SamplingParams(SAMPLES, limit))
            progress = saved.take(counter, {"rollout": request})["rollout"]
            found |= {(counter, s): e for s, e in progress.episodes.items()}
    return found


def evaluated_at_once(folder, step, reward):
    """The report of `distflow evaluate` on the weights after a step."""
    run, out = folder.parent / f"at-{step}", folder.parent / f"{step}.json"
    shutil.copytree(folder / "checkpoints" / str(step), run / "checkpoints" / str(step))
    flags = [f"--config.{flag}" for flag in (*SMALL, *EVALUATED, *reward)]
    named = ("--config=configs/tiny.py", f"--run={run}", f"--out={out}")
    finished("scripts/evaluate.py", *named, *flags)
    report = json.loads(out.read_text())
    assert report["step"] == step
    return report


def check_evaluations(folder, steps, flags):
    """Checks that evaluations of every second step exist once, ended while the run continued, and
    equal those of `distflow evaluate` with the same weights."""
    lines = json_lines(folder / "metrics.jsonl")
    found = [(row["step"], x) for row in lines if (x := _validation(row))]
    assert [step for step, _ in found] == list(range(0, steps + 1, 2))
    places = [place for place, row in enumerate(lines) if _validation(row)]
    assert places[1] < [row["step"] for row in lines].index(steps - 1)
    of_steps = {s: json_lines(folder / "samples" / f"eval-{s}.jsonl") for s, _ in found}
    answers = [str([row["responses"] for row in rows]) for rows in of_steps.values()]
    assert len(set(answers)) == len(answers)  # no two versions answer alike
    for step, metrics in found[1:4:2]:
        wanted = evaluated_at_once(folder, step, flags)
        assert metrics == wanted["metrics"]
        assert of_steps[step] == wanted["records"]


def _validation(row):
    return {name: value for name, value in row.items() if name.startswith("val-")}
