"""Prompts in an engine's cache: entries of each data rank's table, pages, pins, evictions."""

from distflow_jax.rollout.decode_state import pages_of
from distflow_jax.rollout.scheduling.decode_calls import DecodeCalls
from distflow_jax.rollout.scheduling.sequences import CachedPrompt, RequestGroup


class CachedPrompts:
    """The prompts that slots attend to, and those that are pinned for waiting sequences.

    `pages` are the free pages of each rank as of the last call, less those taken since.
    """

    def __init__(self, calls: DecodeCalls):
        self._calls, self._engine = calls, calls.engine
        ranks, slots = self._engine.shapes.ranks, self._engine.shapes.slots
        self.entries = [list(range(slots - 1, -1, -1)) for _ in range(ranks)]  # free ones
        self.pages = [self._engine.shapes.pages] * ranks
        self._by_entry: dict[tuple[int, int], tuple[RequestGroup, CachedPrompt]] = {}

    def add(self, group: RequestGroup, rank: int, length: int) -> CachedPrompt:
        """Gives a prompt of so many tokens an entry; evicts an idle one where none is free."""
        if not self.entries[rank]:
            self.evict(self.idle(rank)[0])
        members = list(range(self._engine.width - 1, -1, -1))
        pages = pages_of(length, self._engine.config.page_size)
        prompt = CachedPrompt(rank, self.entries[rank].pop(), members, pages)
        self._by_entry[rank, prompt.entry] = group, prompt
        self.pages[rank] -= pages
        return prompt

    def idle(self, rank: int) -> list[CachedPrompt]:
        """Prompts that no slot reads, though sequences wait for them, lowest priority first.

        One exists where a slot is free and no entry is: every other entry has a slot.
        """
        found = [
            (group.priority, prompt)
            for (at, _), (group, prompt) in self._by_entry.items()
            if at == rank and not prompt.readers
        ]
        return [prompt for _, prompt in sorted(found, key=lambda f: f[0], reverse=True)]

    def evict(self, prompt: CachedPrompt) -> None:
        """Frees an idle prompt's entry. The group keeps the prefix and inserts it again later."""
        group, _ = self._by_entry[prompt.rank, prompt.entry]
        del group.cached[prompt.rank]
        self.unpin(prompt)
        self.free_entry(prompt)
        self.pages[prompt.rank] += prompt.pages
        self._calls.flush()  # before the entry is another's

    def evict_until(self, rank: int, pages: int, keep: CachedPrompt | None) -> None:
        """Evicts idle prompts of a rank, but for `keep`, until so many pages are free."""
        for prompt in self.idle(rank):
            if self.pages[rank] >= pages:
                return
            if prompt is not keep:
                self.evict(prompt)

    def unpin(self, prompt: CachedPrompt) -> None:
        """Lets the prompt be freed with its last reader."""
        if prompt.pinned:
            prompt.pinned = False
            self._calls.unpin(prompt.rank, prompt.entry)

    def free_entry(self, prompt: CachedPrompt) -> None:
        """Frees the entry of a prompt that is neither read nor pinned."""
        if not (prompt.readers or prompt.pinned):
            del self._by_entry[prompt.rank, prompt.entry]
            self.entries[prompt.rank].append(prompt.entry)
            self.entries[prompt.rank].sort(reverse=True)
            prompt.entry = -1

    def unload(self, group: RequestGroup) -> None:
        """Forgets where the group's prompt is; it is read again when needed."""
        for prompt in group.cached.values():
            self.unpin(prompt)
            self.free_entry(prompt)
        group.cached, group.prefix, group.logits_by = {}, None, None
