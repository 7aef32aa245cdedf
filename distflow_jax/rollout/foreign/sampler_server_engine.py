"""Servers of distflow.Sampler (scripts/serve.py) behind the protocol of foreign engines."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import grpc

from distflow_jax.parsing.one_line import shown
from distflow_jax.rollout.foreign.engine_protocol import (
    Answer,
    AnswerThreads,
    EngineError,
    EngineRequest,
    Failure,
    Status,
)
from distflow_jax.rollout.foreign.weight_folders import WeightFolders

STATUS_SECONDS = 10.0
_ENDS = {"stop": True, "length": False}


class SamplerConnection(Protocol):
    """serving.client.SamplerClient, as far as it is used here."""

    def sample(self, *, timeout: float | None = None, **request: Any) -> Iterator[dict[str, Any]]:
        """Events of a request."""

    def load_weights(
        self,
        path: str,
        version: int | None = None,
        cache: str = "keep",
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Swaps the server's weights."""

    def status(self, timeout: float | None = None) -> dict[str, Any]:
        """The server's model, limits and load."""

    def close(self) -> None:
        """Ends the connection."""


class SamplerServiceEngine:
    """A server of distflow.Sampler, which swaps weights in flight and reads them from folders.

    What is drawn depends on the server's seed and on (counter, sample, place), as in a run.
    """

    updates_in_flight = True

    def __init__(
        self,
        name: str,
        connection: SamplerConnection,
        folders: WeightFolders,
        *,
        try_seconds: float = 600.0,
        load_seconds: float = 600.0,
    ):
        """`try_seconds`: for a response; `load_seconds`: for the server to read weights.

        EngineError if the server does not answer.
        """
        self.name, self._connection, self._folders = name, connection, folders
        self._try_seconds, self._load_seconds = try_seconds, load_seconds
        facts = self._facts()
        self.slots, self.longest_prompt = facts["slots"], facts["max_prompt"]
        self._threads = AnswerThreads(self.slots)

    def submit(self, requests: Sequence[EngineRequest]) -> None:
        """See ForeignEngine."""
        for run in runs_of_samples(requests):
            numbers = [request.id for request in run]
            self._threads.start(numbers, functools.partial(self._answer, run))

    def results(self, seconds: float) -> list[Answer | Failure]:
        """See ForeignEngine."""
        return self._threads.results(seconds)

    def load(self, params: Any, version: int, *, cache: str = "keep") -> None:
        """See ForeignEngine."""
        try:
            folder = self._folders.write(params, version)
        except (OSError, ValueError) as error:
            raise EngineError(f"weights of version {version} cannot be written: {error}") from error
        try:
            self._connection.load_weights(folder, version, cache, timeout=self._load_seconds)
        except (grpc.RpcError, ValueError) as error:
            raise EngineError(
                f"{self.name} did not load version {version}: {_reason(error)}"
            ) from error
        self._folders.keep_only(version)

    def status(self) -> Status:
        """See ForeignEngine."""
        facts = self._facts()
        return Status(str(facts.get("model", "")), facts["slots"], facts.get("started"))

    def close(self) -> None:
        """See ForeignEngine."""
        self._threads.close()
        self._connection.close()

    def _facts(self) -> Mapping[str, Any]:
        try:
            facts = self._connection.status(timeout=STATUS_SECONDS)
        except (grpc.RpcError, ValueError) as error:
            raise EngineError(f"{self.name} does not answer: {_reason(error)}") from error
        needed = {name: facts.get(name) for name in ("slots", "max_prompt")}
        if not all(type(value) is int for value in needed.values()):
            raise EngineError(f"{self.name} is no sampler server: its status has {shown(needed)}")
        return facts

    # -- in the threads ---------------------------------------------------------------------------

    def _answer(self, run: Sequence[EngineRequest]) -> Iterator[Answer | Failure]:
        numbers = {request.sample: request.id for request in run}
        try:
            for event in self._connection.sample(timeout=self._try_seconds, **_message(run)):
                if "sample" in event:
                    yield _answer_of(event, numbers[event["sample"]])
        except grpc.RpcError as error:
            lost = error.code() == grpc.StatusCode.UNAVAILABLE
            for number in numbers.values():  # those that were answered have ended
                yield Failure(number, _reason(error), lost)


def _message(run: Sequence[EngineRequest]) -> dict[str, Any]:
    first, sampling = run[0], run[0].sampling
    begun = {"begun": first.begun} if first.begun else {}
    return {
        **begun,
        "tokens": first.tokens.tolist(),
        "uid": first.counter,
        "first_sample": first.sample,
        "num_samples": len(run),
        "max_tokens": sampling.limit,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "stream": False,
    }


def _answer_of(event: Mapping[str, Any], number: int) -> Answer:
    ended = _ENDS[event["end"]]
    return Answer(number, event["tokens"], event["logp"], ended, event["version"])


def _reason(error: Exception) -> str:
    """The reason of a failed call, in one line."""
    if isinstance(error, grpc.RpcError):
        return f"{error.code().name}: {' '.join(str(error.details()).split())[:300]}"
    return f"{type(error).__name__}: {error}"


def runs_of_samples(requests: Sequence[EngineRequest]) -> Iterator[list[EngineRequest]]:
    """Requests for one prompt as lists whose samples follow each other, alike in all else.

    A response that has begun stands alone.
    """
    run: list[EngineRequest] = []
    for request in sorted(requests, key=lambda entry: entry.sample):
        if run and not _follows(request, run[-1]):
            yield run
            run = []
        run.append(request)
    if run:
        yield run


def _follows(request: EngineRequest, last: EngineRequest) -> bool:
    if request.begun or last.begun:
        return False
    return (request.sample, request.sampling) == (last.sample + 1, last.sampling)
