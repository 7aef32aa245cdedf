"""Verdicts on a program: each case runs in the sandbox, and what it gave is compared out here.

No expected output enters the sandbox. What a program prints, patches or exits with is never read as
a verdict, only as the output or the value that it stands for. Every case has processes and a
scratch folder of its own: no call knows of another one.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distflow_jax.rewards.code import program_calls
from distflow_jax.rewards.code.hidden_cases import AssertCase, CallCase, Case, PrintCase
from distflow_jax.sandbox.byte_frames import Frames, FramesEnded
from distflow_jax.sandbox.sandbox import Sandbox
from distflow_jax.sandbox.sandbox_records import SandboxError, SandboxLimits, SandboxProgram

TRIES = 8  # of a case whose sandbox fails
_PAUSE_SECONDS = 0.01  # before the second try; each further pause is twice as long
_CLOSE = 1e-9  # relative difference of floats that are equal
_MOST_ANSWER = 4 << 20  # bytes
_CALLS = pathlib.Path(program_calls.__file__).read_bytes()
_FIRST, _NO_KEYWORDS = {"object": 0}, {"dict": []}  # the first object of which a server has told
# what reading a value may raise that a program wrote
_NO_VALUE = (ValueError, TypeError, LookupError, ArithmeticError, RecursionError)


@dataclasses.dataclass(frozen=True)
class Judge:
    """Decides which cases a program passes.

    sandbox: its limits are those of a case.
    seconds: by the clock, for all cases of a program, added up; later cases fail.
    parallel: cases of a program that run at once.
    """

    sandbox: Sandbox
    seconds: float
    parallel: int = 1

    def count_passed(self, program: str, cases: Sequence[Case], *, all_needed: bool) -> int:
        """Number of cases that a program passes; with `all_needed` it ends at the first failure.

        Raises SandboxError if the sandbox has failed TRIES times for a case.
        """
        main = program.encode("utf-8", "surrogatepass")
        count, taken, waiting = 0, 0.0, iter(cases)
        with concurrent.futures.ThreadPoolExecutor(self.parallel) as threads:
            while batch := list(itertools.islice(waiting, self.parallel)):
                seconds = min(self.sandbox.limits.seconds, self.seconds - taken)
                if seconds <= 0:
                    break
                limits = dataclasses.replace(self.sandbox.limits, seconds=seconds)
                tried = functools.partial(self._tried, main, limits)
                found = list(threads.map(tried, batch))
                count += sum(passed for passed, _ in found)
                taken += sum(seconds for _, seconds in found)
                if all_needed and not all(passed for passed, _ in found):
                    break
        return count

    def _tried(self, main: bytes, limits: SandboxLimits, case: Case) -> tuple[bool, float]:
        """The verdict on a case and its seconds, in as many tries as the sandbox needs."""
        tries = 0
        while True:
            start = time.monotonic()
            try:
                return self._passes(main, limits, case), time.monotonic() - start
            except SandboxError:
                tries += 1
                if tries == TRIES:
                    raise
            time.sleep(_PAUSE_SECONDS * 2**tries)

    def _passes(self, main: bytes, limits: SandboxLimits, case: Case) -> bool:
        if isinstance(case, PrintCase):
            files, stdin = {"main.py": main}, case.stdin.encode()
            ran = self.sandbox.run(SandboxProgram(("python3", "main.py"), files, stdin, limits))
            printed = lines_of(ran.stdout.decode(errors="replace"))
            return ran.succeeded and not ran.is_cut and printed == lines_of(case.expected)
        end = time.monotonic() + limits.seconds

        def ask(program: Frames, message: bytes) -> bytes:
            return program.ask(message, _MOST_ANSWER, end - time.monotonic())

        with self.sandbox.open(_calls("serve", limits, main)) as server:
            with contextlib.suppress(TimeoutError, FramesEnded):
                to_server = functools.partial(ask, server)
                if isinstance(case, CallCase):
                    return _returns(to_server, case)
                with self.sandbox.open(_calls("check", limits)) as checker:
                    return _holds(to_server, functools.partial(ask, checker), case)
        return False


_Ask = Callable[[bytes], bytes]  # the answer of a program to a message


def _calls(mode: str, limits: SandboxLimits, program: bytes = b"") -> SandboxProgram:
    """The program that calls, or answers calls."""
    files = {"program_calls.py": _CALLS, "main.py": program}
    return SandboxProgram(("python3", "program_calls.py", mode), files, limits=limits)


def _returns(server: _Ask, case: CallCase) -> bool:
    """Whether the function returns what the case expects."""
    arguments = program_calls.encode(case.arguments, _no_object)
    server(_json(["name", [case.function], _NO_KEYWORDS]))
    answer = server(_json(["call", [_FIRST, *arguments], _NO_KEYWORDS]))
    try:
        value = program_calls.decode(json.loads(answer)["value"], _no_object)
        return any(same(value, expected) for expected in case.expected)
    except _NO_VALUE:
        return False


def _holds(server: _Ask, checker: _Ask, case: AssertCase) -> bool:
    """Whether an assertion holds, in a process of its own whose requests go to the program's."""
    request = checker(_json(case._asdict()))
    while json.loads(request) != "held":
        request = checker(server(request))
    return True


def _no_object(value: Any) -> Any:
    raise ValueError(f"{value!r} is no plain data")


def _json(message: Any) -> bytes:
    return json.dumps(message).encode()


def lines_of(text: str) -> list[str]:
    """Lines as judges compare them: without white space at their ends, and empty ones at the end.

    >>> lines_of("1 2 \\n\\n3\\n\\n") == lines_of("1 2\\n\\n3")
    True
    """
    lines = [line.rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def same(value: Any, expected: Any) -> bool:
    """Whether a value of plain data equals one of JSON, which has no tuples and no keys but text.

    >>> same({1: (2.0, "a")}, {"1": [2, "a"]})
    True
    """
    if isinstance(value, list | tuple) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(same, value, expected))
    if isinstance(value, dict) and isinstance(expected, Mapping):
        keyed = {key if isinstance(key, str) else json.dumps(key): value[key] for key in value}
        alike = keyed.keys() == expected.keys() and len(keyed) == len(value)
        return alike and all(same(keyed[key], expected[key]) for key in keyed)
    if isinstance(value, float) and isinstance(expected, int | float):
        return math.isclose(value, expected, rel_tol=_CLOSE, abs_tol=_CLOSE)
    return value == expected
