"""Messages of the RPCs of distflow.Sampler: JSON objects in UTF-8, one per gRPC message.

docs/serving.md is the reference for clients. Every mistake that a client can make is reported here,
in one sentence, before any work is done for the request.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from distflow_jax.batch import Prompt
from distflow_jax.rollout.requests import GroupRequest, SamplingParams
from distflow_jax.serving.prompts import PromptReader, ReadPrompt, take_images

SERVICE = "distflow.Sampler"
STOPPING = "the server is stopping; ask again later"
MAX_STOPS = 16
MAX_STOP_TEXT = 1024  # characters of a stop string
MAX_SENTENCE = 500  # characters of an error; gRPC drops what does not fit its headers
_BYTES_PER_CHARACTER = 12  # of JSON at most: "\\ud83d\\ude00"
_OTHER_BYTES = 1 << 18  # of a request, beside its prompt: 16 stop strings and names
MAX_UID = (1 << 31) - 1


@dataclasses.dataclass(frozen=True)
class Limits:
    """The largest request that is accepted."""

    max_prompt: int  # tokens
    max_response: int  # tokens
    default_response: int  # tokens, where a request does not say
    max_samples: int
    vocab_size: int


@dataclasses.dataclass(frozen=True)
class SampleRequest:
    """One request to Sample, checked."""

    group: GroupRequest
    stop: tuple[str, ...]
    stream: bool  # tokens as they come; False: one message per response


@dataclasses.dataclass(frozen=True)
class LoadRequest:
    """One request to LoadWeights, checked."""

    path: str
    version: int | None  # None: the training step
    cache: str  # "keep" or "recompute": keys and values of responses under way


def encode(message: Mapping[str, Any]) -> bytes:
    """A message as it is sent."""
    return json.dumps(message, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def decode(data: bytes) -> dict[str, Any]:
    """A message as it was sent. ValueError if it is no JSON object in UTF-8."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the message is not valid UTF-8 (byte {error.start})") from error
    try:
        message = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the message is not valid JSON: {error}") from error
    if not isinstance(message, dict):
        raise ValueError("the message must be a JSON object, {...}")
    return message


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def sentence(error: Exception) -> str:
    """An error as one line that fits gRPC's headers."""
    text = str(error)
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text[: 2 * MAX_SENTENCE])
    return shown if len(shown) <= MAX_SENTENCE else f"{shown[:MAX_SENTENCE]}..."


def most_bytes(max_text: int, image_bytes: int = 0) -> int:
    """Bytes of the largest request to Sample whose prompt has `max_text` characters.

    `image_bytes`: of its data URIs; 0 for a model without a tower.
    """
    return _BYTES_PER_CHARACTER * max_text + _OTHER_BYTES + image_bytes


def sample_request(
    data: bytes, limits: Limits, prompts: PromptReader, new_uid: Callable[[], int]
) -> SampleRequest:
    """Reads a request to Sample. ValueError says what is wrong with it."""
    most = most_bytes(prompts.max_text, prompts.image_bytes)
    if len(data) > most:
        raise ValueError(
            f"the request has {len(data)} bytes; one with a prompt of {limits.max_prompt} tokens "
            f"has at most {most}"
        )
    message = decode(data)
    _known(
        message,
        "prompt messages tokens begun num_samples first_sample max_tokens temperature top_k top_p "
        "stop uid stream",
    )
    read = _prompt(message, limits, prompts)
    begun = _integer(message, "begun", 0, 0, len(read.tokens) - 1)
    samples = _integer(message, "num_samples", 1, 1, limits.max_samples)
    length = _integer(message, "max_tokens", limits.default_response, 1, limits.max_response)
    temperature = _number(message, "temperature", 1.0)
    top_k = _integer(message, "top_k", 0, 0, MAX_UID)
    top_p = _number(message, "top_p", 1.0)
    sampling = SamplingParams(samples, length, temperature, top_k, top_p)
    if message.get("uid") is None:
        uid = new_uid()
    else:
        uid = _integer(message, "uid", 0, 0, MAX_UID)
    first = _integer(message, "first_sample", 0, 0, MAX_UID - samples)
    prompt = Prompt(
        uid, uid, read.tokens, read.text, "", None, {}, images=read.images, patch=read.patch
    )
    return SampleRequest(
        # no rank: clients take slots in the order of arrival, so that none waits for ever
        GroupRequest(prompt, sampling, first_sample=first, rank=(), begun=begun),
        _stop(message),
        _boolean(message, "stream", True),
    )


def load_request(data: bytes) -> LoadRequest:
    """Reads a request to LoadWeights. ValueError says what is wrong with it."""
    message = decode(data)
    _known(message, "path version cache")
    path = message.get("path")
    if not isinstance(path, str) or not path:
        raise ValueError("path must name the folder of a run, or of one of its checkpoints")
    version = message.get("version")
    if version is not None:
        version = _integer(message, "version", 0, 0, MAX_UID)
    cache = message.get("cache")
    if cache not in (None, "keep", "recompute"):
        raise ValueError(f'cache must be "keep" or "recompute", got {_shown(cache)}')
    return LoadRequest(path, version, cache or "keep")


