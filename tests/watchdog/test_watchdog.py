"""Jobs of small processes, no JAX, that are killed, stopped or stuck; and the watchdogs' rules.

Nightly: the death of process 0, which others look up first, is named as any other.
"""

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
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.paths import ROOT
from support.waiting import HANG, until

from distflow_jax.config.upkeep_config import HealthConfig
from distflow_jax.watchdog.controller import Watchdog
from distflow_jax.watchdog.gossip import (
    COLLECT_SECONDS,
    DIED,
    Peer,
    Record,
    Verdict,
    bodies,
)
from distflow_jax.watchdog.seals import Sealer

TOKEN = "a1b2"

# Silence for which a process may be taken for dead: longer than a busy machine leaves one waiting.
DEAD = 8.0
# A watchdog that gives the others all the time that a busy machine may need. It says by a file that
# it has seen its controller's end.
PATIENT = """
import pathlib, sys
sys.path.append(sys.argv[1])
from distflow_jax.watchdog import gossip, target
import distflow_jax.watchdog.monitor as monitor
rules = {rules}
monitor.SETTLE_SECONDS = rules["settle"]
monitor.FAILED_GRACE_SECONDS = {hang}
gossip.COLLECT_SECONDS = rules.get("collect", gossip.COLLECT_SECONDS)
if rules["answers"]:
    target.STACK_SECONDS = {hang}
note_end = monitor.Watch.note_end

def noted(self):
    note_end(self)
    pathlib.Path(rules["folder"], f"noted.{{self.index}}").touch()

monitor.Watch.note_end = noted
monitor.main(sys.argv[2])
"""
# One controller: python controller.py FOLDER INDEX COUNT MODE CONFIG RELAY PROGRAM. It tells the
# test by files what it is at.
CONTROLLER = """
import ctypes, json, os, pathlib, resource, sys, time
from distflow_jax.watchdog import controller
from distflow_jax.watchdog.controller import HealthConfig, Watchdog

folder, index, count, mode = pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:4]), sys.argv[4]
controller.PROGRAM = sys.argv[7]
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

def put(name, text):
    (folder / "new").with_suffix(f".{index}").write_text(text)
    os.replace((folder / "new").with_suffix(f".{index}"), folder / name)

def wait_for(*names):
    while not all((folder / name).exists() for name in names):
        time.sleep(0.01)

def busy_in_the_rollout(watchdog):
    # in an orderly job process 0 ends first, and the others go on for more than dead_seconds
    steps = 10**9 if mode != "done" else {dead_steps} if index else 5
    for step in range(1, steps + 1):
        watchdog.progress(step, "rollout")
        time.sleep(0.05)
        if mode == "stuck" and step == 3:
            if index != 2:
                watchdog.progress(step, "actor_train")
            put(f"there.{index}", "")
            time.sleep(1000)
        if mode == "fail" and step == 7 and index == 1:
            raise RuntimeError("the loss\\nis not finite")
        if mode == "abort" and (folder / "noted.1").exists():
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
""".replace("{dead_steps}", str(round(1.2 * DEAD / 0.05)))


