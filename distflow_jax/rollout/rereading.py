"""A scheduler of responses in several turns that keeps tokens and no cache: each turn is read anew.

A response that waits for its environment holds no slot. When it goes on, prompt and everything so
far are prefilled together, so a turn costs a prefill of all that was before it, and long waits cost
nothing.
"""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from distflow_jax.rollout.engine import DecodeState, Prefix, RolloutEngine, SlotRequest
from distflow_jax.rollout.scheduler import GroupRequest, Response, RolloutStats


@dataclasses.dataclass(frozen=True)
class HeldRequest(GroupRequest):
    """A GroupRequest; with `hold` a response that has ended its turn can be gone on with."""

    hold: bool = False


@dataclasses.dataclass
class _Sequence:
    """A response and all that belongs to it. The arrays are of the response so far, [T]."""

    id: int
    sample: int
    request: HeldRequest
    limit: int
    tokens: np.ndarray
    logp: np.ndarray
    margin: np.ndarray
    start: int = 0  # of the turn at work

    def add(self, tokens: np.ndarray, logp: np.ndarray, margin: np.ndarray) -> None:
        self.tokens = np.concatenate([self.tokens, tokens])
        self.logp = np.concatenate([self.logp, logp])
        self.margin = np.concatenate([self.margin, margin])


class RereadingScheduler:
    """Decodes requests, in rounds, and goes on with responses that were held.

    Positions, and with them the noise of every token, count over the whole response, observations
    included. All slots of `decode` must be free; it is donated, and `decode` is the state from then
    on. The engine's longest prompt must hold prompt and response together.
    """

    def __init__(self, engine: RolloutEngine, params: Any, decode: DecodeState):
        self.decode, self.stats = decode, RolloutStats()
        self._engine, self._params = engine, params
        self._free = list(range(engine.max_concurrent_decodes - 1, -1, -1))
        self._waiting: collections.deque[_Sequence] = collections.deque()  # for a first turn
        self._returning: collections.deque[_Sequence] = collections.deque()  # for another one
        self._running: dict[int, _Sequence] = {}
        self._held: dict[tuple[int, int], _Sequence] = {}
        self._prefixes: dict[int, Prefix] = {}  # of prompts, by request id
        self._listeners: dict[int, Callable[[Response], None] | None] = {}
        self._next_id = 0

    @property
    def busy(self) -> bool:
        """Whether something waits for a slot or runs; what is held does neither."""
        return bool(self._waiting or self._returning or self._running)

    def submit(
        self, request: HeldRequest, on_response: Callable[[Response], None] | None = None
    ) -> int:
        """Queues the responses to a prompt; returns the id by which they are called."""
        id, self._next_id = self._next_id, self._next_id + 1
        self._listeners[id] = on_response
        nothing = np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.float32)
        self._waiting.extend(
            _Sequence(id, sample, request, request.limit, *nothing)
            for sample in range(request.num_samples)
        )
        return id

    def extend(self, id: int, sample: int, tokens: np.ndarray, limit: int) -> None:
        """Puts observation tokens [M] behind a held response and goes on sampling.

        `limit`: longest the response may get by that, in tokens from its beginning on. The tokens
        get log-prob 0 and an infinite margin.
        """
        entry = self._held.pop((id, sample))
        entry.add(
            np.asarray(tokens, np.int32),
            np.zeros(len(tokens), np.float32),
            np.full(len(tokens), np.inf, np.float32),
        )
        if len(entry.tokens) >= limit:
            raise ValueError(
                f"a limit of {limit} tokens leaves nothing to sample after {len(entry.tokens)}"
            )
        entry.limit, entry.start = limit, len(entry.tokens)
        self._returning.append(entry)

    def release(self, id: int, sample: int) -> None:
        """Lets go of a held response."""
        del self._held[id, sample]

    def step(self) -> list[Response]:
        """One round: free slots are filled, and one generate call follows. What ended in it.

        A response is what was sampled since it was last gone on with; `finished` says that the
        model ended its turn. With a request's `hold` it is held then, cut or not.
        """
        engine = self._engine
        while self._free and self._returning:  # first: what has begun is nearer to its end
            self._go_on(self._returning.popleft())
        while self._free and self._waiting:
            self._begin()
        crowded = self._waiting or self._returning
        low = engine.max_concurrent_decodes - engine.config.group_size if crowded else 0
        self.decode = engine.set_exit_below(self.decode, max(0, low))
        self.decode, result = engine.generate(self._params, self.decode)
        self.stats.generate_calls += 1
        host = result.convert_to_numpy()
        logp, margin = host.logp(), host.margin()
        ended = []
        for slot, entry in sorted(self._running.items()):
            data = host.get_result_at_slot(slot)
            count = int(data.valid[0].sum())
            entry.add(data.tokens[0, :count], logp[slot, :count], margin[slot, :count])
            self.stats.tokens += count
            stopped = count > 0 and int(data.tokens[0, count - 1]) in engine.stop_ids
            if stopped or len(entry.tokens) >= entry.limit:
                del self._running[slot]
                self._free.append(slot)
                ended.append(self._end(entry, stopped))
        self._free.sort(reverse=True)
        return ended

    def _end(self, entry: _Sequence, stopped: bool) -> Response:
        if entry.request.hold:
            self._held[entry.id, entry.sample] = entry
        turn = (x[entry.start :] for x in (entry.tokens, entry.logp, entry.margin))
        response = Response(entry.request.prompt, entry.sample, *turn, stopped)
        listener = self._listeners[entry.id]
        if listener is not None:
            listener(response)
        return response

    def _begin(self) -> None:
        """Starts the first waiting response, and others to its prompt."""
        first = self._waiting[0]
        if first.id not in self._prefixes:
            self._prefixes[first.id] = self._read(first.request.prompt.tokens)
        prefix, entries = self._prefixes[first.id], []
        most = min(self._engine.config.group_size, len(self._free))
        while len(entries) < most and self._waiting and self._waiting[0].id == first.id:
            entries.append(self._waiting.popleft())
        self._insert(prefix, entries)
        if not self._waiting or self._waiting[0].id != first.id:
            del self._prefixes[first.id]

    def _go_on(self, entry: _Sequence) -> None:
        """Reads a response so far, and tells its slot that this is not the beginning."""
        prefix = self._read(np.concatenate([entry.request.prompt.tokens, entry.tokens]))
        (slot,) = self._insert(prefix, [entry])

        def put(column: jax.Array, value: int) -> jax.Array:
            host = np.array(column)
            host[slot] = value
            # no program: one that runs in some steps only would be compiled in the midst of them
            return jax.make_array_from_callback(
                host.shape, column.sharding, lambda index: host[index], dtype=host.dtype
            )

        self.decode = self.decode.replace(emitted=put(self.decode.emitted, len(entry.tokens)))

    def _insert(self, prefix: Prefix, entries: list[_Sequence]) -> list[int]:
        slots = [self._free.pop() for _ in entries]
        requests = [_slot_request(entry) for entry in entries]
        self.decode = self._engine.bulk_insert(prefix, self.decode, slots, requests)
        self._running |= zip(slots, entries, strict=True)
        return slots

    def _read(self, tokens: np.ndarray) -> Prefix:
        self.stats.prefills += 1
        tokens, length = self._engine.pad(tokens)
        return self._engine.prefill(params=self._params, padded_tokens=tokens, true_length=length)


def _slot_request(entry: _Sequence) -> SlotRequest:
    request = entry.request
    return SlotRequest(
        request.prompt.counter,
        entry.sample,
        entry.limit,
        request.temperature,
        request.top_k,
        request.top_p,
    )
