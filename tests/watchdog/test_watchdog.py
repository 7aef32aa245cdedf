"""Jobs of small processes, no JAX, that are killed, stopped or stuck; and the watchdogs' rules."""

import contextlib
import json
import math
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
from support.paths import ROOT

from distflow_jax.watchdog.controller import HealthConfig, Watchdog
from distflow_jax.watchdog.gossip import (
    COLLECT_SECONDS,
    DIED,
    Limits,
    Peer,
    Record,
    Verdict,
    bodies,
)
from distflow_jax.watchdog.seals import Sealer

LIMITS = Limits(heartbeat=1.0, dead=30.0, stuck=1800.0)
TOKEN = "a1b2"

# One controller: python controller.py FOLDER INDEX COUNT MODE CONFIG RELAY. It tells the test by
# files what it is at, and the test tells it that somebody was killed by the file "killed".
CONTROLLER = """
import ctypes, json, os, pathlib, resource, sys, time
from distflow_jax.watchdog.controller import HealthConfig, Watchdog

folder, index, count, mode = pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:4]), sys.argv[4]
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

def put(name, text):
    (folder / "new").with_suffix(f".{index}").write_text(text)
    os.replace((folder / "new").with_suffix(f".{index}"), folder / name)

def wait_for(*names):
    while not all((folder / name).exists() for name in names):
        time.sleep(0.01)

def busy_in_the_rollout(watchdog):
    # in an orderly job process 0 ends first, and the others go on for more than dead_seconds
    steps = 10**9 if mode != "done" else 110 if index else 5
    for step in range(1, steps + 1):
        watchdog.progress(step, "rollout")
        time.sleep(0.02)
        if mode == "stuck" and step == 3:
            if index != 2:
                watchdog.progress(step, "actor_train")
            put(f"there.{index}", "")
            time.sleep(1000)
        if mode == "fail" and step == 7 and index == 1:
            raise RuntimeError("the loss\\nis not finite")
        if mode == "abort" and (folder / "killed").exists():
            time.sleep(0.1)
            os.abort()
        if mode == "lock" and step == 7 and index == 2:
            ctypes.PyDLL(None).sleep(1000)  # a call that keeps the interpreter's lock
        if step == 5:
            put(f"there.{index}", "")

watchdog = Watchdog.start(
    HealthConfig(**json.loads(sys.argv[5])), index=index, count=count, host="127.0.0.1"
)
put(f"address.{index}", watchdog.address)
addresses = [f"address.{i}" for i in range(count)]
wait_for(*addresses)
relay = sys.argv[6]
peers = [relay or (folder / name).read_text() for name in addresses]
watchdog.connect(peers, "a1b2")
with watchdog:
    busy_in_the_rollout(watchdog)
"""


