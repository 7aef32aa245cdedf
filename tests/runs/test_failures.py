"""Jobs whose processes are killed, stopped, at odds, or asked to end; and what a rerun makes of it.

Every job trains a model of 40,000 parameters, so that its time is that of starting JAX processes.
"""

import contextlib
import dataclasses
import itertools
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid

import pytest
from support import haste
from support.paths import ROOT

from distflow_jax.report.run_writer import read_metrics

PROCESSES = 4
STEPS = 12
COMMAND = [
    "scripts/train.py",
    "--config=configs/tiny.py",
    "--config.model.source=random:llama?hidden=32&layers=2&heads=4&kv_heads=2&mlp=64&vocab=512"
    "&max_position=128",
    "--config.data.prompts_per_step=8",
    "--config.data.max_prompt_length=64",
    "--config.data.overlong=truncate_left",  # spares a look at all 10,000 prompts
    "--config.rollout.max_response_length=8",
    "--config.rollout.num_slots=8",
    "--config.reward.num_workers=1",  # processes that could be left behind
    "--config.training.micro_batch_rows=8",
    f"--config.training.steps={STEPS}",
    "--config.checkpoint.every=2",
    "--config.eval.dataset=",
    "--config.health.heartbeat_seconds=0.5",
    "--config.health.dead_seconds=20",  # a loaded host must not look like a dead one
]
MARK = "DISTFLOW_TEST_JOB"  # in the environment of every process of a job, whoever started it
START_SECONDS = 300.0  # on a loaded host
END_SECONDS = 15.0  # from a process's death to the job's end: collecting, killing, closing pipes
LINGER_SECONDS = 5.0  # for watchdogs to end after their controllers


class Job:
    """A job of scripts/launch_local.py, or one process of a job; its output goes to a file.

    Leaving the block kills what is left of it.
    """

    def __init__(self, folder, workdir, *overrides, processes=PROCESSES, devices=1, member=None):
        self.id, self.started = uuid.uuid4().hex, time.time()
        self.log = folder / f"{self.id}.log"
        command = [*COMMAND, f"--workdir={workdir}", *overrides]
        if member is None:
            launch = ["scripts/launch_local.py", f"--processes={processes}"]
            command = [*launch, f"--devices_per_process={devices}", "--", *command]
        # Not from the cache of tests/conftest.py: JAX lets process 0 alone write it and keeps
        # programs per device on CPU, which makes a job no cheaper, and a moment of step 1 is
        # measured by the undisturbed run.
        own = ("DISTFLOW_", "JAX_COMPILATION_CACHE")
        env = {k: v for k, v in haste.environment().items() if not k.startswith(own)}
        env[MARK] = self.id
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env=env | (member or {}),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @property
    def output(self):
        return self.log.read_text(errors="replace")

    def pids(self):
        """{pid: environment} of the job's processes but the first, zombies apart."""
        found = {}
        for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                pairs = (pair.partition("=") for pair in path.read_text().split("\0"))
                environ = {name: value for name, _, value in pairs}
                if environ.get(MARK) == self.id and int(path.parent.name) != self.process.pid:
                    found[int(path.parent.name)] = environ
        return found

    def controller(self, index):
        """Pid of training process `index`."""
        for pid, environ in self.pids().items():
            stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
            parent = int(stat.rpartition(")")[2].split()[1])
            if parent == self.process.pid and environ["DISTFLOW_PROCESS_ID"] == str(index):
                return pid
        raise AssertionError(f"no process {index}: {self.output[-3000:]}")

    def wait_until(self, true):
        """Returns when `true()`; fails if the job ends before."""
        deadline = time.monotonic() + START_SECONDS
        while not true():
            assert time.monotonic() < deadline, self.output[-3000:]
            assert self.process.poll() is None, self.output[-6000:]
            time.sleep(0.01)

    def step(self):
        """The last step that it has printed, 0 before."""
        return max(map(int, re.findall(r"step (\d+)/", self.output)), default=0)

    def end(self, seconds):
        """Exit code; fails if the job does not end within `seconds`, or leaves a process behind."""
        start = time.monotonic()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end in {seconds} s: {self.output[-6000:]}") from None
        print(f"ended {time.monotonic() - start:.1f} s after")
        deadline = time.monotonic() + LINGER_SECONDS
        while left := self.pids():
            assert time.monotonic() < deadline, [command_line(pid) for pid in left]
            time.sleep(0.05)
        return self.process.returncode


def command_line(pid):
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def newest_checkpoint(workdir):
    folder = workdir / "checkpoints"
    return max((int(p.name) for p in folder.glob("*") if p.name.isdigit()), default=0)


def lasting(row):
    return {k: v for k, v in row.items() if not k.startswith(("timing", "perf/"))}


def finish(folder, workdir, *overrides, **layout):
    with Job(folder, workdir, *overrides, **layout) as job:
        assert job.end(START_SECONDS) == 0, job.output[-6000:]
        assert "watchdog" not in job.output
    return read_metrics(workdir / "metrics.jsonl")


