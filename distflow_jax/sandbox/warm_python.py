"""A Python program in the interpreter of a forked zygote: no start, and no import, to wait for."""

import atexit
import builtins
import os
import sys
import threading
import types
from _sitebuiltins import Quitter
from collections.abc import Sequence


def run(argv: Sequence[str], environment: dict[str, str], path: Sequence[str]) -> None:
    """Runs `argv[1]` as the main program of this process; never returns.

    path: folders of modules; that of the program comes first.
    """
    for name in [name for name in sys.modules if name.split(".")[0] == "distflow_jax"]:
        del sys.modules[name]
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = list(argv[1:])
    sys.path[:] = [os.path.dirname(os.path.abspath(argv[1])), *path]
    sys.executable = sys._base_executable
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)
    sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.__stderr__ = open(
        2, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False
    )
    for name in ("exit", "quit"):  # programs expect them, and the zygote runs without site
        setattr(builtins, name, Quitter(name, "Ctrl-D"))
    module = types.ModuleType("__main__")
    module.__file__, module.__builtins__ = argv[1], builtins
    sys.modules["__main__"] = module
    try:
        with open(argv[1], "rb") as file:
            source = file.read()
        exec(compile(source, argv[1], "exec", dont_inherit=True), vars(module))
    finally:
        _end(sys.exception())


def _end(error: BaseException | None) -> None:
    """Ends the process as the interpreter does at the end of a program, without taking it down."""
    code: object = 0
    if isinstance(error, SystemExit):
        code = 0 if error.code is None else error.code
    elif error is not None:
        trace = error.__traceback__.tb_next  # without our own frame
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code = 1
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # waits for threads, as the interpreter does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    os._exit(code & 0xFF)
