"""The data coordinator: a stage asks for a field, and gets it in its own layout.

Callers never learn whether a value stayed, was packed from host columns into rows, was resharded to
another mesh, or came back to the host. N samples of this process; K mini-batches, R rows, L tokens,
S sequences per row.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from distflow_jax import batch as batch_lib
from distflow_jax.batch import Placement, Prompt, Rows, RowShape, Samples
from distflow_jax.types import Edge, Layout

# On a mesh these three are one Rows record: packed tokens say what is prompt and what is response.
STRUCTURE = ("prompt", "response", "response_mask")


@dataclasses.dataclass(frozen=True)
class CoordinatorConfig:
    """How data move between stages."""

    double_buffer: bool = True  # read and tokenise the next step's prompts while devices work


@dataclasses.dataclass(frozen=True)
class PackingPlan:
    """Static facts of how one process's samples become rows."""

    shape: RowShape  # R counts this process's rows
    ranks: int  # data ranks of this process
    prompts_per_step: int
    attention_cost: float  # cost of one attended pair in units of one token's other work
    shared_prompts: bool


class Coordinator:
    """Keeps the fields of a step. See dag.worker for the protocol; `begin` starts a step."""

    def __init__(self, packing: PackingPlan, meshes: Mapping[Layout, Mesh]):
        self._packing = packing
        self._meshes = dict(meshes)
        self._values: dict[tuple[str | None, str], Any] = {}
        self._moved: dict[tuple[str | None, str, Layout], Any] = {}
        self._columns: dict[str, Any] = {}  # every host column of the step, small beside arrays
        self._packed: tuple[Samples, Placement] | None = None
        self._rows: dict[Layout, Rows] = {}

    def begin(self, prompts: Sequence[Prompt], num_samples: int) -> None:
        """Starts a step: every column from here on has one entry per (prompt, sample)."""
        for table in (self._values, self._moved, self._rows):
            table.clear()
        self._columns = {}
        self._packed = None
        self.put(None, "prompt", [p for p in prompts for _ in range(num_samples)])

    def put(self, source: str | None, field: str, value: Any) -> None:
        """Takes what `source` wrote."""
        self._values[source, field] = value
        if not isinstance(value, jax.Array | Rows):
            assert field not in STRUCTURE or self._packed is None, f"{field} came after packing"
            self._columns[field] = value

    def get(self, edge: Edge) -> Any:
        """The value in the layout that the reader asks for."""
        value = self._values[edge.source, edge.field]
        if edge.move == "stay":
            return value
        key = (edge.source, edge.field, edge.target_layout)
        if key not in self._moved:
            self._moved[key] = self._move(edge, value)
        return self._moved[key]

    def free(self, source: str | None, field: str) -> None:
        """Forgets the value: its last reader is done."""
        self._values.pop((source, field), None)
        for key in [key for key in self._moved if key[:2] == (source, field)]:
            del self._moved[key]

    def samples(self) -> Samples:
        """The step's responses and everything that was written about them on the host."""
        if self._packed is None:
            self._pack()
        return self._packed[0]

    def tokens_per_rank(self) -> np.ndarray:
        """Tokens in the rows of each data rank of this process, int64 [ranks]."""
        filled = batch_lib.filled_tokens(self.samples(), self._packed[1])
        ranks = self._packing.ranks
        return filled.reshape(filled.shape[0], ranks, -1).sum(axis=(0, 2))

    # -- moves ------------------------------------------------------------------------------------

    def _move(self, edge: Edge, value: Any) -> Any:
        if edge.move == "pack":
            return self._to_mesh(edge, value)
        if edge.move == "reshard":
            return self._reshard(value, edge.target_layout)
        return self._to_host(value)

    def _pack(self) -> None:
        columns = self._columns
        prompts, count = columns["prompt"], len(columns["prompt"])
        seen: dict[int, int] = {}
        sample = np.zeros(count, np.int32)
        for i, prompt in enumerate(prompts):
            sample[i] = seen.get(prompt.counter, 0)
            seen[prompt.counter] = sample[i] + 1
        samples = Samples(
            prompt=prompts,
            sample=sample,
            response=columns["response"],
            response_mask=columns["response_mask"],
            fields=columns,
        )
        p = self._packing
        placement = batch_lib.pack(
            samples,
            p.shape,
            ranks=p.ranks,
            prompts_per_step=p.prompts_per_step,
            attention_cost=p.attention_cost,
            shared=p.shared_prompts,
        )
        self._packed = (samples, placement)

    def _to_mesh(self, edge: Edge, value: Any) -> Any:
        layout = edge.target_layout
        if self._packed is None:
            self._pack()
        samples, placement = self._packed
        if edge.field in STRUCTURE:
            if layout not in self._rows:
                rows = batch_lib.to_rows(
                    samples, placement, prompts_per_step=self._packing.prompts_per_step
                )
                self._rows[layout] = jax.tree.map(lambda x: self._place(x, layout), rows)
            return self._rows[layout]
        if len(value) != len(samples):
            raise ValueError(
                f"field {edge.field!r} written by {edge.source!r} has {len(value)} entries, "
                f"one per response is {len(samples)}"
            )
        if np.ndim(value[0]) == 0:
            packed = batch_lib.sequence_field(placement, value)
        else:
            packed = batch_lib.token_field(samples, placement, value)
        return self._place(packed, layout)

    def _place(self, local: np.ndarray, layout: Layout) -> jax.Array:
        """This process's rows -> global array, rows divided over the mesh's data ranks."""
        mesh = self._meshes[layout]
        sharding = NamedSharding(mesh, PartitionSpec(None, "fsdp"))
        rows = local.shape[1] // self._packing.ranks * mesh.shape["fsdp"]
        shape = (local.shape[0], rows, *local.shape[2:])
        return jax.make_array_from_process_local_data(sharding, local, shape)

    def _reshard(self, value: Any, layout: Layout) -> Any:
        sharding = NamedSharding(self._meshes[layout], PartitionSpec(None, "fsdp"))
        move = jax.jit(lambda x: x, out_shardings=jax.tree.map(lambda _: sharding, value))
        return move(value)

    def _to_host(self, value: Any) -> Any:
        """Device field -> column of this process's samples, in their order."""
        samples, placement = self._packed
        local = _own_rows(value)
        if local.shape[2] == placement.shape.tokens:
            return batch_lib.from_token_field(samples, placement, local)
        return batch_lib.from_sequence_field(placement, local, len(samples))


def _own_rows(x: jax.Array) -> np.ndarray:
    """The rows of [K, R, ...] that lie on this process's devices, each once, in order."""
    parts = {}
    for shard in x.addressable_shards:
        parts[shard.index[1].start or 0] = shard.data
    return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)], axis=1)
