"""The tools `python` and `bash`: interpreters in the sandbox that live as long as a response."""

import asyncio
import dataclasses
import pathlib

from distflow_jax.config.sandbox_config import SandboxConfig
from distflow_jax.environments.event_loop import in_thread, seconds_left
from distflow_jax.environments.tool_functions import Unsuccessful
from distflow_jax.sandbox.byte_frames import FramesEnded
from distflow_jax.sandbox.sandbox import shared_sandbox
from distflow_jax.sandbox.sandbox_records import SandboxProgram
from distflow_jax.sandbox.zygote_process import SandboxSession

_LONGEST = 60.0  # seconds of a call, where an environment's has no deadline
_LIFE = 24 * 3600.0  # seconds of an interpreter, whose calls have deadlines of their own
_MOST_BYTES = 1 << 17  # of an answer, which interpreter_loop.py bounds
_LOOP = pathlib.Path(__file__).with_name("interpreter_loop.py").read_bytes()


class Interpreter:
    """A program that runs pieces of code, and is begun anew where it has ended.

    Raises ValueError if the machine has no sandbox as `sandbox` asks for.
    """

    language = ""

    def __init__(self, sandbox: SandboxConfig):
        if sandbox.level == "remote":
            raise ValueError(
                "the tools python and bash need sandbox sessions, which sandbox.level=remote does "
                "not support: use another level"
            )
        self._sandbox = shared_sandbox(sandbox)
        self._session: SandboxSession | None = None
        self._cancelled = False

    async def run(self, code: str) -> str:
        """Runs code, and returns what it prints. It gets half of the time that the environment's
        call has left, so that all calls of a turn end within that.

        Raises Unsuccessful with the answer for code that failed, took too long or ended the
        interpreter; SandboxError. One that is cancelled ends the program at once.
        """
        try:
            return await in_thread(self._run, code, min(_LONGEST, seconds_left() / 2))
        except asyncio.CancelledError:
            self._cancelled = True
            self._end_cancelled()
            raise

    def close(self) -> None:
        """Ends the program. Raises SandboxError."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _end_cancelled(self) -> None:
        session = self._session
        if self._cancelled and session is not None:
            session.end()

    def _run(self, code: str, seconds: float) -> str:
        if self._session is None:
            # limits of processor time are those of a call, and it has many
            limits = dataclasses.replace(self._sandbox.limits, seconds=_LIFE, cpu_seconds=_LIFE)
            argv = ("python3", "main.py", self.language)
            program = SandboxProgram(argv, {"main.py": _LOOP}, limits=limits)
            self._session = self._sandbox.open(program)
            self._end_cancelled()
        try:
            answer = self._session.ask(code.encode("utf-8", "replace"), _MOST_BYTES, seconds)
        except (TimeoutError, FramesEnded) as error:
            self.close()
            # no seconds and no cause: another interpreter that is given the code must answer alike
            what = "timed out" if isinstance(error, TimeoutError) else "exited"
            new = "the next call starts a new one"
            raise Unsuccessful(f"error: the interpreter {what}; {new}") from None
        text = answer[1:].decode("utf-8", "replace").rstrip("\n")
        if answer[:1] != b"+":
            raise Unsuccessful(text)
        return text


class Python(Interpreter):
    """An interpreter of Python."""

    language = "python"

    async def __call__(self, code: str) -> str:
        """Runs Python code, and returns its output and the value of its last expression. Variables
        persist between calls.

        Args:
          code: the code.
        """
        return await self.run(code)


class Bash(Interpreter):
    """A shell."""

    language = "bash"

    async def __call__(self, command: str) -> str:
        """Runs a command in a bash shell, and returns its output. The working folder, files and
        variables persist between calls.

        Args:
          command: the command.
        """
        return await self.run(command)
