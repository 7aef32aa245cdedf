"""Fields of a step, each in the layout of the node that reads it.

Readers need not know whether a value stayed, was cut to this process's share, packed from host
columns into rows, moved to another mesh, or came back to the host. There is no node through which
data pass: all processes know the lengths, compute the same assignment (assignment.py) and exchange
what moves, each with each (field_moves.py).
"""

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from distflow_jax.batch import Rows, Samples, TokenColumn
from distflow_jax.cluster import processes
from distflow_jax.cluster.host_exchange import Traffic
from distflow_jax.coordinator import field_moves
from distflow_jax.coordinator.assignment import PackingPlan, Shares, StepLengths
from distflow_jax.coordinator.field_store import FieldStore, Value
from distflow_jax.layout import (
    ADVANTAGE,
    KEEP,
    RESPONSE_IMAGES,
    ROWS,
    ROWS_COLUMNS,
    Edge,
    Layout,
    Metrics,
    Parts,
    move_between,
    overlaps,
)
from distflow_jax.models.model_flops import BatchWork
from distflow_jax.resharding.rows_all_to_all import RowsAcrossSubmeshes, RowsAllToAll


class Coordinator:
    """Keeps a step's fields, and moves each to its readers. dag.plan_walker has the protocol.

    `begin` starts a step. Methods that move data are collective: all processes call them in the
    same order, as they do when they walk the same plan.

    Attributes:
      store: the fields of the step.
      meshes: by layout.
    """

    def __init__(
        self,
        packing: PackingPlan,
        meshes: Mapping[Layout, Mesh],
        writers: Mapping[str | None, Layout],
        packs: Mapping[Layout, Collection[Value]],
        per_token: Mapping[Value, TokenColumn] | None = None,
        *,
        span: Callable[[str], contextlib.AbstractContextManager] | None = None,
    ):
        """`writers`: layout of each node by its id, of the loader under None. `packs`: the values
        that the plan brings from the host to each mesh; `per_token`: those of them with an entry
        per token, where the others have one number per response."""
        self._packing, self.meshes, self._writers = packing, dict(meshes), dict(writers)
        self._packs = {layout: frozenset(values) for layout, values in packs.items()}
        self._per_token = dict(per_token or {})
        self._span = span or (lambda name: contextlib.nullcontext())
        self._repartitions = repartitions(packing, meshes)
        self.use(FieldStore(self._writers, np.zeros((0, 2), np.int64), np.zeros(0, np.int64)))

    def begin(self, given: Mapping[str, Sequence[Any]]) -> None:
        """Starts a step with the loader's columns, see FieldStore.of_step."""
        self.use(FieldStore.of_step(self._writers, given, processes.process_index()))

    def use(self, store: FieldStore, known: StepLengths | None = None) -> None:
        """Continues with the fields of `store`, whose responses are not packed yet.

        `known`: their lengths on all processes, where every process knows them already, so that
        none are gathered.
        """
        self.store, self._known = store, known
        self._shares: Shares | None = None

    @property
    def done(self) -> Collection[str]:
        """Nodes that ran before the step, see FieldStore.done."""
        return self.store.done

    def merged(self, metrics: Metrics, *, strict: bool = True) -> Metrics:
        """Metrics of the step's nodes, those of the host over all processes. Collective.

        `strict`: see merge_parts.
        """
        with processes.coordinating():
            return merge_parts(metrics, strict=strict)

    def put(self, source: str | None, field: str, value: Any) -> None:
        """Stores a field that `source` wrote."""
        packed = field in (*ROWS_COLUMNS, RESPONSE_IMAGES)
        if field == KEEP or (packed and not isinstance(value, jax.Array | Rows)):
            assert self._shares is None, f"{field} came after packing"
        self.store.put(source, field, value)

    def get(self, edge: Edge) -> Any:
        """The value in the layout of its reader."""
        store = self.store
        # rows are packed from the columns that hold them
        value = None if edge.field == ROWS else store.values[edge.source, edge.field]
        if edge.move == "stay":
            return value
        key = (edge.source, edge.field, edge.target_layout)
        if key not in store.moved:
            # the span has the name of one move and times all: pack, share and unpack too
            with self._span("reshard"), processes.coordinating():
                store.moved[key] = self._move(edge, value)
        return store.moved[key]

    def free(self, source: str | None, field: str) -> None:
        """Drops the value after its last reader."""
        self.store.free(source, field)

    def samples(self) -> Samples:
        """The responses that this process sampled, with all columns about them."""
        return self.store.samples()

    def advantages(self) -> dict[str, list[float | None]]:
        """{"advantage": one number per response of this process}; {} where no node wrote them.

        The mean over the tokens that the policy chose, None without any; a value that is one per
        sequence is itself. Collective, and on the host alone: no program runs.
        """
        store = self.store
        column = store.columns.get(ADVANTAGE)
        if store.advantage is not None:
            source, value = store.advantage
            here, host = self._writers[source], Layout("host")
            edge = Edge(ADVANTAGE, source, "samples", here, host, move_between(here, host))
            with self._span("reshard"), processes.coordinating():
                column = field_moves.unpack(store, self.shares, edge, value)
        if column is None:
            return {}
        masks = store.columns["response_mask"]
        return {ADVANTAGE: [_mean(x, mask) for x, mask in zip(column, masks, strict=True)]}

    @property
    def shares(self) -> Shares:
        """The step's assignment of sequences to rows.

        The first access of a step all-gathers the lengths and computes it: that is collective.
        """
        if self._shares is None:
            lengths = self._known or field_moves.gathered_lengths(self.store)
            self._shares = Shares.make(self._packing, lengths, processes=processes.process_count())
        return self._shares

    def entries(self, source: str | None, field: str, layout: Layout) -> list[Any]:
        """A host column's entries for this process's rows of a mesh, see field_moves.entries."""
        self._fetch(layout, [(source, field)])
        return field_moves.entries(self.store, self.shares, (source, field), layout)

    @property
    def traffic(self) -> Mapping[str, Traffic]:
        """Bytes that came to this process in this step, by field."""
        return self.store.traffic

    def bytes_received(self) -> int:
        """Bytes that came to this process from others in this step, padding left out."""
        return sum(traffic.payload for traffic in self.traffic.values())

    def image_counts(self) -> np.ndarray:
        """Bytes that came with images, and what this process's rows encode, int64 [5].

        The latter as row_images.encoded_images has it; 0 for rows of which another process counts
        the same ones.
        """
        encoded = self.store.encoded
        if not self.shares.counts_rows(processes.process_index()):
            encoded = np.zeros_like(encoded)
        return np.array([self.store.image_bytes, *encoded], np.int64)

    def tokens_per_rank(self) -> np.ndarray:
        """Tokens in the rows of each of the trainer's data ranks, int64 [ranks]."""
        return self.shares.tokens_per_rank(self._packing.primary)

    def work(self, window: int = 0) -> BatchWork:
        """Tokens and pairs in the rows of this step; `window` is that of layers which have one.

        All tokens of responses count as scored, those that an environment wrote among them.
        """
        return work_of(self.shares, window)

    def _move(self, edge: Edge, value: Any) -> Any:
        store, layout = self.store, edge.target_layout
        if edge.move == "pack":
            return self._pack(edge)
        if edge.move == "reshard":
            repartition = self._repartitions[edge.source_layout, layout]
            return field_moves.reshard(store, self.shares, edge, value, repartition)
        if edge.move == "share":
            own = store.own_entries(edge.source, edge.field, value)
        else:
            own = field_moves.unpack(store, self.shares, edge, value)
        return field_moves.share(store, edge, own)

    def _pack(self, edge: Edge) -> Any:
        store, layout, value = self.store, edge.target_layout, (edge.source, edge.field)
        mesh = self.meshes[layout]
        if edge.field == ROWS:
            self._fetch(layout, store.rows_columns)
            return field_moves.pack_rows(store, self.shares, layout, mesh)
        self._fetch(layout, [value])
        return field_moves.pack(store, self.shares, edge, mesh, self._per_token.get(value))

    def _fetch(self, layout: Layout, needed: Collection[Value]) -> None:
        packed = {value for value in self._packs[layout] if value[1] != ROWS}
        if len(packed) < len(self._packs[layout]):
            packed |= set(self.store.rows_columns)
        field_moves.fetch(self.store, self.shares, layout, needed, packed)


