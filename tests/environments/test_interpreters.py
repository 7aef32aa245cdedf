"""The tools `python` and `bash`: what stays, what the model is told, and that nothing is left.

What the model's code does is its answer; what the sandbox does is a failure of the environment.
"""

import asyncio
import contextlib
import math
import pathlib
import queue
import random
import threading

import numpy as np
import pytest
from support.turn_sampler import PROMPTS, TOKENIZER
from support.waiting import HANG, until

from distflow_jax.config.sandbox_config import SandboxConfig
from distflow_jax.environments import interpreters
from distflow_jax.environments.failures import CallFailure
from distflow_jax.environments.handle import EnvironmentHandle, check_environments
from distflow_jax.environments.registry import CallLimits, Environments, with_sandbox
from distflow_jax.environments.tools import Tools
from distflow_jax.sandbox.sandbox import Sandbox
from distflow_jax.sandbox.sandbox_records import SandboxError
from distflow_jax.sandbox.zygote_process import SandboxSession

SETTINGS = SandboxConfig()
KWARGS = {"tools": ("python", "bash"), "max_calls": 9}


def answers(*calls, **kwargs):
    """(results, calls that failed) of a turn with calls: code of Python, or ("bash", command)."""
    text = "".join(
        f'<tool name="{name}">{code}</tool>'
        for name, code in (call if isinstance(call, tuple) else ("python", call) for call in calls)
    )

    async def turn():
        tools = Tools(TOKENIZER, sandbox=SETTINGS, **(KWARGS | kwargs))
        tools.reset(PROMPTS[0])
        try:
            return await tools.step(np.zeros(1, np.int32), text)
        finally:
            await tools.close()

    found = asyncio.run(turn())
    results = found.observation.split("<result>")[1:]
    return [r.removesuffix("\n").removesuffix("</result>") for r in results], found.logged


def running(marker):
    """Whether a process of this machine has that in its arguments."""
    for place in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if marker.encode() in place.read_bytes():
                return True
    return False


def test_python_keeps_its_state_and_shows_the_last_value():
    results, logged = answers("x = 6\nx + 1\nx * 7", "print('a'); x", "x = None\nx", "x.y")
    assert results[:3] == ["42", "a\n6", ""]
    assert results[3] == (
        'Traceback (most recent call last):\n  File "<call 4>", line 1, in <module>\n    x.y\n'
        "AttributeError: 'NoneType' object has no attribute 'y'"
    )
    assert logged == {"tool_calls": 4, "tool_errors": 1}


