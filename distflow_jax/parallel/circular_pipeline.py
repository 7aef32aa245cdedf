"""Layers dealt in turn to the stages of a circular pipeline, worked on in parts, and dealt back.

L layers lie in order, L / S of them on each of S stages. A pipeline that goes round the stages r
times cuts them into r S chunks of L / (r S): chunk g is for stage g mod S, in round g // S. Every
stage has r chunks and is to get r, so that the moves are a bipartite multigraph in which all
degrees are r, and that is r perfect matchings (König 1916): r permutations, in each of which a
stage sends one chunk and gets one. A device has its share of the layers twice, and never more.

`deal` and `collect` are for the body of a shard_map over the axis of stages.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# (x [B, T, D], (a layer, its inputs)) -> (x, what the layer gives beside it)
Body = Callable[[jax.Array, tuple[Any, Any]], tuple[jax.Array, Any]]


def matchings(stages: int, repeats: int) -> np.ndarray:
    """The chunk that each stage sends in each permutation, int32 [r, S].

    In permutation k stage s sends the ((k + s d // S) mod r)-th of its chunks s r .. s r + r - 1,
    with d = gcd(r, S). Each goes to another stage: with s = a S / d + b, b < S / d, chunk
    s r + (k + a) mod r is for stage b r + (k + a) mod r, modulo S. For two a these differ modulo d,
    as d divides r and S; for one a the b r differ modulo S.
    """
    k, s = np.arange(repeats)[:, None], np.arange(stages)
    return (s * repeats + (k + s * math.gcd(repeats, stages) // stages) % repeats).astype(np.int32)


def rounds(stages: int, repeats: int) -> np.ndarray:
    """The round of the chunk that each stage gets in each permutation, int32 [r, S]."""
    chunk = matchings(stages, repeats)
    found = np.empty_like(chunk)
    np.put_along_axis(found, chunk % stages, chunk // stages, axis=1)
    return found


def deal(layers: Any, stage: jax.Array, axis: str, stages: int, repeats: int) -> Any:
    """The layers of stage `stage`, arrays [L / S, ...] -> those that it works on, as many.

    In the order of permutations, see `rounds`. A stage sends its layers once, and the gradient of
    those that it got.
    """
    if repeats == 1:
        return layers
    chunk = matchings(stages, repeats)
    own = jnp.asarray(chunk % repeats)

    def one(x):
        x, got = x.reshape(repeats, -1, *x.shape[1:]), []
        for k, to in enumerate((chunk % stages).tolist()):
            sent = jax.lax.dynamic_index_in_dim(x, own[k, stage], keepdims=False)
            got.append(jax.lax.ppermute(sent, axis, list(enumerate(to))))
        return jnp.concatenate(got)

    return jax.tree.map(one, layers)


def collect(by_round: Any, stage: jax.Array, axis: str, stages: int, repeats: int) -> Any:
    """What stage `stage` has of each round, arrays [r, L / (r S), ...] -> of its own layers in
    their order, [L / S, ...]."""
    if repeats == 1:
        return jax.tree.map(lambda x: x[0], by_round)
    chunk = matchings(stages, repeats)
    got = jnp.asarray(rounds(stages, repeats))
    # the permutation in which a stage sent each of its chunks
    order = jnp.asarray(np.argsort(chunk % repeats, axis=0).astype(np.int32))[:, stage]

    def one(x):
        back = []
        for k, to in enumerate((chunk % stages).tolist()):
            held = jax.lax.dynamic_index_in_dim(x, got[k, stage], keepdims=False)
            back.append(jax.lax.ppermute(held, axis, [(d, s) for s, d in enumerate(to)]))
        return jnp.take(jnp.stack(back), order, axis=0).reshape(-1, *x.shape[2:])

    return jax.tree.map(one, by_round)


def some(layers: Any, first: jax.Array, size: int) -> Any:
    """`size` layers from `first` on, of arrays with layers in front."""
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, first, size), layers)


def scan_some(
    body: Body,
    remat: Callable[[Body], Body],
    x: jax.Array,
    layers: Any,
    inputs: Any,
    first: jax.Array,
    size: int,
) -> tuple[jax.Array, Any]:
    """`jax.lax.scan(remat(body), x, (some(layers, first, size), inputs))`, for a loop over `first`.

    Its gradient would keep the weights of every round of that loop. So they are cut out of `layers`
    within `remat`, which cuts them out again for the backward pass. Their gradient goes to what is
    cut out before it: of a cut within, it would be zeros for all layers but one, added up layer by
    layer.
    """
    held = jax.lax.stop_gradient(layers)

    def one(x, given):
        number, layer, extra = given
        value = jax.tree.map(functools.partial(_at, number), held)
        return body(x, (jax.tree.map(_with_gradient_of, value, layer), extra))

    numbers = first + jnp.arange(size, dtype=jnp.int32)
    return jax.lax.scan(remat(one), x, (numbers, some(layers, first, size), inputs))


def _at(number: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, number, keepdims=False)


@jax.custom_jvp
def _with_gradient_of(value: jax.Array, same: jax.Array) -> jax.Array:
    """`value`, whose gradient goes to `same`: equal to it, and not read."""
    return value


_with_gradient_of.defjvp(lambda primals, tangents: (primals[0], tangents[1]))
