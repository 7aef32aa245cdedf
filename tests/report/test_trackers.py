"""Every tracker holds each step of metrics.jsonl once, whatever happens to it or to the run.

Nightly: trackers' own readers give back metrics.jsonl after a kill of the run, or of it and them
(needs requirements-trackers.txt).
"""

import contextlib
import importlib.util
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from support import programs
from support.paths import ROOT
from support.run_folders import json_lines
from support.tracked_run import metrics
from support.waiting import HANG, until
from tensorboardX.proto import event_pb2

from distflow_jax.config.config_dict import from_config_dict
from distflow_jax.config.upkeep_config import ObserveConfig
from distflow_jax.report.json_lines import json_line
from distflow_jax.report.run_writer import RunWriter, read_metrics
from distflow_jax.report.trackers import sender
from distflow_jax.report.trackers.sender import Follower, state_path
from distflow_jax.report.trackers.tracker import BUILT_IN, check_trackers

OWN = """
import json, pathlib, time

class Lines:
    \"\"\"Appends what it is given to a file.\"\"\"

    def __init__(self, run):
        self.run_id = run.run_id or f"lines-{time.time_ns()}"
        self._path = run.folder / f"{self.run_id}.txt"
        self._write("opened", run.last_step, run.config.get("seed"))

    def _write(self, *values):
        with self._path.open("a") as file:
            file.write(json.dumps(values) + "\\n")

    def metrics(self, step, values):
        self._write("metrics", step, values)

    def samples(self, step, kind, records):
        self._write("samples", step, kind, len(records))

    def file(self, path):
        self._write("file", path.name)

    def close(self, failed):
        self._write("closed", failed)

class Hangs(Lines):
    def metrics(self, step, values):
        time.sleep(3600)

class Spins(Lines):
    def metrics(self, step, values):
        while True:
            pass

class HangsAtFirst(Lines):
    def __init__(self, run):
        time.sleep(3600)

class Raises(Lines):
    def metrics(self, step, values):
        raise KeyError("no connection")

class RaisesOnce(Lines):
    tries = 0

    def metrics(self, step, values):
        self.tries += step == 3
        if step == 3 and self.tries == 1:
            raise SystemExit("busy")
        super().metrics(step, values)

    def file(self, path):
        raise OSError("no files here")

class RefusesStep3(Lines):
    def metrics(self, step, values):
        if step == 3:
            raise ValueError("3")
        super().metrics(step, values)

class Gated(Lines):
    def metrics(self, step, values):
        while not (pathlib.Path(__file__).parent / "open").exists():
            time.sleep(0.01)
        super().metrics(step, values)

class Forks(Lines):
    def __init__(self, run):
        import os

        super().__init__(run)
        if pid := os.fork():
            self._write("forked", pid)
        else:
            time.sleep(3600)

class GatedAtStep3(Gated):
    def metrics(self, step, values):
        (super() if step == 3 else super(Gated, self)).metrics(step, values)

class Dies(Lines):
    def metrics(self, step, values):
        import os
        os._exit(3)
"""


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Nobody is late, but where a test says so."""
    monkeypatch.setattr(sender, "LATE_SECONDS", HANG)
    monkeypatch.setattr(sender, "HASTY_SECONDS", HANG)


def Trackers(specs, folder, *, seconds=HANG, **how):
    return sender.Trackers(specs, folder, seconds=seconds, **how)


def follower(spec, folder):
    (folder / "trackers").mkdir(parents=True, exist_ok=True)
    return Follower(spec, folder)


def record(folder, *steps, attempt=0, failed=False, **how):
    """Writes steps as a run does; `how`: of its writer."""
    writer = RunWriter(folder, **how)
    for step in steps:
        writer.metrics(step, metrics(step, attempt))
    writer.close(failed=failed)


@pytest.fixture
def own(tmp_path):
    """Names trackers of a user's own file."""
    path = tmp_path / "own_trackers.py"
    path.write_text(OWN)
    return lambda name: f"{path}:{name}"


