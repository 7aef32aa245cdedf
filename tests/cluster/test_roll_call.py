"""A job that starts: who dies, stops or never comes is named by all who are there.

Nightly: processes of a job that starts say whom they wait for, and who stopped or ended.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
from support.paths import ROOT
from support.waiting import HANG, until

from distflow_jax.cluster import processes, startup
from distflow_jax.cluster.handshakes import open_listener
from distflow_jax.cluster.job import Job
from distflow_jax.cluster.startup import Registrar, StartMonitor, register
from distflow_jax.parsing.addresses import Address, reserved_port

ME = f"host {socket.gethostname()}, pid {os.getpid()}"


class Process:
    """One process of a job in this one: what it says when the job ends."""

    def __init__(self):
        self.reasons = []

    def wait(self):
        return until(lambda: self.reasons)[0]


@pytest.fixture
def job():
    """(process 0, join(index) -> (process, its monitor), process 0's registrar) of a job of 3."""
    listener, first = open_listener("127.0.0.1:0"), Process()
    coordinator = str(Address(*listener.getsockname()))

    def described(index):
        return Job("flags", "in a test", coordinator, 3, index)

    registrar = Registrar(described(0), first.reasons.append, listener, "127.0.0.1:1")
    with contextlib.ExitStack() as stack:
        stack.callback(registrar.close)

        def join(index):
            process = Process()
            _, connection = register(described(index), seconds=0.0)
            monitor = StartMonitor(described(index), process.reasons.append, connection)
            stack.callback(monitor.close)
            return process, monitor

        join.described = described
        yield first, join, registrar


def wait_for_beats(registrar, *indices):
    until(lambda: all(i in (m := registrar.members) and m[i].confirmed for i in indices))


def test_an_end_is_named_by_all_others(job):
    first, join, registrar = job
    (_, dead), (alive, _) = join(1), join(2)
    wait_for_beats(registrar, 1, 2)
    dead.close()
    wanted = f"process 1 ({ME}) ended while the job was starting"
    assert first.wait() == alive.wait() == wanted


def test_an_application_without_a_sign_of_life_is_no_process(job):
    """Its process has applied again, since the answer came late."""
    first, join, registrar = job
    _, connection = register(join.described(1), seconds=0.0)
    connection.close()
    second, _ = join(1)
    other, _ = join(2)
    time.sleep(1.5)  # longer than a look
    assert first.reasons == second.reasons == other.reasons == []
    assert registrar.members[1].place == ME and not registrar.members[1].ended


def test_an_end_of_process_0_is_named(job, monkeypatch):
    _, join, registrar = job
    process, _ = join(1)
    monkeypatch.setattr(registrar, "_send", lambda line: None)  # it has no time to say anything
    registrar.close()
    assert re.match(r"process 0 at 127.0.0.1:\d+ ended while the job was starting", process.wait())


def test_whoever_has_met_the_others_may_end(job):
    first, join, registrar = job
    (a, leaving), (b, staying) = join(1), join(2)
    for one in (leaving, staying, registrar):
        one.met()
    until(lambda: registrar.done)
    until(lambda: not any(one._thread.is_alive() for one in (leaving, staying)))
    leaving.close()
    registrar.close()
    time.sleep(1.5)  # longer than a beat
    assert first.reasons == a.reasons == b.reasons == []


@pytest.mark.slow
def test_who_gives_no_sign_is_named_and_then_ends_the_job(job, monkeypatch, caplog):
    monkeypatch.setattr(startup, "SILENT_SECONDS", 6.0)  # and none of the others is near it
    monkeypatch.setattr(startup, "LOST_SECONDS", 8.0)
    first, join, _ = job
    silent, monitor = join(1)
    other, _ = join(2)
    monkeypatch.setattr(monitor, "_send", lambda line: None)
    monkeypatch.setattr(monitor.members[0], "read", lambda now: [])
    line = rf"process 1 \({re.escape(ME)}\) has given no sign of life for \d+ s"
    assert re.fullmatch(line, first.wait()) and re.fullmatch(line, other.wait())
    assert re.search(f"{line}: it is stopped, or its host is overloaded", caplog.text)
    assert re.match(r"process 0 at .* has given no sign of life for \d+ s", silent.wait())


# -- real processes -------------------------------------------------------------------------------


@contextlib.contextmanager
def started(tmp_path, coordinator, count, *indices):
    """Processes of a job that is started by hand, by index; their output is in tmp_path."""
    processes = {}
    command = [sys.executable, "scripts/train.py", "--config=tiny", f"--workdir={tmp_path / 'run'}"]
    flags = [f"--coordinator={coordinator}", f"--num_processes={count}"]
    try:
        for index in indices:
            with (tmp_path / f"log.{index}").open("w") as log:
                processes[index] = subprocess.Popen(
                    [*command, *flags, f"--process_id={index}"],
                    cwd=ROOT,
                    env=os.environ | {"JAX_PLATFORMS": "cpu"},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
        yield processes
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def wait_for(tmp_path, processes, index, pattern):
    """The log of a process, once it has the pattern."""
    log = tmp_path / f"log.{index}"

    def is_there():
        ended = processes[index].poll() is not None
        found = re.search(pattern, log.read_text())
        assert found or not ended, log.read_text()
        return found

    until(is_there, log.read_text, pause=0.05)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_processes_say_whom_they_wait_for_and_who_ended(tmp_path):
    """A job of 4 by hand: process 0 comes late, process 3 never, process 2 stops and is killed."""
    with reserved_port("127.0.0.1") as address:
        coordinator = address
    with started(tmp_path, coordinator, 4, 1, 2) as peers:
        waits = rf"process 1 waits for process 0 at {coordinator}, for \d\d s so far"
        wait_for(tmp_path, peers, 1, waits)
        with started(tmp_path, coordinator, 4, 0) as first:
            everybody = peers | first
            for index in everybody:
                wait_for(tmp_path, everybody, index, "waiting for process 3 of 4, for 1. s so far")
            who = rf"process 2 \(host {re.escape(socket.gethostname())}, pid {peers[2].pid}\)"
            peers[2].send_signal(signal.SIGSTOP)
            for index in (0, 1):
                wait_for(tmp_path, everybody, index, f"{who} has given no sign of life for . s: it")
            peers[2].kill()
            for index in (0, 1):
                assert everybody[index].wait(HANG) == processes.EXIT_LOST
                log = (tmp_path / f"log.{index}").read_text()
                assert re.search(f"{who} ended while the job was starting; this process", log)
                assert "Traceback" not in log
