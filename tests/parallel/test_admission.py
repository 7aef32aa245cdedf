"""The gate of a job: each number once, and only with the job's token."""

import contextlib
import os
import socket
import threading

import pytest
from support.waiting import HANG

from distflow_jax.parallel import admission
from distflow_jax.parallel.admission import Address, Gate, apply, open_listener, reserved_port
from distflow_jax.parallel.roll_call import RollCall

SERVICE = "127.0.0.1:4711"


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Nobody is late, but where a test says so."""
    monkeypatch.setattr(admission, "ANSWER_SECONDS", HANG)


@pytest.fixture
def gate():
    """(HOST:PORT of the gate of a job of 4, join(index, ...) with a connection to close)."""
    listener = open_listener("127.0.0.1:0")
    coordinator = str(Address(*listener.getsockname()))
    opened = Gate(listener, SERVICE, RollCall(4, 300.0, lambda reason: None), "secret")
    with contextlib.ExitStack() as stack:

        def join(index, count=4, token="secret"):
            service, connection = apply(coordinator, index, count, token, seconds=0.0)
            stack.callback(connection.close)
            return service, connection

        yield coordinator, join
        opened.close()


def test_every_process_is_admitted_once(gate, caplog):
    _, join = gate
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
def test_another_token_is_refused_and_named(gate, caplog, token):
    with pytest.raises(ValueError, match="different tokens: .*DISTFLOW_JOB_TOKEN differs"):
        gate[1](1, token=token)
    assert "a process with another token is refused: 127.0.0.1:" in caplog.text
    assert gate[1](1)[0] == SERVICE


def test_another_number_of_processes_is_refused(gate):
    with pytest.raises(ValueError, match="started for 8 processes, and this job has 4"):
        gate[1](7, count=8)


def test_strangers_get_nothing_and_delay_nobody(gate):
    coordinator, join = gate
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


def test_an_application_cannot_be_sent_again(gate, monkeypatch):
    """Whoever has recorded one on the network cannot use it: the gate's nonce is another."""
    recorded = []
    send = socket.socket.sendall

    def record(self, data):
        recorded.append(data)
        send(self, data)

    monkeypatch.setattr(socket.socket, "sendall", record)
    gate[1](1)[1].close()
    monkeypatch.undo()
    with socket.create_connection(Address.parse(gate[0])) as stranger:
        stranger.settimeout(HANG)
        stranger.sendall(recorded[0])
        answer = b""
        while part := stranger.recv(1000):
            answer += part
        assert SERVICE.encode() not in answer


def test_an_address_that_is_taken_is_an_error(gate, monkeypatch):
    monkeypatch.setattr(admission, "RELEASE_SECONDS", 0.0)
    with pytest.raises(ValueError, match=f"process 0 cannot listen on {gate[0]} .*process 0 of"):
        open_listener(gate[0])


def test_a_process_0_that_does_not_come_is_named():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = str(Address(*closed.getsockname()))
        with pytest.raises(ConnectionError, match=f"cannot reach process 0 at {address} "):
            apply(address, 1, 2, "", seconds=0.0)


def test_another_service_at_the_address_is_named():
    def answer():
        with server.accept()[0] as taken, contextlib.suppress(ConnectionError):
            taken.sendall(bytes(100))
            taken.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(ConnectionError, match="another service has this port"):
            apply(str(Address(*server.getsockname())), 1, 2, "", seconds=0.0)
        thread.join()


def test_the_gate_listens_on_the_jobs_interface_only(gate):
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
