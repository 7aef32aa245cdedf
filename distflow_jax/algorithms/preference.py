"""Losses on preferences: of pairs of a chosen and a rejected response (DPO, IPO, ORPO, a reward
model's ranking loss), and of single responses with a label (KTO).

All return one number per pair or response, in the shape of their arguments. `chosen` and `rejected`
are the rewards of both responses: log-prob less that of the reference, summed over the response, or
the mean log-prob of a token where there is no reference. R rows, S sequences per row.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from distflow_jax.batch import Rows

# least distance of a mean log-prob to 0, where the odds p / (1 - p) are infinite
_LEAST_SURPRISE = 1e-6


class PairLoss(NamedTuple):
    """The loss of each pair, any shape, and the numbers of a loss that are metrics of their own."""

    loss: jax.Array
    metrics: dict[str, jax.Array] = {}


def dpo(chosen: jax.Array, rejected: jax.Array, *, beta: float) -> PairLoss:
    """DPO: -log sigmoid(beta Delta), any shape, with Delta = chosen - rejected.

    Rafailov et al. 2023 (arxiv.org/abs/2305.18290), eq. 7.
    """
    return PairLoss(-jax.nn.log_sigmoid(beta * (chosen - rejected)))


def ipo(chosen: jax.Array, rejected: jax.Array, *, beta: float) -> PairLoss:
    """IPO: (Delta - 1 / (2 beta))^2, any shape, with Delta = chosen - rejected.

    The margin has a target, whereas under DPO it grows without bound. Azar et al. 2023
    (arxiv.org/abs/2310.12036), eq. 17.
    """
    return PairLoss(jnp.square(chosen - rejected - 1.0 / (2.0 * beta)))


def orpo(chosen: jax.Array, rejected: jax.Array, *, beta: float) -> PairLoss:
    """ORPO: -log P+ - beta log sigmoid(log(odds+ / odds-)), any shape, odds = P / (1 - P).

    There is no reference: log P is the mean log-prob of a token, counted as at most -1e-6 in the
    odds, and -log P+ the loss of supervised fine-tuning. beta is the paper's lambda. Hong et al.
    2024 (arxiv.org/abs/2403.07691), eqs. 3, 4, 6 and 7.
    """
    ratio = _log_odds(chosen) - _log_odds(rejected)
    loss = -chosen - beta * jax.nn.log_sigmoid(ratio)
    return PairLoss(loss, {"preference/nll": -chosen, "preference/log_odds_ratio": ratio})


def _log_odds(logp: jax.Array) -> jax.Array:
    """log(P / (1 - P)) of P = exp(logp), any shape."""
    logp = jnp.minimum(logp, -_LEAST_SURPRISE)
    return logp - jnp.log(-jnp.expm1(logp))


def kto(
    reward: jax.Array, baseline: jax.Array, weight: jax.Array, desirable: jax.Array, *, beta: float
) -> jax.Array:
    """KTO: weight (1 - sigmoid(+-beta (reward - baseline))), any shape, + of desirable responses.

    `reward` is the log-prob less that of the reference, summed over a response; `baseline` the
    paper's z0; `weight` lambda_D or lambda_U; `desirable` a mask. Ethayarajh et al. 2024
    (arxiv.org/abs/2402.01306), sec. 4.
    """
    sign = jnp.where(desirable, 1.0, -1.0)
    return weight * jax.nn.sigmoid(-sign * beta * (reward - baseline))


def reward_model(
    chosen: jax.Array, rejected: jax.Array, *, margin: float, center_coef: float
) -> jax.Array:
    """Ranking loss -log sigmoid(s+ - s- - margin) + center_coef (s+ + s-)^2, any shape.

    Touvron et al. 2023 (arxiv.org/abs/2307.09288), eq. 2; the second term: Eisenstein et al. 2023
    (arxiv.org/abs/2312.09244), sec. 2.
    """
    ranking = -jax.nn.log_sigmoid(chosen - rejected - margin)
    return ranking + center_coef * jnp.square(chosen + rejected)


PREFERENCE_LOSSES: dict[str, Callable[..., PairLoss]] = {"dpo": dpo, "ipo": ipo, "orpo": orpo}


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
