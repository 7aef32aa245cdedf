"""The server of the live report: a page of one or several runs that grows while they train.

It answers GET requests for the page, and for numbers and sections that it reads from the runs'
folders. No part of a request is used as a path. Names in the Host header are checked, so that a web
page elsewhere cannot read the runs through a name that it points at this machine (DNS rebinding).
"""

import contextlib
import http
import http.server
import ipaddress
import json
import os
import pathlib
import signal
import socket
import sys
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Any

from distflow_jax.parsing.addresses import listen
from distflow_jax.parsing.paths import checked_path
from distflow_jax.report.headline import status
from distflow_jax.report.live.metrics_tail import end_token, news
from distflow_jax.report.page import differences, live_page, run_sections
from distflow_jax.report.read_run import read_config, read_run
from distflow_jax.report.sections.chart_data import chart_data

LOOPBACK = "127.0.0.1"
MOST_RUNS = 21  # colours times dashes of the page's lines
_IDLE_SECONDS = 120  # after which a connection is closed
_SIGNAL_SECONDS = 0.5  # at most, until a signal that another thread received ends the server
_FILES = ("config.json", "metrics.jsonl", "plan.json", "events.jsonl", "stragglers.jsonl")
_MARKS = ("config.json", "metrics.jsonl", "events.jsonl", "plan.json")  # of a run's folder


def find_runs(folders: Sequence[str | os.PathLike]) -> list[pathlib.Path]:
    """The folders of runs: those given, and for a folder that is no run those directly in it.

    A folder without any of them is a run that has not begun.

    Raises:
      ValueError: no folder, one that does not exist, or more runs than the page has lines for.
    """
    found: list[pathlib.Path] = []
    for folder in (checked_path("folder", "a run's folder", folder) for folder in folders):
        children = [] if _is_run(folder) else [p for p in sorted(folder.iterdir()) if _is_run(p)]
        found += children or [folder]
    found = list(dict.fromkeys(path.resolve() for path in found))
    if not found:
        raise ValueError("no run is given; name the folders of one or several runs")
    if len(found) > MOST_RUNS:
        raise ValueError(f"{len(found)} runs are given; name at most {MOST_RUNS}")
    return found


def _is_run(folder: pathlib.Path) -> bool:
    return any((folder / name).is_file() for name in _MARKS)


def names_of(folders: Sequence[pathlib.Path]) -> list[str]:
    """Short names that differ: the last parts of the paths."""
    for depth in range(1, max(len(path.parts) for path in folders) + 1):
        names = ["/".join(path.parts[-depth:]) for path in folders]
        if len(set(names)) == len(names):
            break
    return names


class LiveReport:
    """JSON values and HTML about some runs, read from their folders. Safe in several threads."""

    def __init__(self, folders: Sequence[pathlib.Path]):
        self._folders, self.names = list(folders), names_of(folders)
        self.page = live_page(self.names)

    def data(self, number: int) -> dict[str, Any]:
        """A run's charts, with the token to follow its metrics from there."""
        folder = self._folders[number]
        token = end_token(folder / "metrics.jsonl")  # first: a row may come twice, none is lost
        data = chart_data(read_run(folder))
        return {"data": data | {"name": self.names[number]}, "token": token}

    def news(self, tokens: dict[int, str]) -> dict[str, Any]:
        """Rows after the token of each run."""
        found = {}
        for number, token in tokens.items():
            told = news(self._folders[number] / "metrics.jsonl", token)
            found[str(number)] = {"rows": told.rows, "token": told.token}
        return found

    def sections(self, number: int) -> dict[str, Any]:
        """HTML of a run's sections by name."""
        run = read_run(self._folders[number])
        return {"parts": run_sections(run, number), "status": status(run)}

    def differences(self) -> dict[str, str]:
        """HTML of the settings in which the runs differ."""
        configs = [read_config(folder) for folder in self._folders]
        return {"html": differences(dict(zip(self.names, configs, strict=True)))}

    def version(self, number: int) -> str:
        """A text that changes when a file of the run's sections does."""
        folder = self._folders[number]
        paths = [*(folder / name for name in _FILES), folder / "samples"]
        return "-".join(_stamp(path) for path in paths)

    def __len__(self) -> int:
        return len(self._folders)


def _stamp(path: pathlib.Path) -> str:
    with contextlib.suppress(OSError):
        found = path.stat()
        return f"{found.st_mtime_ns:x}.{found.st_size:x}"
    return "none"


