"""Runs whose samplers run ahead, on several processes, killed at random moments.

Everything is read from the files that all processes write: WORKDIR/groups/PROCESS.jsonl.

Nightly: samplers that run ahead are killed at random: with weight updates at the step boundary runs
end bit-equal, in flight every prompt trains once, on any number of processes.
"""

import random
import signal
import time

import compare_checkouts
import pytest
from support.delayed_train import REWARD
from support.paths import ROOT
from support.picture_rows import write_rows
from support.programs import Process, training
from support.run_folders import await_step, last_step, lasting, records
from support.tiny_config import SMALL_AHEAD

from distflow_jax.report.run_writer import read_metrics
from distflow_jax.watchdog.exit_codes import EXIT_PREEMPTED

PROMPTS, STEPS = 8, 6
SOAK_KILLS = 20
SMALL = [
    *SMALL_AHEAD,
    "eval.every=0",
    "observe.report_every=0",
    "checkpoint.every=1",
    "checkpoint.keep=3",
]
# each process trains on two devices, and samples on a third
PART = ["mesh.devices=0:2", "mesh.roles={'ROLLOUT': {'devices': '2:3'}}"]
SHARED = ("mesh.devices=0:2", "mesh.roles={'ROLLOUT': {'devices': '0:2'}}")
PARTIAL_BATCHES = ("stream.partial_batches=counter", "stream.partial_batch_prompts=3")
SEEING = (
    "model.source=random:qwen2_5_vl?hidden=32&layers=2&heads=4&kv_heads=2&mlp=64&vocab=512"
    "&max_position=256&vision_hidden=32&vision_layers=2&vision_heads=4&patch=8",
    "training.freeze=vision",
)
GRACE = 60.0


