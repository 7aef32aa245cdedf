"""Calls of reward functions, and checks of their results."""

import asyncio
import dataclasses
import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from distflow_jax.rewards import call_forms, reward_function
from distflow_jax.rewards.call_forms import BATCH
from distflow_jax.rewards.records import (
    MOST_SCORE,
    OF_RUN,
    RewardRequest,
    RewardResult,
    VoteRequest,
    number_of,
)
from distflow_jax.rewards.registry import ANSWERS, same_answers
from distflow_jax.rewards.reward_function import RewardFunction, WeightedFunction
from distflow_jax.user_functions import raised, shown_with_type

NOT_SCORED = RewardResult(math.nan)


def score_requests(
    reward: RewardFunction,
    requests: Sequence[RewardRequest | VoteRequest],
    *,
    timeout_seconds: float,
    on_error: float,
    conversational: bool = False,
) -> list[RewardResult]:
    """Scores requests; returns one result each, in order. The functions' exceptions are results.

    A batch function is called once, coroutine functions concurrently for all requests (each with
    the deadline), any other function row by row without a deadline: RewardPool ends hanging calls.
    `conversational`: a batch function gets prompts and completions as lists of messages.
    """
    if requests and isinstance(requests[0], VoteRequest):
        function = reward.parts[0].function
        votes = (same_answers(function, request.answers) for request in requests)
        return [RewardResult(on_error, votes=found) for found in votes]
    waiting = [part for part in reward.parts if part.is_async and part.form is not BATCH]
    found = {}
    if waiting:
        calls = [functools.partial(part.call, r) for part in waiting for r in requests]
        results = iter(asyncio.run(_gather(calls, timeout_seconds, on_error)))
        found = {id(part): [next(results) for _ in requests] for part in waiting}
    for part in reward.parts:
        if part.form is BATCH:
            call = functools.partial(_guarded_many, part, requests, conversational)
            found[id(part)] = call(timeout_seconds, on_error)
        elif not part.is_async:
            found[id(part)] = _score_rows(part, requests, on_error)
    columns = [found[id(part)] for part in reward.parts]
    if len(reward.parts) == 1 and reward.parts[0].weight == 1:
        return columns[0]
    return [_weighted(reward, results, on_error) for results in zip(*columns, strict=True)]


def _score_rows(
    part: WeightedFunction, requests: Sequence[RewardRequest], on_error: float
) -> list[RewardResult]:
    results = [_guarded(functools.partial(part.call, r), on_error) for r in requests]
    if part.function not in ANSWERS:
        return results
    own = {key: value for key, value in part.kwargs.items() if key != "prompt"}
    answers = [ANSWERS[part.function](r.solution, r.prompt, **own) for r in requests]
    return [
        dataclasses.replace(result, answer=answer)
        for result, answer in zip(results, answers, strict=True)
    ]


def _weighted(
    reward: RewardFunction, results: Sequence[RewardResult], on_error: float
) -> RewardResult:
    """The weighted sum of the parts' results for one response, which logs each part's score.

    A part that did not score the response is left out, as in TRL. A part that failed is the
    failure of the whole.
    """
    for result in results:
        if result.error is not None:
            return RewardResult(on_error, error=result.error)
    scored = [
        (part, result)
        for part, result in zip(reward.parts, results, strict=True)
        if not math.isnan(result.score)
    ]
    logged = {name: value for result in results for name, value in result.logged.items()}
    if len(reward.parts) > 1:
        logged |= {part.name: result.score for part, result in scored}
    total = sum(part.weight * result.score for part, result in scored) if scored else math.nan
    answers = (result.answer for result in results if result.answer is not None)
    return RewardResult(total, logged, answer=next(answers, None))


def result_from(value: Any) -> RewardResult:
    """The RewardResult of the value that a function returned for one response.

    The value is a number, or a dict with a number as `score`; None for the score leaves the
    response out of its group. A dict's `answer` is what the response's answer is; its other entries
    are logged if they are numbers.

    Raises:
      TypeError: any other value.
      ValueError: a score that is nan or outside MOST_SCORE, or a number whose name is of OF_RUN.
    """
    entries = value if isinstance(value, Mapping) else {"score": value}
    not_scored = isinstance(value, Mapping) and "score" in entries and entries["score"] is None
    score = math.nan if not_scored else number_of(entries.get("score"))
    if score is None:
        raise TypeError(
            f"the reward function returned {shown_with_type(value)}; "
            "expected a number or a dict with a number as 'score' (None there: not scored)"
        )
    if not abs(score) <= MOST_SCORE and not not_scored:  # nan, too
        wrong = f"a score of {score}, outside ±{MOST_SCORE:g}"
        raise ValueError(f"the reward function returned {wrong}")
    answer = str(entries["answer"] or "") if "answer" in entries else None
    others = {k: entry for k, entry in entries.items() if k not in ("score", "answer")}
    return RewardResult(score, _numbers(others), answer=answer)


def error_result(error: BaseException, on_error: float, hint: str = "") -> RewardResult:
    """An exception of the user's function as a result, with its file, line and traceback."""
    found = raised(error, _OWN_FILES)
    summary = f"{found.summary}{hint}{found.place}"
    return RewardResult(on_error, error=f"exception: {summary}\n{found.text}")


def _guarded_many(
    part: WeightedFunction,
    requests: Sequence[RewardRequest],
    conversational: bool,
    timeout_seconds: float,
    on_error: float,
) -> list[RewardResult]:
    count, logged = len(requests), [{} for _ in requests]
    try:
        values = part.call_batch(requests, logged, conversational=conversational)
        if inspect.isawaitable(values):
            values = asyncio.run(asyncio.wait_for(values, timeout_seconds))
        if not hasattr(values, "__len__") or isinstance(values, str | Mapping):
            raise TypeError(
                f"the reward function returned {shown_with_type(values)}; expected a list of scores"
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
    return [_item(value, on_error, own) for value, own in zip(values, logged, strict=True)]


# messages of Python where text is taken for a list of messages
_INDEXED_TEXT = ("string indices must be integers", "'str' object has no attribute")
_TEXT_HINT = (
    "; completions are text: reward.conversational=True gives lists of messages as TRL does"
)


def _item(value: Any, on_error: float, logged: Mapping[str, Any]) -> RewardResult:
    """The result of one item of a batch; what is wrong with it concerns no other item.

    `logged`: values that the function logged for it, of which numbers are kept.
    """
    try:
        result = NOT_SCORED if value is None else result_from(value)
        return dataclasses.replace(result, logged=_numbers(logged) | result.logged)
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


# their frames do not help to find the error in the user's function
_OWN_FILES = {__file__, reward_function.__file__, call_forms.__file__}


def _numbers(entries: Mapping[Any, Any]) -> dict[str, float]:
    """The numbers among some values, by name. ValueError for a name that the run logs itself."""
    found = {str(name): number_of(value) for name, value in entries.items()}
    numbers = {name: number for name, number in found.items() if number is not None}
    if taken := sorted(OF_RUN & numbers.keys()):
        raise ValueError(
            f"the reward function logs {taken[0]!r}, a name of the run: choose another"
        )
    return numbers
