"""Engines that speak OpenAI's HTTP interface for completions, as vLLM does.

A response is one call of /v1/completions with the prompt's ids, so that a fault costs one response;
the server's prefix cache reads a prompt once. Log-probs are those of the sampler's temperature,
before top-k and top-p, as everywhere in this package.
"""

import dataclasses
import functools
import re
import string
import urllib.parse
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from distflow_jax.parsing.checked_fields import at_least, one_of
from distflow_jax.parsing.http_call import CallFailed, Connections, HttpServer
from distflow_jax.parsing.one_line import shown
from distflow_jax.parsing.setting_checks import Section, setting
from distflow_jax.rollout.foreign.engine_protocol import (
    Answer,
    AnswerThreads,
    EngineError,
    EngineRequest,
    Failure,
    Status,
)
from distflow_jax.rollout.foreign.weight_folders import WeightFolders
from distflow_jax.rollout.requests import SamplingParams

LOGPROBS = ("raw", "processed")  # of temperature 1 | of what was drawn from
STATUS_SECONDS = 10.0
_BYTES = 1 << 20  # of an answer without tokens
_BYTES_PER_TOKEN = 1 << 10  # of an answer, its log-probs and texts included
_STARTED = "process_start_time_seconds"  # of Prometheus clients, at /metrics


@dataclasses.dataclass(frozen=True)
class HttpStep:
    """One call of the sequence that brings weights to a server.

    $folder and $version are replaced in the path and in texts of the body.
    """

    method: str
    path: str
    body: Any = None

    def filled(self, **values: str) -> "HttpStep":
        """The step with values in the place of its names."""
        quoted = {name: urllib.parse.quote(value) for name, value in values.items()}
        return HttpStep(self.method, _filled(self.path, quoted), _filled(self.body, values))


# vLLM with VLLM_SERVER_DEV_MODE=1
VLLM_LOAD = (
    HttpStep("POST", "/pause?mode=wait&clear_cache=false"),
    HttpStep(
        "POST",
        "/collective_rpc",
        {"method": "reload_weights", "kwargs": {"weights_path": "$folder"}},
    ),
    HttpStep("POST", "/reset_prefix_cache"),
    HttpStep("POST", "/resume"),
)


@dataclasses.dataclass(frozen=True)
class OpenAISettings(Section):
    """A server, and how it is used."""

    server: HttpServer
    model: str = ""  # the name that it serves the model by; "": the first that it lists
    slots: int = setting(64, at_least(1))  # responses that it is given at a time
    try_seconds: float = 600.0  # for one response
    load_seconds: float = 600.0  # for each step of a load
    logprobs: str = setting("raw", one_of(LOGPROBS))  # what the server's log-probs are of
    load_steps: tuple[HttpStep, ...] = VLLM_LOAD
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # more fields of requests


def check_sampling(sampling: SamplingParams, logprobs: str, name: str) -> None:
    """Raises ValueError where a server's log-probs would not be those of the temperature alone."""
    if logprobs == "raw" and sampling.temperature not in (0.0, 1.0):
        raise ValueError(
            f"{name} gives log-probs of temperature 1, and temperature is "
            f"{sampling.temperature:g}; start vLLM with --logprobs-mode=processed_logprobs, and "
            'name "logprobs": "processed" among the engine\'s settings, or sample at 1'
        )
    if logprobs == "processed" and (sampling.top_k or sampling.top_p != 1):
        raise ValueError(
            f"{name} gives log-probs after top-k and top-p, which are no log-probs of the model; "
            "set rollout.top_k=0 and rollout.top_p=1"
        )


class OpenAIEngine:
    """A server of OpenAI's completions, with weights that it reads from folders.

    It is drained before a load: its answers do not say which weights sampled a token.
    """

    updates_in_flight = False
    longest_prompt = 0

    def __init__(
        self, settings: OpenAISettings, folders: WeightFolders, *, stops: Collection[int], seed: int
    ):
        """`stops`: ids that end a response; `seed`: with the response's numbers it keys the noise,
        as far as the server's noise has keys."""
        self.name, self.slots = settings.server.url, settings.slots
        self._settings, self._folders = settings, folders
        self._stops, self._seed = sorted(int(stop) for stop in stops), seed
        self._model = settings.model
        self._threads, self._answers = AnswerThreads(settings.slots), Connections()

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        """See ForeignEngine."""
        for request in requests:
            check_sampling(request.sampling, self._settings.logprobs, self.name)
        for request in requests:
            self._threads.start([request.id], functools.partial(self._answer, request))

    def results(self, seconds: float) -> list[Answer | Failure]:
        """See ForeignEngine."""
        return self._threads.results(seconds)

    def load(self, params: Any, version: int, *, cache: str = "keep") -> None:
        """See ForeignEngine."""
        try:
            folder = self._folders.write(params, version)
        except (OSError, ValueError) as error:
            raise EngineError(f"weights of version {version} cannot be written: {error}") from error
        for step in self._settings.load_steps:
            filled = step.filled(folder=folder, version=str(version))
            try:
                self._settings.server.call(
                    filled.method,
                    filled.path,
                    filled.body,
                    seconds=self._settings.load_seconds,
                    most_bytes=_BYTES,
                )
            except CallFailed as error:
                raise EngineError(
                    f"{self.name} did not load version {version}: {step.method} {step.path}: "
                    f"{error}"
                ) from error
        self._folders.keep_only(version)

    def status(self) -> Status:
        """See ForeignEngine."""
        limits = {"seconds": STATUS_SECONDS, "most_bytes": 16 * _BYTES}
        try:
            listed = self._settings.server.call_json("GET", "/v1/models", **limits).get("data")
        except CallFailed as error:
            raise EngineError(f"{self.name} does not answer: {error}") from error
        entries = listed if isinstance(listed, list) else ()
        names = [e["id"] for e in entries if isinstance(e, Mapping) and type(e.get("id")) is str]
        if not names or self._settings.model and self._settings.model not in names:
            raise EngineError(
                f"{self.name} serves no model {self._settings.model!r}; it lists {names}"
            )
        self._model = self._settings.model or names[0]
        try:
            metrics = self._settings.server.call("GET", "/metrics", **limits)
        except CallFailed:
            return Status(self._model, 0)  # not all servers have it
        return Status(self._model, 0, _started(metrics.decode(errors="replace")))

    def close(self) -> None:
        """See ForeignEngine."""
        self._threads.close()
        self._answers.close()  # a process ends when all its threads have

    # -- in the threads ---------------------------------------------------------------------------

    def _answer(self, request: EngineRequest) -> Iterator[Answer | Failure]:
        try:
            found = self._settings.server.call_json(
                "POST",
                "/v1/completions",
                self._body(request),
                seconds=self._settings.try_seconds,
                most_bytes=_BYTES + _BYTES_PER_TOKEN * request.sampling.limit,
                among=self._answers,
            )
            yield read_completion(found, request)
        except CallFailed as error:
            yield Failure(request.id, str(error), error.lost, error.again)

    def _body(self, request: EngineRequest) -> dict[str, Any]:
        sampling = request.sampling
        # a server would take what is not named from the model's generation_config.json
        return {
            "model": self._model,
            "prompt": request.tokens.tolist(),
            "max_tokens": sampling.limit,
            "n": 1,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or -1,
            "top_p": sampling.top_p,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "seed": noise_seed(self._seed, request.counter, request.sample, request.begun),
            "stop_token_ids": self._stops,
            "add_special_tokens": False,
            "skip_special_tokens": False,
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **self._settings.extra,
        }


