"""A signal ends a process that has finished no step at once, and lets others end in order."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest
from support.waiting import HANG, rest_of

from distflow_jax.watchdog.supervision import StopSignal

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = """
import hashlib, os, signal, sys, threading
from distflow_jax.watchdog import supervision
from distflow_jax.watchdog.supervision import stop_on_signals

# what a shell starts in the background ignores interrupts
signal.signal(signal.SIGINT, signal.default_int_handler)

def hang():
    threading.Event().wait()

def ready():
    os.write(1, b"ready\\n")  # whole, also where Python's streams have no buffer

with stop_on_signals({signals}) as stop:
    stop.before_leaving += [lambda: print("last", flush=True), lambda: print("first", flush=True)]
    {body}
print("in order", flush=True)
"""
# what is done before the end may take as long as a busy machine needs
PATIENT = f"supervision.LEAVE_SECONDS = {HANG}; "
# C code without a return to the interpreter, as a compilation is; for longer than a test may hang
BUSY = "ready(); hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"
WAIT = "ready(); stop.wait()"


BOTH = "signal.SIGTERM, signal.SIGINT"


def terminated(body, *numbers, signals=BOTH):
    """(exit code, output) of a process that gets a signal each time it is ready; SIGTERM if none is
    given."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(body=body, signals=signals)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    before = ""
    for number in numbers or [signal.SIGTERM]:
        while (line := process.stdout.readline()) != "ready\n":
            assert line, "it has ended"
            before += line
        process.send_signal(number)
    output = before + rest_of(process)
    return process.returncode, output


@pytest.mark.parametrize(
    ("body", "number", "name"),
    [(BUSY, signal.SIGTERM, "SIGTERM"), (WAIT, signal.SIGINT, "Ctrl-C")],
)
def test_a_process_without_a_step_leaves_at_once(body, number, name):
    code, output = terminated(f"{PATIENT}stop.leave_at_once(); {body}", number)
    assert code == 75
    assert f"stopped by {name} before a step had ended" in output
    assert output.index("first") < output.index("last") and "in order" not in output


def test_what_hangs_before_the_end_does_not_keep_it():
    code, _ = terminated(f"stop.before_leaving.append(hang); stop.leave_at_once(); {BUSY}")
    assert code == 75


def test_a_process_with_a_step_ends_in_order():
    code, output = terminated(f"stop.leave_at_once(); stop.step_finished(); {WAIT}")
    assert (code, output) == (0, "in order\n")


def test_a_notebook_ends_in_order():
    """It asks for no other end; an interrupt is an exception there."""
    code, output = terminated(WAIT, signals="signal.SIGTERM")
    assert (code, output) == (0, "in order\n")
    code, output = terminated(WAIT, signal.SIGINT, signals="signal.SIGTERM")
    assert code != 0 and "KeyboardInterrupt" in output and "in order" not in output


def test_a_second_signal_gives_no_more_time():
    stop = StopSignal()
    stop.step_finished()
    stop.receive()
    deadline = stop.deadline()
    stop.receive()
    assert stop.deadline() == deadline


def test_a_second_interrupt_ends_a_process_at_once():
    body = f"stop.leave_at_once(); stop.step_finished(); {WAIT}; {BUSY}"
    code, output = terminated(f"{PATIENT}{body}", signal.SIGINT, signal.SIGINT)
    assert code == 130
    assert "stopped by a second Ctrl-C" in output and output.endswith("first\nlast\n")


def test_who_waits_for_others_hears_of_the_first_signal():
    body = f"stop.when_stopped(lambda: print('told', flush=True)); {WAIT}"
    code, output = terminated(body, signal.SIGTERM)
    assert (code, output) == (0, "told\nin order\n")
    late = f"{WAIT}; stop.when_stopped(lambda: print('told late', flush=True))"
    assert terminated(late)[1] == "told late\nin order\n"


def test_a_worker_says_what_its_interrupts_do():
    body = f"stop.leave_at_once(); stop.step_finished(); {WAIT}; {BUSY}"
    signals = f"{BOTH}, words=supervision.OF_A_WORKER"
    _, output = terminated(f"{PATIENT}{body}", signal.SIGINT, signal.SIGINT, signals=signals)
    assert "the worker leaves once it has submitted its responses" in output
    assert "stopped by a second Ctrl-C\n" in output and "checkpoint" not in output
