"""Processes of a local launch: the first failure ends all, gives the exit code, leaves nothing.

Nightly: a child that is stopped is named at once.
"""

import os
import queue
import re
import signal
import socket
import subprocess
import sys
import types

import pytest
from support.paths import ROOT
from support.programs import alive, finished
from support.waiting import HANG, rest_of, until

from distflow_jax.commands.launch import local

LAUNCHER = ROOT / "scripts" / "launch_local.py"


def start(tmp_path, code, *flags, **environment):
    script = tmp_path / "child.py"
    script.write_text("import os, signal, subprocess, sys, time\n" + code)
    return subprocess.Popen(
        [sys.executable, str(LAUNCHER), *flags, "--", str(script), "--an", "argument"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | environment,
    )


def finish(process):
    output = rest_of(process)
    return process.returncode, output


def wait_for_lines(process, number):
    return [process.stdout.readline().rstrip("\n") for _ in range(number)]


ME = 'me = int(os.environ["DISTFLOW_PROCESS_ID"])\n'


def test_each_child_gets_the_job_and_its_lines_are_marked(tmp_path):
    code = """
for name in ("COORDINATOR", "NUM_PROCESSES", "PROCESS_ID"):
    print(os.environ["DISTFLOW_" + name])
print(os.environ["XLA_FLAGS"], sys.argv[1:], file=sys.stderr)
"""
    flags = "--xla_cpu_enable_fast_math=false --xla_force_host_platform_device_count=8"
    process = start(tmp_path, code, "--processes=3", "--devices_per_process=2", XLA_FLAGS=flags)
    status, output = finish(process)
    assert status == 0
    addresses = set()
    for me in range(3):
        mark = f"[p{me}] "
        lines = [x.removeprefix(mark) for x in output.splitlines() if x.startswith(mark)]
        address, number, index, last = lines
        addresses.add(address)
        assert (number, index) == ("3", str(me))
        assert last == (
            "--xla_cpu_enable_fast_math=false --xla_force_host_platform_device_count=2 "
            "['--an', 'argument']"
        )
    (address,) = addresses
    assert address.startswith("127.0.0.1:")
    assert len(output.splitlines()) == 12


def test_the_first_failure_ends_all_and_gives_the_exit_code(tmp_path):
    code = ME + "time.sleep(3600) if me else sys.exit(3)\n"
    status, _ = finish(start(tmp_path, code, "--processes=3"))
    assert status == 3


def test_a_child_killed_by_a_signal_is_a_failure(tmp_path):
    code = ME + "time.sleep(3600) if me else os.kill(os.getpid(), signal.SIGKILL)\n"
    status, output = finish(start(tmp_path, code))
    assert status == 128 + signal.SIGKILL
    (line,) = [line for line in output.splitlines() if line.startswith("launch: ")]
    host = re.escape(socket.gethostname())
    found = rf"launch: process 0 \(host {host}, pid \d+\) died by SIGKILL, [\d.]+ s after its start"
    assert re.match(found, line), line


def test_a_kill_is_named_though_the_others_abort():
    """As JAX's runtime has them do, here before the launcher looks."""
    processes, said = [], []
    for number in (signal.SIGABRT, signal.SIGABRT, signal.SIGKILL):
        processes.append(subprocess.Popen(["sleep", "3600"]))
        processes[-1].send_signal(number)
        processes[-1].wait()
    children = local.Children(processes, 60.0, 10.0, said.append)
    assert children.wait(queue.SimpleQueue()) == 128 + signal.SIGKILL
    assert re.findall(r"process (\d)", said[0]) == ["2"] and len(said) == 1


@pytest.mark.slow
def test_a_stopped_child_is_named_at_once_and_ends_the_job(tmp_path):
    code = ME + "print(os.getpid(), flush=True)\ntime.sleep(3600)\n"
    process = start(tmp_path, code, "--processes=3", "--stopped_seconds=1")
    pids = {line[2]: int(line.split()[1]) for line in wait_for_lines(process, 3)}
    os.kill(pids["1"], signal.SIGSTOP)
    who = f"launch: process 1 (host {socket.gethostname()}, pid {pids['1']})"
    assert wait_for_lines(process, 1)[0].startswith(f"{who} is stopped by SIGSTOP; after 1 s")
    status, output = finish(process)
    assert status == 128 + signal.SIGSTOP
    assert f"{who} was stopped by SIGSTOP for 1 s; the job ends" in output
    assert not any(map(alive, pids.values()))


def test_a_child_that_goes_on_in_time_ends_nothing(monkeypatch):
    """However often it stops: by a clock of ours."""
    now, said = [0.0], []
    monkeypatch.setattr(local, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    with subprocess.Popen(["sleep", "3600"]) as process:
        children = local.Children([process], 60.0, 1.0, said.append)

        def stands(number, stopped):
            os.kill(process.pid, number)
            until(lambda: local.stopped_by(process) == stopped)
            children._note_stops()

        for _ in range(3):
            stands(signal.SIGSTOP, signal.SIGSTOP)
            now[0] += 0.9
            children._note_stops()
            stands(signal.SIGCONT, 0)
        assert len(said) == 3 and all("is stopped by SIGSTOP" in line for line in said)
        stands(signal.SIGSTOP, signal.SIGSTOP)
        now[0] += 1.1
        children._note_stops()
        assert "was stopped by SIGSTOP for 1 s; the job ends" in said[4]
        process.kill()


@pytest.mark.skipif(not hasattr(os, "waitid"), reason="macOS has it from Python 3.13 on")
def test_a_child_that_ends_while_it_is_looked_at_is_not_stopped():
    """Linux has no child to report on, once it is a zombie: the launcher once died of that."""

    class NotYetSeen(subprocess.Popen):
        def poll(self):
            return None

    with NotYetSeen([sys.executable, "-c", ""]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert local.stopped_by(process) == 0


CHECKPOINT = """
def stop(number, frame):
    print("saved", number, flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
print("ready", flush=True)
time.sleep(3600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_all_and_75_is_kept(tmp_path, number):
    process = start(tmp_path, CHECKPOINT)
    assert sorted(wait_for_lines(process, 2)) == ["[p0] ready", "[p1] ready"]
    process.send_signal(number)
    status, output = finish(process)
    assert status == 75
    assert sorted(output.splitlines()) == [f"[p0] saved {number:d}", f"[p1] saved {number:d}"]


def test_one_child_stopped_from_outside_stops_the_others_in_time(tmp_path):
    code = "print(os.getpid(), flush=True)\n" + CHECKPOINT
    process = start(tmp_path, code)
    pids = [int(x.split()[1]) for x in wait_for_lines(process, 4) if not x.endswith("ready")]
    os.kill(pids[0], signal.SIGTERM)
    status, output = finish(process)
    assert status == 75
    assert output.count("saved") == 2


def test_a_closed_output_stops_all(tmp_path):
    """As `launch_local.py ... | head -n 2` does: the processes end, with a checkpoint."""
    code = """
def stop(number, frame):
    open(__file__ + f".saved-{os.environ['DISTFLOW_PROCESS_ID']}", "w").close()
    sys.exit(75)
signal.signal(signal.SIGTERM, stop)
while True:
    print("a line", flush=True)
    time.sleep(0.01)
"""
    process = start(tmp_path, code)
    there = set()
    while len(there) < 2:  # the handler of each is in place
        there.update(wait_for_lines(process, 1))
    process.stdout.close()
    assert process.wait(HANG) == 75
    assert len(list(tmp_path.glob("child.py.saved-*"))) == 2


def test_nothing_is_left_behind(tmp_path):
    """A child that ignores SIGTERM, and the child's own child, end by SIGKILL after the grace."""
    code = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
print(os.getpid(), worker.pid, flush=True)
time.sleep(3600)
"""
    process = start(tmp_path, code, "--grace_seconds=0.3")
    pids = [int(pid) for line in wait_for_lines(process, 2) for pid in line.split()[1:]]
    process.send_signal(signal.SIGTERM)
    status, _ = finish(process)
    assert status == 128 + signal.SIGKILL
    assert len(pids) == 4
    until(lambda: not any(map(alive, pids)))


def test_help_shows_an_example():
    assert "python scripts/launch_local.py --processes=2" in finished(LAUNCHER, "--help").stdout


def test_sizes_below_one_are_refused():
    done = finished(LAUNCHER, "--processes=0", "--", "x.py", codes=(2,))
    assert "must be at least 1" in done.stderr
