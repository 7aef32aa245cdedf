"""HOST:PORT has one form for every flag, key and variable; what listens has a host."""

import socket

import pytest

from distflow_jax.parsing.addresses import checked_address, is_address, listen

GOOD = [
    *("localhost:1", "a-b.example.com:65535", "10.0.0.1:80", "my_host:9", "[::1]:9", "[::]:9"),
    *("[fe80::1%eth0]:9", "host.:9"),
]
BAD = [
    *(
        "",
        ":",
        ":9",
        " :9",
        "a",
        "a:",
        "a:x",
        "a:-1",
        "a:+1",
        "a: 9",
        "a:9 ",
        "a:65536",
        "a:123456",
    ),
    *("a:1.5", "a:0x10", "a:1_0", "a:\u0663", "a:b:9", "::1:9", "[::1]", "[]:9", "[:9", "]:9"),
    *("a b:9", "a\tb:9", "a\n:9", "a,b:9", "a/b:9", "http://a:9", "u@a:9", "*:9", "a..b:9"),
    *("[abc]:9", "[::g]:9", "[1.2.3.4]:9", "[1:2]:9", "[::1%]:9"),
    *("." * 3 + ":9", "x" * 64 + ":9", "a\0:9", "\udcff:9", "$HOST:9", "~:9"),
]


def test_addresses():
    for text in GOOD:
        assert is_address(text) and checked_address("--to", text) == text, text
    for text in BAD:
        assert not is_address(text), text
        with pytest.raises(ValueError, match="^--to must be HOST:PORT, got .*from 1 to 65535") as e:
            checked_address("--to", text)
        assert str(e.value).isprintable()
    assert not is_address("a:0") and is_address("a:0", least_port=0)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "::1", "0.0.0.0", "[::]"])
def test_a_socket_listens(host):
    with listen("--host", host, 0) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection((listener.getsockname()[0], port), 5):
            pass
        with pytest.raises(ValueError, match=rf"^--port: cannot listen on .*:{port} .Address alr"):
            listen("--port", host, port)
    listen("--port", host, str(port)).close()  # free again at once


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("192.0.2.1", "Cannot assign requested address"),
        ("no.such.host.invalid", "cannot listen on"),
        ("256.0.0.1", "cannot listen on"),
        *((host, "must be HOST:PORT") for host in ("", " ", "[]", "\t", "a b", "*", "a..b", "a:9")),
    ],
)
def test_what_no_process_here_can_have(host, reason):
    with pytest.raises(ValueError, match=f"^stream.listen:? .*{reason}"):
        listen("stream.listen", host, 0)


def test_an_empty_host_is_not_every_interface():
    for port in (0, 9000):
        with pytest.raises(ValueError, match="--host must be HOST:PORT, got ':"):
            listen("--host", "", port)


def test_ports_below_1024_may_need_rights(monkeypatch):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket, "create_server", refused)
    with pytest.raises(ValueError, match="Permission denied.; name .* a free port above 1023"):
        listen("--port", "127.0.0.1", 80)