def start(folder, environment=None, **job):
    """A run, and a reader of its lines."""
    command = [sys.executable, "-m", "support.tracked_run", str(folder), json.dumps(job)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": path} | (environment or {}),
        stdout=subprocess.PIPE,
        text=True,
    )


def run(folder, environment=None, **job):
    """Runs to the end; returns the seconds that writing each step took."""
    process = start(folder, environment, **job, then="close")
    lines, _ = process.communicate(timeout=HANG)
    assert process.returncode == 0
    return [float(line.split()[2]) for line in lines.splitlines()]


def kill(process, folder, last, *, everything, awaited=2):
    """Kills a run that has written its last step, with all processes that it started or alone."""
    while process.stdout.readline().split()[:2] != ["step", str(last)]:
        assert process.poll() is None
    until(lambda: stored(folder) >= awaited)
    for pid in [process.pid, *(family(process.pid) if everything else [])]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()


def family(pid):
    """The processes that a process and its children have started (Linux)."""
    found = []
    for path in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            found += [child, *family(child)]
    return found


def stored(folder):
    """The last step that every tracker has taken, as far as any has said so."""
    states = [json.loads(path.read_text()) for path in (folder / "trackers").glob("*.json")]
    return min((state["step"] for state in states), default=-1)


def lines(folder):
    """The newest file of the user's own tracker."""
    path = max(folder.glob("lines-*.txt"))
    return json_lines(path)


def rows(folder):
    """Steps and metrics as metrics.jsonl has them."""
    found = read_metrics(folder / "metrics.jsonl")
    return [(row["step"], {k: v for k, v in row.items() if k != "step"}) for row in found]


def taken(folder):
    """Steps and metrics as the user's own tracker has them; of a step the last."""
    return sorted(
        {step: values for kind, step, *rest in lines_of(folder) for values in rest}.items()
    )


def lines_of(folder):
    return [line for line in lines(folder) if line[0] == "metrics"]


def same(values, others):
    """Whether the values are equal; NaN equals NaN."""
    return values.keys() == others.keys() and all(
        np.array_equal(values[name], others[name], equal_nan=True) for name in values
    )


def test_a_tracker_gets_all_that_a_run_writes(tmp_path, own):
    run(tmp_path / "run", first=1, last=3, trackers=[own("Lines")])
    kinds = [line if line[0] != "metrics" else line[:2] for line in lines(tmp_path / "run")]
    assert kinds == [
        ["opened", -1, 1],
        ["file", "config.json"],
        ["file", "plan.svg"],
        ["samples", 0, "eval", 3],
        ["metrics", 0],
        ["samples", 1, "samples", 3],
        ["metrics", 1],
        ["samples", 2, "samples", 3],
        ["metrics", 2],
        ["samples", 3, "samples", 3],
        ["metrics", 3],
        ["file", "report.html"],
        ["closed", False],
    ]
    assert all(
        same(a, b)
        for (_, a), (_, b) in zip(taken(tmp_path / "run"), rows(tmp_path / "run"), strict=True)
    )


@pytest.mark.parametrize("everything", [False, True])
def test_a_killed_run_goes_on_in_the_same_run_of_the_tracker(tmp_path, own, everything):
    folder, trackers = tmp_path / "run", [own("GatedAtStep3")]
    process = start(folder, first=1, last=6, trackers=trackers, then="wait")
    kill(process, folder, 6, everything=everything)  # while the tracker is at step 3
    (tmp_path / "open").touch()
    run(folder, first=5, last=9, attempt=1, trackers=trackers)
    assert len(list(folder.glob("lines-*.txt"))) == 1
    got, wanted = taken(folder), rows(folder)
    assert [step for step, _ in got] == [step for step, _ in wanted] == list(range(10))
    assert all(same(a, b) for (_, a), (_, b) in zip(got, wanted, strict=True))
    # the processes of the first start have stored all that it wrote, if they lived
    opened = [line[1] for line in lines(folder) if line[0] == "opened"]
    assert len(opened) == 2 and opened[1] <= 4
    assert everything or opened[1] == 4
    steps = [line[1] for line in lines_of(folder)]
    assert steps.count(4) == 1 and steps.count(7) == 1


