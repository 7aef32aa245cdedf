"""Losses on pairs of a chosen and a rejected response: DPO, IPO and a reward model's ranking loss.

All return one number per pair, in the shape of their arguments. R rows, S sequences per row.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from distflow_jax.batch import Rows


def dpo(delta: jax.Array, *, beta: float) -> jax.Array:
    """DPO: -log sigmoid(beta Delta), any shape.

    `delta` is Delta = (logp+ - ref+) - (logp- - ref-), log-probs summed over each response.
    Rafailov et al. 2023 (arxiv.org/abs/2305.18290), eq. 7.
    """
    return -jax.nn.log_sigmoid(beta * delta)


def ipo(delta: jax.Array, *, beta: float) -> jax.Array:
    """IPO: (Delta - 1 / (2 beta))^2, any shape; `delta` as in dpo.

    The margin has a target, whereas under DPO it grows without bound. Azar et al. 2023
    (arxiv.org/abs/2310.12036), eq. 17.
    """
    return jnp.square(delta - 1.0 / (2.0 * beta))


def reward_model(
    chosen: jax.Array, rejected: jax.Array, *, margin: float, center_coef: float
) -> jax.Array:
    """Ranking loss -log sigmoid(s+ - s- - margin) + center_coef (s+ + s-)^2, any shape.

    Touvron et al. 2023 (arxiv.org/abs/2307.09288), eq. 2; the second term: Eisenstein et al. 2023
    (arxiv.org/abs/2312.09244), sec. 2.
    """
    ranking = -jax.nn.log_sigmoid(chosen - rejected - margin)
    return ranking + center_coef * jnp.square(chosen + rejected)


PREFERENCE_LOSSES: dict[str, Callable[..., jax.Array]] = {"dpo": dpo, "ipo": ipo}


def pairs(rows: Rows) -> jax.Array:
    """Mask of pairs within each row, bool [R, S, S]: True at (c, r) if c and r are a pair.

    c is member 0 of a group, the chosen response; r is member 1 of the same group
    in the same row.
    """
    group, member = rows.group, rows.member
    same = group[..., :, None] == group[..., None, :]
    chosen = (rows.valid & (member == 0))[..., :, None]
    rejected = (rows.valid & (member == 1))[..., None, :]
    return same & chosen & rejected


def partner(x: jax.Array, paired: jax.Array) -> jax.Array:
    """x [R, S] of the rejected response, at the index of the chosen one, [R, S]; 0 elsewhere.

    `paired` [R, S, S] is the result of `pairs`.
    """
    return jnp.sum(jnp.where(paired, x[..., None, :], 0.0), axis=-1)
