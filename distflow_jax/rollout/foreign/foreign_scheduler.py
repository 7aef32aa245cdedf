"""A scheduler over an engine that is not ours, with the calls of scheduling/scheduler.py.

It hands out waiting responses as the engine's slots fall free, checks every answer, and repeats
what failed. A fault costs one try of one response, and is named in the log. An engine that was
started again gets its weights again before anything else.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from distflow_jax.parsing.checked_fields import at_least
from distflow_jax.parsing.setting_checks import Section, setting
from distflow_jax.rollout.foreign.engine_protocol import (
    Answer,
    EngineError,
    EngineRequest,
    Failure,
    ForeignEngine,
    checked_columns,
)
from distflow_jax.rollout.foreign.weight_probe import WrongWeights
from distflow_jax.rollout.requests import GroupRequest, Partial, Response, RolloutStats
from distflow_jax.rollout.response_checks import RefusedAnswer, ResponseLimits
from distflow_jax.rollout.sampler import SamplerState
from distflow_jax.rollout.scheduling.sequences import RequestGroup, WaitingQueue

FIRST_PAUSE, LAST_PAUSE = 0.2, 5.0  # seconds between two looks at an engine that is away
TELL_SECONDS = 30.0  # between two lines about it
log = logging.getLogger("distflow_jax")

STEP_SECONDS = 0.05  # that `step` waits for an answer
LEAST_PAUSE, MOST_PAUSE = 0.1, 5.0  # seconds between two tries
_RESTARTED = "the engine was away; its weights may be others"
_LOADED_AGAIN = "the engine was away, or had other weights than it was given"
WRONG_LOADS = 3  # of a version in a row, after which an engine is given up

# (engine, params that it has loaded, those before or None, their version) -> answers to other
# requests that came meanwhile; see WeightProbe
Probe = Callable[[ForeignEngine, Any, Any, int], list[Answer | Failure]]


def no_probe(
    engine: ForeignEngine, params: Any, before: Any, version: int
) -> list[Answer | Failure]:
    """Takes an engine's word for its weights."""
    return []


class TriesEnded(RuntimeError):
    """A response failed too often; the message names it, the engine and the last reason."""

    def __init__(self, message: str, group: RequestGroup, sample: int):
        super().__init__(message)
        self.group, self.request, self.sample = group.id, group.request, sample


@dataclasses.dataclass(frozen=True)
class ForeignLimits(Section):
    """Facts about the model and the run that answers are checked by."""

    vocab_size: int
    stops: frozenset[int]  # ids that end a response
    most_tries: int = setting(5, at_least(1))  # of one response
    lost_seconds: float = 600.0  # that an engine may be away

    @property
    def responses(self) -> ResponseLimits:
        """Limits that every response keeps to."""
        return ResponseLimits(self.vocab_size, self.stops)


@dataclasses.dataclass
class _Try:
    """A response that the engine samples."""

    group: RequestGroup
    partial: Partial
    held: int  # version that the engine had
    tokens: int  # that the response had already

    def asks_for(self, partial: Partial) -> bool:
        """Whether it samples the rest of this response."""
        return (
            self.group.request is partial.request
            and self.partial.sample == partial.sample
            and self.tokens == len(partial.tokens)
        )


