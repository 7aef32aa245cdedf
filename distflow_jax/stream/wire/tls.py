"""TLS of the wire protocol, if certificates are configured: the server's own, and the client's CA.

DISTFLOW_TLS_CERT and DISTFLOW_TLS_KEY name the files of a trainer, DISTFLOW_TLS_CA those of all its
clients; all are in PEM format.
"""

import dataclasses
import os
import ssl
from collections.abc import Mapping

from distflow_jax.parsing.paths import named_path
from distflow_jax.parsing.pem_files import load_authorities, load_pair, read_pair, read_pem

CERTIFICATE, KEY, AUTHORITIES = "DISTFLOW_TLS_CERT", "DISTFLOW_TLS_KEY", "DISTFLOW_TLS_CA"


@dataclasses.dataclass(frozen=True)
class WireTls:
    """Settings of TLS for each side; None: its connections are plain."""

    server: ssl.SSLContext | None = None
    client: ssl.SSLContext | None = None


def read_wire_tls(environment: Mapping[str, str] = os.environ) -> WireTls:
    """TLS by the files that the environment names. ValueError for files that do not fit."""
    given = [(name, environment.get(name, "")) for name in (CERTIFICATE, KEY, AUTHORITIES)]
    paths = [str(named_path(name, path)) if path else "" for name, path in given]
    certificate, _ = read_pair((CERTIFICATE, paths[0]), (KEY, paths[1]))
    authorities = read_pem(AUTHORITIES, paths[2])
    if certificate and not authorities:
        raise ValueError(
            f"{CERTIFICATE} is set and {AUTHORITIES} is not: name the file of the authorities that "
            "others check the certificate by, on all processes"
        )
    return WireTls(
        _server_context(*paths[:2]) if certificate else None,
        _client_context(paths[2]) if authorities else None,
    )


def _server_context(certificate: str, key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # bytes that nobody reads would look like the end of an idle connection
    load_pair(context, (CERTIFICATE, certificate), (KEY, key))
    return context


def _client_context(authorities: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    load_authorities(context, AUTHORITIES, authorities)
    return context
