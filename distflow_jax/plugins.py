"""Functions that a user names: "module:function" or "path/to/file.py:function"."""

import difflib
import importlib
import importlib.util
import inspect
import pathlib
import sys
from collections.abc import Callable
from types import ModuleType


def load_function(spec: str, what: str) -> Callable:
    """The function called `spec`; `what` says in errors what it was wanted for.

    Raises FileNotFoundError for a missing file and ValueError for a missing module or function, with
    the nearest name. What the user's file itself raises on import goes through.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise ValueError(f"{what} {spec!r} must be module:function or file.py:function")
    module = _load_file(place, what) if place.endswith(".py") else _load_module(place, what)
    function = getattr(module, name, None)
    if not callable(function):
        public = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        near = difflib.get_close_matches(name, public, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {sorted(public) or 'none'}"
        raise ValueError(f"{what} {spec!r}: {place} has no function {name!r}; {hint}")
    return function


def _load_file(path: str, what: str) -> ModuleType:
    file = pathlib.Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"{what}: file {path!r} does not exist")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    # under its name, so that dataclasses and pickle find the module of what it defines
    sys.modules.setdefault(file.stem, module)
    spec.loader.exec_module(module)
    return module


def _load_module(name: str, what: str) -> ModuleType:
    top = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != top:
            raise  # something that the user's module needs, not the module itself
        raise ValueError(
            f"{what}: no module {name!r}; is its folder on PYTHONPATH? A file goes as file.py:function"
        ) from None