class LiveServer(http.server.ThreadingHTTPServer):
    """An HTTP server of a LiveReport; `url` is its page."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, report: LiveReport, port: int, host: str = LOOPBACK):
        self.report, self.host = report, host
        super().__init__((host, port), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listen("--serve", host, port)
        self.server_address = self.socket.getsockname()

    @property
    def url(self) -> str:
        """The address of the page."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.server_address[1]}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints errors of our own; a browser that closes a connection is none."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers one connection."""

    server: LiveServer
    protocol_version = "HTTP/1.1"  # one connection for all requests of a page
    timeout = _IDLE_SECONDS
    server_version, sys_version = "distflow", ""

    def do_GET(self) -> None:
        """Answers with the page, or with JSON."""
        if not _is_own_name(self.headers.get("Host", "")):
            self._refuse(http.HTTPStatus.MISDIRECTED_REQUEST, "use the address of the server")
            return
        try:
            url = urllib.parse.urlsplit(self.path)
        except ValueError:
            self._refuse(http.HTTPStatus.BAD_REQUEST, "the address cannot be read")
            return
        kind, _, number = url.path.removeprefix("/").partition("/")
        report = self.server.report
        if url.path == "/":
            self._answer(report.page.encode(), "text/html; charset=utf-8", "")
        elif url.path == "/news" and (tokens := self._tokens(url.query)) is not None:
            self._json(report.news(tokens))
        elif url.path == "/differences":
            self._json(report.differences())
        elif kind in ("data", "sections") and (run := self._run(number)) is not None:
            version = f'"{kind}-{report.version(run)}"' if kind == "sections" else ""
            if version and self.headers.get("If-None-Match") == version:
                self._answer(b"", "application/json", version, http.HTTPStatus.NOT_MODIFIED)
            else:
                self._json(getattr(report, kind)(run), version)
        else:
            self._refuse(http.HTTPStatus.NOT_FOUND, "there is no such page")

    def _run(self, number: str) -> int | None:
        """The number of a run in a request; None for others."""
        known = number.isascii() and number.isdigit() and len(number) < 4
        return int(number) if known and int(number) < len(self.server.report) else None

    def _tokens(self, query: str) -> dict[int, str] | None:
        try:
            pairs = urllib.parse.parse_qsl(
                query, keep_blank_values=True, max_num_fields=len(self.server.report)
            )
        except ValueError:
            return None
        numbers = [self._run(number) for number, _ in pairs]
        if None in numbers:
            return None
        return {n: token for n, (_, token) in zip(numbers, pairs, strict=True)}

    def _json(self, value: Any, version: str = "") -> None:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
        self._answer(text.encode("utf-8", "replace"), "application/json", version)

    def _refuse(self, code: http.HTTPStatus, why: str) -> None:
        self.close_connection = True
        self._answer(f"{why}\n".encode(), "text/plain; charset=utf-8", "", code)

    def _answer(
        self, body: bytes, kind: str, version: str, code: http.HTTPStatus = http.HTTPStatus.OK
    ) -> None:
        self.send_response(code)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-cache" if version else "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
        }
        if version:
            headers["ETag"] = version
        if self.close_connection:
            headers["Connection"] = "close"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


def _is_own_name(host: str) -> bool:
    """Whether a Host header is an address, or a name that only this machine can have."""
    try:
        name = urllib.parse.urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name in ("localhost", socket.gethostname().lower()) or name.endswith(".localhost"):
        return True
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return False


def open_server(
    folders: Sequence[str | os.PathLike], port: int, host: str = LOOPBACK
) -> LiveServer:
    """A server of runs that listens; its `serve_forever` answers. Port 0: any free one.

    Raises ValueError for folders that hold no runs, and for a port that cannot be had.
    """
    return LiveServer(LiveReport(find_runs(folders)), port, host)


def serve(server: LiveServer) -> None:
    """Prints the address and answers requests until SIGINT (Ctrl-C) or SIGTERM."""
    with server, _until_signal():
        count = len(server.report)
        print(f"{count} run{'s' if count > 1 else ''} at {server.url} (Ctrl-C ends)", flush=True)
        server.serve_forever(poll_interval=_SIGNAL_SECONDS)


@contextlib.contextmanager
def _until_signal() -> Iterator[None]:
    """Leaves its body at SIGINT or SIGTERM without an error."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with contextlib.suppress(KeyboardInterrupt):
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
