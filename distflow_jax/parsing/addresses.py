"""Addresses that strangers wrote, HOST:PORT, and sockets that listen there.

`name` is the flag, the key or the variable that gave an address: messages begin with it.
"""

import re
import socket

from distflow_jax.parsing.one_line import shown

_ADDRESS = re.compile(r"(?:[\w-]{1,63}(?:\.[\w-]{1,63})*\.?|\[[\w.:%-]+\]):(\d{1,5})", re.ASCII)


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
