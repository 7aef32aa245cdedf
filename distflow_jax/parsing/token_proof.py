"""Proofs of a secret: keys that are derived from it, and HMAC-SHA256 under these.

The one module that compares secrets and signatures: of a job's registrar, of the watchdogs'
datagrams, of a server's token, of connections between processes, and of workers. Standard library
only, for the watchdog's process.
"""

import hashlib
import hmac

MAC_BYTES = 32


def derive_key(purpose: str, secret: str | bytes) -> bytes:
    """A key for one purpose; that of another purpose says nothing about it."""
    secret = secret if isinstance(secret, bytes) else secret.encode()
    return hashlib.sha256(b"distflow " + purpose.encode() + b" " + secret).digest()


def sign(key: bytes, *parts: bytes) -> bytes:
    """A signature of the joined parts; all but one of them have fixed sizes."""
    return hmac.digest(key, b"".join(parts), "sha256")


def is_signed(key: bytes, signature: bytes, *parts: bytes, size: int = MAC_BYTES) -> bool:
    """Whether a signature, or its first `size` bytes, is that of the parts, in constant time."""
    return hmac.compare_digest(sign(key, *parts)[:size], signature)


def same_secret(given: bytes, expected: bytes) -> bool:
    """Whether two secrets are equal, in constant time."""
    return hmac.compare_digest(given, expected)
