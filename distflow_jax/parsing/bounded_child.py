"""A child process that does a stranger's bidding under limits of the kernel.

Python cannot end a computation inside a built-in operation (`9 ** 9 ** 9`), nor an allocation. The
kernel can: each request has seconds of processor time (ITIMER_PROF, whose signal ends the process)
and the process has an address space (RLIMIT_AS). A child that was ended is started again for the
next request.

Requests are pickled, since they come from this process; answers are JSON, since they come from
something that a stranger may have taken over.
"""

import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, BinaryIO

_HEADER = 8  # bytes of a length


class ChildEnded(Exception):
    """The kernel ended the child during a request; the message says which limit it met."""


class BoundedChild:
    """The parent's handle; started by the first request. May be used by several threads.

    Args:
      module: whose `answer(request)` is called, by its dotted name.
      seconds: processor time of a request.
      memory: bytes of address space.
      most_answer: bytes of an answer.
    """

    def __init__(self, module: str, *, seconds: float, memory: int, most_answer: int):
        self._arguments = [module, repr(seconds), str(memory), str(most_answer)]
        self._seconds, self._most_answer = seconds, most_answer
        self._lock = threading.Lock()
        self._process: subprocess.Popen | None = None
        self._owner = os.getpid()

    def ask(self, request: Any) -> Any:
        """The answer of the module, plain JSON values.

        Raises ValueError with the text of the module's own, and ChildEnded.
        """
        with self._lock:
            if self._process is None or self._owner != os.getpid():
                self._start()
            try:
                write_block(self._process.stdin, pickle.dumps(request))
                answer = json.loads(read_block(self._process.stdout, self._most_answer))
            except (OSError, EOFError) as error:
                raise ChildEnded(self._end()) from error
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["value"]

    def _start(self) -> None:
        """Starts the process. After a fork the parent's is left to the parent."""
        self._owner = os.getpid()
        self._process = subprocess.Popen(
            # PYTHONPATH below has the working folder if this process has it
            [sys.executable, "-P", "-m", __name__, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches the parent alone
            env=os.environ | {"PYTHONPATH": module_path()},
        )
        weakref.finalize(self, _stop, self._process)

    def _end(self) -> str:
        """Reaps the process; says why it ended."""
        process, self._process = self._process, None
        _stop(process)
        if process.returncode == -signal.SIGPROF:
            return f"took more than {self._seconds:g} s of processor time"
        return f"ended with exit code {process.returncode}"


def module_path() -> str:
    """PYTHONPATH of a child that is to find the same modules as this process."""
    return os.pathsep.join(entry or os.getcwd() for entry in sys.path)


def _stop(process: subprocess.Popen) -> None:
    for pipe in (process.stdin, process.stdout):
        try:
            pipe.close()  # the child reads its end
        except OSError:  # it has died: what was not sent is lost
            pass
    try:
        process.wait(1)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def write_block(file: BinaryIO, content: bytes) -> None:
    """Writes bytes with their length before them."""
    file.write(len(content).to_bytes(_HEADER, "little") + content)
    file.flush()


def read_block(file: BinaryIO, most: int | None = None) -> bytes:
    """Reads what write_block wrote. Raises EOFError at the end, or above `most` bytes."""
    header = file.read(_HEADER)
    size = int.from_bytes(header, "little")
    if len(header) < _HEADER or (most is not None and size > most):
        raise EOFError
    content = file.read(size)
    if len(content) < size:
        raise EOFError
    return content


def serve(answer: Callable[[Any], Any], seconds: float, memory: int, most_answer: int) -> None:
    """Answers requests until standard input ends. The child's side."""
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr
    while True:
        try:
            content = read_block(requests)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, seconds)
        text = _answered(answer, content, memory, most_answer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        write_block(answers, text)


def _answered(answer: Callable[[Any], Any], content: bytes, memory: int, most_answer: int) -> bytes:
    try:
        text = json.dumps({"value": answer(pickle.loads(content))}).encode()
        if len(text) <= most_answer:
            return text
        problem = f"gives more than {most_answer >> 20} MiB"
    except MemoryError:
        problem = f"took more than {memory >> 20} MiB of memory"
    except RecursionError:
        problem = "calls itself too deeply"
    except Exception as error:  # a stranger's code may raise anything
        problem = f"{error}" or type(error).__name__
    return json.dumps({"error": problem[:1000]}).encode()


if __name__ == "__main__":
    import importlib

    module, *limits = sys.argv[1:]
    serve(importlib.import_module(module).answer, float(limits[0]), int(limits[1]), int(limits[2]))
