"""An engine of the protocol whose answers a test decides: it computes nothing."""

import collections

from distflow_jax.rollout.foreign.engine_protocol import Answer, Failure, Status

STOP = 2  # ends a response


class ScriptedEngine:
    """Answers each request at the next call of `results`, by `answer(request)`.

    Attributes:
      started: of its process; None: it does not say.
      loads: (version, weights) of each load.
      asked: (prompt, sample) of each request.
      running: requests that were not answered.
    """

    name = "the scripted engine"
    longest_prompt = 0

    def __init__(self, answer, *, slots=8, started=1.0, updates_in_flight=True):
        """`answer(request)`: an Answer, a Failure, or None: not yet."""
        self.slots, self.started, self.updates_in_flight = slots, started, updates_in_flight
        self._answer, self.running = answer, []
        self.loads, self.asked = [], collections.Counter()

    def submit(self, requests):
        """See ForeignEngine."""
        self.running += requests
        self.asked.update((request.counter, request.sample) for request in requests)

    def results(self, seconds):
        """See ForeignEngine; waits for nothing."""
        found = {request.id: self._answer(request) for request in self.running}
        self.running = [request for request in self.running if found[request.id] is None]
        return [answer for answer in found.values() if answer is not None]

    def load(self, params, version, *, cache="keep"):
        """See ForeignEngine."""
        self.loads.append((version, params))

    def status(self):
        """See ForeignEngine."""
        return Status("scripted", self.slots, self.started)

    def close(self):
        """See ForeignEngine."""


def good(request):
    """A response of two tokens."""
    return Answer(request.id, [5, STOP], [-1.0, -0.5], True)


def bad(request, *, lost=False):
    """A request that failed; `lost`: its connection."""
    return Failure(request.id, "scripted", lost)
