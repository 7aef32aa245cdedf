"""SIGTERM ends a process that has finished no step at once, and lets others end in order."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = """
import hashlib, sys, time
from distflow_jax.watchdog.supervision import stop_on_sigterm

def hang():
    time.sleep(60)

with stop_on_sigterm() as stop:
    stop.before_leaving += [lambda: print("last", flush=True), lambda: print("first", flush=True)]
    {body}
print("in order", flush=True)
"""
# C code without a return to the interpreter, as a compilation is
BUSY = "print('ready', flush=True); hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9)"
WAIT = "print('ready', flush=True); stop.wait()"


def terminated(body):
    """(exit code, output, seconds) of a process that gets SIGTERM once it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(body=body)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    output, _ = process.communicate(timeout=60)
    return process.returncode, output, time.monotonic() - began


@pytest.mark.parametrize("body", [BUSY, WAIT])
def test_a_process_without_a_step_leaves_at_once(body):
    code, output, seconds = terminated(f"stop.leave_at_once(); {body}")
    assert code == 75 and seconds < 5.0
    assert "stopped by SIGTERM before a step had ended" in output
    assert output.index("first") < output.index("last") and "in order" not in output


def test_what_hangs_before_the_end_does_not_keep_it():
    code, output, seconds = terminated(
        f"stop.before_leaving.append(hang); stop.leave_at_once(); {BUSY}"
    )
    assert code == 75 and seconds < 5.0


def test_a_process_with_a_step_ends_in_order():
    code, output, _ = terminated(f"stop.leave_at_once(); stop.step_finished(); {WAIT}")
    assert (code, output) == (0, "in order\n")


def test_a_notebook_ends_in_order():
    """It asks for no other end."""
    code, output, _ = terminated(WAIT)
    assert (code, output) == (0, "in order\n")
