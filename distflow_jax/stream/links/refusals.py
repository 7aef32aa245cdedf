"""Results that were refused, by worker, and the workers that may come back.

A worker of which too much was refused is ended. Its name is its own choice, so the host that it
came from counts too: nobody joins from there for a while, which grows with each worker ended there.
"""

import dataclasses

from distflow_jax.stream.leases import Leases
from distflow_jax.stream.sample_requests import HERE
from distflow_jax.stream.wire.calls import Refused

MOST_REFUSED = 3  # results of a worker, after which it is ended
FIRST_PAUSE, LAST_PAUSE = 10.0, 3600.0  # seconds in which nobody joins from a host
MOST_NAMES = 10_000  # of workers whose hosts are known
MOST_TEXT = 300  # characters of a reason


@dataclasses.dataclass
class _Caller:
    """A worker that has called."""

    host: str = ""  # "": it is not known
    refused: int = 0  # of its results
    joined: bool = False


class Refusals:
    """The callers of one task buffer. All calls come under its lock."""

    def __init__(self, leases: Leases):
        self._leases = leases
        self._callers: dict[str, _Caller] = {}

    def meet(self, worker: str, host: str) -> None:
        """Notes where a worker calls from."""
        self._caller(worker).host = host

    def check(self, worker: str, now: float) -> None:
        """Raises Refused for a worker that was ended, or that must not join yet."""
        if worker in ("", HERE):
            raise Refused(f"no worker may be named {worker!r}")
        ended, caller = self._leases.ended, self._caller(worker)
        if worker in ended:
            raise Refused(f"{worker} is ended: {ended[worker][0]}")
        if caller.joined:
            return
        at = [at for name, (_, at) in ended.items() if caller.host == self._host_of(name)]
        pause = min(LAST_PAUSE, FIRST_PAUSE * 2.0 ** min(len(at) - 1, 20))
        if caller.host and at and (left := max(at) + pause - now) > 0:
            raise Refused(
                f"{len(at)} workers of host {caller.host} were ended, the trainers' log says why: "
                f"no other one may join from there for {left:.0f} s"
            )
        caller.joined = True

    def refuse(self, worker: str, why: str, now: float) -> str:
        """Counts a result that is not used, and ends a worker of which too much was refused;
        returns the reason, for the log."""
        caller, why = self._caller(worker), " ".join(why.split())[:MOST_TEXT]
        caller.refused += 1
        if caller.refused < MOST_REFUSED:
            return why
        text = f"{caller.refused} of its results were refused, the last one for this: {why}"
        self._leases.end(worker, text, now)
        return f"{why}; it is ended"

    def _caller(self, worker: str) -> _Caller:
        if worker not in self._callers:
            if len(self._callers) >= MOST_NAMES:
                del self._callers[next(iter(self._callers))]
            self._callers[worker] = _Caller()
        return self._callers[worker]

    def _host_of(self, worker: str) -> str:
        caller = self._callers.get(worker)
        return "" if caller is None else caller.host