def prompt_length_error(length: int, limits: Limits) -> str | None:
    """The error of a prompt of so many tokens; None if it is accepted."""
    if length < 1:
        return "the prompt is empty; give at least one token"
    if length > limits.max_prompt:
        return f"the prompt has {length} tokens; this server reads at most {limits.max_prompt}"
    return None


def token_ids_error(ids: np.ndarray, limits: Limits) -> str | None:
    """The error of ids, an object array [T], that are no prompt; None if they are one."""
    wrong = ids[(ids < 0) | (ids >= limits.vocab_size)]
    if len(wrong):
        return f"token id {wrong[0]} is not in the vocabulary of {limits.vocab_size}"
    return None


def _prompt(message: Mapping[str, Any], limits: Limits, prompts: PromptReader) -> ReadPrompt:
    """The prompt of whichever of prompt, messages and tokens is there."""
    given = [name for name in ("prompt", "messages", "tokens") if message.get(name) is not None]
    if len(given) != 1:
        raise ValueError(
            "give exactly one of prompt (a text), messages (a conversation) and tokens (ids), "
            f"got {' and '.join(given) or 'none'}"
        )
    value = message[given[0]]
    if given == ["tokens"]:
        if not isinstance(value, list) or not all(type(i) is int for i in value):
            raise ValueError("tokens must be a list of integers")
        if wrong := prompt_length_error(len(value), limits):
            raise ValueError(wrong)
        ids = np.array(value, object)
        if wrong := token_ids_error(ids, limits):
            raise ValueError(wrong)
        return ReadPrompt("", ids.astype(np.int32))
    if given == ["prompt"] and not isinstance(value, str):
        raise ValueError("prompt must be a string; a conversation goes into messages")

    def check(ids: np.ndarray) -> None:
        if wrong := prompt_length_error(len(ids), limits):
            raise ValueError(wrong)

    if given == ["messages"]:
        _check_messages(value)
        value, images = take_images(value)
        if images:
            _check_unicode(json.dumps(value, ensure_ascii=False))
            return prompts.place(value, images, check)
    text = prompts.render(value)
    _check_unicode(text)
    ids = prompts.encode(text)
    check(ids)
    return ReadPrompt(text, ids)


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON may spell half of a surrogate pair
        raise ValueError(f"the prompt is not valid Unicode: {error.reason}") from error


def _check_messages(value: Any) -> None:
    if not isinstance(value, list) or not value:
        raise ValueError('messages must be a list like [{"role": "user", "content": "..."}]')
    for index, turn in enumerate(value):
        if (
            not isinstance(turn, dict)
            or not isinstance(turn.get("role"), str)
            or not isinstance(turn.get("content"), str | list)
        ):
            raise ValueError(
                f"message {index} must have role and content, both strings; content may be a list "
                "of parts too"
            )


def _stop(message: Mapping[str, Any]) -> tuple[str, ...]:
    value = message.get("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        raise ValueError("stop must be a string or a list of strings")
    if not all(stops):
        raise ValueError("a stop string is empty; leave it out")
    longest = max(map(len, stops), default=0)
    if longest > MAX_STOP_TEXT:
        raise ValueError(
            f"a stop string has {longest} characters; give at most {MAX_STOP_TEXT} of it"
        )
    if len(stops) > MAX_STOPS:
        raise ValueError(f"{len(stops)} stop strings are too many; give at most {MAX_STOPS}")
    return tuple(stops)


def _known(message: Mapping[str, Any], names: str) -> None:
    unknown = sorted(message.keys() - set(names.split()))
    if unknown:
        raise ValueError(f"unknown field {unknown[0]!r}; there are: {names}")


def _integer(message: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = message.get(name)
    if value is None:
        return default
    if type(value) is not int:  # True is an int to isinstance
        raise ValueError(f"{name} must be an integer, got {_shown(value)}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be from {low} to {high}, got {_shown(value)}")
    return value


def _number(message: Mapping[str, Any], name: str, default: float) -> float:
    value = message.get(name)
    if value is None:
        return default
    if type(value) not in (int, float):
        raise ValueError(f"{name} must be a number, got {_shown(value)}")
    # a float32 on the device, where more is infinite
    if not abs(value) <= float(np.finfo(np.float32).max) or not math.isfinite(value):
        raise ValueError(f"{name} is too large: {_shown(value)}")
    return float(value)


def _boolean(message: Mapping[str, Any], name: str, default: bool) -> bool:
    value = message.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {_shown(value)}")
    return value


def _shown(value: Any, longest: int = 40) -> str:
    text = json.dumps(value)
    return text if len(text) <= longest else f"{text[:longest]}..."
