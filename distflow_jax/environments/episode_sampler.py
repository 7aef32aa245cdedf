"""Episodes of requests that come at any time, on one engine whose weights may change meanwhile."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from distflow_jax.environments.episodes import Episode, single_turn
from distflow_jax.environments.multiturn import TurnDriver
from distflow_jax.environments.registry import Environments
from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.rollout.occupancy import Occupancy
from distflow_jax.rollout.requests import GroupRequest, Partial, Response
from distflow_jax.rollout.sampler import SamplerState
from distflow_jax.rollout.scheduling.scheduler import Scheduler

RequestKey = Hashable  # chosen by the caller; stream/tasks.py's Key where samplers run ahead


@dataclasses.dataclass
class Progress:
    """Samples of a request: responses that have ended, by sample, and the tokens of
    others."""

    episodes: dict[int, Episode] = dataclasses.field(default_factory=dict)
    partials: list[Partial] = dataclasses.field(default_factory=list)

    @property
    def num_sampled(self) -> int:
        """Tokens that were sampled."""
        ended = sum(episode.num_sampled for episode in self.episodes.values())
        return ended + sum(len(p.tokens) - len(p.fed) for p in self.partials)


UNBEGUN = Progress()  # read alone


class Counts(NamedTuple):
    """Numbers of what a sampler has sampled."""

    tokens: int = 0
    under_way: int = 0  # tokens of requests that it has not returned
    occupancy: Occupancy = Occupancy()


@dataclasses.dataclass(eq=False)
class _Request:
    """A request that is not complete."""

    key: RequestKey
    request: GroupRequest
    episodes: dict[int, Episode] = dataclasses.field(default_factory=dict)  # by sample

    @property
    def lacks(self) -> int:
        """Responses that have not ended."""
        return len(self.request.samples) - len(self.episodes)


class EpisodeSampler:
    """Answers requests on one engine: `submit` them, call `round` while it is `busy`.

    When nothing is under way it begins anew, so that no bit of a response depends on what was
    sampled before. One thread at a time.

    Attributes:
      in_turns: whether responses are in turns, with environments.
      stats: RolloutStats of the scheduler that has ended last; None: none has.
    """

    def __init__(
        self,
        engine: RolloutEngine | None,
        state: SamplerState,
        environments: Environments | None = None,
        on_response: Callable[[Response], None] | None = None,
        start: Callable[[SamplerState], Any] | None = None,
    ):
        """`state`: donated. `on_response` is called as soon as a response has ended. `start`: makes
        a scheduler with this state, over another engine; None: a Scheduler over `engine`."""
        self._start = start or functools.partial(_start_own, engine)
        self._engine, self._environments, self._on_response = engine, environments, on_response
        self.in_turns = environments is not None
        self._state = state
        self._open: dict[RequestKey, _Request] = {}
        self._pending: collections.deque[_Request] = collections.deque()  # for slots of their own
        self._ended: list[_Request] = []
        self._scheduler: Any = None  # of `start`
        self._driver: TurnDriver | None = None
        self._past = Counts()  # of earlier schedulers; `under_way` is not used
        self.stats: Any = None

    @property
    def version(self) -> int:
        """Training steps that the weights have seen."""
        return self._state.version

    @property
    def counts(self) -> Counts:
        """Numbers of all that was sampled so far."""
        tokens, _, occupancy = self._past
        if self._scheduler is not None:
            stats = self._scheduler.stats
            tokens += stats.tokens
            occupancy = occupancy.plus(stats.occupancy._replace(calls=stats.generate_calls))
        waiting = [*self._open.values(), *self._ended]
        under_way = sum(e.num_sampled for entry in waiting for e in entry.episodes.values())
        under_way += sum(len(p.tokens) - len(p.fed) for _, p in self._under_way())
        if self._driver is not None:
            under_way += self._driver.num_sampled
        return Counts(tokens, under_way, occupancy)

    @property
    def lacks(self) -> int:
        """Responses of all requests that have not ended."""
        return sum(entry.lacks for entry in self._open.values())

    @property
    def busy(self) -> bool:
        """Whether a response is under way, or a request is yet to be returned by `round`."""
        return bool(self._open or self._ended)

    def submit(self, key: RequestKey, request: GroupRequest, progress: Progress = UNBEGUN) -> None:
        """Adds a request, to go on with the `progress` of an earlier sampler.

        What has begun comes before all other requests, the last one first; responses in turns that
        have not ended begin anew. ValueError for a request that no slot can take.
        """
        entry = _Request(key, request, dict(progress.episodes))
        self._open[key] = entry
        if not entry.lacks:
            self._end_if_complete(entry)
        elif self._environments is not None:
            self._pending.append(entry)
        elif progress.episodes or progress.partials:
            begun = {*progress.episodes, *(partial.sample for partial in progress.partials)}
            new = [s for s in request.samples if s not in begun]
            nothing = np.zeros(0, np.int32)
            self._restore([*progress.partials, *(Partial(request, s, nothing) for s in new)])
        else:
            keep = functools.partial(self._keep, entry)
            self._started().submit(request, keep)

    def round(self) -> list[tuple[RequestKey, list[Episode]]]:
        """One round of the scheduler; returns requests that are complete now, their responses in
        the order of their numbers."""
        if self._open:
            if self._environments is None:
                self._started().step()
            else:
                self._round_of_turns()
        ended, self._ended = self._ended, []
        if self._scheduler is not None and not self.busy:
            self._stop()
        return [(e.key, [e.episodes[i] for i in sorted(e.episodes)]) for e in ended]

    def drain(self) -> None:
        """Waits for the decode call in flight: no program uses the weights until `round`."""
        if self._scheduler is not None:
            self._scheduler.drain()

    def free_weights(self) -> None:
        """Frees the weights, for others that `load` brings, if an engine of ours holds them."""
        self.drain()
        if self._engine is not None:
            jax.tree.map(lambda x: x.delete(), self._state.params)

    def load(self, params: Any, version: int, *, cache: str = "keep") -> None:
        """Swaps the weights between two decode calls, see Scheduler.load."""
        self._state = dataclasses.replace(self._state, params=params, version=version)
        if self._scheduler is not None:
            self._scheduler.load(params, version, cache=cache)

    def suspend(self) -> tuple[SamplerState, list[Partial]]:
        """Suspends what is under way; the state is free until `resume`.

        ValueError with environments at work, which cannot be suspended.
        """
        if self._environments is not None and self.busy:
            raise ValueError("responses in turns cannot be suspended: wait until none is under way")
        partials = self._export()
        return self._state, partials

    def resume(self, state: SamplerState, partials: list[Partial]) -> None:
        """Goes on after `suspend`: tokens that were sampled are read again."""
        self._state = state
        self._restore(partials)

    def drop(self, keys: Collection[RequestKey]) -> None:
        """Answers some requests no longer: `round` returns none of them. Tokens of others are read
        again, but for responses in turns."""
        partials: list[Partial] = []
        if self._driver is None:
            partials = self._export()
        else:
            for key in keys:
                self._driver.cancel(key)
        # the decode call in flight may have completed some of them
        self._ended = [entry for entry in self._ended if entry.key not in keys]
        self._pending = collections.deque(e for e in self._pending if e.key not in keys)
        gone = {id(self._open.pop(key).request) for key in keys if key in self._open}
        self._restore([p for p in partials if id(p.request) not in gone])
        if not self.busy:
            self._stop()

    def progress(self) -> dict[RequestKey, Progress]:
        """Samples of each request that `round` has not returned, which do not grow any more.

        Of responses in turns only those that have ended.
        """
        entries = [*self._ended, *self._open.values()]
        found = {entry.key: Progress(dict(entry.episodes)) for entry in entries}
        for entry, partial in self._under_way():
            if entry is not None:
                copy = dataclasses.replace(partial, chunks=list(partial.chunks))
                found[entry.key].partials.append(copy)
        return found

    def close(self) -> SamplerState:
        """Drops everything that is under way; returns the state."""
        self._open.clear()
        self._pending.clear()
        self._stop()
        return self._state

    # -- one turn ---------------------------------------------------------------------------------

    def _started(self) -> Scheduler:
        if self._scheduler is None:
            self._scheduler = self._start(self._state)
        return self._scheduler

    def _stop(self) -> None:
        if self._driver is not None:
            self._driver.close()
            self._driver = None
        if self._scheduler is not None:
            self._past, self.stats = self.counts, self._scheduler.stats
            self._state = dataclasses.replace(self._state, decode=self._scheduler.close())
            self._scheduler = None

    def _export(self) -> list[Partial]:
        """Suspends what is under way, and ends the scheduler."""
        partials = [] if self._scheduler is None else self._scheduler.export()
        self._stop()
        return partials

    def _under_way(self) -> list[tuple[_Request | None, Partial]]:
        """Sequences that have begun and not ended, the tokens of a decode call in flight apart;
        those of responses in turns belong to no request."""
        if self._scheduler is None:
            return []
        entries = {id(entry.request): entry for entry in self._open.values()}
        found = [partial for _, partial in self._scheduler.under_way()]
        return [(entries.get(id(partial.request)), partial) for partial in found]

    def _restore(self, partials: Sequence[Partial]) -> None:
        """Goes on with partial responses; requests of which nothing has begun wait as before."""
        entries = {id(entry.request): entry for entry in self._open.values()}
        begun = [p for p in partials if p.chunks or len(p.fed)]
        resumed = {id(p.request) for p in begun}
        resumed |= {key for key, entry in entries.items() if entry.episodes}
        for partial in reversed(partials):  # each comes before all others
            if id(partial.request) in resumed:
                keep = functools.partial(self._keep, entries[id(partial.request)])
                self._started().restore([partial], keep)
        for key in dict.fromkeys(id(partial.request) for partial in partials):
            if key not in resumed:  # their prompt is read once for all responses
                entry = entries[key]
                keep = functools.partial(self._keep, entry)
                self._started().submit(entry.request, keep)

    def _keep(self, entry: _Request, response: Response) -> None:
        entry.episodes[response.sample] = single_turn(response)
        if self._on_response is not None:
            self._on_response(response)
        self._end_if_complete(entry)

    def _end_if_complete(self, entry: _Request) -> None:
        if not entry.lacks:
            del self._open[entry.key]
            self._ended.append(entry)

    # -- turns ------------------------------------------------------------------------------------

    def _round_of_turns(self) -> None:
        scheduler = self._started()
        if self._driver is None:
            self._driver = TurnDriver(scheduler, self._environments, self._on_response)
        driver, most = self._driver, self._engine.max_concurrent_decodes
        while self._pending and (not driver.live or driver.live + self._pending[0].lacks <= most):
            entry = self._pending.popleft()
            driver.begin(entry.key, entry.request, entry.episodes)
        driver.take_answers(wait=not scheduler.busy or scheduler.stalled)
        driver.step()
        for (key, sample), episode in list(driver.done.items()):
            entry = self._open[key]
            entry.episodes[sample] = episode
            del driver.done[key, sample]
            self._end_if_complete(entry)


def _start_own(engine: RolloutEngine, state: SamplerState) -> Scheduler:
    return Scheduler(engine, state.params, version=state.version, state=state.decode)
