"""Reward functions: loading by name, checks of the signature, calls, and checks of results."""

import asyncio
import dataclasses
import functools
import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from distflow_jax import user_functions
from distflow_jax.did_you_mean import suggestion
from distflow_jax.rewards.records import MOST_SCORE, RewardRequest, RewardResult, VoteRequest
from distflow_jax.rewards.registry import ANSWERS, REWARDS, same_answers

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
            fix = suggestion(key, names) or "take it out of reward.kwargs"
            raise ValueError(f"reward.kwargs: {shown} takes no {key!r}; {fix}")
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


NOT_SCORED = RewardResult(math.nan)


def score_requests(
    function: Callable[..., Any],
    kwargs: Mapping[str, Any],
    requests: Sequence[RewardRequest | VoteRequest],
    *,
    timeout_seconds: float,
    on_error: float,
    conversational: bool = False,
) -> list[RewardResult]:
    """Scores requests; returns one result each, in order. The function's exceptions are results.

    A batch function is called once, a coroutine function concurrently for all requests (each with
    the deadline), any other function row by row without a deadline: RewardPool ends hanging calls.
    `conversational`: a batch function gets prompts and completions as lists of messages.
    """
    if requests and isinstance(requests[0], VoteRequest):
        votes = (same_answers(function, request.answers) for request in requests)
        return [RewardResult(on_error, votes=found) for found in votes]
    if is_batch(function):
        call = functools.partial(_call_batch, function, kwargs, requests, conversational)
        return _guarded_many(call, len(requests), timeout_seconds, on_error, conversational)
    calls = [functools.partial(function, **_row_arguments(function, r), **kwargs) for r in requests]
    if is_async(function):
        return asyncio.run(_gather(calls, timeout_seconds, on_error))
    results = [_guarded(call, on_error) for call in calls]
    if function not in ANSWERS:
        return results
    own = {key: value for key, value in kwargs.items() if key != "prompt"}
    answers = [ANSWERS[function](r.solution, r.prompt, **own) for r in requests]
    return [
        dataclasses.replace(result, answer=answer)
        for result, answer in zip(results, answers, strict=True)
    ]


def result_from(value: Any) -> RewardResult:
    """The RewardResult of the value that a function returned for one response.

    The value is a number, or a dict with a number as `score`; None for the score leaves the
    response out of its group. A dict's `answer` is what the response's answer is; its other entries
    are logged if they are numbers.

    Raises:
      TypeError: any other value.
      ValueError: a score that is nan or outside MOST_SCORE.
    """
    entries = value if isinstance(value, Mapping) else {"score": value}
    not_scored = isinstance(value, Mapping) and "score" in entries and entries["score"] is None
    score = math.nan if not_scored else _number(entries.get("score"))
    if score is None:
        raise TypeError(
            f"the reward function returned {_shown(value)}; "
            "expected a number or a dict with a number as 'score' (None there: not scored)"
        )
    if not abs(score) <= MOST_SCORE and not not_scored:  # nan, too
        wrong = f"a score of {score}, outside ±{MOST_SCORE:g}"
        raise ValueError(f"the reward function returned {wrong}")
    numbers = {k: _number(entry) for k, entry in entries.items() if k not in ("score", "answer")}
    answer = str(entries["answer"] or "") if "answer" in entries else None
    logged = {str(k): v for k, v in numbers.items() if v is not None}
    return RewardResult(score, logged, answer=answer)


def error_result(error: BaseException, on_error: float, hint: str = "") -> RewardResult:
    """An exception of the user's function as a result, with its file, line and traceback."""
    trace = _beyond_this_file(error.__traceback__)
    summary = "".join(traceback.format_exception_only(error)).strip() + hint
    if trace is not None:
        frame = traceback.extract_tb(trace)[-1]
        summary += f" ({frame.filename}, line {frame.lineno})"
    text = "".join(traceback.format_exception(type(error), error, trace))
    return RewardResult(on_error, error=f"exception: {summary}\n{text}")


