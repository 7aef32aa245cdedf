"""Trial of a sampler's attention on this device: of decode steps over pages, and of prefill.

O owners, K key/value heads, R query rows of one, N heads, H head dim, W tokens of a page, C pages
of an owner, T tokens of a row.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from distflow_jax.models.attention import masked_attention, within
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.kernels.decode_attention import IMPLEMENTATIONS, partial_attention
from distflow_jax.models.kernels.implementation_trial import Tried, tried
from distflow_jax.models.kernels.library_attention import BY_MASK
from distflow_jax.rollout.decode_state import EngineConfig, pages_of

_OWNERS = 32


def try_decode(
    names: Sequence[str], model: DecoderConfig, config: EngineConfig
) -> dict[str, Tried]:
    """Tries each attention over pages, by name, in the dtype of the engine; a walk over pages,
    which is XLA alone, is not tried."""
    width, kv_heads, head_dim = config.page_size, model.num_kv_heads, model.head_dim
    slots, rows = pages_of(config.max_response, width), model.num_heads // kv_heads
    q, keys, values = _random(
        config,
        (_OWNERS, kv_heads, rows, head_dim),
        (_OWNERS * slots, kv_heads, head_dim, width),
        (_OWNERS * slots, kv_heads, width, head_dim),
    )
    table = jnp.arange(_OWNERS * slots, dtype=jnp.int32).reshape(slots, _OWNERS).T
    length = 1 + jnp.arange(_OWNERS, dtype=jnp.int32) * (slots * width - 1) // (_OWNERS - 1)
    first = None
    if model.sliding_window:
        first = jnp.repeat((length - model.sliding_window)[:, None], rows, axis=1)

    def attend(implementation, dtype, *arrays):
        q, keys, values = (x.astype(dtype) for x in arrays)
        options: dict[str, Any] = {"implementation": implementation, "first": first}
        return partial_attention(q, keys, values, table, length, **options)[0]

    runs = {n: functools.partial(attend, n, config.dtype) for n in names if n in IMPLEMENTATIONS}
    exact = functools.partial(attend, "reference", "float32")
    return _all(runs, exact, (q, keys, values))


def try_prefill(
    names: Sequence[str], model: DecoderConfig, config: EngineConfig
) -> dict[str, Tried]:
    """Tries each of library_attention.BY_MASK, by name, on a row of two prompts; {} where there is
    only XLA."""
    here = jnp.arange(config.prefill_tokens, dtype=jnp.int32)[None]
    second = (here >= config.prefill_tokens // 2)[:, :, None]
    mask = (second == second.mT) & (here[:, :, None] >= here[:, None])
    mask &= within(here, here, model.sliding_window or config.prefill_tokens)
    heads = (model.num_heads, model.num_kv_heads, model.num_kv_heads)
    arguments = _random(config, *((1, here.size, n, model.head_dim) for n in heads))

    def attend(by, dtype, *arrays):
        return by(*(x.astype(dtype) for x in arrays), mask)

    runs = {name: functools.partial(attend, BY_MASK[name], config.dtype) for name in names}
    exact = functools.partial(attend, masked_attention, "float32")
    return {} if names == ("loops",) else _all(runs, exact, arguments)


def _random(config: EngineConfig, *shapes: tuple[int, ...]) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    normal = functools.partial(jax.random.normal, dtype=jnp.float32)
    return [normal(k, shape).astype(config.dtype) for k, shape in zip(keys, shapes, strict=True)]


def _all(
    runs: dict[str, Callable[..., Any]], exact: Callable[..., Any], arguments: Sequence[Any]
) -> dict[str, Tried]:
    """Each compared with `exact`, and timed where there is a choice."""
    timed = len(runs) > 1
    return {
        n: tried(f, exact, arguments, (f, arguments) if timed else None) for n, f in runs.items()
    }