@pytest.mark.parametrize(
    "code, said",
    [
        ("for", "SyntaxError: invalid syntax"),
        ("'\0'", "SyntaxError"),
        ("(" * 900 + ")" * 900, "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("input()", "EOFError"),
        ("def f(): f()\nf()", "RecursionError"),
        ("' ' * (1 << 40)", "MemoryError"),
        ("import os; os._exit(3)", "error: the interpreter exited; the next call starts a new"),
        ("import os; os.kill(os.getpid(), 9)", "error: the interpreter exited"),
        ("import os; os.closerange(0, 99)", "error: the interpreter exited"),
        ("import os; os.write(4, b'\\xff' * 8)", "error: the interpreter exited"),
        ("print('\\ud800'); 1 / 0", "\\ud800\nTraceback"),
    ],
)
def test_what_code_does_is_its_answer_and_the_next_call_works(code, said):
    (first, second, third), logged = answers(code, "1 + 1", ("bash", "echo 2"))
    assert said in first and (second, third) == ("2", "2")
    assert logged == {"tool_calls": 3, "tool_errors": 1}


def test_output_of_every_kind_is_shown_in_its_order_and_cut():
    code = (
        "import os, subprocess, sys\nprint('a'); subprocess.run(['echo', 'b'], check=True)\n"
        "os.write(1, b'c\\n'); print('d', file=sys.stderr)\nif not os.fork(): os._exit(0)\n"
        "os.wait()\nsys.stdout.close()"
    )
    assert answers(code, "'e'")[0] == ["a\nb\nc\nd", "'e'"]
    (flood,), _ = answers("print('a' * 1_000_000); 1 / 0", max_characters=200)
    assert flood.startswith("a" * 50) and flood.endswith("ZeroDivisionError: division by zero")
    assert len(flood) < 250 and "characters left out" in flood


def test_bash_keeps_its_folder_and_variables():
    commands = ["pwd; ls -A", "x=3; mkdir d; cd d; echo $x > f", "cat f; echo $x; exit 4", "ls"]
    results, logged = answers(*(("bash", command) for command in commands))
    assert results == ["/scratch", "", "3\n3\n(the shell exited with code 4)", "d"]
    results, _ = answers(("bash", "echo 'a"), ("bash", "cat"), ("bash", "false"))
    assert "unexpected EOF" in results[0] and results[1:] == ["", "(exit code 1)"]
    assert logged == {"tool_calls": 4, "tool_errors": 1}


def test_equal_code_gives_equal_results():
    """An interpreter that is given the calls so far again must answer alike."""
    code = "import random; [random.random(), {'a', 'b', 'c', 'd', 'e', 'f'}, hash('a')]"
    assert answers(code) == answers(code)


# -- in a run --------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(seconds=HANG, **limits):
    """(a function that gives the outcome of a turn, the handle, the environments)."""
    calls = CallLimits(seconds, **limits)
    kwargs = with_sandbox("tools", KWARGS, SETTINGS)
    environments = Environments("tools", kwargs, TOKENIZER, calls=calls)
    found: queue.SimpleQueue = queue.SimpleQueue()
    handle = EnvironmentHandle(environments, PROMPTS[0], found)

    def outcomes(turn=None):
        """All outcomes of a reset or a turn, the last one at the end."""
        handle.reset() if turn is None else handle.step(TOKENIZER.encode(turn))
        told = [found.get(timeout=HANG)]
        while not told[-1].last:
            told.append(found.get(timeout=HANG))
        return [each.outcome for each in told]

    try:
        outcomes()
        yield outcomes, handle, environments
    finally:
        handle.close()
        environments.close()


def text_of(outcome):
    return TOKENIZER.decode(outcome.tokens)


def test_code_that_takes_too_long_is_the_models_mistake(monkeypatch):
    with opened() as (outcomes, _, environments):
        outcomes("<tool>x = 1</tool>")
        with monkeypatch.context() as short:
            short.setattr(interpreters, "_LONGEST", 0.2)
            (outcome,) = outcomes("<tool>while True: pass</tool>")
        assert "error: the interpreter timed out; the next" in text_of(outcome)
        assert outcome.logged == {"tool_calls": 1, "tool_errors": 1}
        (outcome,) = outcomes("<tool>x</tool>")
        assert "NameError: name 'x' is not defined" in text_of(outcome)
        assert not environments.failures._kinds


def test_calls_of_a_turn_end_within_the_environments_deadline(monkeypatch):
    """Each has half of what is left, so any number of them."""
    given, deadline = [], 8.0

    def run(_, code, seconds):
        given.append(seconds)
        return code

    monkeypatch.setattr(interpreters, "seconds_left", lambda: deadline - sum(given))
    monkeypatch.setattr(interpreters.Interpreter, "_run", run)
    answers(*"123456789")
    assert len(given) == 9 and given[:3] == [4, 2, 1] and sum(given) < deadline


def test_a_response_leaves_no_process(monkeypatch):
    marker = f"{random.SystemRandom().randrange(10**8, 10**9)}.5"
    turn = f'<tool name="bash">sleep {marker} &</tool>'
    with opened() as (outcomes, handle, _):
        outcomes(turn)
        until(lambda: running(marker))
        monkeypatch.setattr(interpreters, "_LONGEST", 1.0)  # so long a call goes on after its end
        handle.step(TOKENIZER.encode(f'<tool name="bash">sleep {marker}</tool>'))
        handle.close()  # while a call is at work
    until(lambda: not running(marker))


@pytest.mark.parametrize("abort", ["response", "run"])
def test_an_aborted_response_ends_its_interpreter_at_once(monkeypatch, abort):
    """However much time its present call has left."""
    monkeypatch.setattr(interpreters, "_LONGEST", math.inf)
    marker = f"{random.SystemRandom().randrange(10**8, 10**9)}.5"
    with opened(3 * HANG) as (_, handle, environments):
        handle.step(TOKENIZER.encode(f'<tool name="bash">sleep {marker}</tool>'))
        until(lambda: running(marker))
        {"response": handle, "run": environments}[abort].close()
        until(lambda: not running(marker))


def test_an_interpreter_that_begins_while_its_response_is_aborted_ends(monkeypatch):
    begins, aborted, open_ = threading.Event(), threading.Event(), Sandbox.open

    def late(*args):
        begins.set()
        aborted.wait()
        return open_(*args)

    monkeypatch.setattr(interpreters, "_LONGEST", math.inf)
    monkeypatch.setattr(Sandbox, "open", late)
    with opened(3 * HANG) as (_, handle, environments):
        handle.step(TOKENIZER.encode("<tool>while True: pass</tool>"))
        begins.wait()
        handle.close()
        until(lambda: environments.loop._ending)
        aborted.set()
        until(lambda: not environments.loop._ending)


def test_failures_of_the_sandbox_are_none_of_the_model(monkeypatch):
    """One of five calls fails, and answers are those without failures."""
    turns = ["<tool>x = [1]</tool>", "<tool>x.append(2); x</tool>", "<tool>x; 1 / 0</tool>"] * 2
    with opened() as (outcomes, _, _):
        wanted = [text_of(outcomes(turn)[-1]) for turn in turns]
    rng, open_, receive = random.Random(1), Sandbox.open, SandboxSession.receive

    def failing(method):
        def call(*args):
            if rng.random() < 0.2:
                raise SandboxError("no more")
            return method(*args)

        return call

    monkeypatch.setattr(Sandbox, "open", failing(open_))
    monkeypatch.setattr(SandboxSession, "receive", failing(receive))
    monkeypatch.setattr("distflow_jax.environments.handle.PAUSE", 0.0)
    failed = 0
    for _ in range(6):
        with opened(retries=30, max_infra_rate=1.0) as (outcomes, _, _):
            for turn, text in zip(turns, wanted, strict=True):
                *failures, last = outcomes(turn)
                assert text_of(last) == text
                assert all(isinstance(f, CallFailure) and f.cause == "raised" for f in failures)
                failed += len(failures)
    assert failed > 3


def test_a_machine_without_such_a_sandbox_is_refused_before_step_1(monkeypatch):
    remote = SandboxConfig(level="remote", url="http://127.0.0.1:1/run")
    with pytest.raises(ValueError, match="which sandbox.level=remote does not support"):
        Tools(TOKENIZER, tools="python", sandbox=remote).reset(PROMPTS[0])

    def refuse(*_):
        raise ValueError("sandbox.minimum=kernel: this machine lacks Landlock")

    monkeypatch.setattr("distflow_jax.environments.interpreters.shared_sandbox", refuse)
    found = Environments("python", {}, TOKENIZER, calls=CallLimits(HANG, 0))
    with contextlib.closing(found), pytest.raises(ValueError, match="this machine lacks Landlock"):
        check_environments(found, PROMPTS[0])
