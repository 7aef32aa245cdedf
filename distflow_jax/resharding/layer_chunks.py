"""Stacked layers synced in chunks, each with some layers of every pipeline rank.

L layers, S pipeline ranks of the trainer's mesh, which divide the layers in order. A chunk has c
layers of each rank, [S c, ...], those of the first rank in front.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from distflow_jax.resharding.common_mesh import Layouts, Route


@dataclasses.dataclass(frozen=True)
class LayerChunks:
    """Division of the layers into chunks: `size` layers of each rank, from each of `starts`.

    All chunks have one size. Where that does not divide the layers of a rank, the last two overlap.
    """

    layers: int  # L, over all ranks
    ranks: int  # S
    size: int  # c

    @classmethod
    def of_at_most(cls, layers: int, ranks: int, most: int) -> "LayerChunks":
        """The fewest chunks of at most `most` layers each, but at least one layer of every rank."""
        per_rank = layers // ranks
        count = -(-per_rank // max(1, most // ranks))
        return cls(layers, ranks, -(-per_rank // count))

    @property
    def starts(self) -> tuple[int, ...]:
        """The first layer of each chunk, counted within a rank."""
        per_rank = self.layers // self.ranks
        firsts = range(0, per_rank, self.size)
        return tuple(min(first, per_rank - self.size) for first in firsts)

    def layer_numbers(self, start: int) -> list[int]:
        """Numbers of the layers in the chunk at `start`, in the order of the chunk."""
        per_rank = self.layers // self.ranks
        return [s * per_rank + start + i for s in range(self.ranks) for i in range(self.size)]

    def take(self, x: jax.Array, start: jax.Array) -> jax.Array:
        """Cuts a chunk out: x [L, ...] -> [S c, ...], `start` a scalar.

        Traceable; moves nothing between ranks.
        """
        by_rank = x.reshape(self.ranks, -1, *x.shape[1:])
        chunk = lax.dynamic_slice_in_dim(by_rank, start, self.size, axis=1)
        return chunk.reshape(-1, *x.shape[1:])

    def put(self, out: jax.Array, chunk: jax.Array, start: jax.Array) -> jax.Array:
        """Writes a chunk [S c, ...] into `out` [L, ...] at `start`: the inverse of `take`."""
        by_rank = out.reshape(self.ranks, -1, *out.shape[1:])
        chunk = chunk.reshape(self.ranks, self.size, *chunk.shape[1:])
        return lax.dynamic_update_slice_in_dim(by_rank, chunk, start, axis=1).reshape(out.shape)


class LayerSync:
    """Brings the layers to the samplers in chunks: as stacked arrays, or as a list of layers.

    Args:
      route: from the trainer's mesh to the samplers.
      chunks: the division of the layers.
      layers: the trainer's stacked layers, or their ShapeDtypeStructs.
      prepare: applied to a chunk before it is moved; traceable, takes any number of layers.
      hold: applied to a chunk after it has arrived, likewise.
      layouts: of the stacked layers; `layouts.held` is a list where samplers hold a list.
    """

    def __init__(
        self,
        route: Route,
        chunks: LayerChunks,
        layers: Any,
        prepare: Callable[[Any], Any],
        hold: Callable[[Any], Any],
        layouts: Layouts,
    ):
        self._chunks, self._out = chunks, None

        def take(layers, start):
            return prepare(jax.tree.map(lambda x: chunks.take(x, start), layers))

        def put(out, chunk, start):
            if out is None:
                return hold(chunk)
            return jax.tree.map(lambda x, new: chunks.put(x, new, start), out, hold(chunk))

        if isinstance(layouts.held, list):
            of_chunk = layouts.held[: chunks.ranks * chunks.size]
            layouts = dataclasses.replace(layouts, held=of_chunk)
        else:
            self._out = jax.tree.map(
                lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=route.place(s)),
                jax.eval_shape(lambda x: hold(prepare(x)), layers),
                layouts.held,
            )
            self._empty = jax.jit(
                lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self._out),
                out_shardings=jax.tree.map(lambda x: x.sharding, self._out),
            )
        self._move = route.move(take, put, layouts)

    def __call__(self, layers: Any) -> Any:
        """All layers, in the form in which samplers hold them."""
        if self._out is None:
            return self._sync_list(layers)
        out = self._empty()
        for start in self._chunks.starts:
            out = self._sync_chunk(out, layers, start)
        return out

    def leaving(self, layers: Any) -> Iterator[tuple[int, Callable[[], Any]]]:
        """(start of a chunk, call that sends it to the memory of the host) of all chunks."""
        for start in self._chunks.starts:
            yield start, functools.partial(self._move.leave, layers, np.int32(start))

    def arrive(self, left: Sequence[tuple[int, Any]]) -> Any:
        """All layers, from the chunks that have left."""
        if self._out is None:
            return self._listed(
                (start, self._move.arrive(None, chunk, np.int32(start))) for start, chunk in left
            )
        out = self._empty()
        for start, chunk in left:
            out = jax.block_until_ready(self._move.arrive(out, chunk, np.int32(start)))
        return out

    def trace(self, layers: Any) -> tuple[jax.stages.Traced, int]:
        """The program that moves a chunk on the trainer's devices, and how often it runs."""
        return self._move.trace(self._out, layers, np.int32(0)), len(self._chunks.starts)

    def _sync_list(self, layers: Any) -> list[Any]:
        return self._listed(
            (start, self._sync_chunk(None, layers, start)) for start in self._chunks.starts
        )

    def _listed(self, chunks: Iterable[tuple[int, Any]]) -> list[Any]:
        found: dict[int, Any] = {}
        for start, chunk in chunks:
            found |= zip(self._chunks.layer_numbers(start), chunk, strict=True)
        return [found[number] for number in sorted(found)]

    def _sync_chunk(self, out: Any, layers: Any, start: int) -> Any:
        # programs that are enqueued ahead of time allocate their outputs ahead of time
        return jax.block_until_ready(self._move(out, layers, np.int32(start)))
