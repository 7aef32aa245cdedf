"""Programs at a provider of somebody else: one HTTP call for each. docs/sandbox.md has the wire."""

import base64
import functools
from collections.abc import Callable

from distflow_jax.parsing.checked_fields import FLAG, NUMBER, TEXT, check_fields, one_of
from distflow_jax.parsing.http_call import CallFailed, HttpServer
from distflow_jax.parsing.pem_files import read_secret
from distflow_jax.sandbox.sandbox_records import SandboxError, SandboxOutcome, SandboxProgram

_CAUSE = one_of(("ended", "signal", "deadline", "cpu", "memory", "output", "disk"))
_KINDS = {"cause": _CAUSE, "stdout": TEXT, "stderr": TEXT, "is_cut": FLAG}
_KINDS |= dict.fromkeys(("exit_code", "seconds", "cpu_seconds", "memory"), NUMBER)
_GRACE_SECONDS = 30.0  # beyond a program's own
_OVERHEAD = 1 << 16  # bytes of an answer beside the two streams


def find_provider(url: str, token_file: str) -> Callable[[SandboxProgram], SandboxOutcome]:
    """The call that runs a program at the provider of these settings. ValueError if it cannot."""
    token = read_secret("sandbox.token_file", token_file) if token_file else ""
    try:
        provider = functools.partial(run_there, HttpServer(url, token))
        provider(SandboxProgram(("python3", "main.py"), {"main.py": b""}))
    except (ValueError, SandboxError) as error:
        raise ValueError(f"sandbox.url: {error}") from None
    return provider


def run_there(server: HttpServer, program: SandboxProgram) -> SandboxOutcome:
    """Runs a program at a provider. Raises SandboxError, with the address, for all but its outcome.

    Several threads may call this.
    """
    body = {
        "argv": program.argv,
        "files": {name: _text(content) for name, content in program.files.items()},
        "stdin": _text(program.stdin),
        "limits": vars(program.limits),
    }
    seconds = program.limits.seconds + _GRACE_SECONDS
    most = 4 * program.limits.output + _OVERHEAD
    try:
        told = dict(server.call_json("POST", "", body, seconds=seconds, most_bytes=most))
        if missing := sorted(_KINDS.keys() - told.keys()):
            raise ValueError(f"the answer has no {', '.join(missing)}")
        check_fields(told, _KINDS, "the answer")
        for name in ("stdout", "stderr"):
            told[name] = base64.b64decode(told[name], validate=True)
    except (CallFailed, ValueError) as error:
        raise SandboxError(f"the provider at {server.url}: {error}") from None
    whole = {name: int(told[name]) for name in ("exit_code", "memory")}
    return SandboxOutcome(**{name: told[name] for name in _KINDS} | whole)


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()
