"""Certificates and keys in files that a flag or a variable names."""

import pathlib

Named = tuple[str, str]  # a flag or a variable, and the path that it has


def read_pair(certificate: Named, key: Named) -> tuple[bytes, bytes]:
    """(certificate, key), both b"" where neither is named. ValueError for one without the other."""
    if bool(certificate[1]) != bool(key[1]):
        raise ValueError(f"{certificate[0]} and {key[0]} belong together; give both or none")
    return read_pem(*certificate), read_pem(*key)


def read_pem(name: str, path: str) -> bytes:
    """The PEM text in a file, b"" without a path. ValueError with the flag's name."""
    if not path:
        return b""
    text = read_named(name, path)
    if b"-----BEGIN " not in text:
        raise ValueError(f"{name}={path} is not in PEM format")
    return text


def read_named(name: str, path: str) -> bytes:
    """The bytes of a file. ValueError, with the name of its flag, if it cannot be read."""
    try:
        return pathlib.Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{name}={path} cannot be read: {error.strerror}") from error
