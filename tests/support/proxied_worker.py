"""scripts/worker.py, whose connections to the task buffers go through a proxy that the environment
names.

A test can then cut this worker off the network, and no other process. http_proxy: the URL of a
proxy that answers CONNECT.
"""

import os
import socket
import time

from distflow_jax.commands.main import run_script
from distflow_jax.stream.wire import wire_client as client


def connect_by_proxy(host: str, port: int, end: float) -> socket.socket:
    """A connection to an address, in place of caller._connect."""
    proxy = os.environ["http_proxy"].removeprefix("http://").rpartition(":")
    connection = socket.create_connection((proxy[0], int(proxy[2])))
    connection.settimeout(max(0.001, end - time.monotonic()))
    connection.sendall(f"CONNECT {host}:{port} HTTP/1.1\r\n\r\n".encode())
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        if not (piece := connection.recv(1)):
            raise ConnectionResetError("the proxy has ended the connection")
        head += piece
    return connection


if __name__ == "__main__":
    client._connect = connect_by_proxy
    run_script("worker")
