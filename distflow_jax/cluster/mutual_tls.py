"""Mutual TLS of JAX's coordination service, by four variables of JAX 0.12 and later.

An earlier JAX does not know JAX_MTLS_CERT_FILE, JAX_MTLS_KEY_FILE, JAX_MTLS_CA_FILE and
JAX_MTLS_PEER_URI_PREFIX, and would send in clear text without a word.
"""

import os
import ssl
from collections.abc import Mapping

import jax

from distflow_jax.parsing.paths import named_path
from distflow_jax.parsing.pem_files import load_authorities, load_pair, read_pair

CERTIFICATE, KEY, AUTHORITIES = "JAX_MTLS_CERT_FILE", "JAX_MTLS_KEY_FILE", "JAX_MTLS_CA_FILE"
PREFIX = "JAX_MTLS_PEER_URI_PREFIX"  # of the URI in a peer's certificate; "": its host name counts


def set_mutual_tls(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment asks for mutual TLS; gives the files' paths to JAX.

    Raises ValueError, or OSError for a file, if it asks for what it cannot have.
    """
    given = {name: environment.get(name, "") for name in (CERTIFICATE, KEY, AUTHORITIES)}
    prefix = environment.get(PREFIX, "")
    if not any(given.values()) and not prefix:
        return False
    if not hasattr(jax.config, CERTIFICATE.lower()):
        raise ValueError(
            f"JAX_MTLS_* is set, and jax {jax.__version__} has no mutual TLS for its coordination "
            "service: install jax 0.12 or later, or unset these variables and keep the job's "
            "ports inside a private network"
        )
    if missing := [name for name, path in given.items() if not path]:
        raise ValueError(f"JAX_MTLS_* is set without {' and '.join(missing)}: name all three files")
    if prefix and not prefix.endswith("/"):
        raise ValueError(f"{PREFIX}={prefix} must end with /: longer names begin with it too")
    paths = {name: str(named_path(name, path)) for name, path in given.items()}
    pair = [(name, paths[name]) for name in (CERTIFICATE, KEY)]
    read_pair(*pair)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    load_pair(context, *pair)
    load_authorities(context, AUTHORITIES, paths[AUTHORITIES])
    for name, path in paths.items():
        jax.config.update(name.lower(), path)
    return True
