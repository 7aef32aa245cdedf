"""A client of distflow.Sampler: what docs/serving.md says on the wire, as a class."""

from collections.abc import Iterator
from types import TracebackType
from typing import Any

import grpc

from distflow_jax.serving.messages import SERVICE, decode, encode


class SamplerClient:
    """One connection to a server, for any number of threads.

    grpc.RpcError carries what the server says: INVALID_ARGUMENT with a sentence for a bad request,
    UNAVAILABLE while it stops.

    >>> with SamplerClient("127.0.0.1:9000") as client:
    ...     for event in client.sample(prompt="1, 2, 3,", num_samples=2, stop=["."]):
    ...         print(event)
    """

    def __init__(self, address: str):
        self._channel = grpc.insecure_channel(address)
        path = f"/{SERVICE}"
        self._sample = self._channel.unary_stream(f"{path}/Sample")
        self._load = self._channel.unary_unary(f"{path}/LoadWeights")
        self._status = self._channel.unary_unary(f"{path}/Status")

    def sample(self, *, timeout: float | None = None, **request: Any) -> Iterator[dict[str, Any]]:
        """Events of a request as they come; `request` holds the fields of docs/serving.md.

        The first has `uid` and `prompt_tokens`; then `sample`, `text`, `tokens`, `logp`, `version`,
        and `end` in the last one of each sample. Closing the iterator ends the request.
        """
        call = self._sample(encode(request), timeout=timeout)
        try:
            for data in call:
                yield decode(data)
        finally:
            call.cancel()

    def responses(self, *, timeout: float | None = None, **request: Any) -> list[dict[str, Any]]:
        """All responses to one prompt, whole, in the order of their samples."""
        events = list(self.sample(timeout=timeout, **(request | {"stream": False})))
        return sorted(events[1:], key=lambda event: event["sample"])

    def load_weights(
        self, path: str, version: int | None = None, cache: str = "keep"
    ) -> dict[str, Any]:
        """Swaps the server's weights for those of a run's folder on its disk."""
        return decode(self._load(encode({"path": path, "version": version, "cache": cache})))

    def status(self) -> dict[str, Any]:
        """The server's model, limits and load."""
        return decode(self._status(encode({})))

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()

    def __enter__(self) -> "SamplerClient":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
