"""Jobs whose processes are killed, stopped, at odds, or asked to end; and what a rerun makes of it.

Every job trains a model of 40,000 parameters, so that its time is that of starting JAX processes.

Nightly: a run killed again and again, ended in every way, or continued in another layout ends as
the undisturbed one; a process that is stopped is named.
"""

import contextlib
import dataclasses
import itertools
import os
import pathlib
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid

import compare_checkouts
import numpy as np
import pytest
from support import haste
from support.paths import ROOT
from support.picture_rows import write_rows
from support.waiting import HANG, until

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
    f"--config.health.dead_seconds={HANG}",  # a loaded host must not look like a dead one
]
MARK = "DISTFLOW_TEST_JOB"  # in the environment of every process of a job, whoever started it


class Job:
    """A job of scripts/launch_local.py, or one process of a job; its output goes to a file.

    Leaving the block kills what is left of it.
    """

    def __init__(
        self,
        folder,
        workdir,
        *overrides,
        processes=PROCESSES,
        devices=1,
        member=None,
        stopped_seconds=10,
    ):
        self.id, self.started, self.processes = uuid.uuid4().hex, time.time(), processes
        self.log = folder / f"{self.id}.log"
        command = [*COMMAND, f"--workdir={workdir}", *overrides]
        if member is None:
            launch = ["scripts/launch_local.py", f"--processes={processes}"]
            launch += [f"--stopped_seconds={stopped_seconds}"]
            command = [*launch, f"--devices_per_process={devices}", "--", *command]
        self.command = command
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

    def controllers(self):
        """{index: pid} of the training processes."""
        found = {}
        for pid, environ in self.pids().items():
            with contextlib.suppress(
                OSError, KeyError
            ):  # it ends; it is a copy of the launcher yet
                stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
                if int(stat.rpartition(")")[2].split()[1]) == self.process.pid:
                    found[int(environ["DISTFLOW_PROCESS_ID"])] = pid
        return found

    def controller(self, index):
        """Pid of training process `index`."""
        found = self.controllers()
        assert index in found, f"no process {index}: {self.output[-3000:]}"
        return found[index]

    def has_started(self):
        """Whether all training processes are there; their interpreters may still start."""
        return len(self.controllers()) == self.processes

    def wait_until(self, true):
        """Returns when `true()`; fails if the job ends before."""

        def is_true():
            assert self.process.poll() is None, self.output[-6000:]
            return true()

        until(is_true, lambda: self.output[-3000:])

    def step(self):
        """The last step that it has printed, 0 before."""
        return max(map(int, re.findall(r"step (\d+)/", self.output)), default=0)

    def end(self):
        """Exit code; fails if the job does not end, or leaves a process behind."""
        start = time.monotonic()
        until(lambda: self.process.poll() is not None, lambda: self.output[-6000:])
        print(f"ended {time.monotonic() - start:.1f} s after")
        until(lambda: not self.pids(), lambda: list(map(command_line, self.pids())), pause=0.05)
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
        assert job.end() == 0, job.output[-6000:]
        assert "watchdog" not in job.output
    return read_metrics(workdir / "metrics.jsonl")


@dataclasses.dataclass
class Undisturbed:
    """A run that nothing befalls."""

    workdir: pathlib.Path
    processes: int
    rows: list[dict[str, float]]
    overrides: tuple[str, ...]


def undisturbed_run(folder, processes, *overrides):
    rows = finish(folder, folder / "run", *overrides, processes=processes)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["actor/grad_norm"] > 0 for row in rows)  # or equality would say nothing
    return Undisturbed(folder / "run", processes, rows, overrides)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return undisturbed_run(tmp_path_factory.mktemp("undisturbed"), PROCESSES)


