"""Programs at a provider of somebody else: one HTTP call for each. docs/sandbox.md has the wire."""

import base64
import dataclasses

from distflow_jax.parsing.checked_fields import FLAG, NUMBER, TEXT, check_fields, one_of
from distflow_jax.parsing.http_call import CallFailed, HttpServer
from distflow_jax.parsing.pem_files import read_secret
from distflow_jax.sandbox.sandbox_records import SandboxError, SandboxOutcome, SandboxProgram

_CAUSE = one_of(("ended", "signal", "deadline", "cpu", "memory", "output", "disk"))
_NUMBERS = ("exit_code", "seconds", "cpu_seconds", "memory")
_KINDS = {"cause": _CAUSE, "stdout": TEXT, "stderr": TEXT, "is_cut": FLAG}
_KINDS |= dict.fromkeys(_NUMBERS, NUMBER)
_GRACE_SECONDS = 30.0  # beyond a program's own
_OVERHEAD = 1 << 16  # bytes of an answer beside the two streams


@dataclasses.dataclass(frozen=True)
class RemoteProvider:
    """A provider at an address, which may ask for a token. Several threads may use it."""

    server: HttpServer

    @classmethod
    def of(cls, url: str, token_file: str) -> "RemoteProvider":
        """The provider of these settings, which has run a program. Raises ValueError."""
        token = read_secret("sandbox.token_file", token_file) if token_file else ""
        try:
            provider = cls(HttpServer(url, token))
            provider.run(SandboxProgram(("python3", "main.py"), {"main.py": b""}))
        except (ValueError, SandboxError) as error:
            raise ValueError(f"sandbox.url: {error}") from None
        return provider

    def run(self, program: SandboxProgram) -> SandboxOutcome:
        """Runs a program there. Raises SandboxError, with the address, for all but its outcome."""
        body = {
            "argv": program.argv,
            "files": {name: _text(content) for name, content in program.files.items()},
            "stdin": _text(program.stdin),
            "limits": vars(program.limits),
        }
        limits = {
            "seconds": program.limits.seconds + _GRACE_SECONDS,
            "most_bytes": 4 * program.limits.output + _OVERHEAD,
        }
        try:
            told = dict(self.server.call_json("POST", "", body, **limits))
            if missing := sorted(_KINDS.keys() - told.keys()):
                raise ValueError(f"the answer has no {', '.join(missing)}")
            check_fields(told, _KINDS, "the answer")
            for name in ("stdout", "stderr"):
                told[name] = base64.b64decode(told[name], validate=True)
        except (CallFailed, ValueError) as error:
            raise SandboxError(f"the provider at {self.server.url}: {error}") from None
        whole = {name: int(told[name]) for name in ("exit_code", "memory")}
        return SandboxOutcome(**{name: told[name] for name in _KINDS} | whole)


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()
