"""Continuous batching one call at a time: requests come and go while others are decoded.

Requests are started in the order in which they came; which weights sampled what depends on when
they came, never what an (uid, position) draws. One thread uses it.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from distflow_jax.rollout.engine import Prefix, RolloutEngine, SlotRequest
from distflow_jax.rollout.scheduler import GroupRequest, Response


@dataclasses.dataclass
class VersionedResponse(Response):
    """A response with the version of the weights that each token was sampled by, int32 [T]."""

    version: np.ndarray


@dataclasses.dataclass(frozen=True)
class NewTokens:
    """What one call of the engine added to a response; arrays are [n], n >= 1."""

    sample: int
    tokens: np.ndarray  # int32
    logp: np.ndarray  # float32
    margin: np.ndarray  # float32
    version: np.ndarray  # int32
    last: bool  # the end token, or the limit, is among them


@dataclasses.dataclass
class _Running:
    group: "_Group"
    sample: int
    logits_version: int  # weights that computed the logits of the slot's next token
    parts: list[NewTokens] = dataclasses.field(default_factory=list)

    def response(self, finished: bool) -> VersionedResponse:
        def joined(name, dtype):
            return np.concatenate([np.zeros(0, dtype), *(getattr(p, name) for p in self.parts)])

        return VersionedResponse(
            self.group.request.prompt,
            self.sample,
            joined("tokens", np.int32),
            joined("logp", np.float32),
            joined("margin", np.float32),
            finished,
            joined("version", np.int32),
        )


@dataclasses.dataclass
class _Group:
    id: int
    request: GroupRequest
    on_response: Callable[[VersionedResponse], None] | None
    on_tokens: Callable[[NewTokens], None] | None
    waiting: collections.deque[int]  # samples without a slot
    prefix: Prefix | None = None
    prefix_version: int = 0


class Scheduler:
    """The slots of an engine and the requests in them.

    `on_response` is called with each response as it ends; `on_tokens` with what each call of the
    engine added to each response of the group. Both may call `abort`.
    """

    def __init__(self, engine: RolloutEngine, params: Any, *, version: int = 0):
        self._engine, self._params, self._version = engine, params, version
        self._state = engine.init_decode_state()
        self._deactivate = jax.jit(
            lambda active, keep: active & keep, out_shardings=self._state.active.sharding
        )
        self._free = list(range(engine.max_concurrent_decodes - 1, -1, -1))
        self._running: dict[int, _Running] = {}
        self._waiting: collections.deque[_Group] = collections.deque()
        self._next_id = 0
        self._stops = set(engine.stop_ids)
        self._clear([])  # compiled before the first request

    @property
    def busy(self) -> bool:
        """Whether something waits or runs."""
        return bool(self._running or self._waiting)

    @property
    def free_slots(self) -> int:
        """Slots that no response holds."""
        return len(self._free)

    def submit(
        self,
        request: GroupRequest,
        on_response: Callable[[VersionedResponse], None] | None = None,
        on_tokens: Callable[[NewTokens], None] | None = None,
    ) -> int:
        """Adds a group; returns its id."""
        samples = collections.deque(range(request.num_samples))
        group = _Group(self._next_id, request, on_response, on_tokens, samples)
        self._next_id += 1
        self._waiting.append(group)
        return group.id

    def abort(self, id: int, sample: int | None = None) -> list[VersionedResponse]:
        """Ends a group, or one sample of it: partial responses, their slots free at once.

        Nothing happens where they have ended.
        """
        for group in [g for g in self._waiting if g.id == id]:
            kept = [s for s in group.waiting if sample is not None and s != sample]
            group.waiting = collections.deque(kept)
            if not kept:
                self._waiting.remove(group)
        slots = [
            slot
            for slot, entry in sorted(self._running.items())
            if entry.group.id == id and sample in (None, entry.sample)
        ]
        if not slots:
            return []
        self._clear(slots)
        return [self._release(slot).response(finished=False) for slot in slots]

    def load(self, params: Any, version: int) -> None:
        """Swaps the weights. What runs goes on with the keys and values it has."""
        self._params, self._version = params, version
        for group in self._waiting:
            group.prefix = None  # samples that have not begun are the new weights' alone

    def step(self) -> list[VersionedResponse]:
        """Fills free slots, decodes once; the responses that ended in it."""
        while self._waiting and self._free:
            self._fill(self._waiting[0])
        if not self._running:
            return []
        # with work waiting, come back as soon as enough slots for a group are free
        slots, group = self._engine.max_concurrent_decodes, self._engine.config.group_size
        low = max(0, slots - group) if self._waiting else 0
        self._state = self._engine.set_exit_below(self._state, low)
        self._state, result = self._engine.generate(self._params, self._state)
        host = result.convert_to_numpy()
        logp, margin = host.logp(), host.margin()
        ended = []
        for slot, entry in sorted(self._running.items()):
            if slot not in self._running:  # a callback has aborted it
                continue
            data = host.get_result_at_slot(slot)
            count = int(data.valid[0].sum())
            if not count:
                continue
            tokens = np.array(data.tokens[0, :count], np.int32)
            finished = int(tokens[-1]) in self._stops
            version = np.full(count, self._version, np.int32)
            version[0] = entry.logits_version
            entry.logits_version = self._version
            last = finished or int(data.lengths[0]) >= entry.group.request.limit
            new = NewTokens(
                entry.sample,
                tokens,
                logp[slot, :count].copy(),
                margin[slot, :count].copy(),
                version,
                last,
            )
            entry.parts.append(new)
            response = None
            if last:
                response = self._release(slot).response(finished)
                ended.append(response)
            if entry.group.on_tokens is not None:
                entry.group.on_tokens(new)
            if response is not None and entry.group.on_response is not None:
                entry.group.on_response(response)
        return ended

    def _release(self, slot: int) -> _Running:
        self._free.append(slot)
        self._free.sort(reverse=True)
        return self._running.pop(slot)

    def _clear(self, slots: Sequence[int]) -> None:
        keep = np.ones(self._engine.max_concurrent_decodes, bool)
        keep[list(slots)] = False
        self._state = self._state.replace(active=self._deactivate(self._state.active, keep))

    def _fill(self, group: _Group) -> None:
        """Starts waiting samples of a group in free slots, at most as many as one insert takes."""
        request, engine = group.request, self._engine
        if group.prefix is None:
            tokens, length = engine.pad(request.prompt.tokens)
            group.prefix = engine.prefill(
                params=self._params, padded_tokens=tokens, true_length=length
            )
            group.prefix_version = self._version
        slots, requests = [], []
        while group.waiting and self._free and len(slots) < engine.config.group_size:
            sample = group.waiting.popleft()
            slot = self._free.pop()
            slots.append(slot)
            requests.append(
                SlotRequest(
                    request.prompt.counter,
                    sample,
                    request.limit,
                    request.temperature,
                    request.top_k,
                    request.top_p,
                )
            )
            self._running[slot] = _Running(group, sample, group.prefix_version)
        self._state = engine.bulk_insert(group.prefix, self._state, slots, requests)
        if not group.waiting:
            group.prefix = None
            self._waiting.popleft()