class ForeignScheduler:
    """Drives one foreign engine: submit requests, call `step` until nothing is `busy`.

    One thread at a time. Responses have no margins (0: every token may be a near-tie).

    Attributes:
      params: that the engine was given last.
      version: of these.
    """

    stalled = False

    def __init__(
        self,
        engine: ForeignEngine,
        params: Any,
        limits: ForeignLimits,
        *,
        version: int = 0,
        lost: "LostEngine | None" = None,
    ):
        """Brings the weights to the engine. EngineError if it does not take them, or by the probe
        of `lost` has others."""
        self.engine, self.version, self.stats = engine, version, RolloutStats()
        self._limits, self.params = limits, params
        self._waiting = WaitingQueue()
        self._later: list[tuple[float, RequestGroup, Partial]] = []  # to be repeated, by time
        self._running: dict[int, _Try] = {}
        self._adrift: dict[int, _Try] = {}  # run on, and nobody waits for them (any more)
        self._failed: dict[tuple[int, int], int] = {}  # tries by (request's id, sample)
        self._groups: dict[int, RequestGroup] = {}
        self._ended: list[tuple[RequestGroup, Response]] = []
        self._given_up: list[TriesEnded] = []
        self._next_group = self._next_try = 0
        self._lost = lost or LostEngine(engine, limits.lost_seconds)
        self._lost.start(params, version)

    @property
    def busy(self) -> bool:
        """Whether a response is waiting or running, or is yet to be returned by `step`."""
        return bool(self._waiting or self._later or self._running or self._ended)

    @property
    def free_slots(self) -> int:
        """Responses that the engine could sample beside those that run."""
        return max(0, self.engine.slots - len(self._running) - len(self._adrift))

    def under_way(self) -> Iterator[tuple[int, Partial]]:
        """(id of its group, its tokens so far) of responses that go on with tokens they had.

        What an engine has sampled of others is not known until they end.
        """
        partials = [(entry.group, entry.partial) for entry in self._running.values()]
        partials += [(group, partial) for _, group, partial in self._later]
        for group, partial in (*partials, *self._waiting.resumed()):
            if len(partial.tokens):
                yield group.id, partial

    def submit(
        self, request: GroupRequest, on_response: Callable[[Response], None] | None = None
    ) -> int:
        """Adds a request; returns its id. ValueError for one that the engine cannot take.

        `on_response` is called as soon as a response has ended.
        """
        check_request(self.engine, request)
        group = self._new_group(request, on_response, len(request.samples))
        samples = list(reversed(request.samples))
        group.waiting = [
            sample
            for sample in samples
            if not _adopt(self._adrift, self._running, group, _unbegun(group, sample))
        ]
        if group.waiting:
            self._waiting.push(group)
        return group.id

    def step(self) -> list[Response]:
        """Hands out what waits, and returns responses that have ended; waits shortly for one.

        TriesEnded where a response has failed too often: `abort` its request to go on without it.
        EngineError where the engine stays away.
        """
        if not self.busy:
            return []
        if not self._ended:
            if not self._given_up:
                self._hand_out()
                self._collect()
            if self._given_up:
                raise self._given_up.pop(0)
        ended, self._ended = self._ended, []
        return [response for _, response in ended]

    def abort(self, group_id: int) -> list[Response]:
        """Drops a request; returns those of its responses that `step` has not returned."""
        cut = [response for group, response in self._ended if group.id == group_id]
        self._ended = [entry for entry in self._ended if entry[0].id != group_id]
        if (group := self._groups.pop(group_id, None)) is not None:
            self._waiting.remove_resumed(group)
            self._waiting.remove_group(group)
            self._later = [entry for entry in self._later if entry[1] is not group]
            for number in [n for n, t in self._running.items() if t.group is group]:
                self._adrift[number] = self._running.pop(number)
            self._failed = {key: n for key, n in self._failed.items() if key[0] != group_id}
            self._given_up = [error for error in self._given_up if error.group != group_id]
        return cut

    def export(self) -> list[Partial]:
        """All responses that are waiting or running, with the tokens that they had before.

        The scheduler is empty then, but for responses that `step` has still to return. The engine
        goes on with what runs, which counts if it is submitted or restored again.
        """
        partials = [entry.partial for entry in self._running.values()]
        partials += [partial for _, _, partial in self._later]
        partials += [partial for _, partial in self._waiting.resumed()]
        for group in self._waiting.groups():
            partials += [_unbegun(group, sample) for sample in reversed(group.waiting)]
        ended = self._ended
        for group_id in list(self._groups):
            self.abort(group_id)
        self._ended = ended
        return partials

    def restore(
        self, partials: Sequence[Partial], on_response: Callable[[Response], None] | None = None
    ) -> None:
        """Resumes exported responses before all that wait.

        One that the engine cannot read with its prompt begins again.
        """
        for partial in reversed(partials):
            check_request(self.engine, partial.request)
            longest, had = self.engine.longest_prompt, len(partial.tokens)
            group = self._new_group(partial.request, on_response, 1)
            if longest and len(partial.request.prompt.tokens) + had > longest:
                partial = Partial(partial.request, partial.sample, np.zeros(0, np.int32))
            if not _adopt(self._adrift, self._running, group, partial):
                self._waiting.push_resumed(group, partial)

    def drain(self) -> None:
        """Nothing: no program of this process uses the weights."""

    def load(self, params: Any, version: int, *, cache: str = "keep") -> None:
        """Swaps the engine's weights; returns when it has them.

        An engine that cannot swap in flight is drained first: what runs ends by the weights that
        it began with, and what waits begins with the new ones. `cache`: see Scheduler.load.
        """
        if cache not in ("keep", "recompute"):
            raise ValueError(f'cache must be "keep" or "recompute", got {cache!r}')
        while (self._running or self._adrift) and not self.engine.updates_in_flight:
            self._collect()
        before, self.params, self.version = self.params, params, version
        if not self._lost.load(params, version, before, cache):
            # some may have been sampled by weights that it should not have
            self._put_back([Failure(number, _LOADED_AGAIN) for number in self._running], 0)
            self._adrift.clear()

    def close(self) -> None:
        """Drops everything that is under way, as `export` does."""
        for group_id in list(self._groups):
            self.abort(group_id)
        self._ended.clear()

    # -- responses --------------------------------------------------------------------------------

    def _new_group(
        self, request: GroupRequest, on_response: Callable[[Response], None] | None, left: int
    ) -> RequestGroup:
        group = RequestGroup(self._next_group, request, [], on_response, left=left)
        self._groups[group.id] = group
        self._next_group += 1
        return group

    def _hand_out(self) -> None:
        """Gives waiting responses to the engine while it has slots."""
        now = time.monotonic()
        for entry in [entry for entry in self._later if entry[0] <= now]:
            self._later.remove(entry)
            self._waiting.push_resumed(*entry[1:])
        if not self._waiting or not self.free_slots:
            return
        if not self._running and not self._adrift and not self._lost.is_same():
            self._lost.bring_back(self.params, self.version)
        while self._waiting and self.free_slots:
            self._send(self._next_tries())

    def _next_tries(self) -> list[_Try]:
        """The next responses to one prompt, as many as there are slots."""
        if self._waiting.next_resumed:
            group, partial = self._waiting.pop_resumed()
            return [_Try(group, partial, self.version, len(partial.tokens))]
        group = self._waiting.next_group
        samples = [group.waiting.pop() for _ in range(min(len(group.waiting), self.free_slots))]
        if not group.waiting:
            self._waiting.pop_group()
        return [_Try(group, _unbegun(group, sample), self.version, 0) for sample in samples]

    def _send(self, tries: Sequence[_Try]) -> None:
        requests = []
        for entry in tries:
            request, had = entry.group.request, entry.partial.tokens
            limit = request.sampling.limit - len(had)
            requests.append(
                EngineRequest(
                    self._next_try,
                    request.prompt.counter,
                    entry.partial.sample,
                    np.concatenate([request.prompt.tokens, had]).astype(np.int32),
                    dataclasses.replace(request.sampling, num_samples=1, limit=limit),
                    begun=len(had),
                )
            )
            self._running[self._next_try] = entry
            self._next_try += 1
        self.stats.generate_calls += 1
        self.engine.submit(requests)

    def _collect(self) -> None:
        """Takes what the engine has answered; waits shortly for the first one."""
        if not self._running and not self._adrift:
            time.sleep(STEP_SECONDS)  # until the next try
            return
        found = self._lost.take_answers() or self.engine.results(STEP_SECONDS)
        failures = {entry.id: entry for entry in found if isinstance(entry, Failure)}
        # answers beside a lost connection may be those of an engine with other weights
        if any(entry.lost for entry in failures.values()) and not self._lost.is_same(fault=True):
            # a prompt that breaks every connection must not be repeated for ever
            self._put_back(list(failures.values()))
            self._put_back([Failure(number, _RESTARTED) for number in self._running], 0)
            self._adrift.clear()
            self._lost.bring_back(self.params, self.version)
            return
        for entry in found:
            self._adrift.pop(entry.id, None)
            if isinstance(entry, Answer):
                self._take(entry)
        self._put_back(list(failures.values()))

    def _take(self, answer: Answer) -> None:
        """Adds an answer to its response, or puts that back."""
        entry = self._running.get(answer.id)
        if entry is None:
            return  # of a request that was dropped
        try:
            tokens, logp, version = checked_columns(
                answer,
                self._limits.responses,
                limit=entry.group.request.sampling.limit - entry.tokens,
                held=entry.held,
                known=self.version,
            )
        except RefusedAnswer as error:
            self._put_back([Failure(answer.id, str(error))])
            return
        del self._running[answer.id]
        self.stats.tokens += len(tokens)
        margin = np.zeros(len(tokens), np.float32)
        entry.partial.chunks.append((tokens, logp, margin, version))
        response = entry.partial.response(self._limits.stops)
        self._failed.pop((entry.group.id, entry.partial.sample), None)
        self._ended.append((entry.group, response))
        entry.group.left -= 1
        if not entry.group.left:
            self._groups.pop(entry.group.id, None)
        if entry.group.on_response is not None:  # now: others may give up before it is returned
            entry.group.on_response(response)

    def _put_back(self, failures: Sequence[Failure], cost: int = 1) -> None:
        """Lets responses wait for another try. `cost`: tries that it takes each of them."""
        said: dict[tuple[int, str], list[tuple[int, int]]] = {}  # uids that failed alike
        for failure in failures:
            entry = self._running.pop(failure.id, None)
            if entry is None:
                continue
            key = (entry.group.id, entry.partial.sample)
            tries = self._failed[key] = self._failed.get(key, 0) + cost
            uid = (entry.group.request.prompt.counter, entry.partial.sample)
            said.setdefault((tries, failure.reason), []).append(uid)
            pause = max(failure.again, min(MOST_PAUSE, LEAST_PAUSE * 2 ** max(0, tries - 1)))
            self._later.append((time.monotonic() + pause, entry.group, entry.partial))
            if tries >= self._limits.most_tries:
                text = (
                    f"{self.engine.name} failed {tries} times at response {uid[1]} of prompt "
                    f"{uid[0]}: {failure.reason}"
                )
                self._given_up.append(TriesEnded(text, entry.group, entry.partial.sample))
        for (tries, reason), uids in said.items():
            name, most = self.engine.name, self._limits.most_tries
            log.warning("%s: %s, try %d of %d: %s", name, _listed(uids), tries, most, reason)


