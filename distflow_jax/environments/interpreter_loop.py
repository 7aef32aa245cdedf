"""The program of the tools `python` and `bash`, which runs in the sandbox: `main.py python|bash`.

It receives frames, pieces of code, and answers each with "+" or "-" (the code has succeeded or not)
and what was printed. That goes to a file of the scratch folder that has no name, by the code's
processes too, and is read from there once the code has ended.
"""

import ast
import code
import contextlib
import linecache
import os
import random
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable

from distflow_jax.sandbox.byte_frames import Frames

MOST = 1 << 15  # bytes of output that are read, from its beginning and from its end


class PythonSession(code.InteractiveInterpreter):
    """Runs code in one namespace, and shows the value of an expression in its last line."""

    def __init__(self):
        super().__init__({"__name__": "__main__"})
        self._calls, self._succeeded = 0, True
        random.seed(0)  # a new interpreter that is given the same code answers alike

    def showtraceback(self) -> None:
        """Writes the traceback of what the code has raised."""
        self._succeeded = False
        super().showtraceback()

    def run(self, source: str) -> bool:
        """Runs a piece of code; whether it raised nothing."""
        # new ones, as the code may have closed the last; one, to keep the order of what is printed
        shown = open(1, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
        sys.stdout = sys.stderr = shown
        self._succeeded, self._calls = True, self._calls + 1
        name = f"<call {self._calls}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        try:
            body = ast.parse(source, name).body
            last = [body.pop()] if body and isinstance(body[-1], ast.Expr) else []
            parts = [compile(ast.Module(body, []), name, "exec")]
            parts += [compile(ast.Interactive([value]), name, "single") for value in last]
        except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
            self._succeeded, parts = False, []
            self.showsyntaxerror(name)
        try:
            for part in parts:
                if self._succeeded:
                    self.runcode(part)
        except SystemExit as end:
            self._succeeded = False
            print(f"SystemExit: {end.code}", file=sys.stderr)
        with contextlib.suppress(ValueError, OSError):  # the code has closed it, or a full disk
            shown.flush()
        return self._succeeded


class BashSession:
    """Runs commands in one shell, and in a new one where that has ended."""

    _shell: subprocess.Popen[bytes] | None = None

    def run(self, command: str) -> bool:
        """Runs a command; whether its exit code is 0, which is printed otherwise."""
        if self._shell is None:
            codes, self._given = os.pipe()
            self._codes = open(codes, "rb")
            self._shell = subprocess.Popen(
                ["bash", "--noprofile", "--norc"], stdin=subprocess.PIPE, pass_fds=(self._given,)
            )
            os.close(self._given)
        quoted, told = shlex.quote(command), self._given
        line = f"eval {quoted} </dev/null {told}>&-\nprintf '%d\\n' $? >&{told}\n"
        code = b""
        with contextlib.suppress(BrokenPipeError):
            self._shell.stdin.write(line.encode())  # type: ignore[union-attr]
            self._shell.stdin.flush()  # type: ignore[union-attr]
            code = self._codes.readline()
        if code:
            os.write(1, b"" if code == b"0\n" else b"(exit code %d)\n" % int(code))
            return code == b"0\n"
        self._codes.close()
        os.write(1, b"(the shell exited with code %d)\n" % self._shell.wait())
        self._shell = None
        return False


def main(run: Callable[[str], bool]) -> None:
    """Answers frames until there are no more."""
    here, frames = os.getpid(), Frames(3, 4)
    with tempfile.TemporaryFile(dir=".") as printed, open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
        while True:
            source = frames.receive().decode()
            for stream in (1, 2):
                os.dup2(printed.fileno(), stream)
            succeeded = run(source)
            if os.getpid() != here:  # the code has forked, and this is the child
                os._exit(0)
            frames.send((b"+" if succeeded else b"-") + _taken(printed.fileno()))


def _taken(file: int) -> bytes:
    """Empties a file, and returns its content, the middle left out if it is long."""
    size = os.fstat(file).st_size
    text = os.pread(file, min(size, 2 * MOST), 0)
    if size > 2 * MOST:
        text = text[:MOST] + b"\n...\n" + os.pread(file, MOST, size - MOST)
    os.ftruncate(file, 0)
    os.lseek(file, 0, os.SEEK_SET)
    return text


if __name__ == "__main__":
    os.unlink(sys.argv[0])  # the scratch folder is empty
    main({"python": PythonSession, "bash": BashSession}[sys.argv[1]]().run)
