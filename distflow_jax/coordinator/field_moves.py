"""Moves of fields between layouts: pack, unpack, reshard, share.

Each takes the step's fields (a FieldStore), their assignment to rows (Shares) and meshes. All but
`entries` are collective: every process calls them in the same order. N samples of this process; K
mini-batches, R rows, L tokens, S sequences per row.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from distflow_jax import batch as batch_lib
from distflow_jax.batch import Prompt, Rows, Sequences, TokenColumn
from distflow_jax.cluster import processes
from distflow_jax.coordinator import column_codec
from distflow_jax.coordinator.assignment import Shares, StepLengths, data_ranks
from distflow_jax.coordinator.field_store import FieldStore, Value
from distflow_jax.coordinator.row_images import encoded_images, pack_images
from distflow_jax.images import turn_images
from distflow_jax.images.prompt_images import PromptImages, from_bytes, prompt_images, to_bytes
from distflow_jax.images.turn_images import TurnImages
from distflow_jax.layout import RESPONSE_IMAGES, ROWS_COLUMNS, Edge, Layout, hosts_of
from distflow_jax.parallel.rules import rows_spec
from distflow_jax.resharding.rows_all_to_all import Row, RowsAcrossSubmeshes, RowsAllToAll


def gathered_lengths(store: FieldStore) -> StepLengths:
    """The lengths of the responses of all processes: three integers of each are all-gathered.

    Raises ValueError where counters of a process do not rise: its columns would be taken for those
    of other responses.
    """
    prompt, response = (store.columns[name] for name in ("prompt", "response"))
    counter = store.columns["uid"][:, 0]
    if (np.diff(counter) < 0).any():
        raise ValueError(f"prompts do not stand in the order of their counters: {counter.tolist()}")
    mine = np.stack(
        [
            counter,
            [len(entry.tokens) for entry in prompt],
            [len(entry) for entry in response],
        ],
        axis=1,
    ).astype(np.int32)
    tables = processes.all_gather_ragged(mine)
    home = np.repeat(np.arange(len(tables)), [len(table) for table in tables])
    table = np.concatenate(tables).astype(np.int64)
    order = np.argsort(table[:, 0], kind="stable")  # responses of a prompt are in order
    counter, prompt, response = table[order].T
    return StepLengths(counter, home[order], prompt, response)


# -- host to mesh ---------------------------------------------------------------------------------


def fetch(
    store: FieldStore,
    shares: Shares,
    layout: Layout,
    needed: Collection[Value],
    packed: Collection[Value],
) -> None:
    """Brings columns to the processes whose rows of a mesh need their entries.

    Does nothing where all of `needed` are there already. Otherwise one exchange brings all columns
    of `packed` that are written, the values that the plan brings to this mesh. An entry that a
    process sampled, or received for another layout, is not sent again.
    """
    if all(layout in store.fetched.get(value, ()) for value in needed):
        return
    if not shares.anything_moves(layout):
        return
    me = processes.process_index()
    number = np.cumsum(shares.home == me) - 1  # of a sequence in this process's columns
    wanted = [
        value
        for value in sorted(packed, key=str)
        if store.sources.get(value[1], store) == value[0]
        and layout not in store.fetched.get(value, ())
    ]
    outgoing: dict[int, list[Any]] = {}
    incoming: dict[int, list[tuple[Value, int]]] = {}
    missing: dict[tuple[Layout, ...], list[np.ndarray]] = {}  # by the layouts it was fetched for
    for value in wanted:
        before = tuple(store.fetched.get(value, ()))
        if before not in missing:
            missing[before] = [
                _missing(shares, before, layout, process) for process in range(shares.processes)
            ]
        column = _payloads(store.columns[value[1]], value[1])
        for q, theirs in enumerate(missing[before]):
            for n in theirs[shares.home[theirs] == me]:
                outgoing.setdefault(q, []).append(column[number[n]])
        for n in missing[before][me]:
            incoming.setdefault(int(shares.home[n]), []).append((value, int(n)))
        store.fetched.setdefault(value, []).append(layout)
    names = " ".join(field for _, field in wanted)
    blobs = {q: column_codec.encode(entries, names) for q, entries in outgoing.items()}
    for p, blob in _exchange(store, names, blobs, incoming).items():
        before = None
        for (value, n), entry in zip(incoming[p], column_codec.decode(blob), strict=True):
            pictures = value[1] in ("prompt", RESPONSE_IMAGES)
            if pictures and entry is not before and entry.dtype == np.uint8:
                store.image_bytes += entry.nbytes
            before = entry
            store.received.setdefault(value, {})[n] = entry


def _missing(shares: Shares, before: Sequence[Layout], layout: Layout, process: int) -> np.ndarray:
    """Sequences of a layout that a process has neither sampled nor received `before`, int64 [n]."""
    needed = shares.needed(layout)[process]
    needed = needed[shares.home[needed] != process]
    for other in before:
        needed = np.setdiff1d(needed, shares.needed(other)[process])
    return needed


def entries(store: FieldStore, shares: Shares, value: Value, layout: Layout) -> list[Any]:
    """A fetched column's entries for the sequences in this process's rows of a mesh, in order.

    They are `shares.needed(layout)` of this process. For fields that rows do not hold, images for
    instance; a prompt of another process comes as its tokens.
    """
    me = processes.process_index()
    home = np.flatnonzero(shares.home == me)
    mine = dict(zip(map(int, home), store.columns[value[1]], strict=True))
    received = store.received.get(value, {})
    return [mine[n] if n in mine else received[n] for n in map(int, shares.needed(layout)[me])]


def pack_rows(store: FieldStore, shares: Shares, layout: Layout, mesh: Mesh) -> Rows:
    """Fetched prompts and responses -> Rows on a mesh, [K, R, L] and [K, R, S] arrays."""
    me = processes.process_index()
    needed = shares.needed(layout)[me]
    prompt, response, mask = (
        entries(store, shares, (store.sources[name], name), layout) for name in ROWS_COLUMNS
    )
    tokens, images = _opened(prompt, shares.plan.images is not None)
    sequences = Sequences(
        group=shares.group[needed].tolist(),
        member=shares.member[needed].tolist(),
        prompt=tokens,
        response=response,
        response_mask=mask,
    )
    placement = shares.placement(layout, me)
    rows = batch_lib.to_rows(sequences, placement)
    if shares.plan.images is not None:
        shown: list[TurnImages | None] = []
        if (value := store.response_images) is not None:
            blobs = entries(store, shares, value, layout)
            shown = [turn_images.from_bytes(blob) for blob in blobs]
        rows.images = pack_images(sequences, images, placement, shares.plan.images, shown)
        if layout == shares.plan.primary:
            window = shares.plan.images.window
            store.encoded = encoded_images(sequences, images, placement, window, shown)
    return jax.tree.map(lambda x: _place(x, shares, layout, mesh), rows)


def _opened(
    prompts: Sequence[Any], has_tower: bool
) -> tuple[list[np.ndarray], list[PromptImages | None]]:
    """(tokens, images) of fetched prompts: records of this process, payloads of others."""
    tokens, images = [], []
    known: dict[int, tuple[np.ndarray, PromptImages | None]] = {}
    for entry in prompts:
        if id(entry) not in known:
            if isinstance(entry, Prompt):
                own = prompt_images(entry.images, entry.patch) if has_tower else None
                known[id(entry)] = entry.tokens, own
            else:
                blob = isinstance(entry, np.ndarray) and entry.dtype == np.uint8
                known[id(entry)] = from_bytes(entry) if blob else (entry, None)
        tokens.append(known[id(entry)][0])
        images.append(known[id(entry)][1])
    return tokens, images


def pack(
    store: FieldStore, shares: Shares, edge: Edge, mesh: Mesh, column: TokenColumn | None
) -> jax.Array:
    """A fetched column -> [K, R, L, ...] on a mesh as `column` says; None: float32 [K, R, S].

    Raises ValueError for entries of another shape.
    """
    layout, me = edge.target_layout, processes.process_index()
    placement = shares.placement(layout, me)
    values = entries(store, shares, (edge.source, edge.field), layout)
    if column is None:
        _check_shapes(edge, values, [()] * len(values))
        packed = batch_lib.sequence_field(placement, values)
    else:
        outline = _outline(shares, layout)
        lengths = zip(map(len, outline.prompt), map(len, outline.response), strict=True)
        _check_shapes(edge, values, [column.entry_shape(*of_one) for of_one in lengths])
        packed = batch_lib.token_field(outline, placement, values, column)
    return _place(packed, shares, layout, mesh)


def pack_as_written(
    store: FieldStore,
    shares: Shares,
    edge: Edge,
    mesh: Mesh,
    column: Sequence[Any],
    per_token: TokenColumn | None,
) -> jax.Array:
    """A column of this process's N samples -> the field as if the edge's source, which is on a
    mesh, had written it there: [K, R, L] or, without `per_token`, [K, R, S]."""
    layout, value = edge.source_layout, (edge.source, edge.field)
    columns, sources = dict(store.columns), dict(store.sources)
    there = dataclasses.replace(edge, target_layout=layout, move="pack")
    store.put(*value, column)
    fetch(store, shares, layout, [value], {value})
    packed = pack(store, shares, there, mesh, per_token)
    store.free(*value)
    store.columns, store.sources = columns, sources
    return packed


def _outline(shares: Shares, layout: Layout) -> Sequences:
    """Sequences of this process's rows with the right lengths and arbitrary tokens."""
    needed = shares.needed(layout)[processes.process_index()]
    prompt, response = shares.prompt[needed], shares.response[needed]
    tokens = np.zeros(int(max(prompt.max(initial=0), response.max(initial=0))), np.int32)
    return Sequences(
        group=shares.group[needed].tolist(),
        member=shares.member[needed].tolist(),
        prompt=[tokens[:n] for n in prompt],
        response=[tokens[:n] for n in response],
        response_mask=[tokens[:n] > 0 for n in response],
    )