@dataclasses.dataclass
class Undisturbed:
    """A run that nothing befalls."""

    processes: int
    rows: list[dict[str, float]]


def undisturbed_run(folder, processes):
    rows = finish(folder, folder / "run", processes=processes)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["actor/grad_norm"] > 0 for row in rows)  # or equality would say nothing
    return Undisturbed(processes, rows)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return undisturbed_run(tmp_path_factory.mktemp("undisturbed"), PROCESSES)


def check_finishes(folder, workdir, undisturbed):
    """The same command again goes on, and ends with the undisturbed run's metrics bit for bit."""
    saved = newest_checkpoint(workdir)
    with Job(folder, workdir, processes=undisturbed.processes) as job:
        assert job.end(START_SECONDS) == 0, job.output[-6000:]
        said = "is finished" if saved == STEPS else f"continues from step {saved};"
        assert said in job.output or not saved
    rows = read_metrics(workdir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row, wanted in zip(rows, undisturbed.rows, strict=True):
        assert lasting(row) == lasting(wanted)


def wait_for_moment(job, moment, undisturbed, workdir):
    """Moments are in steps: 2.5 is half a step after the end of step 2, below 1 is start-up.

    Start-up begins here when the processes have joined and their watchdogs know each other.
    """
    durations = [row["timing_s/step"] for row in undisturbed.rows]
    step, fraction = int(moment), moment % 1
    if step:
        job.wait_until(lambda: job.step() >= step)
        time.sleep(fraction * min(durations))
    else:
        # then the first thing is a look whether the folder can be written to
        job.wait_until(lambda: workdir.exists() and workdir.stat().st_mtime > job.started)
        time.sleep(0.3 + fraction * durations[0])  # most of step 1 is compilation


def culprits(output):
    """The processes that the watchdogs name as the cause."""
    lines = re.findall(r"watchdog \d+: (process.*)", output)
    return {int(i) for x in lines for i in re.findall(r"process (\d+) (?:died|failed|is)", x)}


def kill(folder, workdir, process, moment, undisturbed):
    """Starts the job, kills one process, and checks how the job ends."""
    with Job(folder, workdir, processes=undisturbed.processes) as job:
        wait_for_moment(job, moment, undisturbed, workdir)
        pid = job.controller(process)
        at = job.step()
        os.kill(pid, signal.SIGKILL)
        print(f"killed {process} at {moment:.2f}, after step {at}", end=": ")
        assert job.end(END_SECONDS) != 0
        assert re.search(rf"watchdog \d+: process {process} died ", job.output), job.output[-6000:]
        assert culprits(job.output) == {process}, job.output[-6000:]
        for line in re.findall(r"watchdog \d+: process \d+ died.*", job.output)[:1]:
            print(line)


def terminate(folder, workdir, moment, undisturbed):
    """Starts the job, sends it SIGTERM, and checks that it leaves a checkpoint of its last step."""
    with Job(folder, workdir, processes=undisturbed.processes) as job:
        wait_for_moment(job, moment, undisturbed, workdir)
        job.process.send_signal(signal.SIGTERM)
        print(f"SIGTERM at {moment:.2f}, after step {job.step()}", end=": ")
        assert job.end(START_SECONDS) == 75, job.output[-6000:]  # a started step is finished
        assert newest_checkpoint(workdir) == job.step() >= 1
        assert read_metrics(workdir / "metrics.jsonl")[-1]["step"] == job.step()
        assert "watchdog" not in job.output


@pytest.mark.multiprocess
def test_a_killed_run_ends_as_the_undisturbed_one(tmp_path):
    """Killed in a step and asked to end in a later one: the shortest of what can befall a run."""
    undisturbed = undisturbed_run(tmp_path, processes=2)
    draw, workdir = random.Random(2), tmp_path / "interrupted"
    kill(tmp_path, workdir, draw.randrange(2), draw.uniform(2, 4), undisturbed)
    terminate(tmp_path, workdir, draw.uniform(6, STEPS - 3), undisturbed)
    check_finishes(tmp_path, workdir, undisturbed)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_an_interrupted_run_ends_as_the_undisturbed_one(undisturbed, tmp_path):
    """One run, interrupted in turn in every way: a start for each instead of two."""
    draw, workdir = random.Random(1), tmp_path / "run"
    victims = draw.sample([0, draw.randrange(1, PROCESSES)], 2)
    kill(tmp_path, workdir, victims[0], draw.random(), undisturbed)
    terminate(tmp_path, workdir, draw.random(), undisturbed)
    kill(tmp_path, workdir, victims[1], draw.uniform(3, 8), undisturbed)
    terminate(tmp_path, workdir, draw.uniform(8, STEPS - 2), undisturbed)
    check_finishes(tmp_path, workdir, undisturbed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_killed_at_any_moment(undisturbed, tmp_path, seed):
    draw = random.Random(seed)
    process, moment = draw.randrange(PROCESSES), draw.uniform(0.5, STEPS)
    kill(tmp_path, tmp_path / "run", process, moment, undisturbed)
    check_finishes(tmp_path, tmp_path / "run", undisturbed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ended_before_the_processes_have_joined(undisturbed, tmp_path, number, seed):
    """There are no watchdogs yet, and no handler of SIGTERM: the launcher sees to the end."""
    draw, workdir = random.Random(seed), tmp_path / "run"
    with Job(tmp_path, workdir) as job:
        job.wait_until(lambda: len(job.pids()) >= PROCESSES)
        time.sleep(draw.uniform(0, 4))
        if number == signal.SIGKILL:
            os.kill(job.controller(draw.randrange(PROCESSES)), number)
            assert job.end(END_SECONDS) != 0
        else:
            job.process.send_signal(number)
            assert job.end(START_SECONDS) in (75, 128 + number), job.output[-6000:]
    check_finishes(tmp_path, workdir, undisturbed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
def test_asked_to_end_at_any_moment(undisturbed, tmp_path, seed):
    terminate(tmp_path, tmp_path / "run", random.Random(seed).uniform(0, STEPS - 2), undisturbed)
    check_finishes(tmp_path, tmp_path / "run", undisturbed)


@pytest.mark.multiprocess
def test_a_stopped_process_is_named(tmp_path):
    dead_seconds = 4.0
    limit = f"--config.health.dead_seconds={dead_seconds}"
    with Job(tmp_path, tmp_path / "run", limit, processes=2) as job:
        job.wait_until(lambda: job.step() >= 2)
        # else "nothing is left" would say little: a controller, a watchdog and a reward worker each
        assert len(job.pids()) == 3 * 2
        os.kill(job.controller(1), signal.SIGSTOP)
        assert job.end(dead_seconds + 8) != 0
        verdict = r"watchdog \d+: process 1 is alive but does not respond.*stopped by a signal"
        assert re.search(verdict, job.output), job.output[-6000:]
        assert culprits(job.output) == {1}


@pytest.mark.multiprocess
def test_processes_with_two_configs_refuse_to_start(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with contextlib.ExitStack() as stack:
        jobs = []
        for index, lr in enumerate(["1e-3", "2e-3"]):
            member = {"DISTFLOW_COORDINATOR": address, "DISTFLOW_NUM_PROCESSES": "2"}
            job = Job(
                tmp_path,
                tmp_path / "run",
                f"--config.training.optimizer.lr={lr}",
                member=member | {"DISTFLOW_PROCESS_ID": str(index)},
            )
            jobs.append(stack.enter_context(job))
        for job in jobs:
            assert job.end(START_SECONDS) == 2, job.output[-6000:]
            (error,) = re.findall("error: .*", job.output)
            assert "training.optimizer.lr: process 0 has 0.001, process 1 has 0.002" in error
            assert "Traceback" not in job.output
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert not newest_checkpoint(tmp_path / "run")


# -- one run, two layouts ---------------------------------------------------------------------

LAYOUTS = {
    "1x8": dict(processes=1, devices=8, overrides=[]),
    "2x4": dict(processes=2, devices=4, overrides=["--config.mesh.tensor=2"]),
    # a sampler over 2 hosts
    "4x2": dict(processes=4, devices=2, overrides=["--config.mesh.rollout_tensor=4"]),
    "8x1": dict(
        processes=8,
        devices=1,
        overrides=["--config.mesh.tensor=2", "--config.mesh.rollout_tensor=2"],
    ),
}


def run_in(layout, folder, workdir):
    settings = dict(LAYOUTS[layout])
    overrides = ["--config.training.steps=4", *settings.pop("overrides")]
    return finish(folder, workdir, *overrides, **settings)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """whole_run(layout): folder and metrics of a run of 4 steps in that layout, made once."""
    made = {}

    def run(layout):
        if layout not in made:
            folder = tmp_path_factory.mktemp(f"layout-{layout}")
            made[layout] = folder / "run", run_in(layout, folder, folder / "run")
        return made[layout]

    return run


def check_goes_on_in(layout, source, whole_run, tmp_path):
    """The checkpoint of step 2 goes on in another layout as it did in its own."""
    folder, wanted = whole_run(source)
    shutil.copytree(folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    rows = run_in(layout, tmp_path, tmp_path / "run")
    assert [row["step"] for row in rows] == [row["step"] for row in wanted] == [1, 2, 3, 4]
    assert rows[:2] == wanted[:2]
    worst = 0.0
    for row, other in zip(rows[2:], wanted[2:], strict=True):
        row, other = lasting(row), lasting(other)
        assert row.keys() == other.keys()
        for name in row:
            if not name.startswith("global_seqlen/balanced"):  # ranks differ
                worst = max(worst, abs(row[name] - other[name]) / (1e-3 * abs(other[name]) + 1e-4))
                assert row[name] == pytest.approx(other[name], rel=1e-3, abs=1e-4), name
    print(f"{source} to {layout}: at most {worst:.2g} of the tolerance")


@pytest.mark.slow
@pytest.mark.parametrize(("source", "layout"), list(itertools.permutations(LAYOUTS, 2)))
def test_a_checkpoint_goes_on_in_every_layout(whole_run, tmp_path, source, layout):
    check_goes_on_in(layout, source, whole_run, tmp_path)
