"""Rates at which a group of devices exchanges data, by their places on a torus or in nodes.

n devices of a group, V bytes. On a torus the group is a box of n_1 x n_2 x ... places with strides
s_i, and d of these dims are longer than 1; a link carries B bytes/s one way.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from distflow_jax.planning.chips import Chip


@dataclasses.dataclass(frozen=True)
class GroupRates:
    """Rates of a group of devices, while all groups of its kind exchange at the same time."""

    devices: int  # n
    ring: float  # bytes/s that each device receives in a ring through all
    exchange: float  # bytes/s that each device sends, to all others equally
    latency: float  # seconds until data have arrived at the farthest device

    def seconds(self, kind: str, size: float) -> float:
        """Seconds of one collective.

        `kind`: of hlo.COLLECTIVES; `size`: bytes, as in hlo.Collective. A ring moves (n - 1) / n of
        the result of an all-gather or of the operand of a reduce-scatter; an all-reduce is one
        after the other (jax-ml.github.io/scaling-book/sharding).
        """
        others = size * (self.devices - 1) / self.devices
        if kind == "all-reduce":
            return 2 * (others / self.ring + self.latency)
        if kind in ("all-to-all", "ragged-all-to-all"):
            return others / self.exchange + self.latency
        return others / self.ring + self.latency


@dataclasses.dataclass(frozen=True)
class Torus:
    """Chips on a torus, some dims of which may be lines."""

    chip: Chip
    sizes: tuple[int, ...]
    # int [devices, dims]: the coordinates of each device of the canonical order
    places: np.ndarray = dataclasses.field(repr=False, compare=False)

    def unlike(self, groups: np.ndarray) -> np.ndarray:
        """The first group of each form, of int [groups, devices]; shifted ones have equal rates."""
        places = self.places[groups]
        return _first_of_each(groups, places - places.min(axis=1, keepdims=True))

    def span(self, group: Sequence[int]) -> GroupRates | None:
        """Rates of devices, by their numbers; None unless they are a box of evenly spaced places.

        Each dim adds a ring of B / s_i in both directions, a line in one direction: the s_i
        interleaved groups share its links. In an all-to-all, half of the data of a dim's n_i places
        crosses its middle, on two links of a ring (or one of a line) in each direction. The devices
        of a chip share its links; data for both enter the chip once.
        """
        chip = self.chip
        places, counts = np.unique(self.places[list(group)], axis=0, return_counts=True)
        taken = [sorted(set(column)) for column in places.T]
        if math.prod(map(len, taken)) != len(places) or len(set(counts)) > 1:
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
            bandwidth = ways * chip.link_bandwidth / step
            ring += bandwidth
            exchange = min(exchange, 4 * bandwidth / count)
            latency += chip.hop_seconds * step * (count // 2 if closed else count - 1)
        ring *= counts[0] / chip.devices
        if counts[0] > 1:
            ring = min(ring or math.inf, chip.inner_bandwidth)
        return GroupRates(len(group), ring, min(exchange / chip.devices, ring), latency)

    def permute_seconds(self, pairs: np.ndarray, size: float) -> float:
        """Seconds of a permutation of `pairs`, int [pairs, 2], of `size` bytes each.

        Data are routed along one dim at a time, and no pair shares the links of its route with
        another chip's.
        """
        apart = np.abs(self.places[pairs[:, 0]] - self.places[pairs[:, 1]])
        round_ = np.array([s if self._wraps(s) else 2 * s for s in self.sizes])
        hops = np.minimum(apart, round_ - apart).sum(-1)
        moved = hops[hops > 0]
        if not len(moved):
            return 0.0
        seconds = size * moved.mean() * self.chip.devices / self.chip.link_bandwidth
        return float(seconds + moved.max() * self.chip.hop_seconds)

    def _wraps(self, size: int) -> bool:
        return size % self.chip.wraps == 0


@dataclasses.dataclass(frozen=True)
class Nodes:
    """GPUs in nodes of `per_node`, in the canonical order."""

    chip: Chip
    count: int
    per_node: int

    def unlike(self, groups: np.ndarray) -> np.ndarray:
        """The first of the groups, int [groups, devices], that are spread alike over nodes."""
        nodes = groups // self.per_node
        return _first_of_each(groups, nodes - nodes.min(axis=1, keepdims=True))

    def span(self, group: Sequence[int]) -> GroupRates | None:
        """Rates of devices, by their numbers; None if nodes hold unequal numbers of them.

        With g devices in each of m nodes, data from other nodes enter a node once, a g-th through
        each device's adapter, and then go round the node. In an all-to-all, (n - g) / n of the data
        leave the node.
        """
        nodes, counts = np.unique(np.array(group) // self.per_node, return_counts=True)
        if len(set(counts)) > 1:
            return None
        m, g, n = len(nodes), int(counts[0]), len(group)
        c = self.chip
        if n == 1:
            return GroupRates(1, math.inf, math.inf, 0.0)
        inside = (g - 1) / g / c.link_bandwidth
        outside = (m - 1) / m / g / c.network_bandwidth if m > 1 else 0.0
        ring = (n - 1) / n / (inside + outside)
        exchange = c.link_bandwidth if m == 1 else (n - 1) / (n - g) * c.network_bandwidth
        latency = (g - 1) * c.hop_seconds + (m - 1) * c.network_seconds
        return GroupRates(n, ring, exchange, latency)

    def permute_seconds(self, pairs: np.ndarray, size: float) -> float:
        """Seconds of a permutation of `pairs`, int [pairs, 2], of `size` bytes each.

        Pairs in different nodes determine the time, if there are any.
        """
        moved = pairs[pairs[:, 0] != pairs[:, 1]]
        if not len(moved):
            return 0.0
        if (moved[:, 0] // self.per_node != moved[:, 1] // self.per_node).any():
            return size / self.chip.network_bandwidth + self.chip.network_seconds
        return size / self.chip.link_bandwidth + self.chip.hop_seconds


Interconnect = Torus | Nodes


def _first_of_each(groups: np.ndarray, forms: np.ndarray) -> np.ndarray:
    """The first group of each form, in the order of `groups`."""
    _, first = np.unique(forms.reshape(len(groups), -1), axis=0, return_index=True)
    return groups[np.sort(first)]