def _place(local: np.ndarray, shares: Shares, layout: Layout, mesh: Mesh) -> jax.Array:
    """This process's rows -> global array, rows divided over the mesh's data ranks."""
    sharding = NamedSharding(mesh, rows_spec(mesh))
    rows = shares.plan.rows[layout] * data_ranks(layout)
    shape = (local.shape[0], rows, *local.shape[2:])
    return jax.make_array_from_process_local_data(sharding, local, shape)


def _check_shapes(edge: Edge, entries: Sequence[Any], wanted: Sequence[tuple[int, ...]]) -> None:
    """ValueError unless each entry has the shape that rows hold: () or one entry per token."""
    for entry, shape in zip(entries, wanted, strict=True):
        if np.shape(entry) == shape:
            continue
        what = f"{shape[0]} numbers, one per token" if shape else "one number per response"
        if len(shape) > 1:
            what = f"one of shape {shape}: tokens of prompt and response first"
        if shape:
            fix = (
                f"take {edge.field!r} out of its per_token" if np.ndim(entry) == 0 else "write that"
            )
        else:
            fix = (
                "name it in the node's per_token" if np.ndim(entry) == 1 else "read it on the host"
            )
        raise ValueError(
            f"node {edge.source!r}: an entry of {edge.field!r} has shape {np.shape(entry)}, and "
            f"rows hold {what}: {fix}"
        )


