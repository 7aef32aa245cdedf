"""Advantages: from rewards of tokens to how much better each token did than expected.

K mini-batches, R rows, L tokens per row, S sequences per row, G groups. All statistics are over the
whole step, wherever its rows lie. s is the sum of a sequence's rewards; a group is the n responses
to one prompt. A group of one has mean 0; one whose scores are all equal has advantage exactly 0,
for rounding of the mean must not make one up.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from distflow_jax.algorithms.groups import GroupStatistics, group_statistics, group_sum
from distflow_jax.algorithms.masked import whiten
from distflow_jax.algorithms.packed import (
    counted,
    following,
    per_sequence,
    per_token,
    reverse_recurrence,
)
from distflow_jax.batch import Rows

AdvantageAndReturn = tuple[jax.Array, jax.Array]  # float32 [K, R, L] each, 0 outside the mask

CPGD_WEIGHTS = ("std", "equal", "clip_filter")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a step earned. `value` and `baseline` are there where the algorithm declares them."""

    reward: jax.Array  # float32 [K, R, L]; see token_reward.py
    rows: Rows  # fields [K, R, L] and [K, R, S]
    num_groups: int  # G
    value: jax.Array | None = None  # [K, R, L]; the critic's expectation before the token
    baseline: jax.Array | None = None  # [K, R, S]; score of the greedy response to the prompt

    @functools.cached_property
    def score(self) -> jax.Array:
        """s, [K, R, S]."""
        return per_sequence(self.reward, self.rows)

    @functools.cached_property
    def statistics(self) -> GroupStatistics:
        """Of s over the groups."""
        return group_statistics(self.score, self.rows.group, counted(self.rows), self.num_groups)


def reward_to_go(reward: jax.Array, rows: Rows, *, gamma: float = 1.0) -> jax.Array:
    """G_t = R_t + gamma G_{t+1} within a sequence, passed unchanged through tokens that the policy
    did not choose; [K, R, L], 0 outside the mask."""
    mask = rows.response_mask
    decay = jnp.where(mask, gamma, jnp.ones_like(reward))
    summed = reverse_recurrence(jnp.where(mask, reward, 0.0), decay, rows.segment)
    return jnp.where(mask, summed, 0.0)


def _spread(outcome: Outcome, per_sequence_advantage: jax.Array) -> AdvantageAndReturn:
    """One number for all tokens of a sequence; the return is the undiscounted reward to go."""
    mask = outcome.rows.response_mask
    advantage = per_token(per_sequence_advantage, outcome.rows.segment)
    return jnp.where(mask, advantage, 0.0), reward_to_go(outcome.reward, outcome.rows)


def _centred(outcome: Outcome, mean: jax.Array, statistics: GroupStatistics) -> jax.Array:
    """s - mean of the group [G], with the two special groups of the module's docstring."""
    group, single = outcome.rows.group, statistics.count == 1
    mean = jnp.where(single, 0.0, mean)
    flat = (statistics.equal & ~single)[group]
    return jnp.where(counted(outcome.rows) & ~flat, outcome.score - mean[group], 0.0)


def gae(outcome: Outcome, *, gamma: float, lam: float) -> AdvantageAndReturn:
    """delta_t = R_t + gamma V_{t+1} - V_t, g_t = delta_t + gamma lam g_{t+1}; the return is g + V,
    the advantage g, whitened.

    V_{t+1} and g_{t+1} pass unchanged through tokens that the policy did not choose, and are 0
    behind the last one. Schulman et al. 2016 (arxiv.org/abs/1506.02438), eq. 16.
    """
    rows, mask = outcome.rows, outcome.rows.response_mask
    value = jnp.where(mask, outcome.value, 0.0)
    passed_on = jnp.where(mask, 0.0, jnp.ones_like(value))
    next_value = following(reverse_recurrence(value, passed_on, rows.segment), rows.segment)
    delta = jnp.where(mask, outcome.reward + gamma * next_value - value, 0.0)
    decay = jnp.where(mask, gamma * lam, jnp.ones_like(value))
    g = reverse_recurrence(delta, decay, rows.segment)
    return whiten(g, mask), jnp.where(mask, g + value, 0.0)


def grpo(outcome: Outcome) -> AdvantageAndReturn:
    """(s - mean) / (sd + 1e-6) within the group, sd with n - 1 below; a group of one has sd 1.

    Shao et al. 2024 (arxiv.org/abs/2402.03300), sec. 4.1.2.
    """
    return _spread(outcome, _grpo_scores(outcome))


def _grpo_scores(outcome: Outcome) -> jax.Array:
    found = outcome.statistics
    sd = jnp.sqrt(found.squares / jnp.maximum(found.count - 1.0, 1.0))
    sd = jnp.where(found.count == 1, 1.0, sd)
    return _centred(outcome, found.mean, found) / (sd[outcome.rows.group] + 1e-6)


def dr_grpo(outcome: Outcome) -> AdvantageAndReturn:
    """s - mean within the group. Liu et al. 2025 (arxiv.org/abs/2503.20783), sec. 3.2."""
    found = outcome.statistics
    return _spread(outcome, _centred(outcome, found.mean, found))