def check_finishes(folder, workdir, undisturbed):
    """The same command again goes on, and ends with the undisturbed run's metrics and parameters,
    bit for bit."""
    saved = newest_checkpoint(workdir)
    with Job(folder, workdir, *undisturbed.overrides, processes=undisturbed.processes) as job:
        assert job.end() == 0, job.output[-6000:]
        said = "is finished" if saved == STEPS else f"continues from step {saved};"
        assert said in job.output or not saved
    rows = read_metrics(workdir / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row, wanted in zip(rows, undisturbed.rows, strict=True):
        assert lasting(row) == lasting(wanted)
    assert newest_checkpoint(workdir) == STEPS
    found, wanted = map(compare_checkouts.arrays, (workdir, undisturbed.workdir))
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


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
    with Job(folder, workdir, *undisturbed.overrides, processes=undisturbed.processes) as job:
        wait_for_moment(job, moment, undisturbed, workdir)
        pid = job.controller(process)
        at = job.step()
        os.kill(pid, signal.SIGKILL)
        print(f"killed {process} at {moment:.2f}, after step {at}", end=": ")
        assert job.end() != 0
        assert re.search(rf"watchdog \d+: process {process} died ", job.output), job.output[-6000:]
        assert culprits(job.output) == {process}, job.output[-6000:]
        for line in re.findall(r"watchdog \d+: process \d+ died.*", job.output)[:1]:
            print(line)


def terminate(folder, workdir, moment, undisturbed, number=signal.SIGTERM):
    """Starts the job, sends it a signal, and checks that it leaves a checkpoint of its last step,
    its report, and the command that resumes it."""
    with Job(folder, workdir, *undisturbed.overrides, processes=undisturbed.processes) as job:
        wait_for_moment(job, moment, undisturbed, workdir)
        job.process.send_signal(number)
        print(f"signal {number} at {moment:.2f}, after step {job.step()}", end=": ")
        assert job.end() == 75, job.output[-6000:]
        # a started step is finished; before the first one there is nothing to save
        assert newest_checkpoint(workdir) == job.step() >= int(moment)
        if job.step():
            assert read_metrics(workdir / "metrics.jsonl")[-1]["step"] == job.step()
            assert f"stopped   step {job.step()} of {STEPS}" in job.output
            assert f"report    {workdir / 'report.html'}" in job.output
            words = f"stopped by a signal: step {job.step()} of {STEPS}"
            assert words in (workdir / "report.html").read_text()
            (resume,) = re.findall(r"resume    python (scripts/launch_local.py .*)", job.output)
            assert shlex.split(resume) == job.command
        assert "watchdog" not in job.output


@pytest.mark.multiprocess
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_as_the_undisturbed_one(tmp_path, processes):
    """Killed in a step, and asked to end in a later one: the shortest of what can befall a run."""
    undisturbed = undisturbed_run(tmp_path, processes)
    draw, workdir = random.Random(2), tmp_path / "interrupted"
    kill(tmp_path, workdir, draw.randrange(processes), draw.uniform(2, 4), undisturbed)
    terminate(tmp_path, workdir, draw.uniform(6, STEPS - 3), undisturbed, signal.SIGINT)
    rows = read_metrics(workdir / "metrics.jsonl")
    assert list(map(lasting, rows)) == list(map(lasting, undisturbed.rows[: len(rows)]))


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


SEEING = (
    "--config.model.source=random:qwen2_5_vl?hidden=32&layers=2&heads=4&kv_heads=2&mlp=64&vocab=512"
    "&max_position=256&vision_hidden=32&vision_layers=2&vision_heads=4&patch=8",
    "--config.data.max_prompt_length=128",
)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("images", ["drawn", "read from disk, frozen tower"])
def test_a_killed_run_that_sees_ends_as_the_undisturbed_one(tmp_path, images):
    if images == "drawn":
        processes, data = 2, "task:shapes?ask=count&sides=24-64"
        changes = ()
    else:
        processes, data = 1, write_rows(tmp_path / "data", pictures=40)
        changes = ("--config.training.freeze=vision",)
    changes = (*SEEING, f"--config.data.train={data}", *changes)
    undisturbed = undisturbed_run(tmp_path, processes, *changes)
    assert all(row["data/images"] == 8 for row in undisturbed.rows)
    draw, workdir = random.Random(processes), tmp_path / "interrupted"
    for first in (1, 4, 7):
        moment = draw.uniform(first, first + 3)
        kill(tmp_path, workdir, draw.randrange(processes), moment, undisturbed)
    check_finishes(tmp_path, workdir, undisturbed)


# -- kills without end ----------------------------------------------------------------------------

PHASES = ("start", "write", "compile", "step", "write", "step")  # of a run, each killed in turn


def wait_for_phase(job, phase, draw, workdir, saved):
    """Returns at a random moment of a phase of a job that goes on from the checkpoint `saved`."""
    if phase == "start":  # imports, the job's gate, JAX's own start
        job.wait_until(job.has_started)
        time.sleep(draw.uniform(0, 6))
    elif phase == "compile":
        job.wait_until(lambda: "algorithm " in job.output)  # the line before
        time.sleep(draw.uniform(0, 4))
    elif phase == "write":

        def writes():
            for path in (workdir / "checkpoints").glob("*-tmp*"):
                with contextlib.suppress(FileNotFoundError):  # it has its final name now
                    if path.stat().st_ctime > job.started:  # not what the last kill left
                        return True
            return False

        job.wait_until(writes)
        time.sleep(draw.uniform(0, 0.1))
    else:
        after = draw.randint(saved + 1, STEPS - 2)
        job.wait_until(lambda: job.step() >= after)
        time.sleep(draw.uniform(0, 0.3))


def kill_in(phase, folder, workdir, process, draw, **layout):
    """Starts the job and kills one process in a phase; returns whether that came before its end."""
    saved = newest_checkpoint(workdir)
    cache = [f"--config.compilation_cache={folder / 'programs'}"]
    # with programs that are kept there would be next to nothing to compile
    with Job(folder, workdir, *(cache if phase != "compile" else []), **layout) as job:
        wait_for_phase(job, phase, draw, workdir, saved)
        if job.process.poll() == 0:
            return False
        pid, at = job.controller(process), job.step()
        os.kill(pid, signal.SIGKILL)
        print(f"killed {process} in {phase}, checkpoint {saved}, step {at}", end=": ")
        code = job.end()
        if code == 0:  # it had ended
            return False
        assert code == 128 + signal.SIGKILL, job.output[-6000:]
        who = rf"process {process} \(host {re.escape(socket.gethostname())}, pid {pid}\)"
        assert re.search(rf"launch: {who} died by SIGKILL", job.output), job.output[-6000:]
        named = re.findall(r"process (\d+) (?:\(.*\)|at \S+) ended while the job", job.output)
        named = culprits(job.output) | set(map(int, named))
        assert named <= {process}, job.output[-6000:]
        if phase in ("step", "write"):  # by the watchdogs too
            assert named == {process}, job.output[-6000:]
        for line in re.findall(r"launch: .*", job.output)[:1]:
            print(line)
    return True


def kill_again_and_again(folder, kills, undisturbed, seed):
    """One run after the other, each killed in all phases until it has all but ended."""
    draw, phases = random.Random(seed), itertools.cycle(PHASES)
    done = runs = 0
    while done < kills:
        runs += 1
        workdir = folder / f"run{runs}"
        while done < kills and newest_checkpoint(workdir) <= STEPS - 4:
            process = done % undisturbed.processes  # each in turn, process 0 first
            layout = {"processes": undisturbed.processes}
            done += kill_in(next(phases), folder, workdir, process, draw, **layout)
        check_finishes(folder, workdir, undisturbed)
        print(f"{done} kills, {runs} runs")


@pytest.fixture(scope="module")
def undisturbed_alone(tmp_path_factory):
    return undisturbed_run(tmp_path_factory.mktemp("undisturbed_alone"), 1)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "kills",
    [pytest.param(6, marks=pytest.mark.slow), pytest.param(100, marks=pytest.mark.soak)],
)
def test_a_process_is_killed_again_and_again(undisturbed_alone, tmp_path, kills):
    """In start, compilation, steps and checkpoint writing: 6 times here, 100 in the soak tier."""
    kill_again_and_again(tmp_path, kills, undisturbed_alone, seed=kills)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "kills",
    [pytest.param(4, marks=pytest.mark.slow), pytest.param(30, marks=pytest.mark.soak)],
)
def test_one_of_four_is_killed_again_and_again(undisturbed, tmp_path, kills):
    """Each of the four in turn: 4 times here, 30 in the soak tier."""
    kill_again_and_again(tmp_path, kills, undisturbed, seed=kills)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("moment", ["imports", "joins"])
