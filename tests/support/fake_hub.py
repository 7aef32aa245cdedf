"""A hub of data sets on this machine: the calls of huggingface_hub that list and download files."""

import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator, Mapping
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextlib.contextmanager
def hub_of(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[tuple[str, list[str]]]:
    """(address, paths of the files that were fetched) of a server with files by repository."""
    fetched: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            path = unquote(urlsplit(self.path).path).strip("/")
            for repo, files in repositories.items():
                of_files = f"datasets/{repo}/resolve/"
                if path.startswith(of_files):
                    name = path[len(of_files) :].partition("/")[2]
                    if name in files:
                        return self.file(name, files[name])
                elif f"{path}/".startswith(f"api/datasets/{repo}/"):
                    entries = [
                        {"type": "file", "path": name, "size": len(data), "oid": _digest(data)}
                        for name, data in files.items()
                    ]
                    names = [{"rfilename": name} for name in files]
                    info = {"id": repo, "sha": COMMIT, "siblings": names}
                    return self.answer(200, entries if "/tree/" in path else info)
            self.answer(404, {"error": "not found"}, {"X-Error-Code": "RepoNotFound"})

        def file(self, name: str, data: bytes) -> None:
            headers = {"ETag": f'"{_digest(data)}"', "X-Repo-Commit": COMMIT}
            if self.command == "GET":
                fetched.append(name)
            self.answer(200, data, headers)

        def answer(self, code: int, value, headers: Mapping[str, str] | None = None) -> None:
            data = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(code)
            for key, text in ({"Content-Length": str(len(data))} | dict(headers or {})).items():
                self.send_header(key, text)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", fetched
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
