"""How long a program takes at least, by its chips' peak rates (Williams et al. 2009,
doi.org/10.1145/1498765.1498785), with links beside compute and memory. docs/scaling.md has the
formulas in one place.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from distflow_jax.pods.interconnect import Interconnect, Span
from distflow_jax.pods.topology import Pod
from distflow_jax.programs.traffic import Traffic


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds of a program at the peak rates of its chips; not measured."""

    compute: float
    memory: float  # of HBM
    links: Mapping[str, float]  # by mesh axes, "fsdp" or "data*fsdp": all that goes over them
    exposed: float  # of `links`, what nothing else is at work beside

    @property
    def total(self) -> float:
        """Whichever takes longest of what runs at once, and then what nothing runs beside."""
        beside = sum(self.links.values()) - self.exposed
        return max(self.compute, self.memory, beside) + self.exposed

    @property
    def bound(self) -> str:
        """What takes longest: "compute", "memory" or the axes of links."""
        parts = {"compute": self.compute, "memory": self.memory} | dict(self.links)
        return max(parts, key=parts.__getitem__)

    def __add__(self, other: "Estimate") -> "Estimate":
        axes = dict.fromkeys([*self.links, *other.links])
        return Estimate(
            self.compute + other.compute,
            self.memory + other.memory,
            {a: self.links.get(a, 0.0) + other.links.get(a, 0.0) for a in axes},
            self.exposed + other.exposed,
        )

    def to_tree(self) -> dict[str, Any]:
        """Plain numbers, as JSON has them."""
        return dataclasses.asdict(self) | {"total": self.total, "bound": self.bound}


def estimate(pod: Pod, *, flops: float, accessed: float, traffic: Iterable[Traffic]) -> Estimate:
    """Roofline of a program on a pod.

    `flops` and `accessed` (bytes of HBM) are those of one chip. Links that different axes use are
    not the same, but programs wait for one collective after the other: their times add up.
    """
    links: dict[str, float] = {}
    exposed = 0.0
    for one in traffic:
        seconds = collective_seconds(pod.interconnect, one)
        name = "*".join(one.axes)
        links[name] = links.get(name, 0.0) + seconds
        exposed += 0.0 if one.overlapped else seconds
    chip = pod.chip
    return Estimate(flops / chip.flops, accessed / chip.memory_bandwidth, links, exposed)


def collective_seconds(interconnect: Interconnect, traffic: Traffic) -> float:
    """Seconds of all of it, with the latency of each."""
    each = traffic.bytes / traffic.times
    if traffic.kind == "collective-permute":
        return traffic.times * interconnect.permute_seconds(traffic.groups, each)
    return traffic.times * _slowest(interconnect, traffic.groups).seconds(traffic.kind, each)


def _slowest(interconnect: Interconnect, groups: np.ndarray) -> Span:
    """Of all groups the one with the slowest ring. Those that fit no box of a torus go round all
    of its places, as their traffic has to."""
    everything = range(int(groups.max()) + 1)
    spans = [interconnect.span(group) for group in np.unique(np.sort(groups, axis=1), axis=0)]
    whole = interconnect.span(everything) if None in spans else None
    return min((span or whole for span in spans), key=lambda span: span.ring)