def test_a_run_that_starts_anew_is_a_new_run_of_the_tracker(tmp_path, own):
    folder, trackers = tmp_path / "run", [own("Lines")]
    process = start(folder, first=1, last=2, trackers=trackers, then="wait")
    kill(process, folder, 2, everything=True)
    run(folder, first=1, last=3, trackers=trackers)
    assert [step for step, _ in taken(folder)] == [0, 1, 2, 3]
    assert lines(folder)[0] == ["opened", -1, 1]


def test_a_tracker_that_comes_later_gets_the_steps_before(tmp_path, own):
    run(tmp_path / "run", first=1, last=4, trackers=[])
    run(tmp_path / "run", first=5, last=6, trackers=[own("Lines")])
    assert [step for step, _ in taken(tmp_path / "run")] == list(range(7))


@pytest.mark.parametrize(
    ("name", "warning"),
    [
        ("Hangs", f"did not end within observe.tracker_seconds={HANG:g}"),
        ("Spins", f"did not end within observe.tracker_seconds={HANG:g}"),
        ("HangsAtFirst", f"did not end within observe.tracker_seconds={HANG:g}"),
        ("Raises", "KeyError: 'no connection'"),
        ("Dies", "its process ended with code 3"),
    ],
)
def test_a_bad_tracker_costs_a_warning_and_no_step(
    tmp_path, own, caplog, name, warning, monkeypatch
):
    folder, before = tmp_path / "run", family(os.getpid())
    trackers = Trackers(["tensorboard", own(name)], folder)
    writer = RunWriter(folder, trackers=trackers)
    writer.plan("1. rollout")
    if "did not end" in warning:  # its time is soon over, not that of the others
        process = trackers._processes[own(name)]
        wait = process.wait
        monkeypatch.setattr(process, "wait", lambda seconds=None: wait(seconds and 1))
    for step in range(1, 5):
        writer.metrics(step, metrics(step))
    writer.close()
    assert sum(warning in message for message in caplog.messages) == 1
    assert sum("it has no step of 4" in message for message in caplog.messages) == 1
    assert [step for step, _ in rows(folder)] == [1, 2, 3, 4]
    assert {step for step, _, _ in scalars(folder)} == {1, 2, 3, 4}
    assert set(family(os.getpid())) <= set(before)


def test_a_tracker_that_takes_no_step_is_named_once(tmp_path, own, caplog, monkeypatch):
    monkeypatch.setattr(sender, "LATE_SECONDS", 0.0)
    folder = tmp_path / "run"
    record(folder, 1, 2, 3, trackers=Trackers([own("Hangs")], folder, seconds=0.1))
    assert sum("no step was taken for 0 s" in message for message in caplog.messages) == 1


def test_steps_that_a_tracker_missed_are_given_by_hand(tmp_path, own, caplog, monkeypatch):
    folder = tmp_path / "run"
    record(folder, 1, 2, 3, trackers=Trackers([own("Gated")], folder, seconds=1))
    (message,) = [message for message in caplog.messages if "python -P" in message]
    (tmp_path / "open").touch()
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    subprocess.run([sys.executable, *message.partition("python ")[2].split()], check=True)
    assert [step for step, _ in taken(folder)] == [1, 2, 3]