class Job(Process):
    """A run of several processes, in its folder.

    Its sampler, trainer and reward are late at random with `DELAYS` in `environment`, see
    support/delayed_train.py; support/killed_train.py tells of `KILL_AT`.
    """

    def __init__(self, folder, flags, processes=2, *, steps=STEPS, environment=()):
        environment = dict(environment)
        program = "tests/support/killed_train.py" if environment else "scripts/train.py"
        if "DELAYS" in environment:
            reward = folder.parent / "reward.py"
            reward.write_text(REWARD)
            flags = [*flags, f"reward.function={reward}:digits", "reward.kwargs={}"]
        settings = [*SMALL, *PART, f"training.steps={steps}", *flags]
        size = {"processes": processes, "devices": 3, "flags": [f"--grace_seconds={GRACE:g}"]}
        command = training(folder, settings, program=program, **size)
        environment["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests'}"
        super().__init__(folder.parent / f"{folder.name}.log", command, own=environment)

    def await_death(self):
        """Waits for a job of which one process was killed."""
        assert self.end() == 128 + signal.SIGKILL, self.output()


def check(folder, staleness, steps=STEPS):
    """Every counter is trained once, in its step; no token is too old; the token account adds
    up."""
    found = records(folder)
    assert sorted(found) == list(range(1, steps + 1))
    for step, rows in found.items():
        counters = sorted(counter for row in rows for counter in row["counters"])
        assert counters == list(range(PROMPTS * (step - 1), PROMPTS * step))
        uids = [tuple(uid) for row in rows for uid in row["uid"]]
        assert len(uids) == len(set(uids)) == PROMPTS * 4
        for row in rows:
            for (low, high), age in zip(row["version"], row["age"], strict=True):
                assert 0 <= low <= high <= step - 1 and 0 <= age <= staleness
    return check_tokens(folder)


def check_tokens(folder):
    """The token account of each step adds up; returns the last one."""
    for row in read_metrics(folder / "metrics.jsonl"):
        if not row["step"]:  # the evaluation of the untrained weights
            continue
        tokens = {
            name.removeprefix("perf/tokens/"): value
            for name, value in row.items()
            if name.startswith("perf/tokens/")
        }
        others = ("trained", "filtered", "lost", "under_way")
        assert tokens["sampled"] == sum(tokens[name] for name in others), row["step"]
    return tokens


def steps_for(kills):
    """Steps of a run that is killed so often: each start makes at least one of them, and those of
    a second where they are fast."""
    return max(STEPS, 10 * kills) if kills == SOAK_KILLS else STEPS


def run_with_kills(folder, flags, draw, kills, processes=(2,), environment=()):
    """Runs to the end; `processes`: their number at each start, in turn."""
    starts, steps = 0, steps_for(kills)
    while True:
        given = dict(environment)
        if "DELAYS" in given:
            given["DELAYS"] += f" {starts}"
        number = processes[starts % len(processes)]
        job = Job(folder, flags, number, steps=steps, environment=given)
        if starts == kills:
            assert job.end() == 0, job.output()
            return job
        wanted = min(steps - 1, last_step(folder) + draw.choice((1, 2)))
        await_step(folder, wanted, job, pause=0.005)
        # at once: between the update and the end of the checkpoint; or anywhere in later steps
        time.sleep(draw.choice((0.0, draw.uniform(0, 1))))
        job.kill_one(draw)
        job.await_death()
        starts += 1


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The folder of a run that nobody killed, by its settings; made when needed."""
    made = {}

    def make(flags, *, processes=2, steps=STEPS):
        key = (*flags, processes, steps)
        if key not in made:
            folder = made[key] = tmp_path_factory.mktemp("undisturbed") / "run"
            job = Job(folder, flags, processes, steps=steps)
            assert job.end() == 0, job.output()
        return made[key]

    return make


def boundary(staleness, *flags):
    return (f"stream.max_staleness={staleness}", "stream.weight_update=boundary", *flags)


def assert_equal(folder, wanted, steps=STEPS):
    """Metrics and samples, bit for bit."""
    assert lasting(folder) == lasting(wanted)
    for step in range(1, steps + 1):
        samples = [path / "samples" / f"{step}.jsonl" for path in (folder, wanted)]
        assert samples[0].read_text() == samples[1].read_text()


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("staleness", "kills", "partial_batches"),
    [
        pytest.param(1, 2, (), marks=pytest.mark.slow),
        pytest.param(2, 3, PARTIAL_BATCHES, marks=pytest.mark.slow),
        pytest.param(2, SOAK_KILLS, (), marks=pytest.mark.soak),
        pytest.param(2, SOAK_KILLS, PARTIAL_BATCHES, marks=pytest.mark.soak),
    ],
)
def test_a_killed_run_with_boundary_swaps_ends_bit_equal(
    undisturbed, tmp_path, staleness, kills, partial_batches
):
    """The samples that older weights began are in the checkpoint: nothing depends on the kills, in
    the middle of a step's partial batches either."""
    check_kills(undisturbed, tmp_path / "killed", staleness, kills, partial_batches)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_killed_run_that_sees_ends_bit_equal(undisturbed, tmp_path):
    """Images are read from disk again, those of samples in a checkpoint too."""
    data = write_rows(tmp_path / "data", pictures=60)
    check_kills(
        undisturbed, tmp_path / "killed", 1, 3, (*PARTIAL_BATCHES, *SEEING, f"data.train={data}")
    )
    rows = [row for row in read_metrics(tmp_path / "killed" / "metrics.jsonl") if row["step"]]
    assert all(row["data/images"] == PROMPTS and row["actor/grad_norm"] > 0 for row in rows)


def check_kills(undisturbed, folder, staleness, kills, flags):
    """A run with boundary weight updates that is killed ends as the undisturbed one, bit for
    bit."""
    flags, steps = boundary(staleness, *flags), steps_for(kills)
    wanted = undisturbed(flags, steps=steps)
    run_with_kills(folder, flags, random.Random(staleness), kills)
    assert_equal(folder, wanted, steps)
    assert not list(compare_checkouts.differences(wanted, folder, 0))  # parameters too
    check(folder, staleness, steps)
    tokens = check(wanted, staleness, steps)
    assert tokens["lost"] == 0 and tokens["sampled"] == tokens["trained"]


TURNS = (
    "rollout.environment=configs/examples/second_try.py:SecondTry",
    "rollout.max_response_length=48",
    "rollout.turn_length=12",
    "rollout.max_turns=3",
)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("flags", "processes"),
    [
        (boundary(1, "dag=dapo"), 2),
        (boundary(2, "dag=ppo"), 2),
        (boundary(1), 4),
    ],
    ids=str,
)
def test_other_graphs_and_numbers_of_processes_end_bit_equal(
    undisturbed, tmp_path, flags, processes
):
    """A region's filter decisions, a critic, and four processes."""
    wanted, folder = undisturbed(flags, processes=processes), tmp_path / "killed"
    run_with_kills(folder, flags, random.Random(str(flags)), 3, (processes,))
    assert_equal(folder, wanted)
    ours, theirs = check_tokens(folder), check_tokens(wanted)
    assert all(ours[name] == theirs[name] for name in ("trained", "filtered"))


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("place", ["finish:3", "partial_batch:8"])
def test_a_kill_between_partial_batches_or_within_an_optimizer_step_leaves_no_trace(
    undisturbed, tmp_path, place
):
    """Gradients of an unfinished step are gone, its groups are not, and none trains twice. A step
    has three partial batches, so that the eighth is amid step 3."""
    flags = boundary(1, *PARTIAL_BATCHES)
    wanted, folder = undisturbed(flags), tmp_path / "killed"
    for process in ("0", "1"):
        job = Job(folder, flags, environment={"KILL_AT": place, "KILL_PROCESS": process})
        job.await_death()
    job = Job(folder, flags)
    assert job.end() == 0, job.output()
    assert_equal(folder, wanted)
    check(folder, 1)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("processes", "kills", "flags"),
    [
        pytest.param((1, 2), 3, (), marks=pytest.mark.slow),
        pytest.param((2, 1), 3, SHARED, marks=pytest.mark.slow),
        pytest.param((2, 1), 3, TURNS, marks=pytest.mark.slow),
        pytest.param((2, 1), SOAK_KILLS, (), marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_a_killed_run_with_swaps_in_flight(tmp_path, processes, kills, flags):
    """With any number of processes after the restart, and all of them late at random."""
    folder, draw = tmp_path / "killed", random.Random(sum(processes))
    flags, late = ["stream.max_staleness=2", *flags], {"DELAYS": "1"}
    run_with_kills(folder, flags, draw, kills, processes, late)
    check(folder, 2, steps_for(kills))


@pytest.mark.slow
@pytest.mark.multiprocess
def test_sigterm_leaves_a_complete_checkpoint(undisturbed, tmp_path):
    """The samples that it owes are finished: the run goes on from there, bit for bit."""
    wanted, folder = undisturbed(boundary(2)), tmp_path / "stopped"
    flags = boundary(2, "checkpoint.every=100")
    job = Job(folder, flags)
    await_step(folder, 3, job)
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == EXIT_PREEMPTED, job.output()
    steps = [int(path.name) for path in (folder / "checkpoints").iterdir()]
    assert len(steps) == 1 and steps[0] >= 3
    assert len(list((folder / "checkpoints" / str(steps[0]) / "additions").glob("*.npz"))) == 2
    job = Job(folder, flags)
    assert job.end() == 0, job.output()
    check(folder, 2)
    assert_equal(folder, wanted)
