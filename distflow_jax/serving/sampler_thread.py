"""The thread behind distflow.Sampler: it alone uses the scheduler, and turns tokens into events.

Other threads hand it work through a queue and get events through callbacks, in order.
"""

import dataclasses
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent import futures
from typing import Any

from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.rollout.requests import Response
from distflow_jax.rollout.scheduling.scheduler import Scheduler
from distflow_jax.serving.messages import SampleRequest
from distflow_jax.serving.served_weights import Weights
from distflow_jax.serving.text_stream import StopText, TextStream

log = logging.getLogger("distflow_jax")

Event = Mapping[str, Any]  # a message of docs/serving.md; None: nothing follows


class SamplerStopped(RuntimeError):
    """The thread has been stopped: nothing is sampled any more."""


class Failed(SamplerStopped):
    """The thread has ended by an error; it is in the log."""


@dataclasses.dataclass(frozen=True)
class _Work:
    """A request of another thread: `do` runs in the service's thread, or `fail` gets the error."""

    do: Callable[[], None]
    fail: Callable[[Exception], None]


@dataclasses.dataclass
class _OutgoingSample:
    """One response on its way out."""

    text: TextStream
    stop: StopText
    given: int = 0  # tokens that have been turned into events
    seen: int = 0  # chunks of Partial that these were
    pending: list[Event] = dataclasses.field(default_factory=list)  # where it is not streamed
    done: bool = False


class Call:
    """One request to Sample: the events of its responses go to `deliver`, then None.

    `deliver` is called by the service's thread, and gets a `SamplerStopped` where that ends before.
    """

    def __init__(self, request: SampleRequest, deliver: Callable[[Event | Exception | None], None]):
        self.request, self.deliver = request, deliver
        self.id: int | None = None  # of the group in the scheduler
        self.over = False
        self.samples: dict[int, _OutgoingSample] = {}


