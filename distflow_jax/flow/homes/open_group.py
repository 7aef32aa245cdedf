"""Groups of a home and what is known of their responses, each with its lease."""

import dataclasses
from typing import Any

from distflow_jax.flow.homes.leases import Leased
from distflow_jax.flow.saved_samples import Key, Piece

PIECES_BYTES = 160 << 20  # of one group's responses in a frame, which holds its images too
FRUITLESS_LEASES = 30  # for which news without a new token prolong a lease


@dataclasses.dataclass(frozen=True)
class Begun:
    """A group as a home holds it from its beginning on."""

    key: Key
    step: int  # that trains it, at the latest
    samples: range
    order: tuple[float, ...]  # of groups of one step, lowest first
    content: Any  # what a worker needs to answer it
    size: int = 0  # bytes of it, where they are many


@dataclasses.dataclass(eq=False)
class OpenGroup(Leased):
    """A group of a home whose responses have not all ended."""

    group: Begun
    floor: int  # lowest version that its tokens may have
    ended: dict[int, Piece] = dataclasses.field(default_factory=dict)
    under_way: dict[int, Piece] = dataclasses.field(default_factory=dict)
    last: str = ""  # worker that had the last lease
    brought: int = 0  # tokens that this one has shown
    moved: float = 0.0  # when these became more, or the lease began
    told: set[int] = dataclasses.field(default_factory=set)  # samples of which results differed

    def lease(self, worker: str, now: float, seconds: float) -> None:
        """Begins a lease, or prolongs it."""
        if self.last != worker:
            self.last, self.brought = worker, self.tokens
        if self.worker != worker:
            self.worker, self.moved = worker, now
        self.until = min(now + seconds, self.moved + FRUITLESS_LEASES * seconds)

    def sent(self) -> dict[int, Piece]:
        """Known responses that a worker gets, those that have ended first; ones beyond PIECES_BYTES
        it samples again."""
        found, size = {}, 0
        for sample, piece in (*self.ended.items(), *self.under_way.items()):
            size += piece.size
            if size <= PIECES_BYTES:
                found[sample] = piece
        return found

    @property
    def lacks(self) -> int:
        """Responses that have not ended."""
        return len(self.group.samples) - len(self.ended)

    @property
    def tokens(self) -> int:
        """Tokens of all responses."""
        known = (*self.ended.values(), *self.under_way.values())
        return sum(piece.tokens for piece in known)
