"""A provider of somebody else runs programs behind the same call, over the wire of docs/sandbox.md.

The server here is a real one: it runs programs in the sandbox of this machine.
"""

import base64
import contextlib
import dataclasses
import http.server
import json
import re
import socket
import threading

import pytest
from support.paths import ROOT

from distflow_jax.config.sandbox_config import SandboxConfig
from distflow_jax.sandbox import remote_provider, system_calls
from distflow_jax.sandbox.sandbox import Sandbox
from distflow_jax.sandbox.sandbox_records import SandboxError, SandboxLimits, SandboxProgram

pytestmark = pytest.mark.skipif(bool(system_calls.unsupported()), reason=system_calls.unsupported())
TOKEN = "a-secret"


@contextlib.contextmanager
def provider(answer):
    """A server whose `answer(body, headers)` gives a status and a JSON value; its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, value = answer(body, self.headers)
            content = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/run"
        server.shutdown()


def runs_in(sandbox):
    """The answers of a provider that runs programs in a sandbox."""

    def answer(body, headers):
        if headers["Authorization"] != f"Bearer {TOKEN}":
            return 401, {"error": "no such token"}
        program = SandboxProgram(
            tuple(body["argv"]),
            {name: base64.b64decode(content) for name, content in body["files"].items()},
            base64.b64decode(body["stdin"]),
            SandboxLimits(**body["limits"]),
        )
        outcome = dataclasses.asdict(sandbox.run(program))
        streams = {n: base64.b64encode(outcome[n]).decode() for n in ("stdout", "stderr")}
        return 200, outcome | streams

    return answer


@pytest.fixture
def token_file(tmp_path):
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    return str(file)


def test_outcomes_are_those_of_the_provider_s_sandbox(token_file):
    source = b"import sys\nprint(input()[::-1]); sys.stderr.buffer.write(bytes(range(256))); 1 / 0"
    limits = SandboxLimits(seconds=60)
    program = SandboxProgram(("python3", "main.py"), {"main.py": source}, b"abc\n", limits)
    hangs = SandboxProgram(("sleep", "99"), limits=SandboxLimits(seconds=0.2))
    with Sandbox(SandboxConfig()) as here, provider(runs_in(here)) as url:
        settings = SandboxConfig(level="remote", url=url, token_file=token_file)
        with Sandbox(settings) as there:
            assert there.level == "remote"
            for one in (program, hangs):
                ours, theirs = here.run(one), there.run(one)
                for name in ("cause", "exit_code", "stdout", "stderr", "is_cut"):
                    assert getattr(ours, name) == getattr(theirs, name), name
            with pytest.raises(ValueError, match="does not support sessions"):
                there.open(program)


def test_nobody_answers():
    with socket.socket() as taken:  # bound, and listens to nobody
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/run"
        with pytest.raises(ValueError, match=f"sandbox.url: the provider at {url}: ") as caught:
            Sandbox(SandboxConfig(level="remote", url=url)).__enter__()
    assert "\n" not in str(caught.value)


def test_address_that_is_none():
    with pytest.raises(ValueError, match="sandbox.url: 'ftp://a' is no address of a server"):
        Sandbox(SandboxConfig(level="remote", url="ftp://a")).__enter__()


GOOD = {
    "cause": "ended",
    "exit_code": 0,
    "stdout": "",
    "stderr": "",
    "is_cut": False,
    "seconds": 0.1,
    "cpu_seconds": 0.1,
    "memory": 1,
}


@pytest.mark.parametrize(
    "status, value, words",
    [
        (401, {"error": "no such token"}, "HTTP 401"),
        (503, b"busy", "HTTP 503 of .*: busy"),
        (200, b"<html>", "is no JSON"),
        (200, [], "is no JSON object"),
        (200, {**GOOD, "cause": "closed"}, "cause must be one of"),
        (200, {**GOOD, "exit_code": "0"}, "exit_code must be"),
        (200, {**GOOD, "stdout": "%%"}, "base64"),
        (200, {name: GOOD[name] for name in GOOD if name != "memory"}, "has no memory"),
        (200, {**GOOD, "stdout": "A" * 100_000}, "an answer of more than"),
    ],
)
def test_answers_that_are_none_are_no_outcomes(status, value, words):
    limits = SandboxLimits(output=100)
    with provider(lambda *_: (status, value)) as url:
        server = remote_provider.HttpServer(url)
        with pytest.raises(SandboxError, match=f"the provider at {url}: .*{words}"):
            remote_provider.run_there(server, SandboxProgram(("true",), limits=limits))


def test_wire_is_that_of_the_page():
    """docs/sandbox.md names every field of requests and answers."""
    page = (ROOT / "docs" / "sandbox.md").read_text()
    rows = set(re.findall(r"^\| `([a-z_]+)`", page, re.MULTILINE))
    fields = {"argv", "files", "stdin", "limits", *GOOD}
    fields |= {field.name for field in dataclasses.fields(SandboxLimits)}
    assert fields <= rows, fields - rows
