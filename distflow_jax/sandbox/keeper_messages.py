"""Messages between a run and its keepers: values of plain types, with their size before them."""

import marshal
import socket
from typing import Any

from distflow_jax.sandbox.sandbox_records import SandboxError, SandboxOutcome

_HEADER, _CHUNK = 8, 1 << 20


def read_message(connection: socket.socket) -> Any:
    """Reads what `write_message` wrote. Raises EOFError."""
    header = _read_exactly(connection, _HEADER)
    return marshal.loads(_read_exactly(connection, int.from_bytes(header, "little")))


def write_message(connection: socket.socket, message: Any) -> None:
    """Sends a value of plain types with its size before it."""
    content = marshal.dumps(message)
    connection.sendall(len(content).to_bytes(_HEADER, "little") + content)


def _read_exactly(connection: socket.socket, size: int) -> bytes:
    content = bytearray()
    while len(content) < size:
        chunk = connection.recv(min(size - len(content), _CHUNK))
        if not chunk:
            raise EOFError
        content += chunk
    return bytes(content)


def read_outcome(connection: socket.socket) -> SandboxOutcome:
    """Waits for a keeper's answer, closes the connection. Raises SandboxError."""
    try:
        told = read_message(connection)
    except (EOFError, OSError) as error:
        raise SandboxError(f"the keeper of a program exited: {error}".rstrip(": ")) from None
    finally:
        connection.close()
    if "error" in told:
        raise SandboxError(told["error"])
    return SandboxOutcome(**told)
