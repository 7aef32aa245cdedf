"""A stand-in with the interface of RolloutEngine: it sleeps where devices would decode.

k decode steps of n active slots take the sum of k (a + b n) seconds, and prefill those of each
prompt. Responses end at lengths that the seed and the uid decide. B slots.
"""

import collections
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.pods.schedules import Decode
from distflow_jax.rollout.decode_state import EngineConfig, StateShapes, check_length, longest_read
from distflow_jax.rollout.engine.result_tokens import RolloutTokens
from distflow_jax.rollout.engine.slot_updates import SlotRequest
from distflow_jax.rollout.prefill.prefill import buckets

LOGP = -1.0  # of every token
MARGIN = 1.0  # of every token over the runner-up

# (counter, sample) -> tokens of the response
Lengths = Callable[[int, int], int]


class Lane:
    """Devices of one process that work together; `begin` returns at once, as a dispatch does."""

    def __init__(self, devices: int):
        self.devices = devices
        self.busy: collections.Counter[str] = collections.Counter()  # seconds by kind of work
        self.free = 0.0  # when the last piece of work ends, on the clock of time.perf_counter
        self._lock = threading.Lock()

    def begin(self, kind: str, seconds: float) -> float:
        """Queues work behind all that was begun before; returns when it ends."""
        with self._lock:
            self.free = max(self.free, time.perf_counter()) + seconds
            self.busy[kind] += seconds
            return self.free


def wait_until(end: float) -> None:
    """Sleeps until a time on the clock of time.perf_counter."""
    while (left := end - time.perf_counter()) > 0:
        time.sleep(left)


class ReadPrompt(NamedTuple):
    """A prompt that has been read."""

    length: int


class Slots:
    """The decode state: what each slot has still to decode; changed in place."""

    def __init__(self, count: int):
        self.left = np.zeros(count, np.int32)  # tokens of the response; 0: the slot is free
        self.cut = np.zeros(count, bool)  # by the limit: without an end token
        self.exit_below = 0


