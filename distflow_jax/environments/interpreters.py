"""The tools `python` and `bash`: interpreters in the sandbox that live as long as a response."""

import contextlib
import dataclasses
import functools
import pathlib
import threading

from distflow_jax.config.sandbox_config import SandboxConfig
from distflow_jax.environments.event_loop import in_thread, seconds_left
from distflow_jax.environments.tool_functions import Unsuccessful
from distflow_jax.sandbox.sandbox import Sandbox
from distflow_jax.sandbox.sandbox_records import SandboxLimits, SandboxProgram
from distflow_jax.sandbox.sandbox_session import SandboxSession, SessionEnded

_LONGEST = 60.0  # seconds of a call, where an environment's has no deadline
_LIFE = 24 * 3600.0  # seconds of an interpreter, whose calls have deadlines of their own
_MOST_BYTES = 1 << 17  # of an answer, which interpreter_loop.py bounds
_LOOP = pathlib.Path(__file__).with_name("interpreter_loop.py")
_OPENING = threading.Lock()


class Interpreter:
    """A program that runs pieces of code, and is begun anew where it has ended.

    Raises ValueError if the machine has no sandbox as `sandbox` asks for.
    """

    def __init__(self, language: str, sandbox: SandboxConfig):
        with _OPENING:
            self._sandbox = _opened(sandbox)
        self._language = language
        self._session: SandboxSession | None = None

    async def run(self, code: str) -> str:
        """Runs code, and returns what it prints. It gets half of the time that the environment's
        call has left, so that all calls of a turn end within that.

        Raises Unsuccessful with the answer for code that failed, took too long or ended the
        interpreter; SandboxError.
        """
        return await in_thread(self._run, code, min(_LONGEST, seconds_left() / 2))

    def close(self) -> None:
        """Ends the program. Raises SandboxError."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _run(self, code: str, seconds: float) -> str:
        if self._session is None:
            self._session = self._sandbox.open(_program(self._language, self._sandbox.limits))
        try:
            self._session.send(code.encode("utf-8", "replace"), seconds)
            answer = self._session.receive(_MOST_BYTES, seconds)
        except (TimeoutError, SessionEnded) as error:
            self.close()
            # no seconds and no cause: another interpreter that is given the code must answer alike
            what = "timed out" if isinstance(error, TimeoutError) else "exited"
            new = "the next call starts a new one"
            raise Unsuccessful(f"error: the interpreter {what}; {new}") from None
        text = answer[1:].decode("utf-8", "replace").rstrip("\n")
        if answer[:1] != b"+":
            raise Unsuccessful(text)
        return text


class Python:
    """An interpreter of Python."""

    def __init__(self, sandbox: SandboxConfig):
        self._interpreter = Interpreter("python", sandbox)
        self.close = self._interpreter.close

    async def __call__(self, code: str) -> str:
        """Runs Python code, and returns its output and the value of its last expression. Variables
        persist between calls.

        Args:
          code: the code.
        """
        return await self._interpreter.run(code)


class Bash:
    """A shell."""

    def __init__(self, sandbox: SandboxConfig):
        self._interpreter = Interpreter("bash", sandbox)
        self.close = self._interpreter.close

    async def __call__(self, command: str) -> str:
        """Runs a command in a bash shell, and returns its output. The working folder, files and
        variables persist between calls.

        Args:
          command: the command.
        """
        return await self._interpreter.run(command)


@functools.lru_cache(maxsize=1)
def _opened(settings: SandboxConfig) -> Sandbox:
    """This process's sandbox, which ends with it."""
    if settings.level == "remote":
        raise ValueError(
            "the tools python and bash need sandbox sessions, which sandbox.level=remote does not "
            "support: use another level"
        )
    return contextlib.ExitStack().enter_context(Sandbox(settings))


def _program(language: str, limits: SandboxLimits) -> SandboxProgram:
    """The loop of a language; `limits` of processor time are those of a call, and it has many."""
    limits = dataclasses.replace(limits, seconds=_LIFE, cpu_seconds=_LIFE)
    return SandboxProgram(
        ("python3", "main.py", language), {"main.py": _LOOP.read_bytes()}, limits=limits
    )
