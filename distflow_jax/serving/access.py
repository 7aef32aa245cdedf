"""Access to a server: its token, its certificate, and the folders that weights come from."""

import dataclasses
import ipaddress
import logging
import pathlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

from distflow_jax.parsing.paths import checked_path
from distflow_jax.parsing.pem_files import read_pair, read_secret
from distflow_jax.parsing.token_proof import same_secret

HEADER = "authorization"
WITHOUT = "this server needs a token; send it as the metadata 'authorization: Bearer TOKEN'"

log = logging.getLogger("distflow_jax")


@dataclasses.dataclass(frozen=True)
class Access:
    """Settings of a server on which clients may do what."""

    token: str = dataclasses.field(default="", repr=False)  # "": every client is answered
    certificate: bytes = b""  # PEM, with the chain; b"": no encryption
    key: bytes = dataclasses.field(default=b"", repr=False)  # PEM, of the certificate
    # folders whose runs LoadWeights may load; with none it is refused
    load_folders: tuple[str, ...] = ()

    def credentials(self) -> grpc.ServerCredentials | None:
        """For a TLS port; None without a certificate."""
        if not self.certificate:
            return None
        return grpc.ssl_server_credentials([(self.key, self.certificate)])

    def interceptors(self) -> list[grpc.aio.ServerInterceptor]:
        """For all methods of a server."""
        return [_TokenCheck(self.token)] if self.token else []

    def checked_path(self, path: str) -> str:
        """`path` without symbolic links. PermissionError if it is below no folder of the server."""
        if not self.load_folders:
            raise PermissionError(
                "this server loads no weights; start it with --load_folders=FOLDER"
            )
        found = pathlib.Path(path).resolve()
        if not any(found.is_relative_to(pathlib.Path(f).resolve()) for f in self.load_folders):
            raise PermissionError(
                "path is not below a folder that this server was started with (--load_folders)"
            )
        return str(found)

    def warn_if_open(self, host: str) -> None:
        """Warns of a server that other machines reach and that every client may use."""
        bare = host.removeprefix("[").removesuffix("]")
        try:
            local = ipaddress.ip_address(bare).is_loopback
        except ValueError:
            local = bare == "localhost"
        if not local and not self.token:
            log.warning("every client that reaches %s can use this server; set --token_file", host)


def read_access(
    token_file: str, tls_cert: str, tls_key: str, load_folders: Sequence[str]
) -> Access:
    """The access that flags describe. ValueError for flags that do not fit together.

    Files that cannot be read, and folders that are not there, are errors too.
    """
    token = read_secret("--token_file", token_file) if token_file else ""
    folders = [str(checked_path("folder", "--load_folders", folder)) for folder in load_folders]
    certificate, key = read_pair(("--tls_cert", tls_cert), ("--tls_key", tls_key))
    return Access(token, certificate, key, tuple(folders))


class _TokenCheck(grpc.aio.ServerInterceptor):
    """Refuses every call without the token."""

    def __init__(self, token: str):
        self._expected = bearer(token).encode()

        async def refuse(request: Any, context: grpc.aio.ServicerContext) -> None:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, WITHOUT)

        self._refuse = grpc.unary_unary_rpc_method_handler(refuse)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """The method's handler for a call with the token, otherwise one that refuses it."""
        given = dict(handler_call_details.invocation_metadata).get(HEADER, "")
        given = given if isinstance(given, bytes) else given.encode()
        if same_secret(given, self._expected):
            return await continuation(handler_call_details)
        return self._refuse


def bearer(token: str) -> str:
    """The value of the metadata `authorization` for this token."""
    return f"Bearer {token}"
