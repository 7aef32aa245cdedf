"""Addresses that strangers wrote, HOST:PORT, and sockets that listen there.

`name` is the flag, the key or the variable that gave an address: messages begin with it.
"""

import contextlib
import re
import socket
from collections.abc import Iterator
from typing import NamedTuple

from distflow_jax.parsing.one_line import shown

_IPV6 = r"\[(?:[\da-fA-F.]*:){2,}[\da-fA-F.]*(?:%[\w.-]+)?\]"
_ADDRESS = re.compile(rf"(?:[\w-]{{1,63}}(?:\.[\w-]{{1,63}})*\.?|{_IPV6}):(\d{{1,5}})", re.ASCII)


class Address(NamedTuple):
    """Host, without brackets, and port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> "Address":
        """HOST:PORT, which is one (`is_address`)."""
        host, _, port = text.rpartition(":")
        return cls(host.strip("[]"), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def is_address(text: str, *, least_port: int = 1) -> bool:
    """Whether a text is HOST:PORT, the host a name, or an IP address (IPv6 in brackets)."""
    found = _ADDRESS.fullmatch(text)
    return found is not None and least_port <= int(found[1]) < 65536


def checked_address(name: str, text: str, *, least_port: int = 1) -> str:
    """The text, if it is HOST:PORT; ValueError otherwise."""
    if not is_address(text, least_port=least_port):
        raise ValueError(
            f"{name} must be HOST:PORT, got {shown(text)}; a port is from {least_port} to 65535, "
            "and IPv6 stands in brackets, as in [fd00::1]:1234"
        )
    return text


def listen(name: str, host: str, port: int | str) -> socket.socket:
    """A socket that listens at a host's port; 0: any free one. ValueError if it cannot."""
    address = f"[{host}]:{port}" if ":" in host and host[0] != "[" else f"{host}:{port}"
    checked_address(name, address, least_port=0)
    try:
        family, _, _, _, place = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM
        )[0]
        both = place[0] == "::" and socket.has_dualstack_ipv6()  # IPv4 is anywhere, too
        return socket.create_server(place, family=family, backlog=512, dualstack_ipv6=both)
    except OSError as error:
        raise ValueError(
            f"{name}: cannot listen on {address} ({error.strerror}); name an address of this host "
            "and a free port above 1023, or port 0"
        ) from error


@contextlib.contextmanager
def reserved_port(host: str) -> Iterator[str]:
    """HOST:PORT of a free port, which no other process gets while the body runs.

    A server that sets SO_REUSEPORT, as gRPC does, can listen on it within the body.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((host, 0))
        yield str(Address(host, holder.getsockname()[1]))