def _listed(uids: Sequence[tuple[int, int]]) -> str:
    """Responses by (prompt, sample), in words."""
    if len(uids) == 1:
        return f"response {uids[0][1]} of prompt {uids[0][0]}"
    prompts = [prompt for prompt, _ in uids]
    return f"{len(uids)} responses, of prompts {min(prompts)} to {max(prompts)}"


def check_request(engine: ForeignEngine, request: GroupRequest) -> None:
    """Raises ValueError for a request that an engine cannot take."""
    if request.hold:
        raise ValueError(
            f"{engine.name} cannot hold responses between turns; sample environments with an "
            "engine of this package"
        )
    length, longest = len(request.prompt.tokens), engine.longest_prompt
    if length < 1:
        raise ValueError("a prompt must have at least 1 token")
    if longest and length > longest:
        raise ValueError(f"{engine.name} reads prompts of up to {longest} tokens, got {length}")


def _adopt(
    adrift: dict[int, _Try], running: dict[int, _Try], group: RequestGroup, partial: Partial
) -> bool:
    """Waits again for a response that the engine samples since before an `export`, if there is one.

    Returns whether there is.
    """
    for number, entry in adrift.items():
        if entry.asks_for(partial):
            running[number] = dataclasses.replace(entry, group=group, partial=partial)
            del adrift[number]
            return True
    return False


