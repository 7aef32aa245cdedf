"""Roofline model: a bound on a program's time at the peak rates of its chips, and the time that is
expected at the shares of these rates that programs reach (efficiency.py).

Williams et al. 2009 (doi.org/10.1145/1498765.1498785), with links in addition to compute and
memory. docs/scaling.md lists all formulas.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from distflow_jax.pods.efficiency import TRAINING, Efficiency, Range
from distflow_jax.pods.interconnect import GroupRates, Interconnect
from distflow_jax.pods.topology import Pod
from distflow_jax.programs.traffic import CollectiveTraffic


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Seconds of a program at the peak rates of its chips: a bound, not measured."""

    compute: float
    memory: float  # of HBM
    links: Mapping[str, float]  # by mesh axes, "fsdp" or "data*fsdp": all collectives over them
    exposed: float  # of `links`, the time that overlaps with nothing
    kind: str = TRAINING  # of work; see efficiency.py
    latency: float = 0.0  # of `exposed`, what does not depend on the links' rates
    steps: float = 0.0  # decode steps, which cost more than their products, memory and links
    parts: tuple["Estimate", ...] = ()  # that run one after the other; (): it is one program

    @property
    def total(self) -> float:
        """The longest of the terms that overlap, plus the exposed time; of parts, their sum."""
        if self.parts:
            return sum(part.total for part in self.parts)
        overlapped = sum(self.links.values()) - self.exposed
        return max(self.compute, self.memory, overlapped) + self.exposed

    @property
    def bound(self) -> str:
        """The longest term: "compute", "memory" or the axes of links."""
        terms = {"compute": self.compute, "memory": self.memory} | dict(self.links)
        return max(terms, key=terms.__getitem__)

    def expected(self, efficiency: Efficiency) -> Range:
        """Seconds at the shares of the peak rates that programs reach."""
        if self.parts:
            return sum((part.expected(efficiency) for part in self.parts), Range(0.0, 0.0))
        of, links, step = efficiency.work[self.kind], efficiency.links, efficiency.step
        slow = self._at(of.compute.low, of.memory.low, links.low) + self.steps * step.high
        fast = self._at(of.compute.high, of.memory.high, links.high) + self.steps * step.low
        return Range(fast, slow)

    def _at(self, compute: float, memory: float, links: float) -> float:
        """Seconds at these shares of the peak rates."""
        overlapped = sum(self.links.values()) - self.exposed
        longest = max(self.compute / compute, self.memory / memory, overlapped / links)
        return longest + (self.exposed - self.latency) / links + self.latency

    def __add__(self, other: "Estimate") -> "Estimate":
        """One after the other."""
        axes = dict.fromkeys([*self.links, *other.links])
        return Estimate(
            self.compute + other.compute,
            self.memory + other.memory,
            {a: self.links.get(a, 0.0) + other.links.get(a, 0.0) for a in axes},
            self.exposed + other.exposed,
            latency=self.latency + other.latency,
            steps=self.steps + other.steps,
            parts=(*(self.parts or [self]), *(other.parts or [other])),
        )

    def __mul__(self, count: float) -> "Estimate":
        """`count` times, one after the other."""
        return Estimate(
            self.compute * count,
            self.memory * count,
            {axes: seconds * count for axes, seconds in self.links.items()},
            self.exposed * count,
            self.kind,
            self.latency * count,
            self.steps * count,
            tuple(part * count for part in self.parts),
        )

    def to_tree(self) -> dict[str, Any]:
        """The estimate as plain JSON values."""
        found = {name: getattr(self, name) for name in ("compute", "memory", "links", "exposed")}
        return found | {"total": self.total, "bound": self.bound}


def estimate(
    pod: Pod,
    *,
    flops: float,
    accessed: float,
    traffic: Iterable[CollectiveTraffic],
    kind: str = TRAINING,
) -> Estimate:
    """Roofline estimate of a program on a pod.

    `flops` and `accessed` (bytes of HBM) are per chip; `kind` is that of its work. Different axes
    use different links, but a program waits for one collective after the other, so their times are
    added. An asynchronous collective is hidden as long as the work beside it takes.
    """
    links: dict[str, float] = {}
    exposed = latency = 0.0
    for one in traffic:
        seconds = collective_seconds(pod.interconnect, one)
        name = "*".join(one.axes)
        links[name] = links.get(name, 0.0) + seconds
        if one.overlapped:
            exposed += exposed_seconds(pod, one)
        else:
            exposed += seconds
            latency += collective_seconds(pod.interconnect, dataclasses.replace(one, bytes=0.0))
    chip = pod.chip
    terms = flops / chip.flops, accessed / chip.memory_bandwidth
    return Estimate(*terms, links, exposed, kind, latency)


def exposed_seconds(pod: Pod, traffic: CollectiveTraffic) -> float:
    """Seconds of the collectives beside which nothing runs; 0 where the schedule is not known."""
    if not traffic.overlapped:
        return collective_seconds(pod.interconnect, traffic)
    alone = 0.0
    for size, times, beside in traffic.covered:
        one = dataclasses.replace(traffic, bytes=size, times=1.0)
        hidden = max(beside.flops / pod.chip.flops, beside.bytes / pod.chip.memory_bandwidth)
        alone += times * max(collective_seconds(pod.interconnect, one) - hidden, 0.0)
    return alone


def traffic_tree(pod: Pod, traffic: CollectiveTraffic) -> dict[str, Any]:
    """The traffic and its seconds as plain JSON values."""
    return {
        "kind": traffic.kind,
        "axes": list(traffic.axes),
        "bytes": traffic.bytes,
        "times": traffic.times,
        "overlapped": traffic.overlapped,
        "estimated_seconds": collective_seconds(pod.interconnect, traffic),
        "exposed_seconds": exposed_seconds(pod, traffic),
    }


def collective_seconds(interconnect: Interconnect, traffic: CollectiveTraffic) -> float:
    """Seconds of all collectives of `traffic`, latencies included."""
    each = traffic.bytes / traffic.times
    if traffic.kind == "collective-permute":
        return traffic.times * interconnect.permute_seconds(traffic.groups, each)
    return traffic.times * _slowest(interconnect, traffic.groups).seconds(traffic.kind, each)


def _slowest(interconnect: Interconnect, groups: np.ndarray) -> GroupRates:
    """The rates of the group with the slowest ring.

    A group that is no box of a torus is treated as a ring through all places, as its traffic is
    routed through them.
    """
    everything = range(int(groups.max()) + 1)
    spans = [interconnect.span(group) for group in interconnect.unlike(np.sort(groups, axis=1))]
    whole = interconnect.span(everything) if None in spans else None
    return min((span or whole for span in spans), key=lambda span: span.ring)
