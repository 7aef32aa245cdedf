"""The registrar of a job: each number once, and only with the job's token."""

import contextlib
import os
import socket
import threading

import pytest
from support.waiting import HANG

from distflow_jax.cluster import handshakes, startup
from distflow_jax.cluster.handshakes import open_listener
from distflow_jax.cluster.job import Job
from distflow_jax.cluster.startup import Registrar, register
from distflow_jax.parsing.addresses import Address, reserved_port

SERVICE = "127.0.0.1:4711"


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Nobody is late, but where a test says so."""
    monkeypatch.setattr(startup, "ANSWER_SECONDS", HANG)


def job(coordinator, index, count=4, token="secret"):
    return Job("flags", "in a test", coordinator, count, index, token=token)


@pytest.fixture
def registrar():
    """(HOST:PORT of the registrar of a job of 4, join(index, ...) with a connection to close)."""
    listener = open_listener("127.0.0.1:0")
    coordinator = str(Address(*listener.getsockname()))
    opened = Registrar(job(coordinator, 0), lambda reason: None, listener, SERVICE)
    with contextlib.ExitStack() as stack:

        def join(index, **other):
            service, connection = register(job(coordinator, index, **other), seconds=0.0)
            stack.callback(connection.close)
            return service, connection

        yield coordinator, join
        opened.close()


def test_every_process_is_admitted_once(registrar, caplog):
    _, join = registrar
    connections = {}
    for index in (3, 1, 2):
        service, connections[index] = join(index)
        assert service == SERVICE
    me = f"host {socket.gethostname()}, pid {os.getpid()}"
    for index in (0, 2):
        taken = f"process {index} of this job is running already ({me})"
        with pytest.raises(ValueError) as error:
            join(index)
        assert taken in str(error.value) and "start each process once" in str(error.value)
        assert f"process {index} ({me}) is refused: {taken}" in caplog.text
    connections[2].close()  # it has ended, and may be started again
    assert join(2)[0] == SERVICE


@pytest.mark.parametrize("token", ["", "Secret"])
def test_another_token_is_refused_and_named(registrar, caplog, token):
    with pytest.raises(ValueError, match="different tokens: .*DISTFLOW_JOB_TOKEN differs"):
        registrar[1](1, token=token)
    assert "a process with another token is refused: 127.0.0.1:" in caplog.text
    assert registrar[1](1)[0] == SERVICE


def test_another_number_of_processes_is_refused(registrar):
    with pytest.raises(ValueError, match="started for 8 processes, and this job has 4"):
        registrar[1](7, count=8)


def test_strangers_get_nothing_and_delay_nobody(registrar):
    coordinator, join = registrar
    address = Address.parse(coordinator)
    with contextlib.ExitStack() as stack:
        for sent in (b"", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", bytes(500), os.urandom(500)) * 20:
            stranger = stack.enter_context(socket.create_connection(address))
            with contextlib.suppress(ConnectionError):
                stranger.sendall(sent)
        assert join(1)[0] == SERVICE
        stranger.settimeout(HANG)
        got = b""
        with contextlib.suppress(ConnectionError):
            while part := stranger.recv(1000):
                got += part
        assert SERVICE.encode() not in got


def test_an_application_cannot_be_sent_again(registrar, monkeypatch):
    """A recorded application is useless, because the registrar's nonce changes."""
    recorded = []
    send = socket.socket.sendall

    def record(self, data):
        recorded.append(data)
        send(self, data)

    monkeypatch.setattr(socket.socket, "sendall", record)
    registrar[1](1)[1].close()
    monkeypatch.undo()
    with socket.create_connection(Address.parse(registrar[0])) as stranger:
        stranger.settimeout(HANG)
        stranger.sendall(recorded[0])
        answer = b""
        while part := stranger.recv(1000):
            answer += part
        assert SERVICE.encode() not in answer


def test_an_address_that_is_taken_is_an_error(registrar, monkeypatch):
    monkeypatch.setattr(handshakes, "RELEASE_SECONDS", 0.0)
    with pytest.raises(
        ValueError, match=f"process 0 cannot listen on {registrar[0]} .*process 0 of"
    ):
        open_listener(registrar[0])


def test_a_process_0_that_does_not_come_is_named():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = str(Address(*closed.getsockname()))
        with pytest.raises(ConnectionError, match=f"cannot reach process 0 at {address} "):
            register(job(address, 1), seconds=0.0)


def test_another_service_at_the_address_is_named():
    def answer():
        with server.accept()[0] as taken, contextlib.suppress(ConnectionError):
            taken.sendall(bytes(100))
            taken.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConnectionError, match="another service has this port"):
            register(job(str(Address(*server.getsockname())), 1), seconds=0.0)
        thread.join()


def test_the_registrar_listens_on_the_jobs_interface_only(registrar):
    with open_listener("127.0.0.1:0") as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    with open_listener("[::1]:0") as listener:
        assert listener.getsockname()[0] == "::1"


def test_a_reserved_port_is_nobody_elses():
    with reserved_port("127.0.0.1") as service:
        address = Address.parse(service)
        with pytest.raises(OSError):
            socket.create_server(address)
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            server.bind(address)
            server.listen()
            socket.create_connection(address).close()
