"""Numbers that samplers tell each other and the trainers, without a collective call."""

from distflow_jax.parallel.peers import Peers

STARVING = 0  # kind of: 1 + the newest version with which a sampler has nothing to do
TAKEN = 1  # kind of: the version that sampler 0 has taken; of sampler n: n more


class SamplerNews:
    """The news of one sampler, and what it has heard of the others. From any thread."""

    def __init__(self, peers: Peers, index: int, samplers: int, *, held: int):
        """`peers`: nothing else uses them; `held`: version that all samplers begin with."""
        self._peers, self._index, self._samplers, self._held = peers, index, samplers, held

    def tell_taken(self, version: int) -> None:
        """Tells that this sampler has taken weights."""
        self._peers.raise_to(TAKEN + self._index, version)

    def taken(self) -> list[int]:
        """Versions that the samplers have taken, by their number, as far as is known."""
        heard = (self._peers.seen(TAKEN + number) for number in range(self._samplers))
        return [max(self._held, version) for version in heard]

    def tell_starving(self, version: int) -> None:
        """Tells that this sampler holds a version and has nothing to do with it."""
        self._peers.raise_to(STARVING, version + 1)

    def starving(self, version: int) -> bool:
        """Whether a sampler has nothing to do with a version, or with a newer one."""
        return self._peers.seen(STARVING) > version

    def close(self) -> None:
        """Ends the connections."""
        self._peers.close()
