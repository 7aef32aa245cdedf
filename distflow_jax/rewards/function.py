"""Reward functions: loading by name, and checks of the signature."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from distflow_jax import user_functions
from distflow_jax.did_you_mean import nearest
from distflow_jax.rewards.registry import REWARDS

ROW_PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
OPTIONAL_ROW_PARAMETERS = ("prompt", "response_length")  # passed to functions that name them
BATCH_PARAMETERS = ("prompts", "completions")


def load_function(name: str) -> Callable[..., Any]:
    """Loads `gsm8k` (built in), `my_module:my_function` or `path/to/file.py:function`.

    Raises:
      ValueError, FileNotFoundError: no such function (the message names the nearest), or importing
        its module raised.
    """
    return user_functions.load_named(
        name,
        REWARDS,
        "reward function",
        setting="reward function",
        example="my_module:my_function or path/to/file.py:my_function",
    )


def is_batch(function: Callable[..., Any]) -> bool:
    """Whether the function has TRL's signature (prompts, completions, **columns)."""
    parameters = inspect.signature(function).parameters
    return any(name in parameters for name in BATCH_PARAMETERS)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling the function returns a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  an instance with an async __call__
    )


def check_signature(name: str, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError unless the function takes verl's or TRL's arguments and these kwargs."""
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    shown = f"{name}{inspect.signature(function)}"
    own = [*BATCH_PARAMETERS] if is_batch(function) else [*ROW_PARAMETERS]
    for key in kwargs:
        if key in (*own, *OPTIONAL_ROW_PARAMETERS):
            raise ValueError(
                f"reward.kwargs: {key!r} is an argument that the run itself passes; take it out"
            )
        if key not in names and not takes_any:
            near = nearest(key, names)
            hint = f"did you mean {near!r}?" if near else "take it out of reward.kwargs"
            raise ValueError(f"reward.kwargs: {shown} takes no {key!r}; {hint}")
    if is_batch(function):
        return  # any other parameter may be a column of the data
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
            + (f"; there is no value for {', '.join(sorted(unknown))}" if unknown else "")
        )
