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
    output, _ = process.communicate(timeout=30)
    return process.returncode, output


def wait_for_lines(process, number):
    return [process.stdout.readline().rstrip("\n") for _ in range(number)]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A zombie that nobody has collected yet is dead.
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


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
    code = ME + "time.sleep(60) if me else sys.exit(3)\n"
    began = time.monotonic()
    status, _ = finish(start(tmp_path, code, "--processes=3"))
    assert status == 3
    assert time.monotonic() - began < 10


def test_a_child_killed_by_a_signal_is_a_failure(tmp_path):
    code = ME + "time.sleep(60) if me else os.kill(os.getpid(), signal.SIGKILL)\n"
    status, output = finish(start(tmp_path, code))
    assert status == 128 + signal.SIGKILL
    (line,) = [line for line in output.splitlines() if line.startswith("launch: ")]
    host = re.escape(socket.gethostname())
    found = rf"launch: process 0 \(host {host}, pid \d+\) died by SIGKILL, [\d.]+ s after its start"
    assert re.match(found, line), line


def test_a_kill_is_named_though_the_others_abort(tmp_path):
    """As JAX's runtime has them do, here before the launcher looks."""
    code = (
        ME
        + """
deadline = time.monotonic() + 20
while me == 2 and time.monotonic() < deadline and len(os.listdir(sys.path[0])) < 3:
    time.sleep(0.01)
open(f"{__file__}.{me}", "w").close()
time.sleep(0.002)
if me == 2:
    os.killpg(os.getpid(), signal.SIGKILL)
while time.monotonic() < deadline and not os.path.exists(f"{__file__}.2"):
    time.sleep(0.0001)
os.abort()
"""
    )
    _, output = finish(start(tmp_path, code, "--processes=3"))
    assert re.findall(r"launch: process (\d)", output) == ["2"], output


def test_a_stopped_child_is_named_at_once_and_ends_the_job(tmp_path):
    code = ME + "print(os.getpid(), flush=True)\ntime.sleep(60)\n"
    process = start(tmp_path, code, "--processes=3", "--stopped_seconds=1")
    pids = {line[2]: int(line.split()[1]) for line in wait_for_lines(process, 3)}
    os.kill(pids["1"], signal.SIGSTOP)
    who = f"launch: process 1 (host {socket.gethostname()}, pid {pids['1']})"
    assert wait_for_lines(process, 1)[0].startswith(f"{who} is stopped by SIGSTOP; after 1 s")
    status, output = finish(process)
    assert status == 128 + signal.SIGSTOP
    assert f"{who} was stopped by SIGSTOP for 1 s; the job ends" in output
    assert not any(map(alive, pids.values()))


def test_a_child_that_goes_on_in_time_ends_nothing(tmp_path):
    code = ME + "print(os.getpid(), flush=True)\ntime.sleep(3)\n"
    process = start(tmp_path, code, "--stopped_seconds=1")
    pid = int(wait_for_lines(process, 2)[0].split()[1])
    os.kill(pid, signal.SIGSTOP)
    assert "is stopped by SIGSTOP" in wait_for_lines(process, 1)[0]
    os.kill(pid, signal.SIGCONT)
    assert finish(process) == (0, "")


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
time.sleep(60)
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
    assert process.wait(timeout=30) == 75
    assert len(list(tmp_path.glob("child.py.saved-*"))) == 2


def test_nothing_is_left_behind(tmp_path):
    """A child that ignores SIGTERM, and the child's own child, end by SIGKILL after the grace."""
    code = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(os.getpid(), worker.pid, flush=True)
time.sleep(60)
"""
    process = start(tmp_path, code, "--grace_seconds=0.3")
    pids = [int(pid) for line in wait_for_lines(process, 2) for pid in line.split()[1:]]
    process.send_signal(signal.SIGTERM)
    status, _ = finish(process)
    assert status == 128 + signal.SIGKILL
    deadline = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(pids) == 4 and not any(map(alive, pids))


def test_help_shows_an_example():
    result = subprocess.run([sys.executable, LAUNCHER, "--help"], capture_output=True, text=True)
    assert result.returncode == 0
    assert "python scripts/launch_local.py --processes=2" in result.stdout


def test_sizes_below_one_are_refused():
    result = subprocess.run(
        [sys.executable, LAUNCHER, "--processes=0", "--", "x.py"], capture_output=True, text=True
    )
    assert result.returncode == 2
    assert "must be at least 1" in result.stderr