def noise_seed(seed: int, counter: int, sample: int, begun: int = 0) -> int:
    """The seed of a response's noise after `begun` tokens, below 2^53: all numbers that JSON keeps.

    A server counts places from its first token, so the rest of a response has a seed of its own:
    by that of its beginning the same noise would be drawn again.
    """
    keys = [seed, counter, sample, begun] if begun else [seed, counter, sample]
    words = np.random.SeedSequence(keys).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(11))


def read_completion(found: Mapping[str, Any], request: EngineRequest) -> Answer:
    """The answer in a server's JSON. CallFailed where it is none."""
    choices = found.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], Mapping):
        raise CallFailed(f"the answer has no single choice: {shown(found)}")
    choice = choices[0]
    read = choice.get("prompt_token_ids")
    if read is not None and read != request.tokens.tolist():
        raise CallFailed("the server read another prompt than it was given")
    if choice.get("finish_reason") not in ("stop", "length"):
        raise CallFailed(f"the response ended by {shown(choice.get('finish_reason'))}")
    logprobs = choice.get("logprobs")
    logprobs = logprobs if isinstance(logprobs, Mapping) else {}
    tokens, spelled = choice.get("token_ids"), _ids(logprobs.get("tokens"))
    tokens = spelled if tokens is None else tokens
    logp = logprobs.get("token_logprobs")
    if not isinstance(tokens, list):
        raise CallFailed(
            "the answer has no token ids; the server must know return_token_ids (vLLM 0.10.2)"
        )
    if spelled not in (None, tokens):
        raise CallFailed("log-probs of other tokens than token_ids")
    if logp is not None and not isinstance(logp, list):
        raise CallFailed("token_logprobs is no list")
    return Answer(request.id, tokens, logp, choice["finish_reason"] == "stop")


def read_steps(entries: Any, place: str) -> tuple[HttpStep, ...]:
    """Steps of a load from JSON values: [["POST", "/path", BODY], ...], the body as wanted.

    ValueError, with `place`, for others.
    """
    steps = []
    for entry in entries if isinstance(entries, list) else [entries]:
        fits = isinstance(entry, list) and len(entry) in (2, 3)
        if not fits or not all(isinstance(part, str) for part in entry[:2]):
            raise ValueError(
                f'{place}: a step is a list such as ["POST", "/resume"] or ["POST", "/load", '
                f'{{"path": "$folder"}}], got {shown(entry)}'
            )
        if not re.fullmatch("/[!-~]*", entry[1]):
            raise ValueError(
                f"{place}: the path of a step begins with / and is ASCII without spaces, got "
                f"{shown(entry[1])}"
            )
        steps.append(HttpStep(*entry))
    return tuple(steps)


def _ids(texts: Any) -> list[int] | None:
    """Ids of tokens that are written as "token_id:7"; None for others."""
    if not isinstance(texts, list):
        return None
    found = [re.fullmatch(r"token_id:(\d{1,11})", str(text), re.ASCII) for text in texts]
    return [int(match[1]) for match in found if match] if all(found) else None


def _started(metrics: str) -> float | None:
    """When a server's process began, from its Prometheus metrics."""
    for line in metrics.splitlines():
        name, _, value = line.partition(" ")
        if name == _STARTED:
            try:
                return float(value) if value.lower() != "nan" else None
            except ValueError:
                return None
    return None


def _filled(value: Any, values: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return string.Template(value).safe_substitute(values)
    if isinstance(value, Mapping):
        return {key: _filled(part, values) for key, part in value.items()}
    if isinstance(value, list):
        return [_filled(part, values) for part in value]
    return value