def test_ended_before_the_watchdogs_have_met(tmp_path, number, moment):
    """By whoever waits for it too, once the gate has admitted it."""
    with Job(tmp_path, tmp_path / "run", processes=3, stopped_seconds=25) as job:
        job.wait_until(job.has_started)
        if moment == "joins":  # with process 2 stopped nobody gets beyond
            last = job.controller(2)
            os.kill(last, signal.SIGSTOP)
            job.wait_until(lambda: job.output.count("job: process") == 2)
            time.sleep(2)  # to reach the gate
            os.kill(last, signal.SIGCONT)
        pid = job.controller(1)
        os.kill(pid, number)
        assert job.end() == 128 + number, job.output[-6000:]
        who = rf"process 1 \(host {re.escape(socket.gethostname())}, pid {pid}\)"
        how = "died by SIGKILL" if number == signal.SIGKILL else "is stopped by SIGSTOP"
        assert re.search(rf"launch: {who} {how}", job.output), job.output[-6000:]
        assert not culprits(job.output) - {1}
        if moment == "joins":
            how = "ended while" if number == signal.SIGKILL else "has given no sign of life"
            assert re.search(rf"\[p0\].*{who} {how}", job.output), job.output[-6000:]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_stopped_process_is_named(tmp_path):
    # no other process is silent for so long, the run does not end before, and the launcher waits
    settings = ("--config.health.dead_seconds=10", "--config.training.steps=100000")
    with Job(tmp_path, tmp_path / "run", *settings, processes=2, stopped_seconds=HANG) as job:
        job.wait_until(lambda: job.step() >= 2)
        # else "nothing is left" would say little: a controller, a watchdog and a reward worker
        # each, and the first one's tracker
        assert len(job.pids()) == 3 * 2 + 1
        os.kill(job.controller(1), signal.SIGSTOP)
        assert job.end() != 0
        decision = r"watchdog \d+: process 1 is alive but does not respond.*stopped by a signal"
        assert re.search(decision, job.output), job.output[-6000:]
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
            assert job.end() == 2, job.output[-6000:]
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
@pytest.mark.parametrize(("source", "layout"), list(itertools.pairwise([*LAYOUTS, *LAYOUTS][:5])))
def test_a_checkpoint_goes_on_in_every_layout(whole_run, tmp_path, source, layout):
    """Each layout writes what another one reads, and reads what another one wrote."""
    check_goes_on_in(layout, source, whole_run, tmp_path)
