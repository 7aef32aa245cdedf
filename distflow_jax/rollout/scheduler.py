"""Continuous batching: which response runs in which slot, and when a slot is refilled.

The order depends on the requests and on what was sampled, never on time: a rerun schedules alike.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from distflow_jax.batch import Prompt
from distflow_jax.rollout.engine import DecodeState, Prefix, RolloutEngine, SlotRequest


@dataclasses.dataclass(frozen=True)
class GroupRequest:
    """One prompt and how many responses are wanted to it."""

    prompt: Prompt
    num_samples: int
    limit: int  # longest response in tokens, the end token included
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


@dataclasses.dataclass
class Response:
    """One finished response. Arrays are [T]."""

    prompt: Prompt
    sample: int
    tokens: np.ndarray  # int32; the end token is part of it
    logp: np.ndarray  # float32, of the distribution that was sampled
    margin: np.ndarray  # float32: lead over the runner-up in perturbed logits
    finished: bool  # False: cut by the limit


@dataclasses.dataclass
class RolloutStats:
    """What a rollout cost."""

    generate_calls: int = 0
    prefills: int = 0
    tokens: int = 0


@dataclasses.dataclass
class _Running:
    index: int  # of the request
    prompt: Prompt
    sample: int
    parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = dataclasses.field(default_factory=list)


def run_requests(
    engine: RolloutEngine,
    params: Any,
    state: DecodeState,
    requests: Sequence[GroupRequest],
    *,
    on_response: Callable[[Response], None] | None = None,
) -> tuple[DecodeState, list[Response], RolloutStats]:
    """Decodes all requests; responses come back ordered by (request, sample).

    All slots of `state` must be free; it is donated and comes back free. A prompt is prefilled
    once, when the first slot for it is free, and its responses take slots as they fall free,
    longest expected first, then longest limit. `on_response` is called as soon as a response ends.
    """
    order = sorted(
        range(len(requests)),
        key=lambda i: (-requests[i].prompt.expected_length, -requests[i].limit, i),
    )
    waiting = collections.deque(
        (index, sample) for index in order for sample in range(requests[index].num_samples)
    )
    free = list(range(engine.max_concurrent_decodes - 1, -1, -1))
    running: dict[int, _Running] = {}
    prefixes: dict[int, Prefix] = {}
    done: dict[tuple[int, int], Response] = {}
    stats = RolloutStats()
    stops = set(engine.stop_ids)

    while waiting or running:
        while waiting and free:
            state = _fill(engine, params, state, requests, waiting, free, running, prefixes, stats)
        # with work waiting, come back as soon as enough slots for a group are free
        low = engine.max_concurrent_decodes - engine.config.group_size if waiting else 0
        state = engine.set_exit_below(state, max(0, low))
        state, result = engine.generate(params, state)
        stats.generate_calls += 1
        host = result.convert_to_numpy()
        logp, margin = host.logp(), host.margin()
        for slot in sorted(running):
            data = host.get_result_at_slot(slot)
            count = int(data.valid[0].sum())
            entry = running[slot]
            entry.parts.append((data.tokens[0, :count], logp[slot, :count], margin[slot, :count]))
            stats.tokens += count
            request = requests[entry.index]
            ended = count > 0 and int(data.tokens[0, count - 1]) in stops
            if ended or int(data.lengths[0]) >= request.limit:
                tokens, logps, margins = (np.concatenate(x) for x in zip(*entry.parts, strict=True))
                response = Response(entry.prompt, entry.sample, tokens, logps, margins, ended)
                done[entry.index, entry.sample] = response
                del running[slot]
                free.append(slot)
                if on_response is not None:
                    on_response(response)
        free.sort(reverse=True)
    return state, [done[key] for key in sorted(done)], stats


def _fill(engine, params, state, requests, waiting, free, running, prefixes, stats):
    """Starts the next request's waiting responses in free slots; returns the new state."""
    index = waiting[0][0]
    request = requests[index]
    if index not in prefixes:
        tokens, length = engine.pad(request.prompt.tokens)
        prefixes[index] = engine.prefill(params=params, padded_tokens=tokens, true_length=length)
        stats.prefills += 1
    slots, slot_requests = [], []
    while waiting and waiting[0][0] == index and free and len(slots) < engine.config.group_size:
        _, sample = waiting.popleft()
        slot = free.pop()
        slots.append(slot)
        slot_requests.append(
            SlotRequest(
                request.prompt.counter,
                sample,
                request.limit,
                request.temperature,
                request.top_k,
                request.top_p,
            )
        )
        running[slot] = _Running(index, request.prompt, sample)
    state = engine.bulk_insert(prefixes[index], state, slots, slot_requests)
    if not waiting or waiting[0][0] != index:
        del prefixes[index]
    return state
