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
from distflow_jax.stream.frames.frames import FRAME_BYTES, Frame, reads_frames
from distflow_jax.stream.frames.image_frames import SentImages, images_of
from distflow_jax.stream.frames.prompt_frames import prompt_facts, prompt_of, tokens_name

MOST_BYTES = FRAME_BYTES // 2  # of a call or an outcome, beside smaller ones in a frame
MOST_TEXT = 20_000  # characters of a failure
_CAUSES = ("raised", "timed_out")
_NUMBER = (int, float)


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


@reads_frames
def calls_of(frame: Frame) -> list[EnvironmentCall]:
    """The calls of a frame; ValueError for what is none."""
    images = images_of(frame.facts, frame.arrays)
    found = enumerate(frame.facts["calls"])
    return [_call(place, fact, images, frame.arrays) for place, fact in found]


def returned(value: Any, _: Any = None) -> bytes:
    """The outcome of a reset or a step, for `answers_frame`, of what it returned, which was checked
    before. ValueError for more than MOST_BYTES."""
    facts: dict[str, Any] = {}
    parts: list[np.ndarray] = []
    if isinstance(value, Turn):
        logged = {str(name): float(number) for name, number in value.logged.items()}
        facts = {"reward": float(value.reward), "done": bool(value.done), "logged": logged}
        value = value.observation
    if isinstance(value, Shown):
        facts |= {"text": value.text, "role": value.role, "pictures": len(value.images)}
        parts = [pixels_of(picture) for picture in value.images]
    elif value is None or isinstance(value, str):
        facts["text"] = value
    else:  # none may have any other type
        parts = [np.asarray(value).astype(np.int32)]
    arrays = {str(number): part for number, part in enumerate(parts)}
    data = Frame({"returned": facts}, arrays).to_bytes()
    if len(data) > MOST_BYTES:
        raise ValueError(
            f"an observation of {len(data)} bytes, where a host of environments sends at most "
            f"{MOST_BYTES}: return a smaller one"
        )
    return data


def failed(failure: CallFailure) -> bytes:
    """The outcome of a call that failed, for `answers_frame`."""
    texts = failure.error[:MOST_TEXT], failure.kind[:MOST_TEXT]
    return Frame({"failure": [failure.cause, *texts]}).to_bytes()


def answers_frame(answers: Sequence[tuple[int, bytes, bool]]) -> Frame:
    """A frame with the outcomes of calls: the number of each, outcome, and `repeatable`."""
    facts = [{"call": number, "repeatable": repeatable} for number, _, repeatable in answers]
    outcomes = {str(n): np.frombuffer(data, np.uint8) for n, (_, data, _) in enumerate(answers)}
    return Frame({"answers": facts}, outcomes)


@reads_frames
def answers_of(frame: Frame) -> list[EnvironmentAnswer]:
    """The outcomes of a frame; ValueError for one that does not say of which calls they are."""
    found = frame.facts.get("answers", [])
    return [_answer(fact, frame.arrays[str(place)]) for place, fact in enumerate(found)]


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


def _answer(fact: Mapping[str, Any], outcome: np.ndarray) -> EnvironmentAnswer:
    number, repeatable = _of(fact, "call", int), _of(fact, "repeatable", bool)
    try:
        frame = Frame.of_bytes(outcome.tobytes(), FRAME_BYTES)
        return EnvironmentAnswer(number, _outcome(frame), repeatable)
    except ValueError as error:
        return EnvironmentAnswer(number, error, repeatable)


@reads_frames
def _outcome(frame: Frame) -> Any:
    fact = frame.facts
    if "failure" in fact:
        cause, *texts = fact["failure"]
        if cause not in _CAUSES or [type(text) for text in texts] != [str, str]:
            raise ValueError(f"failure {fact['failure']!r:.80}, where cause and texts are wanted")
        return CallFailure(cause, *(text[:MOST_TEXT] for text in texts))
    told = fact["returned"]
    observation = _observation(told, frame.arrays)
    if "reward" not in told:
        return observation
    logged = _of(told, "logged", dict)
    reward, *_ = [_of(told, "reward", *_NUMBER), *(_of(logged, name, *_NUMBER) for name in logged)]
    return Turn(observation, reward, _of(told, "done", bool), logged)


def _observation(told: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Any:
    if "text" not in told:
        return arrays["0"]
    text = _of(told, "text", str, type(None))
    if "pictures" not in told:
        return text
    role, count = _of(told, "role", str, type(None)), _of(told, "pictures", int)
    return Shown(text, [arrays[str(n)] for n in range(count)], role)


def _of(facts: Mapping[str, Any], name: str, *kinds: type) -> Any:
    """A JSON value of one of some types. ValueError, which names it, for another one."""
    value = facts.get(name)
    if type(value) not in kinds:
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"{name} is {value!r:.80}, where {wanted} is wanted")
    return value