def _payloads(column: Sequence[Any], field: str) -> Sequence[Any]:
    """The parts of a column's entries that travel: of a prompt only its tokens and patches.

    Entries that are one object stay one object, so that a prompt travels once for its responses.
    """
    if field != "prompt":
        return column
    known: dict[int, Any] = {}
    for entry in column:
        if isinstance(entry, Prompt) and id(entry) not in known:
            images = prompt_images(entry.images, entry.patch)
            known[id(entry)] = entry.tokens if images is None else to_bytes(entry.tokens, images)
    return [known.get(id(entry), entry) for entry in column]


# -- mesh to mesh, mesh to host -------------------------------------------------------------------


def reshard(
    store: FieldStore,
    shares: Shares,
    edge: Edge,
    value: jax.Array,
    repartition: RowsAllToAll | RowsAcrossSubmeshes,
) -> jax.Array:
    """A field [K, R, ...] of one mesh -> the same sequences in the rows of another."""
    pairs: list[tuple[Row, Row]] = []
    layouts = (edge.source_layout, edge.target_layout)
    both = zip(*(shares.assignments(layout) for layout in layouts), strict=True)
    for k, (before, after) in enumerate(both):
        places = zip(_places(before.rank), _places(after.rank), strict=True)
        pairs += [((k, *here), (k, *there)) for here, there in places]
    moved, traffic = repartition(value, pairs)
    store.add_traffic(edge.field, traffic)
    return moved