class Job:
    """Controllers of one job, each with its own stderr."""

    def __init__(self, folder, count, mode, *, relay="", **health):
        self.folder, self.count = folder, count
        (folder / "controller.py").write_text(CONTROLLER)
        settings = json.dumps({"heartbeat_seconds": 0.2, "dead_seconds": 30.0} | health)
        self.processes = []
        for index in range(count):
            arguments = [folder / "controller.py", folder, index, count, mode, settings, relay]
            with (folder / f"stderr.{index}").open("w") as stderr:
                process = subprocess.Popen(
                    [sys.executable, *map(str, arguments)],
                    stderr=stderr,
                    env={**os.environ, "PYTHONPATH": str(ROOT)},
                    start_new_session=True,
                )
            self.processes.append(process)
        self.pids = [process.pid for process in self.processes]

    def wait_until_there(self):
        """Until all have reached the step in which something will happen."""
        deadline = time.monotonic() + 30
        while not all((self.folder / f"there.{i}").exists() for i in range(self.count)):
            assert time.monotonic() < deadline, self.errors()
            time.sleep(0.02)

    def codes(self, timeout):
        """Exit codes of all processes that end within `timeout` seconds, None for the others."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        return [process.poll() for process in self.processes]

    def watchdogs(self):
        """The watchdogs that run, by /proc: controller's pid -> watchdog's pid."""
        found = {}
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                line = path.read_text()
                pid = re.search(r'watchdog\.monitor.*"pid": (\d+)', line, re.DOTALL)
                if pid and int(pid[1]) in self.pids:
                    found[int(pid[1])] = int(path.parent.name)
        return found

    def wait_for_watchdogs(self, timeout):
        deadline = time.monotonic() + timeout
        while self.watchdogs() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not self.watchdogs(), self.errors()

    def errors(self):
        return [(self.folder / f"stderr.{i}").read_text() for i in range(self.count)]

    def verdicts(self):
        """The first line of each watchdog, without its mark."""
        texts = [re.findall(r"^watchdog \d+: (.*)", text, re.M) for text in self.errors()]
        return [lines[0] if lines else "" for lines in texts]

    def close(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()  # ends a stopped process too
            process.wait()
        for pid in self.watchdogs().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def start(tmp_path):
    with contextlib.ExitStack() as jobs:
        yield lambda *args, **health: jobs.enter_context(
            contextlib.closing(Job(tmp_path, *args, **health))
        )


# -- whole jobs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_process_is_named_by_all_and_the_others_end(start, victim):
    job = start(4, "loop")
    job.wait_until_there()
    os.killpg(job.pids[victim], signal.SIGKILL)  # as launchers do: the watchdog is not in it
    time.sleep(0.3)  # waited for at once, it would leave no exit status for the watchdog to read
    codes = job.codes(10)
    assert codes == [-signal.SIGKILL] * 4
    job.wait_for_watchdogs(4)
    first, *others = job.verdicts()
    assert re.match(
        rf"process {victim} died at step \d+ in node 'rollout', \d\d:\d\d:\d\d \(SIGKILL; last "
        rf"beat \d\.\d s before; host {re.escape(socket.gethostname())}, "
        rf"pid {job.pids[victim]}\)$",
        first,
    ), first
    assert others == [first] * 3
    for index, text in enumerate(job.errors()):
        survived = index != victim
        assert (f"this process ({index}) is at step" in text) == survived
        assert ("in busy_in_the_rollout" in text) == survived
        assert "_send_beats" not in text
        assert (f"pid {job.pids[index]}) ended by SIGKILL" in text) == survived


def test_the_first_death_is_named_when_the_runtime_aborts_the_others(start):
    job = start(4, "abort")
    job.wait_until_there()
    job.processes[1].kill()
    (job.folder / "killed").touch()
    assert job.codes(10) == [-signal.SIGKILL if i == 1 else -signal.SIGABRT for i in range(4)]
    job.wait_for_watchdogs(4)
    first, *others = job.verdicts()
    assert first.startswith("process 1 died at step ") and others == [first] * 3
    assert re.search(r"; after that ended (\d \(\+0\.\d\d s\)(, )?){3}$", first), first


def test_an_exception_is_named_with_its_message(start):
    job = start(3, "fail")
    assert job.codes(15) == [-signal.SIGKILL, 1, -signal.SIGKILL]
    job.wait_for_watchdogs(4)
    first, *others = job.verdicts()
    assert re.match(
        r"process 1 failed at step 7 in node 'rollout', [\d:]+, with RuntimeError: the loss is not "
        r"finite \(",
        first,
    ), first
    assert others == [first] * 2


@pytest.mark.parametrize("mode", ["loop", "lock"])
def test_a_process_that_does_not_respond_is_named_and_ended(start, mode):
    job = start(3, mode, dead_seconds=1.5)
    job.wait_until_there()
    if mode == "loop":
        os.kill(job.pids[2], signal.SIGSTOP)
    assert job.codes(10) == [-signal.SIGKILL] * 3
    job.wait_for_watchdogs(4)
    first, *others = job.verdicts()
    assert re.match(
        r"process 2 is alive but does not respond, at step \d+ in node 'rollout' \((stopped by a "
        r"signal|sleeping: a call holds the interpreter's lock); last beat at [\d:]+; host ",
        first,
    ), first
    assert others == [first] * 2
    assert "in busy_in_the_rollout" in job.errors()[0]
    if mode == "loop":
        assert "does not answer SIGUSR1" in job.errors()[2]
    else:  # faulthandler needs no lock
        assert "in busy_in_the_rollout" in job.errors()[2]


def test_a_host_that_is_gone_is_named(start):
    job = start(3, "loop", dead_seconds=1.5)
    job.wait_until_there()
    time.sleep(0.5)  # beats in which the others hear where it is
    for pid in (job.pids[1], job.watchdogs()[job.pids[1]]):
        os.kill(pid, signal.SIGSTOP)
    ended = [job.processes[i].wait(timeout=10) for i in (0, 2)]
    assert ended == [-signal.SIGKILL] * 2
    first, _, third = job.verdicts()
    assert re.match(
        r"the host of process 1 \(127\.0\.0\.1\) is unreachable, or its watchdog has ended: "
        r"nothing heard since [\d:]+, last at step \d+ in node 'rollout'$",
        first,
    ), first
    assert third == first


def test_who_is_waited_for_is_named(start):
    job = start(4, "stuck", dead_seconds=1.5, stuck_seconds=1.7)
    assert job.codes(20) == [-signal.SIGKILL] * 4
    job.wait_for_watchdogs(4)
    first, *others = job.verdicts()
    assert re.match(
        r"no progress since [\d:]+: process 2 is behind, at step 3 in node 'rollout'; the others "
        r"wait at step 3 in node 'actor_train'; if it only needs longer, raise "
        r"health.stuck_seconds$",
        first,
    ), first
    assert others == [first] * 3
    assert all("in busy_in_the_rollout" in text for text in job.errors())


def test_a_single_process_that_is_stuck_says_where(start):
    job = start(1, "stuck", dead_seconds=1.0, stuck_seconds=1.2)
    assert job.codes(20) == [-signal.SIGKILL]
    job.wait_for_watchdogs(4)
    assert "process 0 stuck at step 3 in node 'actor_train'" in job.verdicts()[0]
    assert "in busy_in_the_rollout" in job.errors()[0]


def test_an_orderly_end_is_silent_and_leaves_nothing_behind(start):
    job = start(4, "done", dead_seconds=1.5)
    assert job.codes(20) == [0] * 4
    job.wait_for_watchdogs(3)
    assert job.errors() == [""] * 4


def address(job, index):
    host, _, port = (job.folder / f"address.{index}").read_text().rpartition(":")
    return host, int(port)


def test_foreign_datagrams_are_ignored(start):
    job = start(2, "loop")
    job.wait_until_there()
    dead = Peer(Record(1, 10**6, 1, 1, "x", DIED), 0.0, 0.0, 0.0)
    lie = bodies([dead], Verdict("died", 1, "a lie"), 0.0)[0]
    later = 1000  # of a generation that is not there yet: new to everybody
    with socket.socket(type=socket.SOCK_DGRAM) as stranger:
        for data in (
            lie,
            TOKEN.encode() + b"\n" + lie,
            Sealer(b"wrong", 1, later).seal(lie),
            Sealer(TOKEN.encode(), 0, later).seal(lie),  # the receiver's own
            Sealer(TOKEN.encode(), 2, later).seal(lie),  # of no process
            Sealer(TOKEN.encode(), 1, later).seal(lie)[:-1],
            b"",
            os.urandom(1000),
            *(
                Sealer(TOKEN.encode(), 1, later + i).seal(body)
                for i, body in enumerate(
                    (
                        b"",
                        b"[" * 60000,
                        b'{"rows":[[1]],"verdict":null}',
                        b'{"rows":[[1,2,3,4,"x","gone"]],"verdict":null}',
                        b'{"rows":[],"verdict":["died",1]}',
                        b"\xff\xfe",
                    )
                )
            ),
        ):
            stranger.sendto(data, address(job, 0))
    time.sleep(COLLECT_SECONDS + 0.7)
    assert job.codes(0) == [None, None]
    assert len(job.watchdogs()) == 2 and job.errors() == ["", ""]


def test_datagrams_that_are_sent_again_keep_no_host_alive(start):
    """The beats of a host, recorded on the network, do not replace it when it is gone."""
    with socket.socket(type=socket.SOCK_DGRAM) as between:
        between.bind(("127.0.0.1", 0))
        between.settimeout(10)
        job = start(2, "loop", dead_seconds=1.5, relay=f"127.0.0.1:{between.getsockname()[1]}")
        job.wait_until_there()
        recorded = []
        for _ in range(5):  # of both, whose watchdogs know each other by this address only
            data, sender = between.recvfrom(1 << 16)
            for index in range(2):
                if address(job, index) != sender:
                    between.sendto(data, address(job, index))
                    recorded.append((data, address(job, index)))
        for pid in (job.pids[1], job.watchdogs()[job.pids[1]]):
            os.kill(pid, signal.SIGSTOP)
        deadline = time.monotonic() + 20
        while job.processes[0].poll() is None and time.monotonic() < deadline:
            for data, to in recorded:
                between.sendto(data, to)
            time.sleep(0.1)
        assert job.processes[0].poll() == -signal.SIGKILL
        assert "nothing heard since" in job.verdicts()[0]


def test_watchdogs_that_are_started_again_are_believed(start):
    """Although they begin to count anew."""
    job = start(2, "loop", dead_seconds=2.0)
    job.wait_until_there()
    time.sleep(0.5)
    before = set(job.watchdogs().values())
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while len(set(job.watchdogs().values()) - before) < 2:
        assert time.monotonic() < deadline, job.errors()
        time.sleep(0.05)
    time.sleep(2.5)  # longer than dead_seconds: silence would have ended the job
    assert job.codes(0) == [None, None], job.errors()
    os.kill(job.pids[1], signal.SIGKILL)
    time.sleep(0.3)
    assert job.codes(10) == [-signal.SIGKILL] * 2
    job.wait_for_watchdogs(4)
    found = [re.findall(r"^watchdog \d: (process 1 died .*)", e, re.M) for e in job.errors()]
    assert len(found[0]) == 1 and found[0] == found[1], job.errors()


# -- the controller's side ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"heartbeat_seconds": 0.0}, ["health.heartbeat_seconds", "positive", "0"]),
        ({"dead_seconds": -1.0}, ["health.dead_seconds", "positive", "-1"]),
        ({"stuck_seconds": math.nan}, ["health.stuck_seconds", "positive", "nan"]),
        ({"heartbeat_seconds": 20.0}, ["health.dead_seconds", "30", "60", "20"]),
        ({"stuck_seconds": 30.0}, ["health.stuck_seconds", "more than", "dead_seconds=30"]),
    ],
)
def test_a_config_that_cannot_work_is_refused(changes, words):
    with pytest.raises(ValueError) as error:
        HealthConfig(**changes)
    assert all(word in str(error.value) for word in words), error.value


def test_without_a_watchdog_nothing_happens():
    with Watchdog.start(HealthConfig(enabled=False), index=0, count=2, host="nowhere") as watchdog:
        assert watchdog.address == ""
        watchdog.connect(["", ""], TOKEN)
        watchdog.progress(1, "rollout")
    watchdog.failed("after the end")


def test_a_host_without_that_address_is_an_error():
    with pytest.raises(OSError, match=r"no watchdog on '192\.0\.2\.1'"):
        Watchdog.start(HealthConfig(), index=0, count=1, host="192.0.2.1")


def test_missing_addresses_are_an_error():
    watchdog = Watchdog.start(HealthConfig(), index=0, count=2, host="127.0.0.1")
    with watchdog, pytest.raises(ValueError, match="1 watchdog addresses for 2 processes"):
        watchdog.connect([watchdog.address], TOKEN)


def test_a_killed_watchdog_is_started_again(caplog):
    """At the same address, where the others' news arrives."""
    config = HealthConfig(heartbeat_seconds=0.05, dead_seconds=1.0)
    with Watchdog.start(config, index=0, count=1, host="127.0.0.1") as watchdog:
        address, first = watchdog.address, watchdog._child
        first.kill()
        first.wait()
        watchdog.progress(1, "rollout")
        deadline = time.monotonic() + 60
        while "another one is started" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        watchdog.progress(1, "reward")
        assert watchdog._child is not first and watchdog._child.poll() is None
        assert watchdog.address == address
    assert watchdog._child.wait(timeout=10) == 0


