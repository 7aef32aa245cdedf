"""The live report's server gives each row once, and nothing but the folders of its runs."""

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from support.paths import ROOT
from support.waiting import HANG

from distflow_jax.commands import report_command
from distflow_jax.report.live.live_server import find_runs, names_of, open_server
from distflow_jax.report.live.metrics_tail import end_token, news
from distflow_jax.report.run_writer import RunWriter


def write(folder, steps, *, resume_step=None, value=1.0):
    writer = RunWriter(folder, resume_step=resume_step)
    writer.config({"training": {"steps": 9}, "model": {"source": folder.name}})
    for step in steps:
        writer.metrics(step, {"actor/loss": value / step, "timing_s/step": value})
    writer.close()


@contextlib.contextmanager
def serving(*folders, **options):
    server = open_server(folders, 0, **options)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The server of one run, beside which lies a file that no request may read."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "secret.txt").write_text("secret")
    write(folder / "run", [1])
    with serving(folder / "run") as server:
        yield server


def ask(server, path, method="GET", **headers):
    """(status, headers, body) of a request."""
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=HANG)
    try:
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        reply = connection.getresponse()
        return reply.status, dict(reply.getheaders()), reply.read()
    finally:
        connection.close()


def rows(path, token):
    found = news(path, token)
    return [row["step"] for row in found.rows], found.token


# -- following a file -------------------------------------------------------------------------


def test_each_row_comes_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    token, seen = end_token(path), []
    assert rows(path, token) == ([], token)  # the run has not begun
    lines = [json.dumps({"step": step, "a/b": step / 7}) + "\n" for step in range(1, 30)]
    data = "".join(lines).encode()
    for start in range(0, len(data), 17):  # lines arrive in pieces
        with path.open("ab") as file:
            file.write(data[start : start + 17])
        found, token = rows(path, token)
        seen += found
    assert seen == list(range(1, 30))
    assert token == end_token(path)


def test_a_reader_of_a_resumed_run_begins_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(tmp_path, range(1, 8))
    token = end_token(path)
    write(tmp_path, [], resume_step=7)  # drops nothing
    assert rows(path, token) == ([], token)
    write(tmp_path, [], resume_step=4)
    assert rows(path, token) == ([], "")
    token = end_token(path)
    write(tmp_path, [5, 6], resume_step=4)
    assert rows(path, token)[0] == [5, 6]
    token = end_token(path)
    write(tmp_path, range(5, 40), resume_step=4, value=2.0)  # longer than before, other numbers
    assert rows(path, token) == ([], "")
    path.unlink()
    assert rows(path, token) == ([], "")


@pytest.mark.parametrize("token", ["", "x", "-1-00", "5", "999999999999999999-00", "٣-00", "0-00"])
def test_a_token_of_another_kind_begins_anew(tmp_path, token):
    write(tmp_path, [1, 2])
    assert rows(tmp_path / "metrics.jsonl", token) == ([], "")


def test_lines_that_cannot_be_read_are_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("")
    token = end_token(path)
    path.write_bytes(
        b'\xff\n{"step": 1, "a/b": "NaN", "a/c": "Infinity"}\n[]\n{"a/b": 1}\n'
        b'{"step": "<", "a/b": 1}\n{"step": 2, "a/b": 1, "a/c": "-Infinity"}\n{"st'
    )
    found = news(path, token).rows
    assert found == [
        {"step": 1, "a/b": "NaN", "a/c": "Infinity"},
        {"step": 2, "a/b": 1.0, "a/c": "-Infinity"},
    ]


# -- requests ---------------------------------------------------------------------------------


def test_the_page_and_its_numbers(tmp_path):
    write(tmp_path / "one", range(1, 4))
    write(tmp_path / "two", range(1, 7))
    with serving(tmp_path / "one", tmp_path / "two") as server:
        status, headers, body = ask(server, "/")
        assert status == 200 and b"2 runs" in body and b"connect-src 'self'" in body
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert "no-store" in headers["Cache-Control"]
        loaded = json.loads(ask(server, "/data/1")[2])
        assert (loaded["data"]["name"], loaded["data"]["last"]) == ("two", 6)
        told = json.loads(ask(server, f"/news?1={loaded['token']}&0=")[2])
        assert told == {
            "1": {"rows": [], "token": loaded["token"]},
            "0": {"rows": [], "token": ""},
        }
        write(tmp_path / "two", [7, 8], resume_step=6)
        told = json.loads(ask(server, f"/news?1={loaded['token']}")[2])["1"]
        assert [row["step"] for row in told["rows"]] == [7, 8]
        parts = json.loads(ask(server, "/sections/0")[2])["parts"]
        assert "id='config-0'" in parts["config"] and "top" in parts
        assert "model.<wbr>source" in json.loads(ask(server, "/differences")[2])["html"]


def test_sections_are_sent_again_only_after_a_change(tmp_path):
    write(tmp_path, [1])
    with serving(tmp_path) as server:
        version = ask(server, "/sections/0")[1]["ETag"]
        status, _, body = ask(server, "/sections/0", If_None_Match=version)
        assert (status, body) == (304, b"")
        write(tmp_path, [2], resume_step=1)
        status, headers, _ = ask(server, "/sections/0", If_None_Match=version)
        assert status == 200 and headers["ETag"] != version


