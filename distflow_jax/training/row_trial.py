"""Trial of the trainer's attention on this device, over rows of the run's own kind.

L tokens, N heads, K key/value heads, H head dim.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from distflow_jax.batch import Placement, Rows, RowShape, Sequences, to_rows
from distflow_jax.models.attention import UNLIMITED
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.kernels.implementation_trial import Tried, tried
from distflow_jax.models.kernels.library_attention import SPLASH_UNIT
from distflow_jax.training.attention_choice import RowAttention
from distflow_jax.training.forward import ForwardConfig, row_attention_of

_CHECKED_TOKENS = 512  # at least, in whole tiles
_GROUPS, _MEMBERS = 2, 4


def try_rows(
    found: Sequence[RowAttention],
    model: DecoderConfig,
    forward: ForwardConfig,
    *,
    row_tokens: int,
    shared: bool,
) -> dict[str, Tried]:
    """Tries each, by name: output and gradients in all kinds of layers, without images.

    Each is compared with float32 on a short row, and timed on one of `row_tokens` where there is a
    choice.
    """
    unit = math.lcm(SPLASH_UNIT, *(one.block or 1 for one in found))
    length = min(row_tokens, -(-_CHECKED_TOKENS // unit) * unit)
    few, many = (_rows(n, shared) for n in (length, row_tokens))
    dtype, result = forward.compute_dtype, {}
    plain = dataclasses.replace(forward, attention_block=0, attention_by="loops")
    exact = _runner(plain, model, few, "float32")
    for one in found:
        own = dataclasses.replace(forward, attention_block=one.block, attention_by=one.by)
        timed = _runner(own, model, many, dtype), _arguments(model, row_tokens, dtype)
        result[one.name] = tried(
            _runner(own, model, few, dtype),
            exact,
            _arguments(model, length, dtype),
            timed if len(found) > 1 else None,
        )
    return result


def _rows(length: int, shared: bool) -> Rows:
    """One row of a few sequences and padding: groups of responses to a prompt."""
    prompt = np.zeros(length // 16, np.int32)
    response = np.zeros(length * 3 // 32 if shared else length // 32, np.int32)
    number = range(_GROUPS * _MEMBERS)
    sequences = Sequences(
        group=[i // _MEMBERS for i in number],
        member=[i % _MEMBERS for i in number],
        prompt=[prompt for _ in number],
        response=[response for _ in number],
        response_mask=[np.ones(len(response), bool) for _ in number],
    )
    shape = RowShape(1, 1, length, len(number))
    rows = to_rows(sequences, Placement(shape, ((tuple(number),),), shared))
    return jax.tree.map(lambda x: jnp.asarray(x[0]), rows)


def _arguments(model: DecoderConfig, length: int, dtype: str) -> list[jax.Array]:
    """Queries, keys, values and the output's gradient, [1, L, N or K, H]."""
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (model.num_heads, model.num_kv_heads, model.num_kv_heads, model.num_heads)
    return [
        jax.random.normal(key, (1, length, n, model.head_dim), jnp.float32).astype(dtype)
        for key, n in zip(keys, heads, strict=True)
    ]


def _runner(
    forward: ForwardConfig, model: DecoderConfig, rows: Rows, dtype: str
) -> Callable[..., list[jax.Array]]:
    """Output, and gradients of queries, keys and values, in layers without and with a window."""
    windows = [(UNLIMITED,), (model.sliding_window,)] if model.sliding_window else [()]

    def run(*arguments):
        q, k, v, gradient = (x.astype(dtype) for x in arguments)
        some, found = (rows.segment > 0)[..., None, None], []
        attend = row_attention_of(rows, forward, model)
        for window in windows:
            layer = functools.partial(_layer, attend, some, tuple(map(jnp.int32, window)))
            out, back = jax.vjp(layer, q, k, v)
            found += [out, *back(gradient)]
        return found

    return run


def _layer(attend, some, window, q, k, v):
    """Attention of a layer, 0 for padding, which may attend to anything."""
    return jnp.where(some, attend(q, k, v, None, *window)[0], 0)