def feeder(folder, spec, *options, **streams):
    """The process that feeds a tracker; without options as by hand."""
    command = [sys.executable, "-P", "-m", "distflow_jax.report.trackers.sender"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen([*command, folder, spec, *options], env=environment, **streams)


def finished(folder, last=3):
    """The folder of a run that had no tracker."""
    record(folder, *range(1, last + 1))
    return folder


def await_line(folder):
    """Waits until the user's own tracker has begun to write."""
    until(lambda: list(folder.glob("lines-*.txt")))


@pytest.mark.parametrize("name", ["Hangs", "Lines"])
@pytest.mark.parametrize("last", ["", "end"])
def test_the_process_of_a_tracker_outlives_its_run_only_for_a_while(tmp_path, own, name, last):
    seconds = 0.5 if name == "Hangs" else HANG
    options = ["--run", str(seconds)]
    folder = finished(tmp_path / "run")
    process = feeder(folder, own(name), *options, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    await_line(folder)
    process.communicate(last.encode(), timeout=HANG)  # the run is gone
    assert process.returncode == (name == "Hangs")
    assert name == "Hangs" or lines(folder)[-1] == ["closed", not last]


def test_a_row_that_is_refused_by_hand_is_left_out(tmp_path, own):
    folder = finished(tmp_path / "run", last=5)
    process = feeder(folder, own("RefusesStep3"), stderr=subprocess.PIPE, text=True)
    _, errors = process.communicate(timeout=HANG)
    assert "ValueError: 3" in errors and "the row of step 3 was refused" in errors
    assert process.returncode == 1
    assert [step for step, _ in taken(folder)] == [1, 2, 4, 5]
    assert feeder(folder, own("RefusesStep3")).wait(HANG) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_by_hand_one_command_feeds_a_tracker_and_a_signal_ends_it(tmp_path, own, number):
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("started in a shell's background, which ignores this signal for all below")
    folder = finished(tmp_path / "run")
    first = feeder(folder, own("Hangs"))
    await_line(folder)
    second = feeder(folder, own("Hangs"), stderr=subprocess.PIPE, text=True)
    _, errors = second.communicate(timeout=HANG)
    assert second.returncode == 1 and "Hangs.lock is held" in errors
    first.send_signal(number)
    assert first.wait(HANG) == (130 if number == signal.SIGINT else -signal.SIGTERM)


def test_processes_that_a_tracker_leaves_hold_neither_run_nor_lock(tmp_path, own, caplog):
    folder = tmp_path / "run"
    try:
        for step in (1, 2):
            trackers = Trackers([own("Forks")], folder)
            record(folder, step, resume_step=step - 1 or None, trackers=trackers)
    finally:
        for kind, pid, *_ in lines(folder):
            if kind == "forked":
                os.kill(pid, signal.SIGKILL)
    assert [step for step, _ in taken(folder)] == [1, 2] and not caplog.messages


@pytest.mark.parametrize("failed", [False, True])
def test_a_tracker_is_told_whether_the_run_failed(tmp_path, own, failed):
    record(tmp_path, 1, failed=failed, trackers=Trackers([own("Lines")], tmp_path))
    assert lines(tmp_path)[-1] == ["closed", failed]


def test_a_run_that_failed_waits_little_and_its_trackers_store_the_rest(
    tmp_path, own, caplog, monkeypatch
):
    monkeypatch.setattr(sender, "HASTY_SECONDS", 0.5)
    folder, spec = tmp_path / "run", own("Gated")
    trackers = Trackers([spec], folder)
    record(folder, 1, failed=True, trackers=trackers)
    assert "it has no step of 1" in caplog.messages[-1]
    (tmp_path / "open").touch()
    assert trackers._processes[spec].wait(HANG) == 0
    assert [step for step, _ in taken(folder)] == [1]
    assert lines(folder)[-1] == ["closed", True]


def test_words_reach_a_process_that_was_stopped(tmp_path, own):
    before = family(os.getpid())
    trackers, writer = Trackers([own("Lines")], tmp_path), RunWriter(tmp_path)
    trackers.begin()
    writer.metrics(1, metrics(1))
    (child,) = set(family(os.getpid())) - set(before)
    os.kill(child, signal.SIGSTOP)
    for _ in range(20_000):  # nothing is sent for a row, so that no pipe can be full
        trackers.rows(1)
    timer = threading.Timer(0.3, os.kill, (child, signal.SIGCONT))
    timer.start()
    trackers.close()
    timer.join()
    writer.close()
    assert lines(tmp_path)[-1] == ["closed", False]


def test_a_state_that_cannot_be_read_begins_a_new_run_of_the_tracker(tmp_path, own, caplog):
    record(tmp_path, 1)
    for spec in ("tensorboard", own("Lines")):
        follower(spec, tmp_path)
        state_path(tmp_path, spec).write_text("")  # after a power failure
    trackers = Trackers(["tensorboard", own("Lines")], tmp_path)
    record(tmp_path, 2, resume_step=1, trackers=trackers)
    assert sum("json cannot be read" in message for message in caplog.messages) == 2
    assert [step for step, _ in taken(tmp_path)] == [1, 2]
    assert {step for step, _, _ in scalars(tmp_path)} == {1, 2}


@pytest.mark.parametrize("resume_step", [5, None])
def test_steps_that_a_start_without_the_tracker_drops_are_replaced_in_it(
    tmp_path, own, resume_step
):
    spec = own("Lines")

    def attempt(first, last, attempt, trackers):
        before = first - 1 or None
        fed = Trackers(trackers, tmp_path)
        steps = range(first, last + 1)
        record(tmp_path, *steps, attempt=attempt, resume_step=before, trackers=fed)

    attempt(1, 8, 0, [spec])
    attempt((resume_step or 0) + 1, 9, 1, [])
    attempt(10, 11, 2, [spec])
    got, wanted = taken(tmp_path), rows(tmp_path)
    assert [step for step, _ in got] == list(range(1, 12))
    assert all(same(a, b) for (_, a), (_, b) in zip(got, wanted, strict=True))
    assert len(list(tmp_path.glob("lines-*.txt"))) == (1 if resume_step else 2)


@pytest.mark.parametrize("resume_step", [4, 5, 8, None])
def test_late_evaluations_reach_a_tracker_once(tmp_path, own, resume_step):
    """An evaluation that ends after later steps is a row of its own, with its table, also where the
    run goes on from a step before or after the one that it came in."""
    trackers, records = ["tensorboard", own("Lines")], [{"score": 0.5}]

    def attempt(first, last):
        before = first - 1 or None
        fed = Trackers(trackers, tmp_path)
        writer = RunWriter(tmp_path, resume_step=before, trackers=fed)
        for step in range(first, last + 1):
            late = step - 2
            if late >= 0 and late % 3 == 0 and late not in evaluated(tmp_path):
                writer.samples(f"eval-{late}", map(json_line, records))
                writer.late_metrics(late, {"val-core/sum/reward/mean@1": late / 7})
            writer.samples(step, map(json_line, records))
            writer.metrics(step, {"actor/lr": step / 7})
        writer.close()

    attempt(1, 8)  # evaluations of 0, 3 and 6 after 1, 4 and 7
    in_events = [(step, name) for step, name, _ in scalars(tmp_path)]
    assert len(set(in_events)) == len(in_events) == 8 + 3
    attempt((resume_step or 0) + 1, 9)
    wanted = dict(rows(tmp_path))
    assert list(wanted) == list(range(10)) and set(wanted[3]) == {
        "val-core/sum/reward/mean@1",
        "actor/lr",
    }
    own_rows = lines_of(tmp_path)
    got = [(step, name) for _, step, *rest in own_rows for values in rest for name in values]
    assert set(got) == {(step, name) for step, values in wanted.items() for name in values}
    if resume_step == 8:
        assert len(set(got)) == len(got)
    tables = [line[1:3] for line in lines(tmp_path) if line[0] == "samples"]
    assert {tuple(table) for table in tables} >= {(0, "eval"), (3, "eval"), (6, "eval")}


def evaluated(folder):
    """The steps whose evaluation metrics.jsonl has."""
    path = folder / "metrics.jsonl"
    found = read_metrics(path) if path.exists() else []
    return {row["step"] for row in found if any(name.startswith("val-") for name in row)}


def test_a_row_that_was_written_again_is_another_one(tmp_path, own):
    """A tracker has the rows that are equal to those it was given, up to the first other one."""
    writer = RunWriter(tmp_path)
    for step in range(1, 9):
        writer.metrics(step, {"loss": step / 7})
        if step == 5:
            writer.late_metrics(3, {"val-core/mean": 0.5})
    follower(own("Lines"), tmp_path).close(failed=True)
    writer = RunWriter(tmp_path, resume_step=4)
    assert follower(own("Lines"), tmp_path).state["step"] == 4
    writer.metrics(5, {"loss": 0.0})
    for step in range(6, 9):  # as before, and not what comes after the new step 5
        writer.metrics(step, {"loss": step / 7})
    follower(own("Lines"), tmp_path).close(failed=False)
    given = [line[1] for line in lines_of(tmp_path)]
    assert given == [1, 2, 3, 4, 5, 3, 6, 7, 8, 5, 6, 7, 8]
    RunWriter(tmp_path)
    state = follower(own("Lines"), tmp_path).state
    assert state["step"] == -1 and state["run_id"] is None


def test_a_run_that_began_anew_with_equal_scores_is_a_new_run(tmp_path, own):
    """The untrained weights have the same scores in every start."""
    for loss in (1.0, 2.0):
        writer = RunWriter(tmp_path)
        writer.metrics(0, {"val-core/mean": 0.5})
        writer.metrics(1, {"loss": loss})
        follower(own("Lines"), tmp_path).close(failed=False)
    assert len(list(tmp_path.glob("lines-*.txt"))) == 2
    assert [step for step, _ in taken(tmp_path)] == [0, 1]


def test_a_tracker_that_does_not_start_has_the_steps_of_before(tmp_path, own, caplog):
    record(tmp_path, 1, 2, trackers=Trackers([own("Lines")], tmp_path))
    spec = own("HangsAtFirst")
    for path in state_path(tmp_path, own("Lines")).parent.glob("*Lines.*"):
        path.rename(state_path(tmp_path, spec).with_suffix(path.suffix))
    trackers = Trackers([spec], tmp_path, seconds=2)
    record(tmp_path, 3, resume_step=2, trackers=trackers)
    assert "it has the steps to 2 of 3." in caplog.messages[-1]


def test_modules_of_the_working_directory_are_not_those_of_a_tracker(
    tmp_path, own, caplog, monkeypatch
):
    (tmp_path / "argparse.py").write_text("raise RuntimeError('not the library')")
    monkeypatch.chdir(tmp_path)
    record(tmp_path / "run", 1, trackers=Trackers([own("Lines")], tmp_path / "run"))
    assert not caplog.messages


@pytest.mark.parametrize("name", ["RaisesOnce", "RefusesStep3"])
def test_a_row_is_given_again_until_it_is_clear_that_it_is_refused(tmp_path, own, name):
    folder = tmp_path / "run"
    writer = RunWriter(folder)
    feed = follower(own(name), folder)
    for step in range(1, 7):
        writer.samples(step, [json_line({"prompt": "2+2"})])
        writer.metrics(step, metrics(step))
        feed.catch_up()
    writer.close()
    feed.close(failed=False)
    tables = [line[1] for line in lines(folder) if line[0] == "samples"]
    assert tables == [1, 2, 3, 4, 5, 6]  # once, however often their row is given
    refused = name == "RefusesStep3"
    assert [step for step, _ in taken(folder)] == [1, 2, *([] if refused else [3]), 4, 5, 6]
    assert ("the row of step 3 was refused and left out" in feed.state["problems"]) == refused


def scalars(folder):
    """(step, name, value) of all event files, in order. TFRecord: length (8 bytes), checksum (4),
    content, checksum (4)."""
    for path in sorted((folder / "tensorboard").glob("events.*")):
        data = path.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            event = event_pb2.Event.FromString(data[12 : 12 + size])
            for value in event.summary.value:
                if value.WhichOneof("value") == "simple_value":
                    yield event.step, value.tag, value.simple_value
            data = data[12 + size + 4 :]


def test_tensorboard_gets_the_same_numbers(tmp_path):
    writer = RunWriter(tmp_path, trackers=Trackers(["tensorboard"], tmp_path))
    writer.metrics(1, {"critic/score/mean": 0.25, "val/mean@8": 1})
    writer.metrics(2, {"critic/score/mean": 0.5})
    writer.close()
    assert list(scalars(tmp_path)) == [
        (1, "critic/score/mean", 0.25),
        (1, "val/mean_8", 1),
        (2, "critic/score/mean", 0.5),
    ]


def test_names_are_checked():
    for tree, message in {
        ("wandbb",): "unknown observe.trackers 'wandbb'; did you mean 'wandb'?",
        ("wandb", "wandb"): "names a tracker twice",
    }.items():
        with pytest.raises(ValueError, match=message.replace("?", r"\?")):
            from_config_dict(ObserveConfig, {"trackers": tree})


def test_a_tracker_that_cannot_be_loaded_is_named(tmp_path, own, monkeypatch):
    with pytest.raises(ValueError, match="has no 'Line'; did you mean 'Lines'"):
        check_trackers([own("Line")])
    with pytest.raises(FileNotFoundError, match="did you mean .*own_trackers.py"):
        check_trackers([str(tmp_path / "own_tracker.py") + ":Lines"])
    (tmp_path / "wandb_by_folder").mkdir()  # such as ./wandb, that package's own output
    monkeypatch.syspath_prepend(tmp_path)
    for package in ("wandb_by_folder", "wandb_nowhere"):
        monkeypatch.setitem(BUILT_IN, "wandb", (package, "Wandb"))
        with pytest.raises(ValueError, match=f"not installed: pip install {package}"):
            check_trackers(["wandb"])


PACKAGES = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "trackio": "trackio",
}


@pytest.mark.slow
@pytest.mark.parametrize("everything", [False, True], ids=["run killed", "all killed"])
def test_own_readers_give_back_the_metrics_after_a_kill(tmp_path, everything):
    """The trackers' own readers give metrics.jsonl, one value per step and metric, after a kill of
    the run, or of it with all its trackers. A fault of report/trackers breaks it.
    """
    trackers = [name for name, package in PACKAGES.items() if importlib.util.find_spec(package)]
    if set(trackers) < set(PACKAGES):
        pytest.skip(f"needs requirements-trackers.txt; installed are {trackers}")
    folder = tmp_path / "run"
    environment = {"TRACKIO_DIR": str(tmp_path / "trackio"), "WANDB_MODE": "offline"}
    for name in ("WANDB_DIR", "MLFLOW_TRACKING_URI"):
        environment[name] = ""
    job = {"trackers": trackers, "pause": 1.0}
    process = start(folder, environment, first=1, last=12, then="wait", **job)
    kill(process, folder, 12, everything=everything, awaited=-1)
    run(folder, environment, first=9, last=15, attempt=1, **job)
    for tracker in trackers:
        found = read_back(tracker, folder, environment)
        wanted = {
            (step, written_name(tracker, name)): written_value(tracker, value)
            for step, values in rows(folder)
            for name, value in values.items()
        }
        assert found.keys() == wanted.keys(), tracker
        wrong = {
            key: (found[key], value)
            for key, value in wanted.items()
            if not np.array_equal(found[key], value, equal_nan=True)
        }
        assert not wrong, tracker


def read_back(tracker, folder, environment):
    """{(step, name): value}; of several values the last."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    env = os.environ | {"PYTHONPATH": path} | environment
    done = programs.finished("-m", "support.tracker_readers", tracker, folder, env=env)
    values = json.loads(done.stdout.splitlines()[-1])
    if tracker == "tensorboard":
        keys = [(step, name) for step, name, _ in values]
        assert len(set(keys)) == len(keys)  # it takes rows back
    return {(step, name): value for step, name, value in values}


def written_name(tracker, name):
    """The name of a metric in a tracker."""
    return name.replace("@", "_") if tracker in ("tensorboard", "mlflow") else name


def written_value(tracker, value):
    """A number as the tracker keeps it."""
    if tracker == "tensorboard":
        return float(np.float32(value))
    if tracker == "mlflow" and math.isinf(value):  # its database has none
        return math.copysign(sys.float_info.max, value)
    return value
