"""Finding a reward function by its name, and telling its signature."""

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from distflow_jax.rewards.table import REWARDS

ROW_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
OPTIONAL_ROW_PARAMETERS = ("prompt", "response_length")  # given to functions that name them
BATCH_PARAMETERS = ("prompts", "completions")


def load_function(name: str) -> Callable[..., Any]:
    """`gsm8k` (built in), `my_module:my_function` or `path/to/file.py:function` -> the function.

    Raises:
      ValueError, FileNotFoundError: nothing by that name (the nearest is named), or importing its
        module raises.
    """
    place, colon, attribute = name.rpartition(":")
    if not colon:
        if name not in REWARDS:
            near = difflib.get_close_matches(name, REWARDS, 1) or REWARDS
            raise ValueError(
                f"unknown reward function {name!r}; did you mean {', '.join(near)}? "
                "A function of your own is named my_module:my_function"
            )
        return REWARDS[name]
    module = _module_of_file(place) if place.endswith(".py") else _module(place)
    function = module
    for part in attribute.split("."):
        if not hasattr(function, part):
            near = difflib.get_close_matches(part, dir(function), 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"reward function {name!r}: {place} has no {part!r}{hint}")
        function = getattr(function, part)
    if not callable(function):
        raise ValueError(f"reward function {name!r} is {function!r}, which cannot be called")
    return function


def is_batch(function: Callable[..., Any]) -> bool:
    """Whether the function has TRL's signature (prompts, completions, **columns)."""
    parameters = inspect.signature(function).parameters
    return any(name in parameters for name in BATCH_PARAMETERS)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling the function gives a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  an instance with an async __call__
    )


def check_signature(name: str, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """ValueError unless the function can be called in verl's or TRL's way with these kwargs."""
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    shown = f"{name}{inspect.signature(function)}"
    given = [*BATCH_PARAMETERS] if is_batch(function) else [*ROW_PARAMETERS]
    for key in kwargs:
        if key in (*given, *OPTIONAL_ROW_PARAMETERS):
            raise ValueError(f"reward.kwargs: {key!r} is an argument that the run itself gives")
        if key not in names and not takes_any:
            near = difflib.get_close_matches(key, names, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"reward.kwargs: {shown} takes no {key!r}{hint}")
    if is_batch(function):
        return  # columns of the data may fill any other parameter
    required = {
        p.name
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }
    positional_only = {p.name for p in parameters if p.kind is p.POSITIONAL_ONLY}
    unknown = required - {*ROW_PARAMETERS, *OPTIONAL_ROW_PARAMETERS, *kwargs} | positional_only
    if unknown or not ({"solution_str"} & set(names) or takes_any):
        raise ValueError(
            f"reward function {shown} must take ({', '.join(ROW_PARAMETERS)}=None) as verl's do, "
            "or (prompts, completions, **columns) as TRL's do"
            + (f"; nothing is there to give for {', '.join(sorted(unknown))}" if unknown else "")
        )


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _broken(name, error) from error
        near = difflib.get_close_matches(error.name, [m.name for m in pkgutil.iter_modules()], 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"no module named {error.name!r} for the reward function{hint}. It is looked for in "
            "the current folder and PYTHONPATH; path/to/file.py:function works too"
        ) from error
    except Exception as error:
        raise _broken(name, error) from error


def _module_of_file(path: str) -> ModuleType:
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        names = [p.name for p in file.parent.glob("*.py")]
        near = difflib.get_close_matches(file.name, names, 1)
        hint = f"; did you mean {file.parent / near[0]}?" if near else ""
        raise FileNotFoundError(f"reward file {path} does not exist{hint}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # dataclasses and pickle look their module up there
    with contextlib.ExitStack() as undo:
        undo.callback(sys.modules.pop, file.stem, None)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise _broken(path, error) from error
        undo.pop_all()
    return module


def _broken(name: str, error: Exception) -> ValueError:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return ValueError(
        f"importing {name} for the reward function raised {type(error).__name__}: {error} "
        f"({frame.filename}, line {frame.lineno})"
    )