class Job:
    """Controllers of one job, each with its own stderr."""

    def __init__(self, folder, count, mode, *, relay="", rules=None, **health):
        """`rules`: how long watchdogs `settle` and `collect`, in seconds."""
        self.folder, self.count = folder, count
        (folder / "controller.py").write_text(CONTROLLER)
        settings = json.dumps({"heartbeat_seconds": 0.2, "dead_seconds": HANG} | health)
        self.processes = []
        for index in range(count):
            own = {"folder": str(folder), "settle": 2.0, "answers": (mode, index) != ("stopped", 2)}
            program = PATIENT.format(rules=own | (rules or {}), hang=HANG)
            arguments = [folder / "controller.py", folder, index, count, mode, settings, relay]
            arguments.append(program)
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
        until(self.is_there, self.errors)

    def is_there(self):
        return all((self.folder / f"there.{i}").exists() for i in range(self.count))

    def wait_until_told(self, *indices):
        """Until these watchdogs have said why the job ends."""
        until(lambda: all(self.verdicts()[i] for i in indices), self.errors)

    def codes(self):
        """Exit codes of all processes once they have ended."""
        until(lambda: None not in self.running(), self.errors)
        return self.running()

    def running(self):
        """Exit codes of all processes, None for those that run."""
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

    def wait_for_watchdogs(self):
        until(lambda: not self.watchdogs(), self.errors, pause=0.1)

    def errors(self):
        return [(self.folder / f"stderr.{i}").read_text() for i in range(self.count)]

    def verdicts(self):
        """The first line of each watchdog, without its mark."""
        texts = [re.findall(r"^watchdog \d+: (.*)", text, re.M) for text in self.errors()]
        return [lines[0] if lines else "" for lines in texts]

    def verdict(self):
        """The reports of all watchdogs, after they have ended."""
        self.wait_for_watchdogs()
        first, *others = self.verdicts()
        assert others == [first] * (self.count - 1)
        return first

    def close(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()  # ends a stopped process too
            process.wait()
        for pid in self.watchdogs().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def jobs_in(folder):
    with contextlib.ExitStack() as jobs:
        yield lambda *args, **health: jobs.enter_context(
            contextlib.closing(Job(folder, *args, **health))
        )


@pytest.fixture
def start(tmp_path):
    with jobs_in(tmp_path) as started:
        yield started


WAITING = {}


def waiting(body):
    """A test that waits for a silence of DEAD seconds: all of these run at the same time."""
    WAITING[body.__name__] = body

    def test(begun):
        begun[body.__name__].result()

    test.__name__, test.__doc__ = body.__name__, body.__doc__
    return test


@pytest.fixture(scope="module")
def begun(request, tmp_path_factory):
    """The runs of the waiting tests, by name."""

    def run(name, folder):
        with jobs_in(folder) as started:
            WAITING[name](started)

    names = {item.originalname for item in request.session.items} & WAITING.keys()
    with ThreadPoolExecutor(len(names)) as pool:
        yield {name: pool.submit(run, name, tmp_path_factory.mktemp(name)) for name in names}


# -- whole jobs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_killed_process_is_named_by_all_and_the_others_end(start, victim):
    job = start(4, "loop")
    job.wait_until_there()
    os.killpg(job.pids[victim], signal.SIGKILL)  # as launchers do: the watchdog is not in it
    job.wait_until_told(victim)  # waited for before, it would leave no exit status to read
    codes = job.codes()
    assert codes == [-signal.SIGKILL] * 4
    first = job.verdict()
    assert re.match(
        rf"process {victim} died at step \d+ in node 'rollout', \d\d:\d\d:\d\d \(SIGKILL; last "
        rf"beat \d+\.\d s before; host {re.escape(socket.gethostname())}, "
        rf"pid {job.pids[victim]}\)(; nothing was heard of .*)?$",
        first,
    ), first
    for index, text in enumerate(job.errors()):
        survived = index != victim
        assert (f"this process ({index}) is at step" in text) == survived
        assert ("in busy_in_the_rollout" in text) == survived
        assert "_send_beats" not in text
        assert (f"pid {job.pids[index]}) ended by SIGKILL" in text) == survived


@waiting
def test_the_first_death_is_named_when_the_runtime_aborts_the_others(start):
    job = start(4, "abort", rules={"settle": 2.0, "collect": 10.0})
    job.wait_until_there()
    os.kill(job.pids[1], signal.SIGKILL)
    job.wait_until_told(1)
    assert job.codes() == [-signal.SIGKILL if i == 1 else -signal.SIGABRT for i in range(4)]
    first = job.verdict()
    assert first.startswith("process 1 died at step ")
    assert re.search(r"; after that ended (\d \(\+\d+\.\d\d s\)(, )?){3}", first), first


def test_an_exception_is_named_with_its_message(start):
    job = start(3, "fail")
    assert job.codes() == [-signal.SIGKILL, 1, -signal.SIGKILL]
    first = job.verdict()
    assert re.match(
        r"process 1 failed at step 7 in node 'rollout', [\d:]+, with RuntimeError: the loss is not "
        r"finite \(",
        first,
    ), first


@waiting
def test_a_process_that_is_stopped_is_named_and_ended(start):
    check_that_no_answer_is_named(start, "stopped")


@waiting
def test_a_process_that_keeps_its_interpreter_is_named_and_ended(start):
    check_that_no_answer_is_named(start, "lock")


def check_that_no_answer_is_named(start, mode):
    job = start(3, mode, dead_seconds=DEAD)
    job.wait_until_there()
    if mode == "stopped":
        os.kill(job.pids[2], signal.SIGSTOP)
    assert job.codes() == [-signal.SIGKILL] * 3
    first = job.verdict()
    assert re.match(
        r"process 2 is alive but does not respond, at step \d+ in node 'rollout' \((stopped by a "
        r"signal|sleeping: a call holds the interpreter's lock); last beat at [\d:]+; host ",
        first,
    ), first
    assert "in busy_in_the_rollout" in job.errors()[0]
    if mode == "stopped":
        assert "does not answer SIGUSR1" in job.errors()[2]
    else:  # faulthandler needs no lock
        assert "in busy_in_the_rollout" in job.errors()[2]


@waiting
def test_a_host_that_is_gone_is_named(start):
    job = start(3, "loop", dead_seconds=DEAD, rules={"settle": 5.0})
    job.wait_until_there()
    time.sleep(0.5)  # beats in which the others hear where it is
    for pid in (job.pids[1], job.watchdogs()[job.pids[1]]):
        os.kill(pid, signal.SIGSTOP)
    ended = [job.processes[i].wait(HANG) for i in (0, 2)]
    assert ended == [-signal.SIGKILL] * 2
    first, _, third = job.verdicts()
    assert re.match(
        r"the host of process 1 \(127\.0\.0\.1\) is unreachable, or its watchdog has ended: "
        r"nothing heard since [\d:]+, last at step \d+ in node '\w+'$",
        first,
    ), first
    assert third == first


@waiting
def test_who_is_waited_for_is_named(start):
    job = start(4, "stuck", dead_seconds=DEAD, stuck_seconds=DEAD + 0.5, rules={"settle": 5.0})
    assert job.codes() == [-signal.SIGKILL] * 4
    first = job.verdict()
    assert re.match(
        r"no progress since [\d:]+: process 2 is behind, at step 3 in node 'rollout'; the others "
        r"wait at step 3 in node 'actor_train'; if it only needs longer, raise "
        r"health.stuck_seconds$",
        first,
    ), first
    assert all("in busy_in_the_rollout" in text for text in job.errors())


@waiting
def test_a_single_process_that_is_stuck_says_where(start):
    job = start(1, "stuck", dead_seconds=DEAD, stuck_seconds=DEAD + 0.5)
    assert job.codes() == [-signal.SIGKILL]
    job.wait_for_watchdogs()
    assert "process 0 stuck at step 3 in node 'actor_train'" in job.verdicts()[0]
    assert "in busy_in_the_rollout" in job.errors()[0]


@waiting
def test_an_orderly_end_is_silent_and_leaves_nothing_behind(start):
    job = start(4, "done", dead_seconds=DEAD)
    assert job.codes() == [0] * 4
    job.wait_for_watchdogs()
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
    assert job.running() == [None, None]
    assert len(job.watchdogs()) == 2 and job.errors() == ["", ""]


@waiting
def test_datagrams_that_are_sent_again_keep_no_host_alive(start):
    """The beats of a host, recorded on the network, do not replace it when it is gone."""
    with socket.socket(type=socket.SOCK_DGRAM) as between:
        between.bind(("127.0.0.1", 0))
        between.settimeout(HANG)
        job = start(2, "loop", dead_seconds=DEAD, relay=f"127.0.0.1:{between.getsockname()[1]}")
        recorded = []
        # of both, whose watchdogs know each other by this address only
        while len(recorded) < 5 or not job.is_there():
            data, sender = between.recvfrom(1 << 16)
            for index in range(2):
                if address(job, index) != sender:
                    between.sendto(data, address(job, index))
                    recorded.append((data, address(job, index)))
        for pid in (job.pids[1], job.watchdogs()[job.pids[1]]):
            os.kill(pid, signal.SIGSTOP)

        def ended():
            for data, to in recorded:
                between.sendto(data, to)
            return job.processes[0].poll() is not None

        until(ended, job.errors)
        assert job.processes[0].poll() == -signal.SIGKILL
        assert "nothing heard since" in job.verdicts()[0]


@waiting
def test_watchdogs_that_are_started_again_are_believed(start):
    """Although they begin to count anew."""
    job = start(2, "loop", dead_seconds=DEAD)
    job.wait_until_there()
    time.sleep(0.5)
    before = set(job.watchdogs().values())
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    until(lambda: len(set(job.watchdogs().values()) - before) == 2, job.errors, pause=0.1)
    time.sleep(DEAD + 0.5)  # silence would have ended the job
    assert job.running() == [None, None], job.errors()
    os.kill(job.pids[1], signal.SIGKILL)
    job.wait_until_told(0, 1)
    assert job.codes() == [-signal.SIGKILL] * 2
    job.wait_for_watchdogs()
    found = [re.findall(r"^watchdog \d: (process 1 died .*)", e, re.M) for e in job.errors()]
    assert len(found[0]) == 1 and found[0] == found[1], job.errors()


# -- the controller's side ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stuck_seconds": math.nan}, ["health.stuck_seconds", "finite", "nan"]),
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
    config = HealthConfig(heartbeat_seconds=0.05, dead_seconds=HANG)
    with Watchdog.start(config, index=0, count=1, host="127.0.0.1") as watchdog:
        address, first = watchdog.address, watchdog._child
        first.kill()
        first.wait()
        watchdog.progress(1, "rollout")
        until(lambda: "another one is started" in caplog.text)
        watchdog.progress(1, "reward")
        assert watchdog._child is not first and watchdog._child.poll() is None
        assert watchdog.address == address
    assert watchdog._child.wait(HANG) == 0


def test_a_watchdog_that_does_not_read_does_not_stop_the_training():
    with Watchdog.start(HealthConfig(), index=0, count=1, host="127.0.0.1") as watchdog:
        os.kill(watchdog._child.pid, signal.SIGSTOP)
        for step in range(5000):  # more than a pipe holds: one that waits for room waits for ever
            watchdog.progress(step, "rollout")
        assert watchdog._unsent
        os.kill(watchdog._child.pid, signal.SIGCONT)
        until(lambda: watchdog.progress(5000, "rollout") or not watchdog._unsent)
    assert watchdog._child.wait(HANG) == 0


def test_the_watchdog_process_is_small_and_idle():
    with Watchdog.start(HealthConfig(), index=0, count=1, host="127.0.0.1") as watchdog:
        folder = pathlib.Path(f"/proc/{watchdog._child.pid}")

        def sleeps():
            """How often it has gone to sleep; 0 while it runs."""
            status = (folder / "status").read_text()
            found = re.search(r"State:\s+S.*\nvoluntary_ctxt_switches:\s+(\d+)", status, re.DOTALL)
            return int(found[1]) if found else 0

        before, began = until(sleeps), time.monotonic()
        time.sleep(1.0)
        # two a second; the more the longer this process itself was kept waiting
        assert until(sleeps) - before < 20 + 10 * (time.monotonic() - began)
        resident_kb = int(re.search(r"VmRSS:\s+(\d+)", (folder / "status").read_text())[1])
        libraries = (folder / "maps").read_text()
    assert resident_kb < 20_000
    assert "site-packages" not in libraries
