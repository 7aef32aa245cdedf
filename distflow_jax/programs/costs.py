"""Costs of a program from its jaxpr and its compiled form, before it has run."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from distflow_jax.programs import hlo
from distflow_jax.programs.jaxpr_flops import matmul_flops
from distflow_jax.programs.traffic import CollectiveTraffic, bytes_by_axes, merged, traffic_of


@dataclasses.dataclass(frozen=True)
class Costs:
    """FLOPs, memory and traffic of a program.

    A bounded loop counts as often as it may run at most. None: not known, because the program was
    not compiled or the platform does not report it.
    """

    flops: float  # of matrix products, over all devices
    unbounded: tuple[str, ...] = ()  # while loops without a bound, by their names in jaxpr or HLO
    # on each device:
    bytes_accessed: float | None = None  # read and written
    collective_bytes: Mapping[str, float] | None = None  # by the kinds that occur
    traffic: tuple[CollectiveTraffic, ...] = ()  # the same collectives, by mesh axes
    argument_bytes: int | None = None
    output_bytes: int | None = None
    temp_bytes: int | None = None
    alias_bytes: int | None = None  # of outputs that reuse the buffers of donated arguments
    unread: int = 0  # lines of the HLO that could not be parsed; they count as 0

    @property
    def peak_bytes(self) -> int | None:
        """Memory of each device while the program runs: arguments, outputs and temporaries."""
        sizes = self.argument_bytes, self.output_bytes, self.temp_bytes, self.alias_bytes
        if None in sizes:
            return None
        return sizes[0] + sizes[1] + sizes[2] - sizes[3]

    def to_tree(self) -> dict[str, Any]:
        """The costs as plain JSON values."""
        tree = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del tree["traffic"]
        more = {"peak_bytes": self.peak_bytes, "bytes_by_axes": bytes_by_axes(self.traffic)}
        return tree | {"unbounded": list(self.unbounded)} | more


def costs_of(
    traced: jax.stages.Traced,
    compiled: jax.stages.Compiled | None,
    mesh: Mapping[str, int] | None = None,
    numbers: np.ndarray | None = None,
) -> Costs:
    """Costs of a program from its jaxpr and, if given, its compiled form.

    Args:
      traced: the program.
      compiled: made of `traced`; None: only the costs that follow from the jaxpr.
      mesh: {axis: size} of the mesh it was compiled for; None: no traffic by axes.
      numbers: of the mesh's devices, int [devices], as for traffic_of.
    """
    found = matmul_flops(traced.jaxpr)
    costs = Costs(found.total, found.unbounded)
    if compiled is None:
        return costs
    text, memory = compiled.as_text(), compiled.memory_analysis()
    if text is not None:
        module = hlo.read(text)
        kinds = sorted({c.kind for c in module.collectives})
        costs = dataclasses.replace(
            costs,
            unbounded=tuple(dict.fromkeys(costs.unbounded + module.unbounded)),
            bytes_accessed=module.bytes_accessed,
            collective_bytes={kind: module.bytes_by(kind) for kind in kinds},
            traffic=() if mesh is None else tuple(traffic_of(module.collectives, mesh, numbers)),
            unread=module.unread,
        )
    if memory is not None:
        costs = dataclasses.replace(
            costs,
            argument_bytes=memory.argument_size_in_bytes,
            output_bytes=memory.output_size_in_bytes,
            temp_bytes=memory.temp_size_in_bytes,
            alias_bytes=memory.alias_size_in_bytes,
        )
    return costs


def in_turn(runs: Sequence[tuple[Costs, int]], *, argument_bytes: int, output_bytes: int) -> Costs:
    """Costs of compiled programs that run one after the other, as if they were one program.

    `runs`: (costs of a program, number of its runs). `argument_bytes` and `output_bytes` are those
    of all programs together. Temporaries are those of the program that needs the most.
    """
    kinds: dict[str, float] = {}
    for cost, times in runs:
        for kind, size in (cost.collective_bytes or {}).items():
            kinds[kind] = kinds.get(kind, 0.0) + times * size
    temporaries = [cost.temp_bytes for cost, _ in runs if cost.temp_bytes is not None]
    return Costs(
        sum(times * cost.flops for cost, times in runs),
        tuple(dict.fromkeys(name for cost, _ in runs for name in cost.unbounded)),
        bytes_accessed=sum(times * (cost.bytes_accessed or 0.0) for cost, times in runs),
        collective_bytes=kinds,
        traffic=merged(one.repeated(times) for cost, times in runs for one in cost.traffic),
        argument_bytes=argument_bytes,
        output_bytes=output_bytes,
        temp_bytes=max(temporaries, default=None),
        alias_bytes=0,
        unread=sum(cost.unread for cost, _ in runs),
    )