def rloo(outcome: Outcome) -> AdvantageAndReturn:
    """(s - mean) n / (n - 1): the mean of the others as baseline; a group of one keeps s.

    Ahmadian et al. 2024 (arxiv.org/abs/2402.14740), sec. 2.2.
    """
    found = outcome.statistics
    factor = jnp.where(found.count == 1, 1.0, found.count / jnp.maximum(found.count - 1.0, 1.0))
    centred = _centred(outcome, found.mean, found)
    return _spread(outcome, centred * factor[outcome.rows.group])


def reinforce_plus_plus(outcome: Outcome, *, gamma: float) -> AdvantageAndReturn:
    """The discounted reward to go, whitened. Hu 2025 (arxiv.org/abs/2501.03262)."""
    returns = reward_to_go(outcome.reward, outcome.rows, gamma=gamma)
    return whiten(returns, outcome.rows.response_mask), returns


def reinforce_plus_plus_baseline(outcome: Outcome) -> AdvantageAndReturn:
    """s - mean within the group, on every token, then whitened over the step's tokens.

    Hu 2025 (arxiv.org/abs/2501.03262). Equal scores give exactly 0 before the whitening.
    """
    advantage, returns = dr_grpo(outcome)
    return whiten(advantage, outcome.rows.response_mask), returns


def remax(outcome: Outcome) -> AdvantageAndReturn:
    """Reward to go minus the score of the greedy response to the same prompt.

    Li et al. 2024 (arxiv.org/abs/2310.10505), alg. 1.
    """
    rows = outcome.rows
    returns = reward_to_go(outcome.reward, rows)
    baseline = per_token(jnp.where(rows.valid, outcome.baseline, 0.0), rows.segment)
    return jnp.where(rows.response_mask, returns - baseline, 0.0), returns


def gpg(outcome: Outcome) -> AdvantageAndReturn:
    """(B / number of sequences with s != 0) (s - mean), B sequences in all.

    Chu et al. 2025 (arxiv.org/abs/2504.02546).
    """
    counts = counted(outcome.rows)
    total = counts.sum(dtype=jnp.int32).astype(jnp.float32)
    nonzero = (counts & (outcome.score != 0)).sum(dtype=jnp.int32).astype(jnp.float32)
    found = outcome.statistics
    factor = total / jnp.maximum(nonzero, 1.0)
    return _spread(outcome, factor * _centred(outcome, found.mean, found))


def opo(outcome: Outcome) -> AdvantageAndReturn:
    """s - sum(length s) / sum(length) over the group: the baseline of least variance where the
    gradient's norm grows with the length. Hao et al. 2025 (arxiv.org/abs/2505.23585)."""
    rows = outcome.rows
    length = jnp.where(counted(rows), rows.length, 0).astype(jnp.float32)
    weighted = group_sum(length * outcome.score, rows.group, outcome.num_groups)
    lengths = group_sum(length, rows.group, outcome.num_groups)
    mean = weighted / jnp.maximum(lengths, 1.0)
    return _spread(outcome, _centred(outcome, mean, outcome.statistics))


def cpgd(outcome: Outcome, *, cpgd_weight: str) -> AdvantageAndReturn:
    """Three weights: "std" is grpo's, "equal" is s - mean, and "clip_filter" is (s - mean)
    min(groups / groups whose scores differ, 3). Liu et al. 2025 (arxiv.org/abs/2505.12504).
    """
    if cpgd_weight == "std":
        return grpo(outcome)
    found = outcome.statistics
    centred = _centred(outcome, found.mean, found)
    if cpgd_weight == "clip_filter":
        groups = (found.count > 0).sum(dtype=jnp.int32).astype(jnp.float32)
        differ = (~found.equal).sum(dtype=jnp.int32).astype(jnp.float32)
        centred = centred * jnp.minimum(groups / jnp.maximum(differ, 1.0), 3.0)
    return _spread(outcome, centred)


@dataclasses.dataclass(frozen=True)
class AdvantageKind:
    """An algorithm of the table: estimate(outcome, **options) -> (advantage, returns)."""

    estimate: Callable[..., AdvantageAndReturn]
    reads: tuple[str, ...] = ()  # fields of Outcome that it needs beyond the rewards
    options: tuple[str, ...] = ()  # keys of AlgorithmConfig that it takes


ADVANTAGES: dict[str, AdvantageKind] = {
    "gae": AdvantageKind(gae, reads=("value",), options=("gamma", "lam")),
    "grpo": AdvantageKind(grpo),
    "dr_grpo": AdvantageKind(dr_grpo),
    "rloo": AdvantageKind(rloo),
    "reinforce_plus_plus": AdvantageKind(reinforce_plus_plus, options=("gamma",)),
    "reinforce_plus_plus_baseline": AdvantageKind(reinforce_plus_plus_baseline),
    "remax": AdvantageKind(remax, reads=("baseline",)),
    "gpg": AdvantageKind(gpg),
    "opo": AdvantageKind(opo),
    "cpgd": AdvantageKind(cpgd, options=("cpgd_weight",)),
}