def _unbegun(group: RequestGroup, sample: int) -> Partial:
    return Partial(group.request, sample, np.zeros(0, np.int32))


class LostEngine:
    """Loads of one engine, and what to do when it was away."""

    def __init__(
        self,
        engine: ForeignEngine,
        lost_seconds: float,
        probe: Probe = no_probe,
        leaving: threading.Event | None = None,
    ):
        """`lost_seconds`: that it may be away; `probe`: of its weights after each load; `leaving`:
        once it is set, an engine that is away is an error at once."""
        self._engine, self._seconds, self._probe = engine, lost_seconds, probe
        self._leaving = leaving or threading.Event()
        self._answers: list[Answer | Failure] = []  # that came while it was probed
        self._started: float | None = None  # of the process that has the weights

    def start(self, params: Any, version: int) -> None:
        """The first load: an engine that does not answer, or does not load, is an error at once."""
        self._started = self._engine.status().started
        self._bring(params, None, version)

    def load(self, params: Any, version: int, before: Any, cache: str) -> bool:
        """Brings new weights, to an engine that was away in between too; whether it took them at
        once. `before`: those that it has."""
        try:
            self._bring(params, before, version, cache)
        except EngineError as error:
            log.warning("%s", error)
            self.bring_back(params, version, before)
            return False
        return True

    def take_answers(self) -> list[Answer | Failure]:
        """Answers to requests of others that came while the engine was probed."""
        taken, self._answers = self._answers, []
        return taken

    def _bring(self, params: Any, before: Any, version: int, cache: str = "keep") -> None:
        self._engine.load(params, version, cache=cache)
        self._answers += self._probe(self._engine, params, before, version)

    def is_same(self, *, fault: bool = False) -> bool:
        """Whether the engine is there, and its process is the one that has the weights.

        `fault`: a connection to it has failed. Then an engine that does not say when it began may
        be another one.
        """
        try:
            started = self._engine.status().started
        except EngineError as error:
            log.warning("%s", error)
            return False
        return started == self._started and not (fault and started is None)

    def bring_back(self, params: Any, version: int, before: Any = None) -> None:
        """Waits until the engine is there and has these weights. `before`: those that it had, if
        it was not started again.

        EngineError where that takes too long, or it has others after several loads.
        """
        self._answers.clear()
        wrong, pause = 0, FIRST_PAUSE
        begin = told = time.monotonic()
        log.warning("%s: waiting up to %g s for it", self._engine.name, self._seconds)
        while True:
            try:
                self._started = self._engine.status().started
                self._bring(params, before, version)
                log.warning("%s is back, with version %d", self._engine.name, version)
                return
            except EngineError as error:
                wrong += isinstance(error, WrongWeights)
                if wrong >= WRONG_LOADS:
                    raise
                now = time.monotonic()
                if now - begin + pause > self._seconds:
                    raise EngineError(
                        f"{self._engine.name} was away for {self._seconds:g} s: {error}"
                    ) from error
                if now - told >= TELL_SECONDS:
                    log.warning("away for %d of %g s: %s", now - begin, self._seconds, error)
                    told = now
            if self._leaving.wait(pause):
                raise EngineError(f"{self._engine.name} was away when this worker was told to end")
            pause = min(LAST_PAUSE, 2 * pause)


class ForeignStart:
    """Starts an EpisodeSampler's schedulers over a foreign engine.

    `SamplerState.params` are in the form of training, and its decode state is None.
    """

    def __init__(
        self,
        engine: ForeignEngine,
        limits: ForeignLimits,
        probe: Probe = no_probe,
        leaving: threading.Event | None = None,
    ):
        """`probe` and `leaving`: see LostEngine."""
        self.engine, self._limits = engine, limits
        self._lost = LostEngine(engine, limits.lost_seconds, probe, leaving)
        self._scheduler: ForeignScheduler | None = None

    def __call__(self, state: SamplerState) -> ForeignScheduler:
        """An empty scheduler, over the engine with the weights of `state`.

        EngineError if the engine does not take them.
        """
        if self._scheduler is None:
            self._scheduler = ForeignScheduler(
                self.engine,
                state.params,
                self._limits,
                version=state.version,
                lost=self._lost,
            )
        elif (
            self._scheduler.version != state.version or self._scheduler.params is not state.params
        ):  # after a restart of the run a version may be that of other weights
            self._scheduler.load(state.params, state.version)
        self._scheduler.stats = RolloutStats()
        return self._scheduler

    def close(self) -> None:
        """Ends the engine's connections."""
        self.engine.close()
