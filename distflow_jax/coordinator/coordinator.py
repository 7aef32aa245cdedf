"""The data coordinator: a stage asks for a field, and gets it in its own layout.

Callers never learn whether a value stayed, was cut to this process's share, packed from host
columns into rows, moved to another mesh, or came back to the host. There is no node through which
data pass: all processes know the lengths, compute the same shares (shares.py) and exchange what
moves, each with each. N samples of this process; K mini-batches, R rows, L tokens, S sequences.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from distflow_jax import batch as batch_lib
from distflow_jax.batch import Placement, Prompt, Rows, Samples, Sequences, TokenColumn
from distflow_jax.coordinator import column_codec
from distflow_jax.coordinator.assignment import PackingPlan, Shares, data_ranks
from distflow_jax.layout import KEEP, Edge, Layout, hosts_of, overlaps
from distflow_jax.models.model_flops import Work
from distflow_jax.parallel import processes
from distflow_jax.parallel.host_exchange import Traffic
from distflow_jax.parallel.rules import rows_spec
from distflow_jax.resharding.rows_across_submeshes import RowsAcrossSubmeshes
from distflow_jax.resharding.rows_all_to_all import Row, RowsAllToAll

# On a mesh these three are one Rows record: packed tokens say what is prompt and what is response.
STRUCTURE = ("prompt", "response", "response_mask")

Value = tuple[str | None, str]  # (source, field)


@dataclasses.dataclass(frozen=True)
class CoordinatorConfig:
    """How data move between stages."""

    double_buffer: bool = True  # read and tokenise the next step's prompts while devices work
    # score responses while others are still being sampled; the scores are the same either way
    overlap_rewards: bool = True
    # share by which the busiest data rank must get lighter (rows, then tokens) for rows to move
    balance_threshold: float = 0.03

    def __post_init__(self):
        if not 0 <= self.balance_threshold < 1:
            raise ValueError(
                "coordinator.balance_threshold must be at least 0 and below 1, got "
                f"{self.balance_threshold}"
            )


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """A step before its responses are packed. `columns` have an entry per response of this process,
    and so have `values`, except where hosts share a sampler (Coordinator.is_shared)."""

    values: dict[Value, Sequence[Any]]
    columns: dict[str, Sequence[Any]]
    sources: dict[str, str | None]
    counters: np.ndarray  # int64, of the prompt of each response of this process's sampler
    own: np.ndarray  # int64 [N], which of these are this process's


class Coordinator:
    """Keeps the fields of a step. See dag.worker for the protocol; `begin` starts a step.

    Every method that moves data is collective: all processes call them in the same order, as they
    do when they walk the same plan.
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
        """`writers`: layout of each node by its id, of the loader under None. `packs`: what the
        plan brings from the host to each mesh; `per_token`: what of that has something for every
        token, where the rest has one number per response."""
        self._packing, self._meshes = packing, dict(meshes)
        self._writers = dict(writers)
        self._packs = {layout: sorted(values, key=str) for layout, values in packs.items()}
        self._per_token = dict(per_token or {})
        self._span = span or (lambda name: contextlib.nullcontext())
        self._me, self._count = processes.process_index(), processes.process_count()
        self._repartitions = {
            (a, b): (RowsAllToAll if a.submesh == b.submesh else RowsAcrossSubmeshes)(
                mesh_a, mesh_b, (packing.rows[a], packing.rows[b])
            )
            for a, mesh_a in self._meshes.items()
            for b, mesh_b in self._meshes.items()
            if a != b and (a.submesh == b.submesh or not overlaps(a, b))
        }
        self._clear()

    def _clear(self) -> None:
        self._values: dict[Value, Any] = {}
        self._moved: dict[tuple[str | None, str, Layout], Any] = {}
        self._columns: dict[str, Sequence[Any]] = {}  # this process's share, as last written
        self._sources: dict[str, str | None] = {}  # who wrote it
        self._received: dict[Value, dict[int, Any]] = {}  # entries that came from others
        self._fetched: dict[Value, list[Layout]] = {}  # for which layouts they came
        self._placements: dict[Layout, Placement] = {}
        self._counters = np.zeros(0, np.int64)  # of the prompt of each response of the sampler
        self._own = np.zeros(0, np.int64)  # which of these are this process's
        self._shares: Shares | None = None
        self._rows: dict[Layout, Rows] = {}
        self.traffic: dict[str, Traffic] = {}  # of this step and process, by field

    def begin(self, given: Mapping[str, Sequence[Any]]) -> None:
        """Starts a step with what the loader gives: "prompt", and whatever else, by its name.

        Every column has one entry per response of this process's sampler, those to one prompt next
        to each other; where k hosts share a sampler, all of them are given the same.
        """
        self._clear()
        hosts = hosts_of(self._writers[None])
        self._counters = np.array([prompt.counter for prompt in given["prompt"]], np.int64)
        groups = [len(list(same)) for _, same in itertools.groupby(self._counters)]
        ends = np.cumsum([0, *groups])
        member = self._me % hosts
        first, last = (int(ends[len(groups) * (member + i) // hosts]) for i in range(2))
        self._own = np.arange(first, last)
        for field, column in given.items():
            self.put(None, field, column)

    def put(self, source: str | None, field: str, value: Any) -> None:
        """Takes what `source` wrote."""
        if field == KEEP:
            self._select(self._owned(source, field, value))
            return
        self._values[source, field] = value
        self._forget((source, field))  # of an earlier write in this step
        if not isinstance(value, jax.Array | Rows):
            assert field not in STRUCTURE or self._shares is None, f"{field} came after packing"
            own = self._owned(source, field, value)
            self._columns[field], self._sources[field] = own, source

    def _select(self, keep: Sequence[int]) -> None:
        """Goes on with the chosen responses of this process."""
        assert self._shares is None, f"{KEEP} came after packing"
        rank = np.asarray(keep, np.int64)
        _, place = np.unique(self._counters[self._own], return_inverse=True)
        first = np.full(place.max(initial=-1) + 1, len(rank))
        np.minimum.at(first, place, np.arange(len(rank)))
        order = np.lexsort((rank, first[place]))  # groups stay in their order
        chosen = order[rank[order] > 0]
        self._own = self._own[chosen]
        for value, column in self._values.items():
            if not self.is_shared(value):
                self._values[value] = take(column, chosen)
            self._forget(value)
        self._columns = {field: take(column, chosen) for field, column in self._columns.items()}

    def snapshot(self) -> "Snapshot":
        """What there is in this step so far. Only before responses are packed."""
        assert self._shares is None, "a step cannot be taken apart after packing"
        return Snapshot(dict(self._values), self._columns, self._sources, self._counters, self._own)

    def resume(self, snapshot: "Snapshot") -> None:
        """Goes on with this in place of what there is."""
        self._clear()
        for field in dataclasses.fields(Snapshot):
            setattr(self, f"_{field.name}", getattr(snapshot, field.name))

    def is_shared(self, value: Value) -> bool:
        """Whether a column has the entries of all hosts of a sampler, rather than one's own."""
        return hosts_of(self._writers[value[0]]) > 1

    def columns(self) -> dict[str, Sequence[Any]]:
        """The columns of this process's responses, as last written."""
        return dict(self._columns)

    def get(self, edge: Edge) -> Any:
        """The value in the layout that the reader asks for."""
        value = self._values[edge.source, edge.field]
        if edge.move == "stay":
            return value
        key = (edge.source, edge.field, edge.target_layout)
        if key not in self._moved:
            with self._span("reshard"), processes.coordinating():
                self._moved[key] = self._move(edge, value)
        return self._moved[key]

    def free(self, source: str | None, field: str) -> None:
        """Forgets the value: its last reader is done. Scalars per sample stay for the records."""
        self._values.pop((source, field), None)
        self._forget((source, field))
        if field in STRUCTURE:
            if not any(name in STRUCTURE for _, name in self._values):
                self._rows.clear()
        elif self._sources.get(field) == source and any(np.ndim(x) for x in self._columns[field]):
            del self._columns[field], self._sources[field]

    def _forget(self, value: Value) -> None:
        """Drops what was made of a value elsewhere."""
        self._received.pop(value, None)
        self._fetched.pop(value, None)
        for key in [key for key in self._moved if key[:2] == value]:
            del self._moved[key]

    def samples(self) -> Samples:
        """The responses that this process sampled, with what was written about them."""
        columns = self._columns
        prompts = columns["prompt"]
        seen: dict[int, int] = {}
        sample = np.zeros(len(prompts), np.int32)
        for i, prompt in enumerate(prompts):
            sample[i] = seen.get(prompt.counter, 0)
            seen[prompt.counter] = sample[i] + 1
        fields = {name: column for name, column in columns.items() if name not in STRUCTURE}
        return Samples(list(prompts), sample, columns["response"], columns["response_mask"], fields)

    @property
    def shares(self) -> Shares:
        """Who holds what in this step. Collective when it is asked for the first time."""
        if self._shares is None:
            self._shares = self._make_shares()
        return self._shares

    def bytes_received(self) -> int:
        """What came to this process from others in this step, padding left out."""
        return sum(traffic.payload for traffic in self.traffic.values())

    def tokens_per_rank(self) -> np.ndarray:
        """Tokens in the rows of each of the trainer's data ranks, int64 [ranks]."""
        return self.shares.tokens_per_rank(self._packing.primary)

    def work(self, window: int = 0) -> Work:
        """What the rows of this step hold; `window` is that of layers which have one.

        All tokens of responses count as scored, those that an environment wrote among them.
        """
        shares = self.shares
        near = shares.pairs(window) if window else 0
        tokens, scored = int(self.tokens_per_rank().sum()), int(shares.response.sum())
        return Work(tokens, scored, shares.pairs(), near)

    # -- moves ------------------------------------------------------------------------------------

    def _move(self, edge: Edge, value: Any) -> Any:
        if edge.move == "pack":
            return self._to_mesh(edge)
        if edge.move == "reshard":
            return self._to_other_mesh(edge, value)
        if edge.move == "share":
            own = self._owned(edge.source, edge.field, value)
        else:
            own = self._to_host(edge, value)
        hosts = hosts_of(edge.target_layout)
        return own if hosts == 1 else self._with_peers(edge.field, own, hosts)

    def _owned(self, source: str | None, field: str, value: Sequence[Any]) -> Sequence[Any]:
        """The part of a host column that this process answers for."""
        if hosts_of(self._writers[source]) > 1:
            return take(value, self._own)
        if len(value) != len(self._own):
            raise ValueError(
                f"field {field!r} written by {source!r} has {len(value)} entries, one per response "
                f"is {len(self._own)}"
            )
        return value

    def _make_shares(self) -> Shares:
        columns = self._columns
        mine = np.array(
            [
                [prompt.counter, len(prompt.tokens), len(response)]
                for prompt, response in zip(columns["prompt"], columns["response"], strict=True)
            ],
            np.int32,
        ).reshape(-1, 3)
        parts = processes.all_gather_ragged(mine)
        home = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        table = np.concatenate(parts).astype(np.int64)
        order = np.argsort(table[:, 0], kind="stable")  # samples of a prompt are in order
        counter, prompt, response = table[order].T
        return Shares.make(
            self._packing, counter, home[order], prompt, response, processes=self._count
        )

    def entries(self, source: str | None, field: str, layout: Layout) -> list[Any]:
        """A host column's entries for the sequences in this process's rows of a mesh, in order.

        They are `shares.needed(layout)` of this process. For fields that rows do not hold, images
        for instance; a prompt of another process comes as its tokens.
        """
        value, shares, me = (source, field), self.shares, self._me
        if layout not in self._fetched.get(value, ()) and shares.anything_moves(layout):
            self._fetch(layout)
        home = np.flatnonzero(shares.home == me)
        mine = dict(zip(map(int, home), self._columns[field], strict=True))
        received = self._received.get(value, {})
        return [mine[n] if n in mine else received[n] for n in map(int, shares.needed(layout)[me])]

    def _fetch(self, layout: Layout) -> None:
        """One exchange of all columns there are that this layout wants, each entry once.

        What a process has, by sampling it or because another layout wanted it, is not sent again.
        """
        shares, me = self.shares, self._me
        number = np.cumsum(shares.home == me) - 1  # of a sequence in this process's columns
        wanted = [
            value
            for value in self._packs[layout]
            if self._sources.get(value[1], self) == value[0]
            and layout not in self._fetched.get(value, ())
        ]
        outgoing: dict[int, list[Any]] = {}
        incoming: dict[int, list[tuple[Value, int]]] = {}
        missing: dict[tuple[Layout, ...], list[np.ndarray]] = {}  # by where it has been fetched to
        for value in wanted:
            before = tuple(self._fetched.get(value, ()))
            if before not in missing:
                missing[before] = [
                    self._missing(before, layout, process) for process in range(self._count)
                ]
            column = self._columns[value[1]]
            for q, theirs in enumerate(missing[before]):
                for n in theirs[shares.home[theirs] == me]:
                    outgoing.setdefault(q, []).append(_payload(column[number[n]]))
            for n in missing[before][me]:
                incoming.setdefault(int(shares.home[n]), []).append((value, int(n)))
            self._fetched.setdefault(value, []).append(layout)
        names = " ".join(field for _, field in wanted)
        blobs = {q: column_codec.encode(entries, names) for q, entries in outgoing.items()}
        for p, blob in self._swap(names, blobs, incoming).items():
            for (value, n), entry in zip(incoming[p], column_codec.decode(blob), strict=True):
                self._received.setdefault(value, {})[n] = entry

    def _missing(self, before: Sequence[Layout], layout: Layout, process: int) -> np.ndarray:
        """Sequences that a process wants for a layout and has neither at home nor from before."""
        needed = self.shares.needed(layout)[process]
        needed = needed[self.shares.home[needed] != process]
        for other in before:
            needed = np.setdiff1d(needed, self.shares.needed(other)[process])
        return needed

    def _swap(
        self, what: str, blobs: Mapping[int, bytes], sources: Collection[int]
    ) -> dict[int, bytes]:
        with processes.communicating():
            came, traffic = processes.host_exchange().exchange(blobs, sources)
        self.traffic[what] = self.traffic.get(what, Traffic()) + traffic
        return came

    def _sequences(self, layout: Layout) -> Sequences:
        """The sequences in this process's rows."""
        needed = self.shares.needed(layout)[self._me]
        prompt, response, mask = (
            self.entries(self._sources[field], field, layout) for field in STRUCTURE
        )
        return Sequences(
            group=[int(g) for g in self.shares.group[needed]],
            sample=[int(n) for n in self.shares.sample[needed]],
            prompt=[_payload(p) for p in prompt],
            response=response,
            response_mask=mask,
        )

    def _placement(self, layout: Layout) -> Placement:
        if layout not in self._placements:
            self._placements[layout] = self.shares.placement(layout, self._me)
        return self._placements[layout]

    def _to_mesh(self, edge: Edge) -> Any:
        layout = edge.target_layout
        placement = self._placement(layout)
        if edge.field in STRUCTURE:
            if layout not in self._rows:
                rows = batch_lib.to_rows(self._sequences(layout), placement)
                self._rows[layout] = jax.tree.map(lambda x: self._place(x, layout), rows)
            return self._rows[layout]
        entries = self.entries(edge.source, edge.field, layout)
        column = self._per_token.get((edge.source, edge.field))
        if column is not None:
            outline = self._outline(layout)
            lengths = zip(map(len, outline.prompt), map(len, outline.response), strict=True)
            _check_shapes(edge, entries, [column.entry_shape(*of_one) for of_one in lengths])
            packed = batch_lib.token_field(outline, placement, entries, column)
        else:
            _check_shapes(edge, entries, [()] * len(entries))
            packed = batch_lib.sequence_field(placement, entries)
        return self._place(packed, layout)

    def _outline(self, layout: Layout) -> Sequences:
        """Sequences of this process's rows, whose values do not matter."""
        shares = self.shares
        needed = shares.needed(layout)[self._me]
        prompt, response = shares.prompt[needed], shares.response[needed]
        tokens = np.zeros(int(max(prompt.max(initial=0), response.max(initial=0))), np.int32)
        return Sequences(
            group=[int(g) for g in shares.group[needed]],
            sample=[int(n) for n in shares.sample[needed]],
            prompt=[tokens[:n] for n in prompt],
            response=[tokens[:n] for n in response],
            response_mask=[tokens[:n] > 0 for n in response],
        )

    def _place(self, local: np.ndarray, layout: Layout) -> jax.Array:
        """This process's rows -> global array, rows divided over the mesh's data ranks."""
        mesh = self._meshes[layout]
        sharding = NamedSharding(mesh, rows_spec(mesh))
        rows = self._packing.rows[layout] * data_ranks(layout)
        shape = (local.shape[0], rows, *local.shape[2:])
        return jax.make_array_from_process_local_data(sharding, local, shape)

    def _to_other_mesh(self, edge: Edge, value: Any) -> Any:
        source, target = edge.source_layout, edge.target_layout
        pairs: list[tuple[Row, Row]] = []
        both = zip(self.shares.assignments(source), self.shares.assignments(target), strict=True)
        for k, (before, after) in enumerate(both):
            places = zip(_places(before.rank), _places(after.rank), strict=True)
            pairs += [((k, *here), (k, *there)) for here, there in places]
        moved, traffic = self._repartitions[source, target](value, pairs)
        self.traffic[edge.field] = self.traffic.get(edge.field, Traffic()) + traffic
        return moved

    def _to_host(self, edge: Edge, value: Any) -> list[Any]:
        """Device field -> column of this process's samples, in their order."""
        layout, shares = edge.source_layout, self.shares
        placement = self._placement(layout)
        local = _own_rows(value)
        if local.shape[2] == placement.shape.tokens:
            found = batch_lib.from_token_field(self._outline(layout), placement, local)
        else:
            found = batch_lib.from_sequence_field(placement, local)
        needed = shares.needed(layout)[self._me]
        here = {int(n): found[i] for i, n in enumerate(needed)}
        sender = shares.sender(layout)
        if shares.anything_moves(layout):
            blobs = {}
            for q in range(self._count):
                wanted = needed[(sender[needed] == self._me) & (shares.home[needed] == q)]
                if q != self._me and len(wanted):
                    blobs[q] = column_codec.encode((here[int(n)] for n in wanted), edge.field)
            home = np.flatnonzero(shares.home == self._me)
            senders = {int(p) for p in sender[home]} - {self._me}
            for p, blob in self._swap(edge.field, blobs, senders).items():
                here |= zip(
                    map(int, home[sender[home] == p]), column_codec.decode(blob), strict=True
                )
        return [here[int(n)] for n in np.flatnonzero(shares.home == self._me)]

    def _with_peers(self, field: str, own: Sequence[Any], hosts: int) -> list[Any]:
        """The columns of all hosts of this process's sampler, one after the other."""
        first = self._me // hosts * hosts
        group = range(first, first + hosts)
        others = [p for p in group if p != self._me]
        blob = column_codec.encode(own, field)
        came = self._swap(field, dict.fromkeys(others, blob), others)
        parts = (own if p == self._me else column_codec.decode(came[p]) for p in group)
        return [entry for part in parts for entry in part]


def take(column: Sequence[Any], index: np.ndarray) -> Sequence[Any]:
    """The entries of a column at these places."""
    return column[index] if isinstance(column, np.ndarray) else [column[i] for i in index]


def _check_shapes(edge: Edge, entries: Sequence[Any], wanted: Sequence[tuple[int, ...]]) -> None:
    """ValueError unless entries are what rows hold of a field: a number, or something for every
    token."""
    for entry, shape in zip(entries, wanted, strict=True):
        if np.shape(entry) == shape:
            continue
        what = f"{shape[0]} numbers, one per token" if shape else "one number per response"
        if len(shape) > 1:
            what = f"one of shape {shape}: tokens of prompt and response first"
        if shape:
            fix = f"take {edge.field!r} out of its per_token" if np.ndim(entry) == 0 else "mend it"
        else:
            fix = (
                "name it in the node's per_token" if np.ndim(entry) == 1 else "read it on the host"
            )
        raise ValueError(
            f"node {edge.source!r}: an entry of {edge.field!r} has shape {np.shape(entry)}, and "
            f"rows hold {what}: {fix}"
        )


def _payload(entry: Any) -> Any:
    """What of an entry travels: of a prompt its tokens, the rest stays with its owner."""
    return entry.tokens if isinstance(entry, Prompt) else entry


def _places(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """(rank, row within it) of each row, given the rank of each."""
    filled: dict[int, int] = {}
    places = []
    for rank in ranks:
        places.append((rank, filled.get(rank, 0)))
        filled[rank] = filled.get(rank, 0) + 1
    return places


def _own_rows(x: jax.Array) -> np.ndarray:
    """The rows of [K, R, ...] that lie on this process's devices, each once, in order."""
    parts = {}
    for shard in x.addressable_shards:
        parts[shard.index[1].start or 0] = shard.data
    return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)], axis=1)