class Result:
    """The columns of a decode call, int32 [B, columns], which are there at a time."""

    def __init__(self, columns: np.ndarray, ready: float):
        self._columns, self._ready = columns, ready

    def copy_to_host_async(self) -> None:
        """Does nothing."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        wait_until(self._ready)
        return self._columns


class SimulatedEngine:
    """Slots of one process on a lane of simulated devices.

    It has what Scheduler, EpisodeSampler and a run use of a RolloutEngine. `mesh` lends its shape
    to the scheduler, and runs nothing.
    """

    def __init__(
        self,
        model: DecoderConfig,
        config: EngineConfig,
        mesh: Mesh,
        *,
        stop_ids: Sequence[int],
        token: int,
        lane: Lane,
        costs: Decode,
        lengths: Lengths,
    ):
        """`token`: the one that every response repeats before its end token."""
        self.model, self.config, self.mesh = model, config, mesh
        self.shapes = StateShapes(model, config, mesh)
        self.stop_ids = tuple(int(i) for i in stop_ids)
        self.buckets, self.width, self.few_slots = buckets(config), self.shapes.members, 0
        self.programs = self.prompts = self  # where an engine has its compiled programs
        self.images = None  # no vision tower
        self._token, self._lane, self._costs, self._lengths = token, lane, costs, lengths

    @property
    def max_concurrent_decodes(self) -> int:
        """Number of slots."""
        return self.config.slots

    def compile(self, params: Any) -> None:
        """Does nothing: there is no program."""

    def temporaries(self, params: Any) -> int | None:
        """None: there is no program."""

    def init_decode_state(self) -> Slots:
        """All slots free."""
        return Slots(self.config.slots)

    # -- prompts ----------------------------------------------------------------------------------

    def row(
        self, params: Any, prompts: Sequence[np.ndarray], after: Any = None, sights: Any = None
    ) -> list[ReadPrompt]:
        """Reads prompts together; they have no images."""
        self._lane.begin("decode", len(prompts) * self._costs.prompt)
        return [ReadPrompt(len(tokens)) for tokens in prompts]

    def prefill(
        self,
        *,
        params: Any,
        padded_tokens: Any,
        true_length: int,
        existing_prefix: Any = None,
        sight: Any = None,
    ) -> ReadPrompt:
        """Reads one prompt, which has no images."""
        check_length(true_length, longest_read(self.config))
        self._lane.begin("decode", self._costs.prompt)
        return ReadPrompt(int(true_length))

    # -- slots ------------------------------------------------------------------------------------

    def start(self, *given: Any, **options: Any) -> tuple[Slots, int]:
        """Starts responses in slots."""
        return self.join(*given, **options), options.get("entry", 0)

    def join(
        self,
        prefix: ReadPrompt,
        state: Slots,
        slots: Sequence[int],
        requests: Sequence[SlotRequest],
        **options: Any,
    ) -> Slots:
        """Starts responses in slots."""
        for slot, request in zip(slots, requests, strict=True):
            length, limit = self._lengths(request.counter, request.sample), request.sampling.limit
            state.left[slot] = min(length, limit) - request.emitted
            state.cut[slot] = length > limit
        return state

    def change(
        self,
        state: Slots,
        *,
        drop: Sequence[int] = (),
        unhold: Sequence[tuple[int, int]] = (),
        inject: Sequence[Any] = (),
        exit_below: int = 0,
    ) -> Slots:
        """Ends slots; sets when `generate` comes back early. Tokens cannot be injected."""
        if inject:
            raise ValueError("simulated devices have no responses in turns")
        state.left[list(drop)] = 0
        state.exit_below = exit_below
        return state

    def generate(
        self, params: Any, state: Slots, *, few: bool = False
    ) -> tuple[Slots, RolloutTokens]:
        """Up to k decode steps of all active slots; the result comes when they would be done."""
        active = state.left[state.left > 0]
        counts = np.array([np.sum(active > t) for t in range(self.config.tokens_per_call + 1)])
        enough = np.flatnonzero(counts[1:] <= state.exit_below)  # the first step always runs
        steps = int(enough[0]) + 1 if len(enough) else self.config.tokens_per_call
        seconds = steps * self._costs.step + self._costs.slot * float(counts[:steps].sum())
        ready = self._lane.begin("decode", seconds)
        columns = self._columns(state, steps)
        state.left = np.maximum(state.left - steps, 0)
        columns[:, -2] = state.left > 0
        return state, RolloutTokens.of(Result(columns, ready), self.config)

    def _columns(self, state: Slots, steps: int) -> np.ndarray:
        """The columns of a call, but for the slots that go on."""
        k, slots = self.config.tokens_per_call, self.config.slots
        count = np.minimum(state.left, steps)
        valid = np.arange(k) < count[:, None]
        tokens = np.where(valid, self._token, 0).astype(np.int32)
        ended = (state.left > 0) & (state.left <= steps) & ~state.cut
        tokens[ended, count[ended] - 1] = self.stop_ids[0]
        logp, margin = (np.full((slots, k), x, np.float32).view(np.int32) for x in (LOGP, MARGIN))
        rest = np.zeros((slots, 3), np.int32)  # length, goes on, free pages of the rank
        rest[:, 0], rest[:, 2] = count, self.shapes.pages
        parts = (tokens, valid.astype(np.int32), rest[:, :1], logp, margin, rest[:, 1:])
        return np.concatenate(parts, axis=1)


class DrawnLengths:
    """Lengths of responses by (seed, uid), whatever the process and the order."""

    def __init__(self, draw: Callable[[np.random.Generator, int], np.ndarray], seed: int, n: int):
        """`draw(rng, n)`: the lengths of the `n` responses to one prompt."""
        self._draw, self._seed, self._n = draw, seed, n
        self._known: dict[int, np.ndarray] = {}
        self._lock = threading.Lock()

    def __call__(self, counter: int, sample: int) -> int:
        """Tokens of a response."""
        with self._lock:
            if counter not in self._known:
                rng = np.random.default_rng((self._seed, counter))
                self._known[counter] = self._draw(rng, self._n)
            return int(self._known[counter][sample])
