"""SIGTERM ends a process that has finished no step at once, and lets others end in order."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest
from support.waiting import HANG

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = """
import hashlib, sys, threading
from distflow_jax.watchdog import supervision
from distflow_jax.watchdog.supervision import stop_on_sigterm

def hang():
    threading.Event().wait()

with stop_on_sigterm() as stop:
    stop.before_leaving += [lambda: print("last", flush=True), lambda: print("first", flush=True)]
    {body}
print("in order", flush=True)
"""
# what is done before the end may take as long as a busy machine needs
PATIENT = f"supervision.LEAVE_SECONDS = {HANG}; "
# C code without a return to the interpreter, as a compilation is; for longer than a test may hang
BUSY = "print('ready', flush=True); hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"
WAIT = "print('ready', flush=True); stop.wait()"


def terminated(body):
    """(exit code, output) of a process that gets SIGTERM once it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(body=body)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=HANG)
    return process.returncode, output


@pytest.mark.parametrize("body", [BUSY, WAIT])
def test_a_process_without_a_step_leaves_at_once(body):
    code, output = terminated(f"{PATIENT}stop.leave_at_once(); {body}")
    assert code == 75
    assert "stopped by SIGTERM before a step had ended" in output
    assert output.index("first") < output.index("last") and "in order" not in output


def test_what_hangs_before_the_end_does_not_keep_it():
    code, _ = terminated(f"stop.before_leaving.append(hang); stop.leave_at_once(); {BUSY}")
    assert code == 75


def test_a_process_with_a_step_ends_in_order():
    code, output = terminated(f"stop.leave_at_once(); stop.step_finished(); {WAIT}")
    assert (code, output) == (0, "in order\n")


def test_a_notebook_ends_in_order():
    """It asks for no other end."""
    code, output = terminated(WAIT)
    assert (code, output) == (0, "in order\n")