def _row_arguments(function: Callable[..., Any], request: RewardRequest) -> dict[str, Any]:
    available = {
        "data_source": request.data_source,
        "solution_str": request.solution,
        "ground_truth": request.ground_truth,
        "extra_info": request.extra_info,
        "prompt": request.prompt,
        "response_length": request.response_length,
    }
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {
        key: value
        for key, value in available.items()
        if key in parameters or (takes_any and key in ROW_PARAMETERS)
    }


def _call_batch(
    function: Callable[..., Any],
    kwargs: Mapping[str, Any],
    requests: Sequence[RewardRequest],
    conversational: bool,
) -> Any:
    columns: dict[str, list[Any]] = {
        key: [r.extra_info.get(key) for r in requests]
        for key in dict.fromkeys(key for r in requests for key in r.extra_info)
    }
    prompts, completions = [r.prompt for r in requests], [r.solution for r in requests]
    columns |= {
        "prompts": _messages("user", prompts) if conversational else prompts,
        "completions": _messages("assistant", completions) if conversational else completions,
        "ground_truth": [r.ground_truth for r in requests],
        "data_source": [r.data_source for r in requests],
    }
    parameters = inspect.signature(function).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        columns = {key: column for key, column in columns.items() if key in parameters}
    return function(**columns | dict(kwargs))


def _messages(role: str, texts: Sequence[str]) -> list[list[dict[str, str]]]:
    """Each text as TRL's conversation of one message."""
    return [[{"role": role, "content": text}] for text in texts]


def _guarded_many(
    call: Callable[[], Any],
    count: int,
    timeout_seconds: float,
    on_error: float,
    conversational: bool,
) -> list[RewardResult]:
    try:
        values = call()
        if inspect.isawaitable(values):
            values = asyncio.run(asyncio.wait_for(values, timeout_seconds))
        if not hasattr(values, "__len__") or isinstance(values, str | Mapping):
            raise TypeError(
                f"the reward function returned {_shown(values)}; expected a list of scores"
            )
        if len(values) != count:
            raise ValueError(
                f"the reward function returned {len(values)} scores for {count} completions"
            )
    except TimeoutError:
        return [RewardResult(on_error, error="timeout")] * count
    except (Exception, SystemExit) as error:  # user code may raise anything
        text = not conversational and any(sign in str(error) for sign in _INDEXED_TEXT)
        return [error_result(error, on_error, _TEXT_HINT if text else "")] * count
    return [_item(value, on_error) for value in values]


# messages of Python where text is taken for a list of messages
_INDEXED_TEXT = ("string indices must be integers", "'str' object has no attribute")
_TEXT_HINT = (
    "; completions are text: reward.conversational=True gives lists of messages as TRL does"
)


def _item(value: Any, on_error: float) -> RewardResult:
    """The result of one item of a batch; what is wrong with it concerns no other item."""
    try:
        return NOT_SCORED if value is None else result_from(value)
    except (TypeError, ValueError) as error:
        return error_result(error, on_error)


def _guarded(call: Callable[[], Any], on_error: float) -> RewardResult:
    try:
        return result_from(call())
    except (Exception, SystemExit) as error:  # user code may raise anything
        return error_result(error, on_error)


async def _gather(
    calls: Sequence[Callable[[], Awaitable[Any]]], timeout_seconds: float, on_error: float
) -> list[RewardResult]:
    async def one(call: Callable[[], Awaitable[Any]]) -> RewardResult:
        try:
            async with asyncio.timeout(timeout_seconds) as deadline:
                return result_from(await call())
        except TimeoutError as error:
            # a timeout inside the function, of a socket for instance, is an ordinary exception
            if deadline.expired():
                return RewardResult(on_error, error="timeout")
            return error_result(error, on_error)
        except (Exception, SystemExit) as error:  # user code may raise anything
            return error_result(error, on_error)

    return await asyncio.gather(*map(one, calls))


def _beyond_this_file(trace: TracebackType | None) -> TracebackType | None:
    # the frames of this file do not help to find the error in the user's function
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _number(value: Any) -> float | None:
    """A number of Python, NumPy or torch as a float; None for anything else."""
    if isinstance(value, str | bytes):
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 80 else text[:77] + '...'} ({type(value).__name__})"
