"""A folder has one run at a time, whatever its file system and however the one before ended.

Nightly: eight processes that start together are one run.
"""

import errno
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest
from support.waiting import HANG

from distflow_jax.checkpoint import run_lock
from distflow_jax.checkpoint.run_lock import NAME, RunLock

ROOT = pathlib.Path(__file__).parents[2]
# a holder beats soon, and is given all the time to do so; nobody else comes at the same moment
BEATS = {"beat": 0.05, "lease": HANG, "settle": 0.0}
SETTLE = 6.0  # longer than a busy machine leaves a thread waiting before it writes its name
# takes the lock, says so, and holds it until its input ends
HOLD = """
import sys
from pathlib import Path
from distflow_jax.checkpoint.run_lock import RunLock
try:
    lock = RunLock(Path(sys.argv[1]))
except ValueError as error:
    sys.exit(str(error))
print("held", flush=True)
sys.stdin.read()
lock.release()
"""


def start(folder, program=HOLD, cwd=None):
    return subprocess.Popen(
        [sys.executable, "-c", program, str(folder)],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def holder(tmp_path):
    process = start(tmp_path)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def refuse(file, how):
    raise OSError(errno.ENOTSUP, "not supported")


@pytest.fixture
def without_flock(monkeypatch):
    monkeypatch.setattr(run_lock.fcntl, "flock", refuse)


def elsewhere(monkeypatch):
    """From now on this process seems to run on another host."""
    here = run_lock._mine
    monkeypatch.setattr(run_lock, "_mine", lambda: here()._replace(kernel="other"))


def test_the_holder_is_named(tmp_path, holder):
    with pytest.raises(ValueError, match=f"in use by process {holder.pid} on .*, started 2"):
        RunLock(tmp_path)


def test_a_released_folder_is_free_at_once(tmp_path, holder):
    holder.communicate("")
    lock = RunLock(tmp_path, lease=60)
    lock.release()
    lock.release()
    assert not (tmp_path / NAME).exists()


def test_a_killed_holder_on_this_host_is_dead_at_once(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    lock = RunLock(tmp_path, lease=1e6)  # it does not wait for so long
    assert json.loads((tmp_path / NAME).read_text())
    lock.release()


def test_a_stopped_holder_on_this_host_keeps_its_folder(tmp_path, holder):
    holder.send_signal(signal.SIGSTOP)
    with pytest.raises(ValueError, match=f"process {holder.pid}"):
        RunLock(tmp_path, lease=0.2)


def test_who_has_just_taken_over_is_named_not_the_dead(tmp_path, holder, monkeypatch):
    """The lock is taken a moment before the name is written."""
    monkeypatch.setattr(run_lock, "SETTLE_SECONDS", HANG)
    holder.kill()
    holder.wait()
    file = os.open(tmp_path / NAME, os.O_RDWR)
    run_lock.fcntl.flock(file, run_lock.fcntl.LOCK_EX)
    late = threading.Timer(0.3, lambda: run_lock._write(file, run_lock._mine()))
    late.start()
    with pytest.raises(ValueError, match=f"in use by process {os.getpid()} on"):
        RunLock(tmp_path)
    late.join()
    os.close(file)


def test_one_of_several_that_start_together(tmp_path):
    started = [start(tmp_path) for _ in range(4)]
    first = [process.stdout.readline() for process in started]
    assert sorted(first) == ["", "", "", "held\n"]
    for process in started:
        process.communicate("")
    assert sorted(process.returncode for process in started) == [0, 1, 1, 1]


def together(folder, count):
    """(locks, errors) of threads that acquire the folder at the same moment."""
    locks, errors, barrier = [], [], threading.Barrier(count)

    def take():
        barrier.wait()
        try:
            locks.append(RunLock(folder, **BEATS | {"settle": SETTLE}))
        except ValueError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=take) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return locks, errors


@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_without_flock_one_of_several_that_start_together(tmp_path, without_flock, count):
    locks, errors = together(tmp_path, count)
    assert len(locks) == 1 and len(errors) == count - 1
    locks[0].release()


def test_a_lease_without_beats_is_taken_over(tmp_path, monkeypatch, without_flock):
    elsewhere(monkeypatch)
    lock = RunLock(tmp_path, **BEATS | {"beat": 1e6})
    monkeypatch.undo()
    begin = time.monotonic()
    RunLock(tmp_path, **BEATS | {"lease": 1.0}).release()
    assert time.monotonic() - begin >= 1.0
    lock.release()


@pytest.mark.parametrize("has_flock", [True, False])
def test_a_holder_on_another_host_that_beats_keeps_its_folder(tmp_path, monkeypatch, has_flock):
    """Even where this host's flock does not see the other's."""
    flock = (lambda file, how: None) if has_flock else refuse
    monkeypatch.setattr(run_lock.fcntl, "flock", flock)
    lock = RunLock(tmp_path, **BEATS)
    elsewhere(monkeypatch)
    with pytest.raises(ValueError, match="in use by"):
        RunLock(tmp_path, **BEATS)
    lock.release()


def test_a_holder_that_lost_its_folder_ends(tmp_path):
    """The log names who took over."""
    program = HOLD.replace("Path(sys.argv[1])", "Path(sys.argv[1]), beat=0.1")
    process = start(".", program, cwd=tmp_path)
    assert process.stdout.readline() == "held\n"
    record = json.loads((tmp_path / NAME).read_text())
    record |= {"token": "another", "host": "tpu-7", "pid": 9}
    with process:
        while process.poll() is None:  # a beat may cross with a write
            (tmp_path / NAME).write_text(json.dumps(record))
            time.sleep(0.2)
        errors = process.stderr.read()
    assert process.returncode == run_lock.EXIT_LOST
    assert "process 9 on tpu-7" in errors and "took over" in errors


ODD = ["", "{", "[1]", '{"token": 1}', "\0" * 512, "9" * 5000, "[" * 99999]


@pytest.mark.parametrize("content", ODD, ids=len)
def test_a_damaged_file_locks_nobody_out(tmp_path, content):
    (tmp_path / NAME).write_text(content)
    RunLock(tmp_path, **BEATS).release()
    assert not (tmp_path / NAME).exists()
