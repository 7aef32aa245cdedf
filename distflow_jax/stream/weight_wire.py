"""Weights by the wire: the two calls by which a worker pulls manifests and chunks of a trainer."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from distflow_jax.parsing.checked_fields import INTEGERS, SIZE, TEXT, Kind, check_fields
from distflow_jax.parsing.json_text import parse_json
from distflow_jax.stream.weight_store import Manifest, WeightStore, read_manifest
from distflow_jax.stream.wire.calls import Bytes, Method, Refused
from distflow_jax.stream.wire.wire_client import WireClient

MANIFEST, CHUNK = "weights.manifest", "weights.chunk"
NOT_YET = b""  # the answer while a version is still to come
_REQUEST_BYTES = 64 << 10


class WireWeights:
    """The weights of a trainer process behind a client of the wire, as a WeightSource."""

    def __init__(self, client: WireClient):
        self.address, self._client = client.address, client

    def manifest(self, version: int, seconds: float) -> Manifest | None:
        """As WeightSource.manifest."""
        answer = self._client.call(MANIFEST, request(version=version), seconds)
        if answer == NOT_YET:
            return None
        try:
            return read_manifest(answer)
        except (ValueError, LookupError, TypeError) as error:
            raise Refused(f"{self.address}: the manifest cannot be read: {error}") from error

    def chunk(self, version: int, path: str, start: Sequence[int], seconds: float) -> Bytes:
        """As WeightSource.chunk."""
        return self._client.call(CHUNK, request(version=version, path=path, start=start), seconds)


def weight_methods(store: WeightStore) -> Mapping[str, Method]:
    """The methods of a server that hands out a weight store."""

    def manifest(peer: str, payload: Bytes) -> bytes:
        found = store.manifest(_request(payload, {"version": SIZE})["version"])
        return NOT_YET if found is None else found.encode()

    def chunk(peer: str, payload: Bytes) -> bytes:
        asked = _request(payload, {"version": SIZE, "path": TEXT, "start": INTEGERS})
        return store.chunk(asked["version"], asked["path"], asked["start"])

    return {MANIFEST: manifest, CHUNK: chunk}


def request(**fields: Any) -> bytes:
    """Asks for the MANIFEST of a `version`, or for the CHUNK of it at a `path` and a `start`."""
    return json.dumps(fields).encode()


def _request(payload: Bytes, kinds: Mapping[str, Kind]) -> Mapping[str, Any]:
    if len(payload) > _REQUEST_BYTES:
        raise Refused(f"request: {len(payload)} bytes, of {_REQUEST_BYTES} at most")
    try:
        asked = parse_json(payload, "request")
        if not isinstance(asked, Mapping) or kinds.keys() - asked.keys():
            raise ValueError(f"request: {sorted(kinds)} are wanted")
        check_fields(asked, kinds, "request")
    except ValueError as error:
        raise Refused(str(error)) from error
    return asked
