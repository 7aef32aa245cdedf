"""How fast a group of devices can exchange, by where they sit: on a torus, or in nodes.

n devices of a group, V bytes. On a torus the n are a box of n_1 x n_2 x ... places, d of these dims
longer than 1, each s_i apart; B bytes/s go over a link, one way.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from distflow_jax.planning.chips import Chip


@dataclasses.dataclass(frozen=True)
class Span:
    """Rates of a group of devices that all exchange at once, as all other groups alike do."""

    devices: int
    ring: float  # bytes/s that each takes in, round a ring through all
    exchange: float  # bytes/s that each sends, to all others equally
    latency: float  # seconds until the farthest has what was sent

    def seconds(self, kind: str, size: float) -> float:
        """Time of one collective of hlo.COLLECTIVES, whose bytes are those of hlo.Collective.

        A ring passes on (n - 1) / n of what an all-gather gives or a reduce-scatter takes; an
        all-reduce is one after the other (jax-ml.github.io/scaling-book/sharding).
        """
        others = size * (self.devices - 1) / self.devices
        if kind == "all-reduce":
            return 2 * (others / self.ring + self.latency)
        if kind in ("all-to-all", "ragged-all-to-all"):
            return others / self.exchange + self.latency
        return others / self.ring + self.latency


@dataclasses.dataclass(frozen=True)
class Torus:
    """Chips on a torus, some dims of which may be lines. `places` int [devices, dims]: where each
    device of the canonical order sits."""

    chip: Chip
    sizes: tuple[int, ...]
    places: np.ndarray = dataclasses.field(repr=False, compare=False)

    def span(self, group: Sequence[int]) -> Span | None:
        """Rates of devices, by their numbers; None where they are no box of evenly spaced places.

        Each dim adds a ring of B / s_i in both directions, of a line in one: s_i groups that lie
        between each other share its links. Where all send to all, half of what a dim's n_i hold
        crosses its middle, on two links of a ring (or one of a line) in each direction.
        """
        places = self.places[list(group)]
        taken = [sorted(set(column)) for column in places.T]
        if math.prod(map(len, taken)) != len({tuple(place) for place in places}):
            return None
        ring, exchange, latency = 0.0, math.inf, 0.0
        for values, size in zip(taken, self.sizes, strict=True):
            count = len(values)
            if count == 1:
                continue
            steps = {high - low for low, high in zip(values, values[1:], strict=False)}
            if len(steps) > 1:
                return None
            step = steps.pop()
            closed = step * count == size and self._wraps(size)
            ways = 2 if closed else 1
            bandwidth = ways * self.chip.link_bandwidth / step
            ring += bandwidth
            exchange = min(exchange, 4 * bandwidth / count)
            latency += self.chip.hop_seconds * step * (count // 2 if closed else count - 1)
        return Span(len(group), ring, min(exchange, ring), latency)

    def permute_seconds(self, pairs: np.ndarray, size: float) -> float:
        """Time of a permutation of `pairs` [pairs, 2]: each way takes its links for itself, and all
        go along one dim at a time."""
        apart = np.abs(self.places[pairs[:, 0]] - self.places[pairs[:, 1]])
        round_ = np.array([s if self._wraps(s) else 2 * s for s in self.sizes])
        hops = np.minimum(apart, round_ - apart).sum(-1)
        moved = hops[hops > 0]
        if not len(moved):
            return 0.0
        seconds = size * moved.mean() / self.chip.link_bandwidth
        return float(seconds + moved.max() * self.chip.hop_seconds)

    def _wraps(self, size: int) -> bool:
        return size % self.chip.wraps == 0


@dataclasses.dataclass(frozen=True)
class Nodes:
    """GPUs in nodes of `per_node`, in the canonical order."""

    chip: Chip
    count: int
    per_node: int

    def span(self, group: Sequence[int]) -> Span | None:
        """Rates of devices, by their numbers; None where nodes hold unequal parts of them.

        g of a node in each of m nodes: what comes from outside enters once, a g-th by each one's
        adapter, and goes round inside. Where all send to all, n - g of n parts leave the node.
        """
        nodes, counts = np.unique(np.array(group) // self.per_node, return_counts=True)
        if len(set(counts)) > 1:
            return None
        m, g, n = len(nodes), int(counts[0]), len(group)
        c = self.chip
        if n == 1:
            return Span(1, math.inf, math.inf, 0.0)
        inside = (g - 1) / g / c.link_bandwidth
        outside = (m - 1) / m / g / c.network_bandwidth if m > 1 else 0.0
        ring = (n - 1) / n / (inside + outside)
        exchange = c.link_bandwidth if m == 1 else (n - 1) / (n - g) * c.network_bandwidth
        latency = (g - 1) * c.hop_seconds + (m - 1) * c.network_seconds
        return Span(n, ring, exchange, latency)

    def permute_seconds(self, pairs: np.ndarray, size: float) -> float:
        """Time of a permutation of `pairs` [pairs, 2]: that of those which leave their node."""
        moved = pairs[pairs[:, 0] != pairs[:, 1]]
        if not len(moved):
            return 0.0
        if (moved[:, 0] // self.per_node != moved[:, 1] // self.per_node).any():
            return size / self.chip.network_bandwidth + self.chip.network_seconds
        return size / self.chip.link_bandwidth + self.chip.hop_seconds


Interconnect = Torus | Nodes
