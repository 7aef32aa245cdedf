"""Stacked layers piece by piece: some of every stage's at a time.

L layers, S stages of the trainer's mesh, which divide them in order; a piece has c layers of each
stage, [S c, ...], the first stage's in front.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from distflow_jax.resharding.routes import Layouts, Route


@dataclasses.dataclass(frozen=True)
class Pieces:
    """`size` layers of each stage in a piece, from each of `starts`, which count within a stage.

    All are of one size; where that does not divide a stage's layers, the last two overlap.
    """

    layers: int  # of all stages
    stages: int
    size: int

    @classmethod
    def of_at_most(cls, layers: int, stages: int, most: int) -> "Pieces":
        """As few as there can be with `most` layers in each, but one of every stage at least."""
        of_stage = layers // stages
        count = -(-of_stage // max(1, most // stages))
        return cls(layers, stages, -(-of_stage // count))

    @property
    def starts(self) -> tuple[int, ...]:
        """The first layer of each piece, within its stage."""
        of_stage = self.layers // self.stages
        firsts = range(0, of_stage, self.size)
        return tuple(min(first, of_stage - self.size) for first in firsts)

    def numbers(self, start: int) -> list[int]:
        """Which layers the piece has, in its order."""
        of_stage = self.layers // self.stages
        return [s * of_stage + start + i for s in range(self.stages) for i in range(self.size)]

    def take(self, x: jax.Array, start: jax.Array) -> jax.Array:
        """[L, ...] -> [S c, ...]. Traceable; moves nothing between stages."""
        by_stage = x.reshape(self.stages, -1, *x.shape[1:])
        piece = lax.dynamic_slice_in_dim(by_stage, start, self.size, axis=1)
        return piece.reshape(-1, *x.shape[1:])

    def put(self, out: jax.Array, piece: jax.Array, start: jax.Array) -> jax.Array:
        """`out` [L, ...] with the piece [S c, ...] in its place: the inverse of `take`."""
        by_stage = out.reshape(self.stages, -1, *out.shape[1:])
        piece = piece.reshape(self.stages, self.size, *piece.shape[1:])
        return lax.dynamic_update_slice_in_dim(by_stage, piece, start, axis=1).reshape(out.shape)


class LayerSteps:
    """Brings layers to samplers in pieces: into stacked arrays, or a list of layers apart.

    Of stacked layers, any number of them: `prepare`, traceable, is done before they go, and `hold`
    when they have arrived. `layers` are the trainer's, or their ShapeDtypeStructs; `layouts` those
    of stacked layers, but held ones apart are in a list.
    """

    def __init__(
        self,
        route: Route,
        pieces: Pieces,
        layers: Any,
        prepare: Callable[[Any], Any],
        hold: Callable[[Any], Any],
        layouts: Layouts,
    ):
        self._pieces, self._out = pieces, None

        def take(layers, start):
            return prepare(jax.tree.map(lambda x: pieces.take(x, start), layers))

        def put(out, piece, start):
            if out is None:
                return hold(piece)
            return jax.tree.map(lambda x, new: pieces.put(x, new, start), out, hold(piece))

        if isinstance(layouts.held, list):
            of_piece = layouts.held[: pieces.stages * pieces.size]
            layouts = dataclasses.replace(layouts, held=of_piece)
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
        self._step = route.step(take, put, layouts)

    def __call__(self, layers: Any) -> Any:
        """All layers as samplers hold them."""
        if self._out is None:
            return self._bring_apart(layers)
        out = self._empty()
        for start in self._pieces.starts:
            out = self._bring_piece(out, layers, start)
        return out

    def trace(self, layers: Any) -> tuple[jax.stages.Traced, int]:
        """The program that brings a piece on the trainer's devices, and how often it runs."""
        return self._step.trace(self._out, layers, np.int32(0)), len(self._pieces.starts)

    def _bring_apart(self, layers: Any) -> list[Any]:
        found: dict[int, Any] = {}
        for start in self._pieces.starts:
            piece = self._bring_piece(None, layers, start)
            found |= zip(self._pieces.numbers(start), piece, strict=True)
        return [found[number] for number in sorted(found)]

    def _bring_piece(self, out: Any, layers: Any, start: int) -> Any:
        # what is handed to the devices ahead of time has its memory ahead of time
        return jax.block_until_ready(self._step(out, layers, np.int32(start)))