class SamplerService:
    """Runs a scheduler over `engine` in a thread of its own, from `start` to `stop`.

    Weights are those of `weights`, whose turns it takes for each round, so that others may use the
    same devices.
    """

    def __init__(self, engine: RolloutEngine, weights: Weights, tokenizer: Tokenizer):
        self._tokenizer, self._weights = tokenizer, weights
        self._stops = set(engine.stop_ids)
        with weights.turns:
            self.scheduler = Scheduler(engine, weights.params, version=weights.version)
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._doing: _Work | None = None
        self._calls: dict[int, Call] = {}
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._accepts = threading.Lock()
        self._ended: SamplerStopped | None = None
        self.responses = 0  # that have ended
        self.tokens = 0  # that have been given out

    @property
    def failed(self) -> bool:
        """Whether the thread has ended by an error."""
        return isinstance(self._ended, Failed)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the round in which it is. Calls that run get `SamplerStopped`."""
        self._work.put(None)
        self._thread.join()

    def sample(self, call: Call) -> None:
        """Starts a call. SamplerStopped if the thread has."""
        self._put(_Work(lambda: self._submit(call), call.deliver))

    def cancel(self, call: Call) -> None:
        """Ends a call whose client has disconnected; its slots are free with the next round."""
        self._work.put(_Work(lambda: self._end(call, deliver=False), lambda error: None))

    def load(self, params: Any, version: int, *, cache: str = "keep") -> None:
        """Swaps the weights of all services between two calls of the engine; waits until it is
        done.

        `cache`: see Scheduler.load.

        SamplerStopped if the thread has.
        """
        done: futures.Future[None] = futures.Future()

        def weight_update() -> None:
            with self._weights.turns:
                self.scheduler.load(params, version, cache=cache)
                self._weights.params, self._weights.version = params, version
            done.set_result(None)

        self._put(_Work(weight_update, done.set_exception))
        done.result()

    def _put(self, work: _Work) -> None:
        with self._accepts:
            if self._ended is not None:
                raise self._ended
            self._work.put(work)

    # -- in the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        # Broad on purpose: whatever it is, callers must not wait for ever.
        try:
            while True:
                if not self._take_work():
                    return self._end_all(SamplerStopped("the server is stopping; ask again later"))
                if self.scheduler.busy:
                    with self._weights.turns:
                        self.scheduler.step()
                    self._stream()
        except Exception:
            log.exception("the sampler's thread ends")
            self._end_all(Failed("the sampler has failed; the server's log says why"))

    def _take_work(self) -> bool:
        """Does the queued work; waits for some where nothing runs. False: stop."""
        wait = not self.scheduler.busy
        while True:
            try:
                work = self._work.get(block=wait)
            except queue.Empty:
                return True
            if work is None:
                return False
            self._doing = work  # whoever waits for it is told if it raises
            work.do()
            self._doing = None
            wait = not self.scheduler.busy

    def _submit(self, call: Call) -> None:
        for sample in call.request.group.samples:
            text = TextStream(self._tokenizer)
            call.samples[sample] = _OutgoingSample(text, StopText(call.request.stop))
        call.id = self.scheduler.submit(
            call.request.group, on_response=lambda response: self._on_response(call, response)
        )
        self._calls[call.id] = call

    def _stream(self) -> None:
        """Gives out what the last round has added to responses that go on."""
        for group_id, partial in list(self.scheduler.under_way()):
            call = self._calls.get(group_id)
            if call is None:  # ended by an event of this round
                continue
            sample = call.samples[partial.sample]
            for chunk in partial.chunks[sample.seen :]:
                sample.seen += 1
                self._on_tokens(call, partial.sample, *chunk, end=None)
                if sample.done:
                    self.scheduler.abort_sample(group_id, partial.sample)
                    break
            self._settle(call)

    def _on_response(self, call: Call, response: Response) -> None:
        given = call.samples[response.sample].given
        new = (x[given:] for x in (response.tokens, response.logp, response.margin))
        end = "stop" if response.finished else "length"
        self._on_tokens(call, response.sample, *new, response.version[given:], end=end)
        self._settle(call)

    def _on_tokens(self, call: Call, index: int, tokens, logp, margin, version, *, end) -> None:
        """Makes an event of new tokens. `end`: why they are the last ones, None if they are not."""
        sample, pieces, count = call.samples[index], [], len(tokens)
        for i, token in enumerate(tokens):
            pieces.append(sample.stop.push(sample.text.push(int(token))))
            if sample.stop.stopped:
                end, count = "stop_string", i + 1
                break
        if end in ("stop", "length"):
            pieces.append(sample.stop.push(sample.text.rest()))
            if sample.stop.stopped:
                end = "stop_string"
            else:
                pieces.append(sample.stop.rest())
        sample.given += count
        self.tokens += count
        event = {
            "sample": index,
            "text": "".join(pieces),
            "tokens": tokens[:count].tolist(),
            "logp": [float(x) for x in logp[:count]],
            "version": version[:count].tolist(),
        }
        self._emit(call, sample, event, end)

    def _emit(self, call: Call, sample: _OutgoingSample, event: Event, end: str | None) -> None:
        if not call.request.stream:
            sample.pending.append(event)
            event = _joined(sample.pending)
        if end is not None:
            event |= {"end": end}
            sample.done = True
            self.responses += 1
        if end is not None or call.request.stream:
            call.deliver(event)

    def _settle(self, call: Call) -> None:
        if all(s.done for s in call.samples.values()):
            self._end(call, deliver=True)

    def _end(self, call: Call, *, deliver: bool) -> None:
        if call.over:
            return
        call.over = True
        if call.id is not None:
            self.scheduler.abort(call.id)
            del self._calls[call.id]
        if deliver:
            call.deliver(None)

    def _end_all(self, reason: SamplerStopped) -> None:
        with self._accepts:
            self._ended = reason
        for call in list(self._calls.values()):
            call.deliver(reason)
        if self._doing is not None:
            self._doing.fail(reason)
        while not self._work.empty():
            if (work := self._work.get()) is not None:
                work.fail(reason)


def _joined(events: list[Event]) -> dict[str, Any]:
    """Events of one response as one."""
    first, rest = dict(events[0]), events[1:]
    for event in rest:
        for name in ("text", "tokens", "logp", "version"):
            first[name] = first[name] + event[name]
    return first
