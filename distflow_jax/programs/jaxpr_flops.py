"""FLOPs of the matrix products in a jaxpr; the body of a loop counts once per trip."""

import dataclasses
import math
from collections.abc import Iterator

from jax.extend import core

from distflow_jax.programs.bounded_loops import bound_of, is_seldom, sharing


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs of matrix products."""

    total: float
    unbounded: tuple[str, ...] = ()  # names of while loops without a bound, which count once

    def __add__(self, other: "Flops") -> "Flops":
        return Flops(self.total + other.total, self.unbounded + other.unbounded)

    def times(self, factor: float) -> "Flops":
        """A copy with the total multiplied by `factor`."""
        return Flops(self.total * factor, self.unbounded)


def matmul_flops(jaxpr: core.Jaxpr | core.ClosedJaxpr) -> Flops:
    """FLOPs of all matrix products of a jaxpr over all its devices, 2 per multiply-add.

    A scan counts by its length, a `bounded_loop` by its bound, a `shard_map` by the devices of its
    manual axes, a conditional by its most expensive branch, one marked `seldom` by its cheapest.
    Masked attention counts as the whole product, as it is computed, and a layer with a window as
    all blocks of keys. A ragged product counts each row once, a kernel its own cost estimate. Work
    within `share` counts once for all devices.
    """
    return _flops(jaxpr, "")


def _flops(jaxpr: core.Jaxpr | core.ClosedJaxpr, path: str) -> Flops:
    if isinstance(jaxpr, core.ClosedJaxpr):
        jaxpr = jaxpr.jaxpr
    total = Flops(0.0)
    for eqn in jaxpr.eqns:
        total += _eqn_flops(eqn, path).times(1 / sharing(str(eqn.source_info.name_stack)))
    return total


def _eqn_flops(eqn: core.JaxprEqn, path: str) -> Flops:
    kind = eqn.primitive.name
    if kind == "dot_general":
        return Flops(_dot_flops(eqn))
    if kind == "ragged_dot_general":
        return Flops(_ragged_dot_flops(eqn))
    if kind == "pallas_call" and (estimate := eqn.params["cost_estimate"]) is not None:
        return Flops(estimate.flops)  # its jaxpr is one step of a grid
    # names inside are relative to the equation that holds them
    path = "/".join(filter(None, (path, str(eqn.source_info.name_stack), kind)))
    inner = [_flops(jaxpr, path) for jaxpr in _jaxprs_in(eqn)]
    if kind == "cond":
        unbounded = sum((branch.unbounded for branch in inner), ())
        counted = min if is_seldom(str(eqn.source_info.name_stack)) else max
        return Flops(counted(branch.total for branch in inner), unbounded)
    total = sum(inner, Flops(0.0))
    if kind == "scan":
        return total.times(eqn.params["length"])
    if kind == "shard_map":
        sizes = eqn.params["mesh"].shape
        return total.times(math.prod(sizes[axis] for axis in eqn.params["newly_manual_axes"]))
    if kind == "while":
        most = bound_of(str(eqn.source_info.name_stack))
        return total + Flops(0.0, (path,)) if most is None else total.times(most)
    return total


def _jaxprs_in(eqn: core.JaxprEqn) -> Iterator[core.Jaxpr | core.ClosedJaxpr]:
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, core.Jaxpr | core.ClosedJaxpr):
                yield item


def _dot_flops(eqn: core.JaxprEqn) -> float:
    (contracting, _), _ = eqn.params["dimension_numbers"]
    lhs = eqn.invars[0].aval.shape
    return 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(lhs[d] for d in contracting)


def _ragged_dot_flops(eqn: core.JaxprEqn) -> float:
    dims = eqn.params["ragged_dot_dimension_numbers"]
    (contracting, _), _ = dims.dot_dimension_numbers
    lhs, _, sizes = (v.aval.shape for v in eqn.invars)
    flops = 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(lhs[d] for d in contracting)
    if set(dims.lhs_ragged_dimensions) & set(contracting):
        flops /= sizes[-1]  # the output has a dim of groups, each a sum over its own rows
    return flops
