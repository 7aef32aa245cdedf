"""Failures of what environments stand on, which are no answers to the model: told and counted."""

import collections
import dataclasses
import logging
import pathlib

from distflow_jax.environments.event_loop import EnvironmentCallFailed, EnvironmentsFailed
from distflow_jax.parsing.one_line import one_line
from distflow_jax.user_functions import raised

# Why a call gave no answer: it raised, or returned something else than an answer; its deadline
# passed; a new object did not answer the turns so far as the one before; the host that it ran on is
# lost, which is no fault of the environment.
HOST_LOST = "host_lost"
CAUSES = ("raised", "timed_out", "diverged", HOST_LOST)

_WINDOW, _LEAST = 256, 64  # tries whose rate is looked at; and so many at least
_WHY = {
    "timed_out": "gave no answer within rollout.environment_timeout={:g}",
    "diverged": "of a new object gave another observation to the same turns: let observations "
    "follow from the prompt and the turns, or let the environment be `repeatable`",
}
# files whose frames say nothing about what is wrong in a user's code
_OURS = {
    str(pathlib.Path(__file__).with_name(f"{name}.py"))
    for name in ("environment_object", "event_loop", "handle", "registry")
}

log = logging.getLogger("distflow_jax")


@dataclasses.dataclass(frozen=True)
class CallFailure:
    """The failure of a call.

    `cause` is one of CAUSES; `error` holds a summary and below it the traceback; `kind` is the type
    of the error and where it was raised.
    """

    cause: str
    error: str
    kind: str

    @classmethod
    def of(cls, failed: EnvironmentCallFailed, seconds: float) -> "CallFailure":
        """The record of a failed call; `seconds`: what it was given."""
        if isinstance(failed, FailedElsewhere):
            return failed.failure
        what, error = failed.what, failed.error
        if error is None:
            return cls(failed.cause, f"{what} {_WHY[failed.cause].format(seconds)}", what)
        found = raised(error, _OURS)
        kind = f"{what}, {type(error).__name__}{found.place}"
        summary = one_line(found.summary.replace("\n", " "))
        return cls(failed.cause, f"{what} raised {summary}{found.place}\n{found.text}", kind)


class FailedElsewhere(EnvironmentCallFailed):
    """A call that another host made, and the record of its failure."""

    def __init__(self, what: str, failure: CallFailure):
        super().__init__(what, failure.cause)
        self.failure = failure


class Failures:
    """The failures of a run's environment in this process.

    Attributes:
      max_rate: the share of failed tries, of `reset` or of `step`, above which the run ends.
    """

    def __init__(self, name: str, max_rate: float):
        self.name, self.max_rate = name, max_rate
        self._kinds: collections.Counter[str] = collections.Counter()
        self._tries: dict[str, collections.deque[CallFailure | None]] = {
            method: collections.deque(maxlen=_WINDOW) for method in ("reset", "step")
        }

    def tell(self, kind: str, what: str) -> None:
        """Warns of something that went wrong, of each kind once."""
        self._kinds[kind] += 1
        if self._kinds[kind] == 1:
            told = "environment %r: %s\n(further ones of this kind are counted)"
            log.warning(told, self.name, what)

    def count(self, method: str, failure: CallFailure | None) -> None:
        """Counts a try of `reset` or `step`, and why it failed. Calls that bring a new object to
        where the one before was are parts of the try of the turn that follows.

        A lost host is told, and is no try. EnvironmentsFailed where too many of the last tries of
        the method have failed.
        """
        if failure is not None and failure.cause == HOST_LOST:
            self.tell(failure.kind, failure.error)
            return
        window = self._tries[method]
        window.append(failure)
        if failure is None:
            return
        self.tell(failure.kind, failure.error)
        failed, calls = [f for f in window if f is not None], len(window)
        if calls >= _LEAST and len(failed) > self.max_rate * calls:
            causes = collections.Counter(f.cause for f in failed)
            counts = ", ".join(f"{cause} {causes[cause]}" for cause in CAUSES if causes[cause])
            raise EnvironmentsFailed(
                f"{len(failed)} of the last {calls} {method}s of environment {self.name!r} failed "
                f"({counts}), more than rollout.max_infra_rate={self.max_rate:g}: mend it or what "
                f"it calls, or raise that; the first of them: {failed[0].error}"
            )

    def summarize(self) -> None:
        """Says how often each kind has occurred, if it was more than once."""
        for kind, count in self._kinds.most_common():
            if count > 1:
                log.warning("environment %r: %d x %s", self.name, count, kind)
