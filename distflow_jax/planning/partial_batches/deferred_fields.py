"""Fields that stream, and that nodes which wait read of the whole batch."""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import jax

from distflow_jax.dag.plan import Plan, Unit
from distflow_jax.layout import Edge, Layout
from distflow_jax.planning.field_specs import FieldSpecs
from distflow_jax.planning.unit_programs import Program


def deferred(plan: Plan, units: Sequence[Unit]) -> list[Edge]:
    """Edges of fields that `units` on meshes write in partial batches and others read of the whole
    batch; one for each field, to the host."""
    inside = {task.node.id for unit in units for task in unit.tasks if unit.layout.kind == "mesh"}
    found = {
        (edge.source, edge.field): edge
        for unit in plan.units
        if unit not in units
        for edge in unit.inputs
        if edge.source in inside
    }
    host = Layout("host")
    return [dataclasses.replace(e, target_layout=host, move="unpack") for e in found.values()]


def check_deferred(
    plan: Plan, units: Sequence[Unit], programs: Iterable[Program], specs: FieldSpecs
) -> None:
    """Raises ValueError unless all fields that nodes wait for can be moved to the batch.

    `programs` are those of `units`, `specs` describe fields of a partial batch.
    """
    known = {
        value: spec
        for program in programs
        for value, spec in zip(program.unit.outputs, program.outputs, strict=True)
    }
    for edge in deferred(plan, units):
        spec = known[edge.source, edge.field]
        if isinstance(spec, jax.ShapeDtypeStruct) and specs.travels(spec, edge.source_layout):
            continue
        sizes = [math.prod(x.shape) for x in jax.tree.leaves(spec)]
        raise ValueError(
            f"node {edge.source!r}: writes {edge.field!r} as arrays of {sizes} numbers, and node "
            f"{edge.target!r} waits for those of the whole batch, which have one number per token "
            "or per sequence; use stream.partial_batches='off'"
        )
