"""Seals of datagrams: only processes of the job are believed, and nothing twice.

A sealed datagram is its sender's index, a counter, the body, and an HMAC-SHA256 of all of these
under the job's key, which is never sent. The counter rises with every datagram of a sender. It
begins above those of the watchdogs that this process had before, without any clock: the controller
counts how many it has started.

Standard library only, as in all of the watchdog process.
"""

import struct

from distflow_jax.parsing.token_proof import is_signed, sign

_HEAD = struct.Struct(">IQ")  # index of the sender, counter
_MAC_BYTES = 16
SEAL_BYTES = _HEAD.size + _MAC_BYTES
# datagrams of a sender that may overtake one on the network; an older one counts as sent again
WINDOW = 1024
GENERATION_BITS = 40  # datagrams of one watchdog: 10 a second for 3,000 years


class Sealer:
    """Seals what one watchdog sends.

    Args:
      key: the job's secret.
      index: of this process.
      generation: number of watchdogs that this process had before.
    """

    def __init__(self, key: bytes, index: int, generation: int):
        self._key, self._index = key, index
        self._counter = generation << GENERATION_BITS

    def seal(self, body: bytes) -> bytes:
        """A datagram of this body, SEAL_BYTES longer."""
        self._counter += 1
        sealed = _HEAD.pack(self._index, self._counter) + body
        return sealed + sign(self._key, sealed)[:_MAC_BYTES]


class Opener:
    """Opens what the other watchdogs have sealed.

    Args:
      key: the job's secret.
      index: of this process, whose own datagrams are not believed if they come back.
      count: number of processes.
    """

    def __init__(self, key: bytes, index: int, count: int):
        self._key, self._index = key, index
        # for each process the newest counter, and a bit for each of the WINDOW before it
        self._seen = [(0, 0)] * count

    def open(self, datagram: bytes) -> bytes | None:
        """The body; None for a datagram that is foreign, damaged, or has been opened before."""
        if len(datagram) < SEAL_BYTES:
            return None
        sealed, mac = datagram[:-_MAC_BYTES], datagram[-_MAC_BYTES:]
        if not is_signed(self._key, mac, sealed, size=_MAC_BYTES):
            return None
        index, counter = _HEAD.unpack_from(sealed)
        if index == self._index or index >= len(self._seen) or not self._is_new(index, counter):
            return None
        return sealed[_HEAD.size :]

    def _is_new(self, index: int, counter: int) -> bool:
        newest, mask = self._seen[index]
        if counter > newest:
            shift = min(counter - newest, WINDOW)
            self._seen[index] = counter, (mask << shift | 1) & ((1 << WINDOW) - 1)
            return True
        age = newest - counter
        if age >= WINDOW or mask >> age & 1:
            return False
        self._seen[index] = newest, mask | 1 << age
        return True
