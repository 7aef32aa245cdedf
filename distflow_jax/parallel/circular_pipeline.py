"""Circular pipeline: layers assigned to pipeline ranks by round, and brought back in order.

L layers are stored in order, L / S of them on each of S pipeline ranks. A pipeline that goes round
its ranks r times has r S layer groups of L / (r S) layers: group g is worked on by rank g mod S, in
round g // S. Every rank stores r groups and works on r groups, so the moves are a bipartite
multigraph in which all degrees are r. Such a graph is r perfect matchings (König 1916): r
permutations, in each of which a rank sends one group and receives one. A device holds at most twice
its share of the layers.

`assign` and `collect` are for the body of a shard_map over the pipeline axis.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# (x [B, T, D], (a layer, its inputs)) -> (x, further outputs of the layer)
Body = Callable[[jax.Array, tuple[Any, Any]], tuple[jax.Array, Any]]


@dataclasses.dataclass(frozen=True)
class CircularPipeline:
    """Shape of a pipeline. One round is a plain pipeline, whose layers stay where they are."""

    axis: str  # of the mesh
    ranks: int  # S
    repeats: int  # r, rounds


def matchings(ranks: int, repeats: int) -> np.ndarray:
    """The layer group that each rank sends in each permutation, int32 [r, S].

    In permutation k rank s sends the ((k + s d // S) mod r)-th of its groups s r .. s r + r - 1,
    with d = gcd(r, S). Each goes to another rank: with s = a S / d + b, b < S / d, group
    s r + (k + a) mod r is for rank b r + (k + a) mod r, modulo S. For two a these differ modulo d,
    as d divides r and S; for one a the b r differ modulo S.
    """
    k, s = np.arange(repeats)[:, None], np.arange(ranks)
    return (s * repeats + (k + s * math.gcd(repeats, ranks) // ranks) % repeats).astype(np.int32)


def rounds(ranks: int, repeats: int) -> np.ndarray:
    """The round of the layer group that each rank receives in each permutation, int32 [r, S]."""
    group = matchings(ranks, repeats)
    found = np.empty_like(group)
    np.put_along_axis(found, group % ranks, group // ranks, axis=1)
    return found


def assign(layers: Any, rank: jax.Array, pipeline: CircularPipeline) -> Any:
    """The layers that a rank stores, arrays [L / S, ...] -> those it works on, [L / S, ...].

    The result is in the order of permutations, see `rounds`. `rank`: its number, a scalar. The
    gradient takes the same permutations back.
    """
    ranks, repeats = pipeline.ranks, pipeline.repeats
    if repeats == 1:
        return layers
    group = matchings(ranks, repeats)
    own = jnp.asarray(group % repeats)

    def one(x):
        x, received = x.reshape(repeats, -1, *x.shape[1:]), []
        for k, to in enumerate((group % ranks).tolist()):
            sent = jax.lax.dynamic_index_in_dim(x, own[k, rank], keepdims=False)
            received.append(jax.lax.ppermute(sent, pipeline.axis, list(enumerate(to))))
        return jnp.concatenate(received)

    return jax.tree.map(one, layers)


def collect(by_round: Any, rank: jax.Array, pipeline: CircularPipeline) -> Any:
    """Outputs of a rank by round, arrays [r, L / (r S), ...] -> of its stored layers, [L / S, ...].

    The inverse of `assign` for values that belong to layers, in the stored order of these. `rank`:
    a scalar.
    """
    ranks, repeats = pipeline.ranks, pipeline.repeats
    if repeats == 1:
        return jax.tree.map(lambda x: x[0], by_round)
    group = matchings(ranks, repeats)
    received = jnp.asarray(rounds(ranks, repeats))
    # the permutation in which a rank sent each of its groups
    order = jnp.asarray(np.argsort(group % repeats, axis=0).astype(np.int32))[:, rank]

    def one(x):
        back = []
        for k, to in enumerate((group % ranks).tolist()):
            held = jax.lax.dynamic_index_in_dim(x, received[k, rank], keepdims=False)
            back.append(jax.lax.ppermute(held, pipeline.axis, [(d, s) for s, d in enumerate(to)]))
        return jnp.take(jnp.stack(back), order, axis=0).reshape(-1, *x.shape[2:])

    return jax.tree.map(one, by_round)


def layer_slice(layers: Any, first: jax.Array, size: int) -> Any:
    """Layers `first` .. `first + size - 1` of arrays [L, ...]; `first` a scalar."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, size), layers)


def scan_layer_slice(
    body: Body,
    remat: Callable[[Body], Body],
    x: jax.Array,
    layers: Any,
    inputs: Any,
    first: jax.Array,
    size: int,
) -> tuple[jax.Array, Any]:
    """Scans layers `first` .. `first + size - 1`, for use in a loop over `first`.

    Equals `jax.lax.scan(remat(body), x, (layer_slice(layers, first, size), inputs))`. The gradient
    of that scan would store the weights of every round of the loop. Here weights are sliced within
    `remat`, which slices them again in the backward pass. Their gradient is attached to a slice
    outside of `remat`: the gradient of the inner slice would be zeros for all layers but one,
    summed layer by layer.

    Args:
      body: of the scan.
      remat: wraps the body, see pipeline.scan_layers.
      x: [B, T, D].
      layers: arrays [L, ...].
      inputs: arrays [size, ...], of the layers of the slice.
      first: scalar.
      size: number of layers.
    """
    held = jax.lax.stop_gradient(layers)

    def one(x, given):
        number, layer, extra = given
        value = jax.tree.map(functools.partial(_at, number), held)
        return body(x, (jax.tree.map(_with_gradient_of, value, layer), extra))

    numbers = first + jnp.arange(size, dtype=jnp.int32)
    return jax.lax.scan(remat(one), x, (numbers, layer_slice(layers, first, size), inputs))


def _at(number: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, number, keepdims=False)


@jax.custom_jvp
def _with_gradient_of(value: jax.Array, same: jax.Array) -> jax.Array:
    """`value`, with its gradient passed to `same`, which is equal and not read."""
    return value


_with_gradient_of.defjvp(lambda primals, tangents: (primals[0], tangents[1]))