@pytest.mark.parametrize(
    "path",
    [
        "/../secret.txt",
        "/%2e%2e/secret.txt",
        "/data/../../secret.txt",
        "/data/0/../../../secret.txt",
        "/data/-1",
        "/data/1",
        "/data/",
        "/data/0x0",
        "/sections/metrics.jsonl",
        "/metrics.jsonl",
        "/news?0=a&0=b",
        "/news?5=a",
        "/news?../secret.txt=a",
        "//secret.txt",
        "/page",
        "/names",
    ],
)
def test_other_paths_are_not_found(served, path):
    status, _, body = ask(served, path)
    assert status == 404 and b"secret" not in body


def test_an_address_that_cannot_be_read_is_refused(served, capsys):
    with socket.create_connection(served.server_address[:2], timeout=HANG) as connection:
        connection.sendall(b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.makefile().readline().split()[1] == "400"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD", "CONNECT"])
def test_only_get_is_answered(served, method):
    assert ask(served, "/", method)[0] == 501


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LocalHost:8080", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:6006", 200),
        (socket.gethostname(), 200),
        ("evil.example", 421),
        ("evil.example:6006", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost.evil.example", 421),
        ("", 421),
        ("[", 421),
    ],
)
def test_requests_by_a_foreign_name_are_refused(served, host, status):
    found, _, body = ask(served, "/data/0", Host=host)
    assert found == status and (b"loss" in body) == (status == 200)


def test_a_link_out_of_a_run_is_not_read(tmp_path):
    write(tmp_path / "run", [1])
    outside = tmp_path / "secret"
    outside.write_text('{"step": 1, "secret/value": 1}\n')
    for name in ("metrics.jsonl", "plan.txt", "config.json"):
        (tmp_path / "run" / name).unlink(missing_ok=True)
        (tmp_path / "run" / name).symlink_to(outside)
    with serving(tmp_path / "run") as server:
        for path in ("/data/0", "/sections/0", "/news?0=0-e3b0c44298fc1c14"):
            assert b"secret/value" not in ask(server, path)[2]


def test_by_default_only_this_machine_is_served(served):
    assert served.url.startswith("http://127.0.0.1:")


# -- runs, ports, the command -----------------------------------------------------------------


def test_folders_of_runs_are_opened(tmp_path):
    for name in ("a/x", "a/y", "b/x"):
        write(tmp_path / name, [1])
    (tmp_path / "a" / "notes").mkdir()
    found = find_runs([tmp_path / "a", tmp_path / "b" / "x", tmp_path / "a" / "x"])
    assert names_of(found) == ["a/x", "a/y", "b/x"]
    assert names_of(found[:2]) == ["x", "y"]
    (tmp_path / "new").mkdir()
    assert find_runs([tmp_path / "new"]) == [tmp_path / "new"]
    with pytest.raises(FileNotFoundError, match="a run's folder .*nowhere does not exist"):
        find_runs([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="no run is given"):
        find_runs([])


def test_a_port_that_cannot_be_had_is_named(tmp_path):
    with serving(tmp_path) as server:
        port = server.server_address[1]
        with pytest.raises(
            ValueError, match=f"on 127.0.0.1:{port} .Address already in use.*or port 0"
        ):
            open_server([tmp_path], port)
    with pytest.raises(ValueError, match="--serve must be HOST:PORT, got .127.0.0.1:70000"):
        open_server([tmp_path], 70_000)
    with pytest.raises(ValueError, match="on 192.0.2.1:0 .Cannot assign requested address"):
        open_server([tmp_path], 0, "192.0.2.1")


def report(*folders, out="", serve=None):
    options = SimpleNamespace(workdir="", arguments=folders, out=out, serve=serve, host="")
    return report_command.main(options)


def test_a_page_of_several_runs_needs_a_name(tmp_path, capsys):
    write(tmp_path / "one", [1])
    write(tmp_path / "two", [1])
    with pytest.raises(ValueError, match="a page of 2 runs needs a name: give --out=FILE.html"):
        report(tmp_path)
    out = tmp_path / "both.html"
    assert report(tmp_path, out=str(out)) == 0
    assert capsys.readouterr().out == f"wrote {out}\n"
    text = out.read_text()
    assert "Settings that differ" in text and "<td>&quot;one&quot;</td>" in text
    with pytest.raises(ValueError, match="exclude each other"):
        report(tmp_path, out="a.html", serve=0)


def test_the_page_of_one_run_is_in_its_folder(tmp_path, capsys):
    write(tmp_path / "runs" / "one", [1])
    page = tmp_path / "runs" / "one" / "report.html"
    page.unlink()
    report(tmp_path / "runs")
    assert capsys.readouterr().out == f"wrote {page}\n" and page.is_file()
    assert not (tmp_path / "runs" / "report.html").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_command(tmp_path, number):
    write(tmp_path / "run", [1])
    command = [sys.executable, str(ROOT / "scripts" / "report.py"), "--serve=0", tmp_path / "run"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    line = process.stdout.readline()
    assert line.startswith("1 run at http://127.0.0.1:"), process.stderr.read()
    process.send_signal(number)
    out, error = process.communicate(timeout=HANG)
    assert (process.returncode, out, error) == (0, "", "")
