"""Jobs of small processes, no JAX, that are killed, stopped or stuck; and the watchdogs' rules."""

import contextlib
import json
import math
import os
import pathlib
import random
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
    ALL_TO_ALL,
    COLLECT_SECONDS,
    DATAGRAM_BYTES,
    DIED,
    DONE,
    FAILED,
    FANOUT,
    Limits,
    Peer,
    Record,
    Verdict,
    better,
    datagrams,
    describe,
    find_verdict,
    gossip_targets,
    merge,
    names,
    order_of_deaths,
    parse,
)
from distflow_jax.watchdog.target import STACK_LINES, arrange_stacks

LIMITS = Limits(heartbeat=1.0, dead=30.0, stuck=1800.0)
TOKEN = "a1b2"

# One controller: python controller.py FOLDER INDEX COUNT MODE CONFIG. It tells the test by files
# what it is at, and the test tells it that somebody was killed by the file "killed".
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
watchdog.connect([(folder / name).read_text() for name in addresses], "a1b2")
with watchdog:
    busy_in_the_rollout(watchdog)
"""


class Job:
    """Controllers of one job, each with its own stderr."""

    def __init__(self, folder, count, mode, **health):
        self.folder, self.count = folder, count
        (folder / "controller.py").write_text(CONTROLLER)
        settings = json.dumps({"heartbeat_seconds": 0.2, "dead_seconds": 30.0} | health)
        self.processes = []
        for index in range(count):
            arguments = [folder / "controller.py", folder, index, count, mode, settings]
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
        r"wait at step 3 in node 'actor_train'$",
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


def test_foreign_datagrams_are_ignored(start):
    job = start(2, "loop")
    job.wait_until_there()
    host, _, port = (job.folder / "address.0").read_text().rpartition(":")
    dead = Peer(Record(1, 10**6, 1, 1, "x", DIED), 0.0, 0.0, 0.0)
    verdict = Verdict("died", 1, "a lie")
    with socket.socket(type=socket.SOCK_DGRAM) as stranger:
        for data in (
            datagrams("wrong", [dead], verdict, 0.0)[0],
            b"",
            b"a1b2",
            b"a1b2\n",
            b"a1b2\n" + b"[" * 60000,
            b'a1b2\n{"rows":[[1]],"verdict":null}',
            b'a1b2\n{"rows":[[1,2,3,4,"x","gone"]],"verdict":null}',
            b'a1b2\n{"rows":[],"verdict":["died",1]}',
            b"a1b2\n\xff\xfe",
            os.urandom(1000),
        ):
            stranger.sendto(data, (host, int(port)))
    time.sleep(COLLECT_SECONDS + 0.7)
    assert job.codes(0) == [None, None]
    assert len(job.watchdogs()) == 2 and job.errors() == ["", ""]


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


def test_a_dead_watchdog_does_not_stop_the_training(caplog):
    with Watchdog.start(HealthConfig(), index=0, count=1, host="127.0.0.1") as watchdog:
        watchdog._child.kill()
        watchdog._child.wait()
        watchdog.progress(1, "rollout")
        watchdog.progress(1, "reward")
    assert [record.message for record in caplog.records] == [
        "the watchdog of this process has ended; the process is not watched"
    ]


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


# -- tables ---------------------------------------------------------------------------------------


def table_of(*peers):
    return {peer.record.index: peer for peer in peers}


def running(index, sequence=10, heard=100.0, moved=100.0, phase="rollout"):
    return Peer(Record(index, 5, sequence, 7, phase), heard, moved)


def ended(index, at, *, after=-1, cause="", state=DIED, heard=None):
    record = Record(index, 6, 10, 7, "rollout", state, 0, after, cause, "host b, pid 9")
    return Peer(record, at if heard is None else heard, 0.0, at)


def test_the_higher_version_wins_and_times_are_those_of_arrival():
    before = table_of(running(0), running(1))
    newer = Record(1, 6, 11, 7, "reward")
    after = merge(before, [newer, Record(0, 4, 99), Record(5, 1)], 107.0)
    assert after[1] == Peer(newer, 107.0, 107.0)
    assert after[0] == before[0] and 5 not in after
    assert before == table_of(running(0), running(1))
    beat = merge(after, [newer._replace(version=7)], 108.0)[1]
    assert (beat.heard, beat.moved) == (108.0, 107.0)


def test_the_time_of_a_death_is_that_of_the_fastest_copy():
    death = Record(1, 6, 10, 7, "rollout", DIED, ended_ms=300)
    table = merge(table_of(running(0), running(1)), [death], 110.0)
    assert (table[1].ended, table[1].heard) == (pytest.approx(109.7), 110.0)
    table = merge(table, [death._replace(ended_ms=700)], 110.2)
    assert table[1].ended == pytest.approx(109.5) and table[1].heard == 110.0
    table = merge(table, [death._replace(ended_ms=700)], 111.0)  # a slow one
    assert table[1].ended == pytest.approx(109.5)


def test_a_table_travels_in_datagrams_that_are_not_fragmented():
    peers = [running(i, phase="actor_old_log_prob") for i in range(200)]
    peers += [ended(200, 99.5, cause="ValueError: " + "x" * 200, after=3)]
    peers += [Peer(Record(201, 9, state=DONE), 1.0, 1.0)]
    verdict = Verdict("died", 3, "process 200 failed: Ärger" + "y" * 500)
    parts = datagrams(TOKEN, peers, verdict, 100.0)
    assert max(map(len, parts)) <= DATAGRAM_BYTES
    decoded = [parse(part, TOKEN) for part in parts]
    assert all(said == verdict for _, said in decoded)
    records = [record for rows, _ in decoded for record in rows]
    assert records == [
        p.record._replace(ended_ms=500) if p.record.state == DIED else p.record for p in peers
    ]


def test_small_jobs_tell_everybody():
    draw = random.Random(0)
    assert gossip_targets(1, 4, 9, draw) == [0, 2, 3]
    assert len(gossip_targets(3, ALL_TO_ALL, 0, draw)) == ALL_TO_ALL - 1
    assert gossip_targets(0, 1, 0, draw) == []


@pytest.mark.parametrize("lost", [0.0, 0.5])
def test_in_large_jobs_everything_is_known_soon_everywhere(lost):
    count = 40
    draws = [random.Random(i) for i in range(count)]
    network = random.Random(1)
    tables = [{j: Peer(Record(j), 0.0, 0.0) for j in range(count)} for _ in range(count)]
    oldest = []
    for tick in range(1, 41):
        for i, table in enumerate(tables):
            table[i] = Peer(Record(i, version=tick), tick, 0.0)
        before = [dict(table) for table in tables]
        for i in range(count):
            told = gossip_targets(i, count, tick, draws[i])
            assert len(set(told)) == FANOUT and i not in told
            parts = datagrams(TOKEN, before[i].values(), None, tick)
            for j in told:
                if network.random() >= lost:
                    for part in parts:
                        tables[j] = merge(tables[j], parse(part, TOKEN)[0], tick)
        oldest.append(tick - min(p.record.version for t in tables for p in t.values()))
    # what find_verdict allows for
    assert max(oldest[20:]) <= (6 if lost == 0 else 12)


# -- verdicts -------------------------------------------------------------------------------------


def judge(table, now, own=0, beat_age=0.5):
    return find_verdict(table, own, now, beat_age, LIMITS)


def words(kind, who, table, now):
    wall = time.mktime((2025, 1, 2, 12, 0, 0, 0, 0, -1))
    hosts = [f"10.0.0.{i}" for i in range(len(table))]
    return describe(kind, who, table, now, wall=wall, limits=LIMITS, hosts=hosts)


def test_a_healthy_job_has_no_verdict():
    assert judge(table_of(running(0), running(1)), 110.0) is None
    assert judge(table_of(running(0)), 110.0) is None


def test_deaths_are_collected_before_one_is_named():
    table = table_of(running(0), ended(1, at=109.9, heard=110.0))
    assert judge(table, 110.0 + 0.9 * COLLECT_SECONDS) is None
    assert judge(table, 110.0 + 1.1 * COLLECT_SECONDS) == ("died", [1])
    assert judge(table_of(ended(0, at=110.0)), 110.0) == ("died", [0])  # nobody to wait for


def test_a_death_seen_after_another_is_its_consequence():
    # clocks of arrival say that 0 was first, its watchdog knows better
    table = table_of(ended(0, at=110.0, after=2), ended(1, at=110.3), ended(2, at=110.1))
    assert order_of_deaths(table) == ([2], [0, 1])


def test_a_signal_explains_an_abort_but_not_the_reverse():
    table = table_of(ended(0, at=110.0, cause="SIGABRT"), ended(1, at=110.1, cause="SIGKILL"))
    assert order_of_deaths(table) == ([1], [0])
    table = table_of(ended(0, at=110.0, cause="SIGABRT"), ended(1, at=111.0, cause="SIGKILL"))
    assert order_of_deaths(table) == ([0], [1])


def test_a_lost_connection_is_a_consequence_even_where_it_is_noticed_first():
    gloo = "JaxRuntimeError: Gloo AllGather failed: Connection reset by peer"
    table = table_of(
        ended(0, at=110.01, after=3),  # killed, and noticed late by a busy host
        ended(1, at=110.01, after=3, cause=gloo, state="failed"),
        ended(2, at=110.2, after=3, cause="SIGABRT"),
        ended(3, at=110.0, cause=gloo, state="failed"),
    )
    assert order_of_deaths(table) == ([0], [3, 1, 2])
    alone = table_of(running(0), ended(1, at=110.0, cause=gloo, state="failed"))
    assert order_of_deaths(alone) == ([1], [])


def test_deaths_at_the_same_time_are_both_named():
    table = table_of(ended(0, at=110.01), ended(1, at=110.0), ended(2, at=110.2), running(3))
    assert order_of_deaths(table) == ([1, 0], [2])
    text = words("died", [1, 0], table, 112.0)
    assert text == (
        "process 1 died at step 7 in node 'rollout', 11:59:58 (reason unknown; host b, pid 9); "
        "process 0 died at step 7 in node 'rollout', 11:59:58 (reason unknown; host b, pid 9); "
        "within 0.02 s, so the order is not certain; after that ended 2 (+0.20 s); nothing was "
        "heard of process 3 for some time before"
    )


def test_a_failure_is_told_with_its_message():
    table = table_of(running(0, heard=110.0), ended(1, at=110.0, state=FAILED, cause="OSError: x"))
    assert words("died", [1], table, 110.0) == (
        "process 1 failed at step 7 in node 'rollout', 12:00:00, with OSError: x (host b, pid 9)"
    )


def test_only_the_own_watchdog_says_that_a_process_is_silent():
    table = table_of(running(0, heard=131.0), running(1, heard=131.0))
    assert judge(table, 131.0, beat_age=29.0) is None
    assert judge(table, 131.0, beat_age=31.0) == ("silent", [0])
    closed = {0: Peer(Record(0, state=DONE), 100.0, 100.0), 1: table[1]}
    assert judge(closed, 131.0, beat_age=31.0) is None


def test_hosts_not_heard_of_are_unreachable():
    table = table_of(running(0), running(1, heard=131.0), running(2), running(3))
    assert judge(table, 129.0) is None
    assert judge(table, 131.0) == ("unreachable", [2, 3])  # one's own entry is not judged
    assert words("unreachable", [2, 3], table, 131.0) == (
        "the host of processes 2, 3 (10.0.0.2, 10.0.0.3) is unreachable, or its watchdog has "
        "ended: nothing heard since 11:59:29, last at step 7 in node 'rollout'"
    )
    done = {**table, 2: Peer(Record(2, state=DONE), 0.0, 0.0), 3: running(3, heard=130.0)}
    assert judge(done, 131.0) is None


def test_gossip_has_more_time():
    table = {i: running(i, heard=100.0 if i == 5 else 140.0) for i in range(40)}
    assert judge(table, 131.0) is None
    assert judge(table, 143.0) == ("unreachable", [5])


def test_those_behind_are_named_when_nobody_moves():
    heard = 2000.0
    table = table_of(
        running(0, 12, heard, 190.0, "actor_train"),
        running(1, 11, heard, 150.0),
        running(2, 11, heard, 100.0),
        running(3, 12, heard, 200.0, "actor_train"),
    )
    assert judge(table, 1999.0) is None
    assert judge(table, 2001.0) == ("stuck", [1, 2])
    assert words("stuck", [1, 2], table, 2001.0) == (
        "no progress since 11:29:59: processes 1, 2 are behind, at step 7 in node 'rollout'; the "
        "others wait at step 7 in node 'actor_train'"
    )
    same = table_of(running(0, 12, heard), running(1, 12, heard))
    assert judge(same, 2001.0) == ("stuck", [0, 1])
    assert words("stuck", [0, 1], same, 2001.0).endswith(
        ": all processes stuck at step 7 in node 'rollout'"
    )
    left = same | {2: Peer(Record(2, state=DONE), 0.0, 0.0)}
    assert words("stuck", [0, 1], left, 2001.0).endswith("; process 2 had ended in order")


def test_all_prefer_the_same_verdict():
    died, late = Verdict("died", 0, "a"), Verdict("died", 3, "b")
    silent = Verdict("silent", 2, "c")
    assert better(None, late) == late
    assert better(late, died) == better(died, late) == died
    assert better(died, silent) == better(silent, died) == silent


def test_long_lists_of_processes_are_cut():
    assert names([3]) == "process 3"
    assert names(range(100)) == "processes 0, 1, 2, 3, 4, 5, 6, 7 and 92 more"
    table = {i: ended(i, at=100.0 + i, cause="x" * 300) for i in range(1000)}
    assert len(words("died", [0], table, 1100.0)) <= 800


def test_stack_traces_begin_with_the_main_thread():
    text = (
        "Thread 0x00000000000000aa (most recent call first):\n  File w.py, line 1 in work\n\n"
        "Thread 0x00000000000000bb (most recent call first):\n  File t.py, line 1 in _send_beats\n"
        "\nCurrent thread 0x00000000000000cc (most recent call first):\n  File m.py, line 1 in m\n"
    )
    assert [line.split()[-1] for line in arrange_stacks(text, 0xCC)] == [
        "first):",
        "m",
        "first):",
        "work",
    ]
    many = arrange_stacks("\n\n".join([text.strip()] * 50), 0xCC)
    assert len(many) == STACK_LINES + 1 and many[-1] == "  (140 more lines)"
