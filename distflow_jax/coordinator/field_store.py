"""The fields of one step on one process: values by their writer, and columns of responses.

N responses of this process, M of its sampler: M > N where several hosts share one.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from distflow_jax.batch import Rows, Samples
from distflow_jax.cluster.host_exchange import Traffic
from distflow_jax.data.step_columns import entries_of_host
from distflow_jax.layout import (
    ADVANTAGE,
    KEEP,
    RESPONSE_IMAGES,
    ROWS,
    ROWS_COLUMNS,
    VERSION,
    Layout,
    hosts_of,
)

Value = tuple[str | None, str]  # (source, field)


@dataclasses.dataclass
class FieldStore:
    """Fields that nodes wrote in a step, and their copies in other layouts.

    The key of a value is (source, field), so that a node may write a field anew while another still
    reads the version before. The loader is the source None. No method communicates.
    """

    writers: Mapping[str | None, Layout]  # layout of each node by its id
    uid: np.ndarray  # int64 [M, 2], of each response of this process's sampler
    own: np.ndarray  # int64 [N], which of these are this process's
    values: dict[Value, Any] = dataclasses.field(default_factory=dict)  # as written
    # entries of this process's responses by field, as last written, and the node that wrote them
    columns: dict[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    sources: dict[str, str | None] = dataclasses.field(default_factory=dict)
    # values in other layouts, by (source, field, layout)
    moved: dict[tuple[str | None, str, Layout], Any] = dataclasses.field(default_factory=dict)
    # entries of other processes by the number of their sequence, and the layouts that needed them
    received: dict[Value, dict[int, Any]] = dataclasses.field(default_factory=dict)
    fetched: dict[Value, list[Layout]] = dataclasses.field(default_factory=dict)
    # the node that wrote advantages on a mesh, and these: kept after their last reader
    advantage: tuple[str | None, jax.Array] | None = None
    # nodes whose values were there when the step began
    done: frozenset[str] = frozenset()
    # bytes received in this step, by field
    traffic: dict[str, Traffic] = dataclasses.field(default_factory=dict)
    # int64 [4], of the trainer's rows: see row_images.encoded_images
    encoded: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(4, np.int64))
    image_bytes: int = 0  # received with prompts that have images, a prompt's once

    @classmethod
    def of_step(
        cls,
        writers: Mapping[str | None, Layout],
        given: Mapping[str, Sequence[Any]],
        process: int = 0,
    ) -> "FieldStore":
        """The store at the start of a step: the loader's columns by name, with "uid" int64 [M, 2].

        Every column has one entry per response of this process's sampler, those to one prompt next
        to each other; hosts that share a sampler pass the same.
        """
        hosts, uid = hosts_of(writers[None]), given["uid"]
        own = np.arange(len(uid))[entries_of_host(uid, process % hosts, hosts)]
        store = cls(writers, uid, own)
        for field, column in given.items():
            store.put(None, field, column)
        return store

    def copy(self) -> "FieldStore":
        """A store that changes independently of this one; entries and arrays are shared."""
        return dataclasses.replace(
            self,
            values=dict(self.values),
            columns=dict(self.columns),
            sources=dict(self.sources),
            moved=dict(self.moved),
            received={value: dict(entries) for value, entries in self.received.items()},
            fetched={value: list(layouts) for value, layouts in self.fetched.items()},
            traffic=dict(self.traffic),
        )

    def with_advantages(self) -> "FieldStore":
        """A store of advantages alone, and of the mask under which they count."""
        chosen = [f for f in (ADVANTAGE, "response_mask") if f in self.columns]
        return dataclasses.replace(
            FieldStore(self.writers, self.uid, self.own),
            columns={field: self.columns[field] for field in chosen},
            sources={field: self.sources[field] for field in chosen},
            advantage=self.advantage,
        )

    def put(self, source: str | None, field: str, value: Any) -> None:
        """Stores what a node wrote: a column, an array or rows. The field `keep` selects responses.

        Raises ValueError for a column whose length is not the number of responses.
        """
        if field == KEEP:
            self.select(self.own_entries(source, field, value))
            return
        self.values[source, field] = value
        self._drop_copies((source, field))  # of an earlier write in this step
        self._drop_received((source, field))
        if field == ADVANTAGE:
            self.advantage = (source, value) if isinstance(value, jax.Array) else None
        if not isinstance(value, jax.Array | Rows):
            self.columns[field] = self.own_entries(source, field, value)
            self.sources[field] = source

    def select(self, keep: Sequence[int]) -> None:
        """Drops the responses whose `keep`, int [N], is 0; orders the others of a prompt by it."""
        rank = np.asarray(keep, np.int64)
        _, group = np.unique(self.uid[self.own, 0], return_inverse=True)
        first = np.full(group.max(initial=-1) + 1, len(rank))
        np.minimum.at(first, group, np.arange(len(rank)))
        order = np.lexsort((rank, first[group]))  # groups stay in their order
        chosen = order[rank[order] > 0]
        self.own = self.own[chosen]
        for value, column in self.values.items():
            if not self.is_shared(value):
                self.values[value] = take(column, chosen)
            self._drop_copies(value)
        self.columns = {field: take(column, chosen) for field, column in self.columns.items()}

    def free(self, source: str | None, field: str) -> None:
        """Drops a value after its last reader. Numbers per response, advantages and versions stay
        for the records, and so do the columns that rows are packed of."""
        value = (source, field)
        self.values.pop(value, None)
        self._drop_copies(value)
        if field == ROWS:
            for column in self.rows_columns:
                self.received.pop(column, None)
        elif field not in (*ROWS_COLUMNS, RESPONSE_IMAGES, "uid"):  # rows may be packed later
            self._drop_received(value)
            goes = self.sources.get(field) == source and field not in (ADVANTAGE, VERSION)
            if goes and any(np.ndim(x) for x in self.columns[field]):
                del self.columns[field], self.sources[field]

    @property
    def response_images(self) -> Value | None:
        """The images of responses; None where the node that wrote the responses wrote none."""
        source = self.sources.get("response")
        has_images = RESPONSE_IMAGES in self.sources and self.sources[RESPONSE_IMAGES] == source
        return (source, RESPONSE_IMAGES) if has_images else None

    @property
    def rows_columns(self) -> list[Value]:
        """The columns that rows are packed of."""
        columns: list[Value] = [(self.sources[name], name) for name in ROWS_COLUMNS]
        return columns if self.response_images is None else [*columns, self.response_images]

    def is_shared(self, value: Value) -> bool:
        """Whether a column has the entries of all hosts of a sampler: M of them, not N."""
        return hosts_of(self.writers[value[0]]) > 1

    def own_entries(self, source: str | None, field: str, column: Sequence[Any]) -> Sequence[Any]:
        """The N entries of a column that belong to this process's responses."""
        if self.is_shared((source, field)):
            return take(column, self.own)
        if len(column) != len(self.own):
            raise ValueError(
                f"field {field!r} written by {source!r} has {len(column)} entries, one per "
                f"response is {len(self.own)}"
            )
        return column

    def samples(self) -> Samples:
        """This process's responses with all columns about them."""
        fields = dict(self.columns)
        named = {name: fields.pop(name) for name in ("uid", *ROWS_COLUMNS)}
        return Samples(**named, fields=fields)

    def add_traffic(self, what: str, traffic: Traffic) -> None:
        """Counts bytes received for a field, or for several fields in one exchange."""
        self.traffic[what] = self.traffic.get(what, Traffic()) + traffic

    def _drop_copies(self, value: Value) -> None:
        for key in [key for key in self.moved if key[:2] == value]:
            del self.moved[key]

    def _drop_received(self, value: Value) -> None:
        self.received.pop(value, None)
        self.fetched.pop(value, None)


def take(column: Sequence[Any], index: np.ndarray) -> Sequence[Any]:
    """The entries of a column at the places `index`, int [n]."""
    return column[index] if isinstance(column, np.ndarray) else [column[i] for i in index]