def test_a_watchdog_that_does_not_read_does_not_stop_the_training():
    with Watchdog.start(HealthConfig(), index=0, count=1, host="127.0.0.1") as watchdog:
        os.kill(watchdog._child.pid, signal.SIGSTOP)
        started = time.monotonic()
        for step in range(5000):  # more than a pipe holds
            watchdog.progress(step, "rollout")
        assert time.monotonic() - started < 2.0
        os.kill(watchdog._child.pid, signal.SIGCONT)
    assert watchdog._child.wait(timeout=5) == 0


def test_the_watchdog_process_is_small_and_idle():
    with Watchdog.start(HealthConfig(), index=0, count=1, host="127.0.0.1") as watchdog:
        folder = pathlib.Path(f"/proc/{watchdog._child.pid}")
        ticks = [sum(map(int, (folder / "stat").read_text().split()[13:15]))]
        time.sleep(1.0)
        ticks.append(sum(map(int, (folder / "stat").read_text().split()[13:15])))
        resident_kb = int(re.search(r"VmRSS:\s+(\d+)", (folder / "status").read_text())[1])
        libraries = (folder / "maps").read_text()
    assert resident_kb < 20_000
    assert ticks[1] - ticks[0] <= 1  # of 10 ms: 1 % of a core
    assert "site-packages" not in libraries
