"""Refused results, by worker and by host, and when a worker may join again.

A worker with too many refused results is ended. A worker chooses its own name, so its host counts
too: no worker may join from there for a time that grows with the refusals.
"""

import dataclasses
from typing import TypeVar

from distflow_jax.parsing.one_line import one_line
from distflow_jax.stream.leases import Leases
from distflow_jax.stream.sample_requests import HERE
from distflow_jax.stream.wire.calls import Refused

MOST_REFUSED = 3  # results of a worker, after which it is ended
FIRST_PAUSE, LAST_PAUSE = 10.0, 3600.0  # seconds in which nobody joins from a host
FORGET_SECONDS = 86_400.0  # without a refusal, after which a host is as any other
MOST_NAMES = 10_000  # of workers, and of hosts, that are known
MOST_TEXT = 300  # characters of a reason

T = TypeVar("T")


@dataclasses.dataclass
class _Caller:
    """A worker that has registered."""

    host: str = ""  # "": it is not known
    refused: int = 0  # of its results
    joined: bool = False


@dataclasses.dataclass
class _RefusedHost:
    """A host whose results were refused, whatever the names of its workers."""

    refused: int = 0  # MOST_REFUSED for a worker that was ended for its log-probs
    last: float = 0.0  # when


class Refusals:
    """The workers of one task buffer. All calls require its lock."""

    def __init__(self, leases: Leases):
        self._leases = leases
        leases.on_end = self._note_end
        self._callers: dict[str, _Caller] = {}
        self._hosts: dict[str, _RefusedHost] = {}

    def meet(self, worker: str, host: str) -> None:
        """Notes where a worker calls from."""
        _entry(self._callers, worker, _Caller).host = host

    def check(self, worker: str, now: float) -> None:
        """Raises Refused for a worker that was ended, or that must not join yet."""
        if worker in ("", HERE):
            raise Refused(f"no worker may be named {worker!r}")
        ended, caller = self._leases.ended, _entry(self._callers, worker, _Caller)
        if worker in ended:
            raise Refused(f"{worker} is ended: {ended[worker][0]}")
        if caller.joined:
            return
        host = self._hosts.get(caller.host, _RefusedHost())
        times = host.refused // MOST_REFUSED
        pause = min(LAST_PAUSE, FIRST_PAUSE * 2.0 ** min(times - 1, 20))
        if times and (left := host.last + pause - now) > 0:
            raise Refused(
                f"workers of host {caller.host} were refused, the trainers' log says why: no other "
                f"one may join from there for {left:.0f} s"
            )
        caller.joined = True

    def refuse(self, worker: str, why: str, now: float) -> str:
        """Counts a result that is not used, and ends a worker of which too much was refused;
        returns the reason, for the log."""
        caller = _entry(self._callers, worker, _Caller)
        why = one_line(" ".join(why.split())[:MOST_TEXT])
        caller.refused += 1
        self._note(caller.host, 1, now)
        if caller.refused < MOST_REFUSED:
            return why
        text = f"{caller.refused} of its results were refused, the last one for this: {why}"
        self._leases.end(worker, text, now)
        return f"{why}; it is ended"

    def _note_end(self, worker: str, now: float) -> None:
        caller = _entry(self._callers, worker, _Caller)
        self._note(caller.host, max(0, MOST_REFUSED - caller.refused), now)

    def _note(self, host: str, refused: int, now: float) -> None:
        if host:
            found = _entry(self._hosts, host, _RefusedHost)
            before = found.refused if now - found.last < FORGET_SECONDS else 0
            found.refused, found.last = before + refused, now


def _entry(known: dict[str, T], name: str, kind: type[T]) -> T:
    """The entry of a name, which is the last to be forgotten from now on."""
    found = known[name] = known.pop(name, None) or kind()
    if len(known) > MOST_NAMES:
        del known[next(iter(known))]
    return found
