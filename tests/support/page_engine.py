"""An engine that decodes nothing and has exact pages: what a scheduler believes is compared.

A page of a rank belongs to a prompt ("prompt", entry), to a slot ("slot", number), or to nobody. As
in decode_state.py, pages of a prompt are free once no slot reads it and nothing holds it.
"""

import types

import numpy as np

from distflow_jax.rollout.decode_state import pages_of


class PageError(Exception):
    """The scheduler asked for what the pages do not allow."""


class PageState:
    """Pages of each rank, and what each slot does."""

    def __init__(self, shapes):
        count = shapes.ranks * shapes.slots
        self.owner = [[None] * shapes.pages for _ in range(shapes.ranks)]
        self.active, self.kept, self.prompt, self.member = ([0] * count for _ in range(4))
        self.own, self.emitted, self.limit, self.forced = ([0] * count for _ in range(4))
        self.held = [[False] * shapes.slots for _ in range(shapes.ranks)]
        self.exit_below = 0


class PageEngine:
    """`config`: EngineConfig. A response ends at each token with probability `ends`."""

    def __init__(self, config, ranks, draw, ends):
        self.config, self._draw, self._ends = config, draw, ends
        slots, lanes = config.slots // ranks, config.decode_slots // ranks
        pages = config.cache_tokens // (ranks * config.page_size)
        self.shapes = types.SimpleNamespace(
            ranks=ranks, slots=slots, lanes=lanes, pages=pages, owners=2 * slots
        )
        self.width, self.few_slots, self.stop_ids = min(config.group_size, slots), 0, (0,)
        self.buckets = (config.prefill_tokens,)
        self.model = types.SimpleNamespace(image_both_ways=False)
        self.prompts = types.SimpleNamespace(images=None, row=self._row)

    def _row(self, params, tokens, after=None, sights=None):
        return [types.SimpleNamespace(length=len(one)) for one in tokens]

    def prefill(self, *, true_length, **_):
        return types.SimpleNamespace(length=true_length)

    def init_decode_state(self):
        return PageState(self.shapes)

    def free(self, state, rank):
        """Free pages of a rank, after those of nobody's are returned."""
        slots, alive = self.shapes.slots, set()
        for slot in range(slots):
            at = rank * slots + slot
            if state.active[at] or state.kept[at]:
                alive |= {("slot", at), ("prompt", state.prompt[at])}
            if state.held[rank][slot]:
                alive.add(("prompt", slot))
        state.owner[rank] = [one if one in alive else None for one in state.owner[rank]]
        return state.owner[rank].count(None)

    def start(self, prefix, state, slots, requests, *, entry, members, hold):
        rank = slots[0] // self.shapes.slots
        self._vacate(state, slots)
        free, needed = self.free(state, rank), pages_of(prefix.length, self.config.page_size)
        if ("prompt", entry) in state.owner[rank]:
            raise PageError("the entry has pages")
        if free < needed:
            raise PageError(f"a prompt needs {needed} pages, and {free} are free")
        for page, owner in enumerate(state.owner[rank]):
            if needed and owner is None:
                state.owner[rank][page], needed = ("prompt", entry), needed - 1
        return self._admit(state, slots, requests, entry, members, hold), entry

    def join(self, prefix, state, slots, requests, *, entry, members, hold):
        rank = slots[0] // self.shapes.slots
        self._vacate(state, slots)
        self.free(state, rank)
        if ("prompt", entry) not in state.owner[rank]:
            raise PageError("the prompt is gone")
        return self._admit(state, slots, requests, entry, members, hold)

    def _vacate(self, state, slots):
        if any(state.active[slot] or state.kept[slot] for slot in slots):
            raise PageError("a slot is in use")

    def _admit(self, state, slots, requests, entry, members, hold):
        rank = slots[0] // self.shapes.slots
        for slot, request, member in zip(slots, requests, members, strict=True):
            state.prompt[slot], state.member[slot], state.own[slot] = entry, member, 0
            state.emitted[slot], state.limit[slot] = request.emitted, request.sampling.limit
            state.kept[slot], state.forced[slot] = request.keep, 0
            state.active[slot] = request.sampling.limit > request.emitted
        state.held[rank][entry] = hold
        return state

    def change(self, state, *, drop, unhold, inject, exit_below):
        for one in inject:
            state.active[one.slot], state.forced[one.slot] = True, len(one.tokens)
            state.limit[one.slot], state.emitted[one.slot] = one.limit, one.emitted
        for slot in drop:
            state.active[slot] = state.kept[slot] = False
        for rank, entry in unhold:
            state.held[rank][entry] = False
        state.exit_below = exit_below
        return state

    def generate(self, params, state, few=False):
        counts = [0] * len(state.active)
        for step in range(self.config.tokens_per_call):
            if sum(map(bool, state.active)) <= (state.exit_below if step else 0):
                break
            self._emit(state, counts)
            for rank in range(self.shapes.ranks):
                self.free(state, rank)
            for slot in filter(state.active.__getitem__, range(len(counts))):
                self._write(state, slot)
        free = [self.free(state, rank) for rank in range(self.shapes.ranks)]
        return state, _Result(state, counts, np.repeat(free, self.shapes.slots))

    def _emit(self, state, counts):
        for slot, active in enumerate(state.active):
            if active and not state.forced[slot]:
                counts[slot] += 1
                state.emitted[slot] += 1
                ended = state.emitted[slot] >= state.limit[slot]
                state.active[slot] = not (ended or self._draw.random() < self._ends)
                state.forced[slot] = int(state.active[slot])

    def _write(self, state, slot):
        """Keys of a token, for which the slot may need a page; without one it waits."""
        owner = state.owner[slot // self.shapes.slots]
        if state.own[slot] % self.config.page_size == 0:
            if None not in owner:
                return
            owner[owner.index(None)] = ("slot", slot)
        if ("prompt", state.prompt[slot]) not in owner:
            raise PageError("a slot reads a prompt whose pages are free")
        state.own[slot] += 1
        state.forced[slot] -= 1


class _Result:
    def __init__(self, state, counts, free):
        self._active, self._counts, self._free = map(np.array, (state.active, counts, free))
        self._unfed = np.array(
            [a and f > 0 for a, f in zip(state.active, state.forced, strict=True)]
        )

    def copy_to_host_async(self):
        pass

    def convert_to_numpy(self):
        return self

    def active(self):
        return self._active.astype(bool)

    def counts(self):
        return self._counts

    def unfed(self):
        return self._unfed

    def free_pages(self):
        return self._free

    def logp(self, *_):
        return np.zeros((len(self._counts), 64), np.float32)

    margin = logp

    def speculation(self):
        return np.zeros((len(self._counts), 0), int)

    def get_result_at_slot(self, slot):
        return types.SimpleNamespace(tokens=np.full((1, 64), 5, np.int32))
