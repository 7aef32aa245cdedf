"""The scheduler with what a server needs beside: tokens before a response has ended, and ends of
single responses."""

from collections.abc import Iterator

from distflow_jax.rollout.scheduler import Partial, Scheduler


class StreamingScheduler(Scheduler):
    """Adds to Scheduler; changes nothing of it."""

    @property
    def free_slots(self) -> int:
        """Slots that no response holds."""
        return sum(map(len, self._free))

    def under_way(self) -> Iterator[tuple[int, Partial]]:
        """(id of its group, what has been sampled so far) of each response that has begun."""
        for _, held in sorted(self._running.items()):
            if not held.ended:
                yield held.group.id, held.partial
        for group, partial in self._resumed:
            yield group.id, partial

    def abort_sample(self, group_id: int, sample: int) -> None:
        """Gives up one response that is under way; the rest of its group goes on."""
        for slot, held in sorted(self._running.items()):
            if held.group.id == group_id and held.partial.sample == sample:
                self._leave(slot)
                self._end(held.group)
                return
        for index, (group, partial) in enumerate(self._resumed):
            if group.id == group_id and partial.sample == sample:
                del self._resumed[index]
                self._end(group)
                return
        raise ValueError(f"response {sample} of request {group_id} is not under way")
