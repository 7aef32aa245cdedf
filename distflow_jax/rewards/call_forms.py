"""Forms of reward functions: the arguments that verl, TRL, Tunix and verifiers pass.

| form    | scores         | arguments                                            | as in      |
|---------|----------------|------------------------------------------------------|------------|
| row     | one response   | data_source, solution_str, ground_truth, extra_info  | verl       |
| batch   | many responses | prompts, completions, completion_ids, columns        | TRL, Tunix |
| rollout | one response   | prompt, completion, answer, state, info, columns     | verifiers  |

A function gets the arguments that it names, and with `**kwargs` all those of its form.
"""

import dataclasses
import inspect
import json
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distflow_jax.rewards.records import RewardRequest

Messages = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class CallForm:
    """A form by the parameters that tell it (`marks`) and those that a run passes (`own`).

    `named` are passed only to functions that name them, even beside `**kwargs`. `columns`: any
    other parameter is a column of the data.
    """

    name: str
    marks: frozenset[str]
    own: tuple[str, ...]
    named: tuple[str, ...] = ()
    columns: bool = True


ROW = CallForm(
    "row",
    frozenset({"solution_str"}),
    ("data_source", "solution_str", "ground_truth", "extra_info"),
    named=("prompt", "response_length"),
    columns=False,
)
BATCH = CallForm(
    "batch",
    frozenset({"prompts", "completions", "completion_ids"}),
    ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"),
)
ROLLOUT = CallForm(
    "rollout",
    frozenset({"completion", "state", "answer", "info"}),
    ("prompt", "completion", "answer", "state", "info", "task"),
)


def form_of(function: Callable[..., Any]) -> CallForm:
    """The form of a function by its parameters; ROW if none of them tells."""
    names = inspect.signature(function).parameters.keys()
    return next((form for form in (BATCH, ROW, ROLLOUT) if form.marks & names), ROW)


def takes_any(function: Callable[..., Any]) -> bool:
    """Whether a function has a parameter like `**kwargs`."""
    parameters = inspect.signature(function).parameters.values()
    return any(p.kind is p.VAR_KEYWORD for p in parameters)


def required_of(function: Callable[..., Any]) -> set[str]:
    """The parameters without a default."""
    return {
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }


def row_arguments(function: Callable[..., Any], request: RewardRequest) -> dict[str, Any]:
    """The arguments of a function of the form ROW."""
    values = {
        "data_source": request.data_source,
        "solution_str": request.solution,
        "ground_truth": request.ground_truth,
        "extra_info": request.extra_info,
        "prompt": request.prompt,
        "response_length": request.response_length,
    }
    parameters = inspect.signature(function).parameters
    own = ROW.own if takes_any(function) else ()
    return {key: value for key, value in values.items() if key in parameters or key in own}


def rollout_arguments(
    function: Callable[..., Any],
    request: RewardRequest,
    kwargs: Mapping[str, Any],
    objects: Mapping[str, Any],
) -> dict[str, Any]:
    """The arguments of a function of the form ROLLOUT.

    Args:
      function: the function.
      request: a response. Prompt and completion are messages if the row's prompt is, else text.
      kwargs: values of reward.kwargs.
      objects: values that the function's Rubric gives by name, such as its `parser`.

    Raises:
      ValueError: the row has no column of a parameter's name, or `info` is text and no JSON.
    """
    chat, columns = request.messages is not None, dict(request.extra_info)
    info = columns.pop("info", None) or {}
    values = columns | {
        "prompt": request.messages if chat else request.prompt,
        "completion": _message("assistant", request.solution) if chat else request.solution,
        "answer": "" if request.ground_truth is None else request.ground_truth,
        "info": json.loads(info) if isinstance(info, str) else info,
        "task": columns.get("task") or "default",
    }
    available = values | {"state": dict(values)} | dict(objects) | dict(kwargs)
    return _taken(function, available, columns)


def batch_arguments(
    function: Callable[..., Any],
    requests: Sequence[RewardRequest],
    kwargs: Mapping[str, Any],
    logged: Sequence[dict[str, Any]],
    *,
    conversational: bool,
) -> dict[str, Any]:
    """The arguments of a function of the form BATCH.

    Args:
      function: the function.
      requests: responses.
      kwargs: values of reward.kwargs.
      logged: per request the values that the function logs beside its score; written by its
        `log_extra(column, values)` and `log_metric(name, value)`.
      conversational: prompts and completions are lists of messages, else text.

    Raises:
      ValueError: the rows have no column of a parameter's name.
    """
    columns = {
        key: [r.extra_info.get(key) for r in requests]
        for key in dict.fromkeys(key for r in requests for key in r.extra_info)
    }
    prompts, completions = [r.prompt for r in requests], [r.solution for r in requests]
    if conversational:
        prompts = [r.messages or _message("user", r.prompt) for r in requests]
        completions = [_message("assistant", text) for text in completions]

    def log_extra(column: str, values: Sequence[Any]) -> None:
        for entry, value in zip(logged, values, strict=True):
            entry[column] = value

    def log_metric(name: str, value: float) -> None:
        for entry in logged:
            entry[name] = value

    available = columns | {
        "prompts": prompts,
        "completions": completions,
        "completion_ids": [list(r.tokens) for r in requests],
        "trainer_state": types.SimpleNamespace(global_step=max(r.step for r in requests)),
        "log_extra": log_extra,
        "log_metric": log_metric,
        "ground_truth": [r.ground_truth for r in requests],
        "data_source": [r.data_source for r in requests],
    }
    return _taken(function, available | dict(kwargs), columns)


def _taken(
    function: Callable[..., Any], available: Mapping[str, Any], columns: Mapping[str, Any]
) -> dict[str, Any]:
    """The values that a function takes. ValueError for parameters without one."""
    if missing := sorted(required_of(function) - available.keys()):
        raise ValueError(
            f"the rows have no column {', '.join(map(repr, missing))}, which the function takes; "
            f"they have {', '.join(map(repr, sorted(columns))) or 'no other columns'}"
        )
    if takes_any(function):
        return dict(available)
    parameters = inspect.signature(function).parameters
    return {key: value for key, value in available.items() if key in parameters}


def _message(role: str, text: str) -> Messages:
    return [{"role": role, "content": text}]
