"""Programs at a provider of somebody else: one HTTP call for each. docs/sandbox.md has the wire."""

import base64
import binascii
import dataclasses
from typing import Any

from distflow_jax.parsing.checked_fields import FLAG, NUMBER, TEXT, check_fields, one_of
from distflow_jax.parsing.http_call import CallFailed, HttpServer
from distflow_jax.sandbox.sandbox_records import SandboxError, SandboxOutcome, SandboxProgram

CAUSES = ("ended", "signal", "deadline", "cpu", "memory", "output", "disk")
_KINDS = {
    "cause": one_of(CAUSES),
    "exit_code": NUMBER,
    "stdout": TEXT,
    "stderr": TEXT,
    "is_cut": FLAG,
    "seconds": NUMBER,
    "cpu_seconds": NUMBER,
    "memory": NUMBER,
}
_GRACE_SECONDS = 30.0  # beyond a program's own
_OVERHEAD = 1 << 16  # bytes of an answer beside the two streams


@dataclasses.dataclass(frozen=True)
class RemoteProvider:
    """A provider. Several threads may use it.

    server: its address, and the token that it asks for.
    """

    server: HttpServer

    def run(self, program: SandboxProgram) -> SandboxOutcome:
        """Runs a program there. Raises SandboxError, with the address, for all but its outcome."""
        body = dataclasses.asdict(program) | {
            "files": {name: _text(content) for name, content in program.files.items()},
            "stdin": _text(program.stdin),
        }
        try:
            told = self.server.call_json(
                "POST",
                "",
                body,
                seconds=program.limits.seconds + _GRACE_SECONDS,
                most_bytes=4 * program.limits.output + _OVERHEAD,
            )
            return _outcome(dict(told))
        except (CallFailed, ValueError) as error:
            raise SandboxError(f"the provider at {self.server.url}: {error}") from None


def _outcome(told: dict[str, Any]) -> SandboxOutcome:
    if missing := sorted(_KINDS.keys() - told.keys()):
        raise ValueError(f"the answer has no {', '.join(missing)}")
    check_fields(told, _KINDS, "the answer")
    try:
        streams = {name: base64.b64decode(told[name], validate=True) for name in ("stdout", "stderr")}
    except binascii.Error as error:
        raise ValueError(f"the answer's streams are not base64: {error}") from None
    whole = {name: int(told[name]) for name in ("exit_code", "memory")}
    return SandboxOutcome(**{name: told[name] for name in _KINDS} | streams | whole)


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()