def work_of(shares: Shares, window: int = 0) -> BatchWork:
    """Tokens and pairs in the rows of an assignment; `window` is that of layers which have one."""
    tokens = int(shares.tokens_per_rank(shares.plan.primary).sum())
    near = shares.pairs(window) if window else 0
    return BatchWork(tokens, int(shares.response.sum()), shares.pairs(), near)


def repartitions(
    packing: PackingPlan, meshes: Mapping[Layout, Mesh]
) -> dict[tuple[Layout, Layout], RowsAllToAll | RowsAcrossSubmeshes]:
    """Moves of rows from each mesh to each other one on the same devices, or on none of them."""
    return {
        (a, b): (RowsAllToAll if a.submesh == b.submesh else RowsAcrossSubmeshes)(
            mesh_a, mesh_b, (packing.rows[a], packing.rows[b])
        )
        for a, mesh_a in meshes.items()
        for b, mesh_b in meshes.items()
        if a != b and (a.submesh == b.submesh or not overlaps(a, b))
    }


def _mean(entry: Any, mask: np.ndarray) -> float | None:
    """A number, or the mean of numbers per token [T] where `mask` [T] is true."""
    chosen = np.asarray(entry, np.float64)[mask] if np.ndim(entry) else np.float64(entry)
    return float(chosen.mean()) if chosen.size else None


def merge_parts(metrics: Metrics, *, strict: bool = True) -> Metrics:
    """The metrics, with what follows from Parts in their place. Collective if there are any.

    Raises ValueError for a name that a stage reports and another one too; without `strict` the last
    one of those in parts counts.
    """
    parts = {name: value for name, value in metrics.items() if isinstance(value, Parts)}
    if not parts:
        return metrics
    merged = {name: value for name, value in metrics.items() if name not in parts}
    # as text: a function may return other numbers for other rows, so that names differ
    gathered = processes.all_gather_json({name: value.values for name, value in parts.items()})
    for name, value in parts.items():
        of_all = [one for theirs in gathered for one in theirs.get(name, ())]
        found = value.merge(of_all) if of_all else {}
        if strict and (twice := sorted(merged.keys() & found.keys())):
            raise ValueError(
                f"node {name!r}: reports metrics that another node of this step reports: {twice}; "
                "rename them"
            )
        merged |= found
    return merged