def unpack(store: FieldStore, shares: Shares, edge: Edge, value: jax.Array) -> Sequence[Any]:
    """A field of a mesh -> column of this process's N samples: a list of arrays of [K, R, L], an
    array [N] of [K, R, S]."""
    layout, me = edge.source_layout, processes.process_index()
    placement = shares.placement(layout, me)
    local = _own_rows(value)
    per_token = local.shape[2] == placement.shape.tokens
    if per_token:
        found = batch_lib.from_token_field(_outline(shares, layout), placement, local)
    else:
        found = batch_lib.from_sequence_field(placement, local)
    needed = shares.needed(layout)[me]
    here = {int(n): found[i] for i, n in enumerate(needed)}
    home = np.flatnonzero(shares.home == me)
    if shares.anything_moves(layout):
        sender = shares.sender(layout)
        blobs = {}
        for q in range(shares.processes):
            wanted = needed[(sender[needed] == me) & (shares.home[needed] == q)]
            if q != me and len(wanted):
                blobs[q] = column_codec.encode((here[int(n)] for n in wanted), edge.field)
        senders = {int(p) for p in sender[home]} - {me}
        for p, blob in _exchange(store, edge.field, blobs, senders).items():
            from_p = map(int, home[sender[home] == p])
            here |= zip(from_p, column_codec.decode(blob), strict=True)
    column = [here[int(n)] for n in home]
    return column if per_token else np.array(column, local.dtype)


def _places(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """(rank, row within the rank) of each row, from the rank of each."""
    filled: dict[int, int] = {}
    places = []
    for rank in ranks:
        places.append((rank, filled.get(rank, 0)))
        filled[rank] = filled.get(rank, 0) + 1
    return places


def _own_rows(x: jax.Array) -> np.ndarray:
    """The rows of x [K, R, ...] on this process's devices, each once, in order."""
    shards = {}
    for shard in x.addressable_shards:
        shards[shard.index[1].start or 0] = shard.data
    return np.concatenate([np.asarray(shards[start]) for start in sorted(shards)], axis=1)


# -- host to host ---------------------------------------------------------------------------------


def share(store: FieldStore, edge: Edge, own: Sequence[Any]) -> Sequence[Any]:
    """A column of N own entries -> the M entries of all hosts of the reader's sampler."""
    hosts, me = hosts_of(edge.target_layout), processes.process_index()
    if hosts == 1:
        return own
    first = me // hosts * hosts
    group = range(first, first + hosts)
    others = [p for p in group if p != me]
    blob = column_codec.encode(own, edge.field)
    came = _exchange(store, edge.field, dict.fromkeys(others, blob), others)
    columns = (own if p == me else column_codec.decode(came[p]) for p in group)
    entries = [entry for column in columns for entry in column]
    return np.array(entries, own.dtype) if isinstance(own, np.ndarray) else entries


def _exchange(
    store: FieldStore, what: str, blobs: Mapping[int, bytes], sources: Collection[int]
) -> dict[int, bytes]:
    """Sends blobs to processes, and receives one from each of `sources`."""
    with processes.communicating():
        came, traffic = processes.host_exchange().exchange(blobs, sources)
    store.add_traffic(what, traffic)
    return came
