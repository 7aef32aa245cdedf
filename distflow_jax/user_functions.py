"""Functions that a user names: "module:function" or "path/to/file.py:function"; shipped files.

Imports only the standard library, since workers that must start fast use it too.
"""

import contextlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import pathlib
import pkgutil
import sys
import traceback
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from distflow_jax.did_you_mean import hint, near_file, suggestion
from distflow_jax.parsing.one_line import shown
from distflow_jax.parsing.paths import named_path, reading

MOST_SOURCE = 1 << 24  # bytes of a Python file
_MAX_LISTED = 8  # functions named in an error
# what a user's code may raise in a thread that no signal reaches: a test framework's verdicts, too
ANYTHING = (BaseException,)


def shipped_folder() -> pathlib.Path:
    """Folder of the shipped configs and graphs, inside an installed package or in a checkout."""
    package = pathlib.Path(__file__).parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def load_function(spec: str, what: str) -> Callable[..., Any]:
    """Loads the function `spec`; `what` is its purpose, the first words of error messages.

    The name after the colon may be dotted ("module:Class.method"). Raises what load_objects does,
    and ValueError for what cannot be called.
    """
    (found,) = load_objects(spec, what).values()
    if not callable(found):
        raise ValueError(f"{what} {spec!r} is {found!r}, which cannot be called")
    return found


def load_objects(spec: str, what: str) -> dict[str, Any]:
    """{name: object} of "module:name" or "path/to/file.py:name,other"; loads the place once.

    Raises:
      FileNotFoundError: no such file; the message names the nearest.
      ValueError: no such module or name in it (the message names the nearest), or importing it
        raised (the message has the error, file and line).
    """
    place, _, names = spec.rpartition(":")
    if not place or not names:
        raise ValueError(f"{what} {spec!r} must be module:function or path/to/file.py:function")
    loaded: Any = _load_file(place, what) if place.endswith(".py") else _load_module(place, what)
    objects = {}
    for name in names.split(","):
        found = loaded
        for part in name.strip().split("."):
            if not hasattr(found, part):
                raise ValueError(f"{what} {spec!r}: {place} has no {part!r}{_nearest(part, found)}")
            found = getattr(found, part)
        objects[name.strip()] = found
    return objects


def load_named(
    spec: str, known: Mapping[str, Callable[..., Any]], what: str, *, setting: str, example: str
) -> Callable[..., Any]:
    """The function of `known` that has the name `spec`, or else a user's own, by load_function.

    `setting` (a config key, or the same as `what`) and `example` (how a function of the user's own
    is named) are for the message. Raises what load_function does, and ValueError for a name that
    is not known; the message has the nearest.
    """
    if ":" in spec:
        return load_function(spec, what)
    if spec not in known:
        raise ValueError(
            f"unknown {setting} {spec!r}; {hint(spec, known)}; one of your own is named {example}"
        )
    return known[spec]


def _nearest(name: str, place: Any) -> str:
    if near := suggestion(name, dir(place)):
        return f"; {near}"
    own = [
        key
        for key, value in vars(place).items()
        if inspect.isfunction(value) and value.__module__ == getattr(place, "__name__", None)
    ]
    return f"; it has {', '.join(own[:_MAX_LISTED])}" if own else ""


def _load_file(path: str, what: str) -> ModuleType:
    file = source_file(f"{what}: file", path).resolve()
    name = _module_name(file)
    loader = importlib.machinery.SourceFileLoader(name, str(file))  # a link's target has any ending
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        del sys.modules[name]
        raise _broken(path, what, error) from error
    return module


def source_file(name: str, path: str) -> pathlib.Path:
    """The path of a Python file that can be read; errors have the nearest name."""
    file = named_path(name, path)
    try:
        with reading(file, name, MOST_SOURCE):
            return file
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{name} {path} does not exist{near_file(file)}") from error


def _module_name(file: pathlib.Path) -> str:
    """The file's stem, or a longer name if a module of another file has that name already."""
    other = sys.modules.get(file.stem)
    if other is None or getattr(other, "__file__", None) == str(file):
        return file.stem
    return f"{file.stem}_{zlib.crc32(str(file).encode()):08x}"


def _load_module(name: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _broken(name, what, error) from error  # something that the user's module needs
        modules = [module.name for module in pkgutil.iter_modules()]
        near = suggestion(error.name, modules, cutoff=0.75)
        near = f" ({near})" if near else ""
        raise ValueError(
            f"{what}: no module named {error.name!r}{near} in the installed packages and "
            "PYTHONPATH; path/to/file.py:function works too"
        ) from error
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        raise _broken(name, what, error) from error


@contextlib.contextmanager
def errors_of_file(file: str | None, what: str) -> Iterator[None]:
    """Turns what a user's file raises in this block into a ValueError with its line.

    Errors without a line of the file, and ValueErrors of functions that it calls, pass unchanged.
    """
    try:
        yield
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        lines = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
        of_syntax = isinstance(error, SyntaxError) and error.filename in (file, None)
        if file is None or not (lines or of_syntax):
            raise
        text = str(error).splitlines()
        reason = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
        number = error.lineno if isinstance(error, SyntaxError) else None
        if lines:
            number = lines[-1].lineno
        place = f" (line {number})" if number else ""
        raise ValueError(f"{what} {file!r}: {reason}{place}") from error


class Raised(NamedTuple):
    """Error of a user's code: its summary, " (FILE, line N)" or "", and the traceback."""

    summary: str
    place: str
    text: str


def raised(error: BaseException, ours: Collection[str]) -> Raised:
    """The parts of a message about an error. Frames of the files `ours` at the top are left out."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    place = ""
    if trace is not None:
        frame = traceback.extract_tb(trace)[-1]
        place = f" ({frame.filename}, line {frame.lineno})"
    summary = "".join(traceback.format_exception_only(error)).strip()
    return Raised(summary, place, "".join(traceback.format_exception(type(error), error, trace)))


def shown_with_type(value: Any) -> str:
    """A value that a user's code returned, as messages show it, and its type."""
    return f"{shown(value)} ({type(value).__name__})"


def _broken(place: str, what: str, error: BaseException) -> ValueError:
    if isinstance(error, SyntaxError):  # its traceback ends before the file
        reason, file, line = error.msg, error.filename, error.lineno
    else:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        reason, file, line = str(error), frame.filename, frame.lineno
    reason = (reason.splitlines() or [""])[0]
    return ValueError(
        f"{what}: importing {place} raised {type(error).__name__}: {reason} ({file}, line {line})"
    )
