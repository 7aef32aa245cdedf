"""Grouped products of a mixture: their implementations, and a trial of these on this device, of
values and both gradients.

M rows, E experts, I inputs, O outputs.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distflow_jax.config.implementation_table import PRODUCTS, Need, candidates, named
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.grouped_matmul import grouped_product
from distflow_jax.models.kernels.implementation_trial import Tried, tried

_CHECKED_ROWS = 16  # per expert


def grouped_products(name: str, model: DecoderConfig, platform: str, dtype: str) -> tuple[str, ...]:
    """Implementations of a mixture's grouped products that model.grouped_product=`name` allows, the
    preferred first; () without a mixture. Raises ValueError for one that cannot be used here."""
    need = Need(PRODUCTS, platform, 0, dtype)
    if name != "auto":
        return (named("model.grouped_product", name, need).name,)
    return tuple(one.name for one in candidates(need)) if model.num_experts else ()


def try_products(
    names: Sequence[str], rows: int, shape: tuple[int, int, int], dtype: str
) -> dict[str, Tried]:
    """Tries each of implementation_table.PRODUCTS, by name.

    Each is compared with float32 on a few rows per expert, and timed on `rows` of them where there
    is a choice. Groups are uneven, and some are empty.

    Args:
      names: implementations, the preferred one first.
      rows: M, (token, expert) pairs of a device.
      shape: (E, I, O) of a device's experts.
      dtype: of rows and matrices.
    """
    few, many = (_arguments(m, shape, dtype) for m in (_CHECKED_ROWS * shape[0], rows))
    exact, found = functools.partial(_product, "blocks", "float32"), {}
    for name in names:
        run: Callable[..., Any] = functools.partial(_product, name, dtype)
        found[name] = tried(run, exact, few, (run, many) if len(names) > 1 else None)
    return found


def _arguments(rows: int, shape: tuple[int, int, int], dtype: str) -> list[jax.Array]:
    """Rows, matrices, the output's gradient and the sizes of groups."""
    experts, inputs, outputs = shape
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((rows, inputs), shape, (rows, outputs))
    normal = functools.partial(jax.random.normal, dtype=jnp.float32)
    arrays = [normal(k, s).astype(dtype) for k, s in zip(keys, shapes, strict=True)]
    arrays[1] /= inputs**0.5
    of_row = np.random.default_rng(0).geometric(min(1.0, 2 / experts), rows) % experts
    return [*arrays, jnp.asarray(np.bincount(of_row, minlength=experts), jnp.int32)]


def _product(by: str, dtype: str, x, weight, gradient, sizes) -> tuple[jax.Array, ...]:
    x, weight, gradient = (a.astype(dtype) for a in (x, weight, gradient))
    y, back = jax.vjp(lambda x, w: grouped_product(x, w, sizes, by=by), x, weight)
    return (y, *back(gradient))
