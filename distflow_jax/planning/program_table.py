"""A plan's programs before step 1, as tables for people and as plain JSON."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from distflow_jax.dag.plan import Plan
from distflow_jax.layout import Layout
from distflow_jax.planning.field_specs import Value, num_bytes
from distflow_jax.planning.unit_programs import Program, field_specs
from distflow_jax.programs import xla_options
from distflow_jax.programs.costs import Costs
from distflow_jax.programs.text_table import fill_lines, text_table
from distflow_jax.programs.units import format_bytes, format_decimal


@dataclasses.dataclass(frozen=True)
class FieldOnMesh:
    """A value that a program takes in or gives out. `bytes` are over all devices."""

    source: str | None
    field: str
    layout: Layout
    text: str  # shape and dtype
    bytes: int
    ways: tuple[str, ...]  # to the units that read it there, and how it gets there


def fields_on_meshes(plan: Plan, programs: Mapping[str, Program]) -> list[FieldOnMesh]:
    """All values on meshes, in the order in which they come about."""
    specs = field_specs(programs.values())
    ways: dict[tuple[Value, Layout], list[str]] = {key: [] for key in specs}
    for unit in plan.units:
        for edge in unit.inputs:
            key = ((edge.source, edge.field), edge.target_layout)
            if key in ways:
                move = "" if edge.move == "stay" else f" ({edge.move})"
                ways[key].append(f"{unit.name}{move}")
            elif edge.move == "unpack":
                ways[(edge.source, edge.field), edge.source_layout].append(f"{unit.name} (unpack)")
    return [
        FieldOnMesh(*value, layout, _shape_text(spec), num_bytes(spec), tuple(ways[value, layout]))
        for (value, layout), spec in specs.items()
    ]


def bytes_of_fields(fields: Iterable[FieldOnMesh]) -> dict[Value, int]:
    """(source, field) -> bytes on the meshes, for the labels of a picture."""
    found: dict[Value, int] = {}
    for field in fields:
        found[field.source, field.field] = max(
            field.bytes, found.get((field.source, field.field), 0)
        )
    return found


def describe_options(programs: Iterable[Program], sampler: Mesh | None) -> str:
    """XLA's options for the programs, a line for each kind of mesh; `sampler`: its mesh."""
    lines = {}
    for mesh in (program.mesh for program in programs):
        lines[_devices(mesh)] = xla_options.describe(xla_options.compiler_options(mesh))
    if sampler is not None:
        text = xla_options.describe(xla_options.compiler_options(sampler, sampler=True))
        lines[f"{_devices(sampler)}, sampler"] = text
    return "".join(
        fill_lines(f"XLA options, {devices}: {text}") + "\n" for devices, text in lines.items()
    )


def _devices(mesh: Mesh) -> str:
    return f"{mesh.size} {mesh.devices.flat[0].platform}"


def describe(fields: Iterable[FieldOnMesh], costs: Mapping[str, Costs]) -> str:
    """Tables of programs and of the fields between them.

    Loops that run as often as the data say count with their bound: FLOPs and bytes are those of a
    step that fills all rows.
    """
    programs = [("program", "FLOPs", "reads and writes", "memory", "arguments", "collectives")]
    for name, cost in costs.items():
        moved = sum((cost.collective_bytes or {}).values())
        sizes = (cost.bytes_accessed, cost.peak_bytes, cost.argument_bytes)
        known = [format_bytes(size) if size is not None else "-" for size in sizes]
        programs.append(
            (name, format_decimal(cost.flops, ""), *known, format_bytes(moved) if moved else "-")
        )
    shown = [("field", "from", "layout", "shape and dtype", "bytes", "to")]
    for f in fields:
        to = ", ".join(f.ways) or "-"
        shown.append(
            (f.field, f.source or "(loader)", str(f.layout), f.text, format_bytes(f.bytes), to)
        )
    return (
        f"programs, if all rows are filled; FLOPs over all devices, the rest on each\n\n"
        f"{text_table(programs)}\n\nfields on the devices\n\n{text_table(shown)}\n"
    )


def to_tree(fields: Iterable[FieldOnMesh], costs: Mapping[str, Costs]) -> dict[str, Any]:
    """The same as plain JSON values."""
    return {
        "programs": {name: cost.to_tree() for name, cost in costs.items()},
        "fields": [dataclasses.asdict(field) for field in fields],
    }


def _shape_text(spec: Any) -> str:
    leaves = jax.tree.leaves(spec)
    texts = dict.fromkeys(f"{x.dtype}{list(x.shape)}" for x in leaves)
    if len(leaves) == 1:
        return next(iter(texts))
    shapes = dict.fromkeys(str(list(x.shape)) for x in leaves)
    return f"{len(leaves)} arrays {' and '.join(shapes)}"
