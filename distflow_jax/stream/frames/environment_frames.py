"""Frames between a worker and an environment host: calls, and their return values.

Return values are transferred unchanged, and validated on arrival like those of an environment
beside the sampler (Environments.first and observed).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distflow_jax.batch import Prompt
from distflow_jax.environments.environment import Shown, Turn
from distflow_jax.environments.failures import CallFailure
from distflow_jax.environments.observed_pictures import pixels_of
from distflow_jax.images.record import Image
from distflow_jax.stream.frames.frames import Frame, checked
from distflow_jax.stream.frames.image_frames import SentImages, images_of
from distflow_jax.stream.frames.prompt_frames import prompt_facts, prompt_of, tokens_name

MOST_TEXT = 20_000  # characters of a failure
_CAUSES = ("raised", "timed_out")
_NUMBER = (int, float)

# what a method returned, as JSON values and arrays
Returned = tuple[dict[str, Any], list[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class EnvironmentCall:
    """A call of an object.

    `number`: of the call; `place`: of the object, both the caller's choice. `value`: the prompt of
    a reset, the tokens int32 [T] of a step, None to close.
    """

    number: int
    place: int
    value: Prompt | np.ndarray | None


@dataclasses.dataclass(frozen=True)
class EnvironmentAnswer:
    """The outcome of a call: the return value, its failure, or the reason why it cannot be read.

    `repeatable`: whether a failed step may be retried on the same object.
    """

    number: int
    outcome: Any
    repeatable: bool = False


def calls_frame(calls: Sequence[EnvironmentCall]) -> Frame:
    """A frame with calls. ValueError for a prompt whose row cannot be sent."""
    facts: list[dict[str, Any]] = []
    arrays, sent = {}, SentImages(previews=True)
    for place, call in enumerate(calls):
        facts.append({"call": call.number, "object": call.place})
        if isinstance(call.value, Prompt):
            facts[-1]["prompt"] = prompt_facts(call.value)
            if call.value.images:
                facts[-1]["prompt"]["images"] = sent.add(place, call.value)
        tokens = call.value.tokens if isinstance(call.value, Prompt) else call.value
        if tokens is not None:
            arrays[tokens_name(place)] = np.asarray(tokens, np.int32)
    return Frame({"calls": facts, "images": sent.facts}, arrays | sent.arrays)


def calls_of(frame: Frame) -> list[EnvironmentCall]:
    """The calls of a frame; ValueError for what is none."""

    def read() -> list[EnvironmentCall]:
        images = images_of(frame.facts, frame.arrays)
        found = enumerate(frame.facts["calls"])
        return [_call(place, fact, images, frame.arrays) for place, fact in found]

    return checked(read)


def returned(value: Any, _: Any = None) -> Returned:
    """The JSON values and arrays of what a reset or a step returned, which was checked before."""
    facts: dict[str, Any] = {}
    if isinstance(value, Turn):
        logged = {str(name): float(number) for name, number in value.logged.items()}
        facts = {"reward": float(value.reward), "done": bool(value.done), "logged": logged}
        value = value.observation
    if isinstance(value, Shown):
        facts |= {"text": value.text, "role": value.role, "pictures": len(value.images)}
        return facts, [pixels_of(picture) for picture in value.images]
    if value is None or isinstance(value, str):
        return {**facts, "text": value}, []
    return facts, [np.asarray(value)]


def answers_frame(answers: Sequence[tuple[int, Returned | CallFailure, bool]]) -> Frame:
    """A frame with the outcomes of calls, as of EnvironmentAnswer."""
    facts, arrays = [], {}
    for place, (number, outcome, repeatable) in enumerate(answers):
        facts.append({"call": number, "repeatable": repeatable})
        if isinstance(outcome, CallFailure):
            failure = outcome.cause, outcome.error[:MOST_TEXT], outcome.kind[:MOST_TEXT]
            facts[-1]["failure"] = failure
            continue
        told, parts = outcome
        facts[-1]["returned"] = told
        arrays |= {_name(place, n): part for n, part in enumerate(parts)}
    return Frame({"answers": facts}, arrays)


def answers_of(frame: Frame) -> list[EnvironmentAnswer]:
    """The outcomes of a frame; ValueError for one that does not say of which calls they are."""

    def read() -> list[EnvironmentAnswer]:
        found = frame.facts.get("answers", [])
        return [_answer(place, fact, frame.arrays) for place, fact in enumerate(found)]

    return checked(read)


def _call(
    place: int,
    fact: Mapping[str, Any],
    images: Sequence[Image],
    arrays: Mapping[str, np.ndarray],
) -> EnvironmentCall:
    number, of = _of(fact, "call", int), _of(fact, "object", int)
    if "prompt" in fact:
        return EnvironmentCall(number, of, prompt_of(place, fact["prompt"], images, arrays))
    tokens = arrays.get(tokens_name(place))
    if tokens is not None and (tokens.dtype != np.int32 or tokens.ndim != 1):
        raise ValueError(f"a turn is {tokens.dtype}{list(tokens.shape)}, where int32 [T] is wanted")
    return EnvironmentCall(number, of, tokens)


def _answer(
    place: int, fact: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> EnvironmentAnswer:
    number, repeatable = _of(fact, "call", int), _of(fact, "repeatable", bool)
    try:
        return EnvironmentAnswer(number, checked(lambda: _outcome(place, fact, arrays)), repeatable)
    except ValueError as error:
        return EnvironmentAnswer(number, error, repeatable)


def _outcome(place: int, fact: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Any:
    if "failure" in fact:
        cause, *texts = fact["failure"]
        if cause not in _CAUSES or [type(text) for text in texts] != [str, str]:
            raise ValueError(f"failure {fact['failure']!r:.80}, where cause and texts are wanted")
        return CallFailure(cause, *(text[:MOST_TEXT] for text in texts))
    told = fact["returned"]
    observation = _observation(place, told, arrays)
    if "reward" not in told:
        return observation
    logged = _of(told, "logged", dict)
    reward, *_ = [_of(told, "reward", *_NUMBER), *(_of(logged, name, *_NUMBER) for name in logged)]
    return Turn(observation, reward, _of(told, "done", bool), logged)


def _observation(place: int, told: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Any:
    if "text" not in told:
        return arrays[_name(place, 0)]
    text = _of(told, "text", str, type(None))
    if "pictures" not in told:
        return text
    role, count = _of(told, "role", str, type(None)), _of(told, "pictures", int)
    return Shown(text, [arrays[_name(place, n)] for n in range(count)], role)


def _of(facts: Mapping[str, Any], name: str, *kinds: type) -> Any:
    """A JSON value of one of some types. ValueError, which names it, for another one."""
    value = facts.get(name)
    if type(value) not in kinds:
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"{name} is {value!r:.80}, where {wanted} is wanted")
    return value


def _name(place: int, part: int) -> str:
    return f"{place}.{part}"
