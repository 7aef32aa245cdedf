"""Certificates, keys and tokens in files that a flag or a variable names."""

import ssl

from distflow_jax.parsing.json_text import read_text
from distflow_jax.parsing.paths import named_path

Named = tuple[str, str]  # a flag or a variable, and the path that it has
_MOST_BYTES = 1 << 20  # of a file


def read_pair(certificate: Named, key: Named) -> tuple[bytes, bytes]:
    """(certificate, key), both b"" where neither is named. ValueError for one without the other."""
    if bool(certificate[1]) != bool(key[1]):
        raise ValueError(f"{certificate[0]} and {key[0]} belong together; give both or none")
    return read_pem(*certificate), read_pem(*key)


def read_pem(name: str, path: str) -> bytes:
    """The PEM text in a file, b"" without a path. ValueError with the flag's name."""
    if not path:
        return b""
    text = read_text(named_path(name, path), _MOST_BYTES, name)
    if "-----BEGIN " not in text:
        raise ValueError(f"{name}={path} is not in PEM format")
    return text.encode()


def load_pair(context: ssl.SSLContext, certificate: Named, key: Named) -> None:
    """Gives a context its own certificate. ValueError for a key of another one."""
    try:
        context.load_cert_chain(certificate[1], key[1])
    except ssl.SSLError as error:
        raise ValueError(
            f"{key[0]}={key[1]} is not the key of {certificate[0]}={certificate[1]} "
            f"({error.reason})"
        ) from error


def load_authorities(context: ssl.SSLContext, name: str, path: str) -> None:
    """Has a context check others by the authorities in a file. ValueError if it has none."""
    try:
        context.load_verify_locations(cadata=read_pem(name, path).decode())
    except (ssl.SSLError, UnicodeDecodeError) as error:
        raise ValueError(f"{name}={path} has no certificate that can be read") from error


def read_secret(name: str, path: str) -> str:
    """The token or key in a file, one line. ValueError with the name of its flag."""
    text = read_text(named_path(name, path), _MOST_BYTES, name).strip()
    if not text.isascii() or not text.isprintable() or not text:
        raise ValueError(
            f"{name}={path} must hold one line of printable ASCII; write one with "
            "`openssl rand -hex 32`"
        )
    return text
