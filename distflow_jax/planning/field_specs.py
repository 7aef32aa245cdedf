"""Shapes and layouts of the fields that programs take in and give out, before there is an array.

K mini-batches, R rows, L tokens per row, S sequences per row. A *spec* is a pytree of
jax.ShapeDtypeStruct with shardings.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from distflow_jax.batch import ONE_NUMBER, RowImages, Rows, TokenColumn
from distflow_jax.coordinator.assignment import PackingPlan, data_ranks
from distflow_jax.dag.plan import Plan
from distflow_jax.layout import ROUTED_EXPERTS, Layout
from distflow_jax.parallel.rules import rows_spec
from distflow_jax.stages.registry import per_token_fields

Value = tuple[str | None, str]  # (source, field)


@dataclasses.dataclass(frozen=True)
class FieldSpecs:
    """Specs of fields on the meshes of a run."""

    packing: PackingPlan
    meshes: Mapping[Layout, Mesh]
    routed: TokenColumn | None = None  # what is recorded of a mixture's experts

    def rows(self, layout: Layout) -> Rows:
        """The record of packed tokens, [K, R, L] and [K, R, S]."""
        token, sequence = self._shape(layout, False), self._shape(layout, True)
        ints, bools = jnp.int32, jnp.bool_
        return Rows(
            tokens=self._spec(layout, token, ints),
            segment=self._spec(layout, token, ints),
            position=self._spec(layout, token, ints),
            previous=self._spec(layout, token, ints),
            response_mask=self._spec(layout, token, bools),
            parent=self._spec(layout, sequence, ints),
            group=self._spec(layout, sequence, ints),
            member=self._spec(layout, sequence, ints),
            valid=self._spec(layout, sequence, bools),
            length=self._spec(layout, sequence, ints),
            images=self._images(layout, token),
        )

    def _images(self, layout: Layout, token: tuple[int, int, int]) -> RowImages | None:
        """The images beside rows of `token` shape; None where the model has no tower."""
        sizes = self.packing.images
        if sizes is None:
            return None
        chunked = (*token[:2], sizes.chunks, sizes.chunk)
        return RowImages(
            patch=self._spec(layout, token, jnp.int32),
            patches=self._spec(layout, (*chunked, sizes.patch_bytes), jnp.uint8),
            positions=self._spec(layout, (*chunked, sizes.dims), jnp.int32),
            segments=self._spec(layout, chunked, jnp.int32),
            rotary=self._spec(layout, (*token, 3), jnp.int32) if sizes.rotary else None,
        )

    def packed(self, layout: Layout, column: TokenColumn | None) -> jax.ShapeDtypeStruct:
        """A field from the host: [K, R, L, ...] as `column` says, None: float32 [K, R, S]."""
        shape = self._shape(layout, column is None)
        if column is None:
            return self._spec(layout, shape, jnp.float32)
        return self._spec(layout, (*shape, *column.shape), jnp.dtype(column.dtype))

    def moved(self, spec: Any, layout: Layout) -> Any:
        """The same field on another mesh."""
        rows = self._shape(layout, False)[1]
        return jax.tree.map(
            lambda x: self._spec(layout, (x.shape[0], rows, *x.shape[2:]), x.dtype), spec
        )

    def travels(self, spec: Any, layout: Layout) -> bool:
        """Whether the coordinator can move a field: [K, R, L] or [K, R, S] throughout."""
        shapes = (self._shape(layout, False), self._shape(layout, True))
        return all(x.shape in shapes for x in jax.tree.leaves(spec))

    def shardings(self, spec: Any, layout: Layout) -> Any:
        """Layouts of a field: its rows over the data ranks, arrays without rows on every device."""
        rows, mesh = self._shape(layout, False)[:2], self.meshes[layout]

        def one(x):
            return NamedSharding(mesh, rows_spec(mesh) if x.shape[:2] == rows else PartitionSpec())

        return jax.tree.map(one, spec)

    def _shape(self, layout: Layout, per_sequence: bool) -> tuple[int, int, int]:
        p = self.packing
        last = p.limits.sequences if per_sequence else p.limits.tokens
        return (p.mini_batches, p.rows[layout] * data_ranks(layout), last)

    def _spec(self, layout: Layout, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        mesh = self.meshes[layout]
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, rows_spec(mesh)))


def per_token_values(plan: Plan, routed: TokenColumn | None) -> dict[Value, TokenColumn]:
    """The values that nodes on the host write with an entry for every token: one number per
    response token, or `routed`, the record of a mixture's experts."""
    found: dict[Value, TokenColumn] = {}
    for task in plan.tasks:
        node = task.node
        if task.layout.kind == "host":
            found |= {(node.id, field): ONE_NUMBER for field in per_token_fields(node)}
            if routed is not None and node.role == "ROLLOUT" and ROUTED_EXPERTS in node.writes:
                found[node.id, node.writes[ROUTED_EXPERTS]] = routed
    return found


def num_bytes(spec: Any) -> int:
    """Bytes of all arrays, over all devices, copies not counted."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(spec))
