"""A client of distflow.Sampler: what docs/serving.md says on the wire, as a class."""

import os
import pathlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import grpc

from distflow_jax.serving.access import HEADER, bearer
from distflow_jax.serving.messages import SERVICE, decode, encode

# a response that is not streamed is one message, of any size; by itself gRPC takes 4 MiB
_OPTIONS = (("grpc.max_receive_message_length", -1),)


class SamplerClient:
    """One connection to a server, for any number of threads.

    grpc.RpcError carries what the server says: INVALID_ARGUMENT with a sentence for a bad request,
    UNAUTHENTICATED without the server's token, UNAVAILABLE while it stops.

    Args:
      address: HOST:PORT.
      token: of a server that was started with --token_file. Without TLS it is sent in clear.
      tls: encrypt, and check the server's certificate by the system's authorities.
      ca_file: certificates in PEM format to check it by instead, which implies `tls`.

    >>> with SamplerClient("127.0.0.1:9000") as client:
    ...     for event in client.sample(prompt="1, 2, 3,", num_samples=2, stop=["."]):
    ...         print(event)
    """

    def __init__(
        self,
        address: str,
        *,
        token: str = "",
        tls: bool = False,
        ca_file: str | os.PathLike | None = None,
    ):
        if tls or ca_file is not None:
            roots = None if ca_file is None else pathlib.Path(ca_file).read_bytes()
            credentials = grpc.ssl_channel_credentials(roots)
            self._channel = grpc.secure_channel(address, credentials, _OPTIONS)
        else:
            self._channel = grpc.insecure_channel(address, _OPTIONS)
        self._metadata = ((HEADER, bearer(token)),) if token else ()
        path = f"/{SERVICE}"
        self._sample = self._channel.unary_stream(f"{path}/Sample")
        self._load = self._channel.unary_unary(f"{path}/LoadWeights")
        self._status = self._channel.unary_unary(f"{path}/Status")

    def sample(self, *, timeout: float | None = None, **request: Any) -> Iterator[dict[str, Any]]:
        """Events of a request as they come; `request` holds the fields of docs/serving.md.

        The first has `uid` and `prompt_tokens`; then `sample`, `text`, `tokens`, `logp`, `version`,
        and `end` in the last one of each sample. Closing the iterator ends the request.
        """
        call = self._sample(encode(request), timeout=timeout, metadata=self._metadata)
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
        self,
        path: str,
        version: int | None = None,
        cache: str = "keep",
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Swaps the server's weights for those of a run, or of an export, on its disk."""
        request = encode({"path": path, "version": version, "cache": cache})
        return decode(self._load(request, timeout=timeout, metadata=self._metadata))

    def status(self, timeout: float | None = None) -> dict[str, Any]:
        """The server's model, limits and load."""
        return decode(self._status(encode({}), timeout=timeout, metadata=self._metadata))

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
