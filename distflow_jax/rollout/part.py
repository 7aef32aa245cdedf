"""Attention over some of the keys, to be merged with that over others."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

NEVER = -1e30  # finite: the difference of two is 0, not NaN


class Part(NamedTuple):
    """Softmax over some of the keys, not divided yet: out / total is their weighted value."""

    top: jax.Array  # [..., R]: the largest logit, NEVER where there was no key
    total: jax.Array  # [..., R]: sum of exp(logit - top)
    out: jax.Array  # [..., R, H]: sum of exp(logit - top) value


def merge(a: Part, b: Part) -> Part:
    """Softmax over the keys of both."""
    top = jnp.maximum(a.top, b.top)
    wa, wb = jnp.exp(a.top - top), jnp.exp(b.top - top)
    return Part(
        top,
        a.total * wa + b.total * wb,
        a.out * wa[..., None] + b.out * wb[..., None],
    )
