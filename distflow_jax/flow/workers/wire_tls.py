"""TLS of the wire, where certificates are given: the door's own, and what callers check it by.

DISTFLOW_TLS_CERT and DISTFLOW_TLS_KEY name the files of a trainer, DISTFLOW_TLS_CA those of all who
call it; all are in PEM format.
"""

import dataclasses
import os
from collections.abc import Mapping

import grpc

from distflow_jax.parsing.pem_files import read_pair, read_pem

CERTIFICATE, KEY, AUTHORITIES = "DISTFLOW_TLS_CERT", "DISTFLOW_TLS_KEY", "DISTFLOW_TLS_CA"


@dataclasses.dataclass(frozen=True)
class WireTls:
    """PEM texts; b"": none."""

    certificate: bytes = b""  # of the door, with its chain
    key: bytes = dataclasses.field(default=b"", repr=False)  # of the certificate
    authorities: bytes = b""  # that callers check the door's certificate by

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """For a door; None without a certificate."""
        if not self.certificate:
            return None
        return grpc.ssl_server_credentials([(self.key, self.certificate)])

    def caller_credentials(self) -> grpc.ChannelCredentials | None:
        """For a caller; None without authorities."""
        return grpc.ssl_channel_credentials(self.authorities) if self.authorities else None


def read_wire_tls(environment: Mapping[str, str] = os.environ) -> WireTls:
    """TLS by the files that the environment names. ValueError for files that do not fit."""
    paths = [environment.get(name, "") for name in (CERTIFICATE, KEY, AUTHORITIES)]
    certificate, key = read_pair((CERTIFICATE, paths[0]), (KEY, paths[1]))
    authorities = read_pem(AUTHORITIES, paths[2])
    if certificate and not authorities:
        raise ValueError(
            f"{CERTIFICATE} is set and {AUTHORITIES} is not: name the file of the authorities that "
            "others check the certificate by, on all processes"
        )
    return WireTls(certificate, key, authorities)
