"""Advantage estimators: from token rewards to token advantages and returns.

K mini-batches, R rows, L tokens per row, S sequences per row, G groups. s is the sum of a
sequence's rewards; a group is the n responses to one prompt. All statistics are over the whole
step, in whatever rows it is packed. Two special groups: a group of one has mean 0, and a group of
equal scores has advantage exactly 0, so that rounding of the mean cannot produce an advantage.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from distflow_jax.algorithms.masked import offset, whiten
from distflow_jax.algorithms.packed import (
    counted,
    following,
    per_sequence,
    per_token,
    reverse_recurrence,
)
from distflow_jax.batch import Rows

AdvantageAndReturn = tuple[jax.Array, jax.Array]  # float32 [K, R, L] each, 0 outside the mask


class GroupStatistics(NamedTuple):
    """Statistics of the valid sequences of each group, float32 [G]."""

    count: jax.Array
    mean: jax.Array
    squares: jax.Array  # sum of squared deviations from the mean
    equal: jax.Array  # bool: all scores are the same number; True for an empty group


def group_sum(x: jax.Array, group: jax.Array, num_groups: int) -> jax.Array:
    """Sum of x over each group, [G]."""
    return jax.ops.segment_sum(x.reshape(-1), group.reshape(-1), num_segments=num_groups)


def group_extremes(
    x: jax.Array, group: jax.Array, valid: jax.Array, num_groups: int
) -> tuple[jax.Array, jax.Array]:
    """Smallest and largest x of each group, [G] each; (inf, -inf) for an empty group."""
    flat = group.reshape(-1)
    low = jnp.where(valid, x, jnp.inf).reshape(-1)
    high = jnp.where(valid, x, -jnp.inf).reshape(-1)
    return (
        jax.ops.segment_min(low, flat, num_segments=num_groups),
        jax.ops.segment_max(high, flat, num_segments=num_groups),
    )


def group_best_two(
    score: jax.Array, group: jax.Array, valid: jax.Array, num_groups: int
) -> tuple[jax.Array, jax.Array]:
    """Largest and second largest score of each group, [G] each; equal where two are the largest.

    The second is -inf for a group of one, both are for an empty group. Arguments have any equal
    shape.
    """
    _, best = group_extremes(score, group, valid, num_groups)
    is_best = valid & (score == best[group])
    _, below = group_extremes(score, group, valid & ~is_best, num_groups)
    several = group_sum(is_best.astype(jnp.float32), group, num_groups) > 1
    return best, jnp.where(several, best, below)


def group_statistics(
    score: jax.Array, group: jax.Array, valid: jax.Array, num_groups: int
) -> GroupStatistics:
    """Count, mean and spread of each group's scores, [G]; arguments have any equal shape."""
    count = group_sum(valid.astype(jnp.float32), group, num_groups)
    mean = group_sum(jnp.where(valid, score, 0.0), group, num_groups) / jnp.maximum(count, 1.0)
    deviation = jnp.where(valid, score - mean[group], 0.0)
    squares = group_sum(deviation * deviation, group, num_groups)
    low, high = group_extremes(score, group, valid, num_groups)
    return GroupStatistics(count, mean, squares, high <= low)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Rewards of a step. `value` and `baseline` are set if the algorithm declares to read them."""

    reward: jax.Array  # float32 [K, R, L]; see kl.token_rewards
    rows: Rows  # fields [K, R, L] and [K, R, S]
    num_groups: int  # G
    value: jax.Array | None = None  # [K, R, L]; the critic's value before the token
    baseline: jax.Array | None = None  # [K, R, S]; score of the greedy response to the prompt

    @functools.cached_property
    def score(self) -> jax.Array:
        """Sum s of each sequence's rewards, [K, R, S]."""
        return per_sequence(self.reward, self.rows)

    @functools.cached_property
    def relative(self) -> jax.Array:
        """s less a number that is the same for its whole group, mostly 0, [K, R, S]."""
        rows = self.rows
        extremes = group_extremes(self.score, rows.group, counted(rows), self.num_groups)
        return self.score - offset(*extremes)[rows.group]

    @functools.cached_property
    def statistics(self) -> GroupStatistics:
        """Statistics of `relative` over each group."""
        return group_statistics(self.relative, self.rows.group, counted(self.rows), self.num_groups)


def reward_to_go(reward: jax.Array, rows: Rows, *, gamma: float = 1.0) -> jax.Array:
    """Reward to go G_t = R_t + gamma G_{t+1} within each sequence, [K, R, L]; 0 outside the mask.

    `reward` is [K, R, L]. G passes unchanged through tokens that the policy did not choose.
    """
    mask = rows.response_mask
    decay = jnp.where(mask, gamma, jnp.ones_like(reward))
    summed = reverse_recurrence(jnp.where(mask, reward, 0.0), decay, rows.segment)
    return jnp.where(mask, summed, 0.0)


def _spread(outcome: Outcome, per_sequence_advantage: jax.Array) -> AdvantageAndReturn:
    """Spreads one advantage per sequence [K, R, S] over its tokens.

    The return is the undiscounted reward to go.
    """
    mask = outcome.rows.response_mask
    advantage = per_token(per_sequence_advantage, outcome.rows.segment)
    return jnp.where(mask, advantage, 0.0), reward_to_go(outcome.reward, outcome.rows)


def _centred(outcome: Outcome, mean: jax.Array) -> jax.Array:
    """s minus its group's mean, [K, R, S]; see the module's docstring for two special groups.

    `mean` [G] is that of `relative`.
    """
    group, found = outcome.rows.group, outcome.statistics
    single, equal = (found.count == 1)[group], found.equal[group]
    centred = jnp.where(equal, 0.0, outcome.relative - mean[group])
    return jnp.where(counted(outcome.rows), jnp.where(single, outcome.score, centred), 0.0)


def gae(outcome: Outcome, *, gamma: float, lam: float) -> AdvantageAndReturn:
    """Generalized advantage estimation: g_t = delta_t + gamma lam g_{t+1}, whitened.

    delta_t = R_t + gamma V_{t+1} - V_t. The return is g + V. V_{t+1} and g_{t+1} pass unchanged
    through tokens that the policy did not choose, and are 0 after the last token. Schulman et al.
    2016 (arxiv.org/abs/1506.02438), eq. 16.
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
    """GRPO: (s - mean) / (sd + 1e-6) within the group.

    sd has divisor n - 1; a group of one has sd 1. Shao et al. 2024 (arxiv.org/abs/2402.03300),
    sec. 4.1.2.
    """
    return _spread(outcome, _grpo_scores(outcome))


def _grpo_scores(outcome: Outcome) -> jax.Array:
    found = outcome.statistics
    sd = jnp.sqrt(found.squares / jnp.maximum(found.count - 1.0, 1.0))
    sd = jnp.where(found.count == 1, 1.0, sd)
    return _centred(outcome, found.mean) / (sd[outcome.rows.group] + 1e-6)


def dr_grpo(outcome: Outcome) -> AdvantageAndReturn:
    """Dr. GRPO: s - mean within the group. Liu et al. 2025 (arxiv.org/abs/2503.20783), sec. 3.2."""
    return _spread(outcome, _centred(outcome, outcome.statistics.mean))


def grpo_passk(outcome: Outcome, *, norm_adv_by_std_in_grpo: bool) -> AdvantageAndReturn:
    """Pass@k: the best response of a group gets s_best - s_second, all others get 0.

    s_second counts equal scores apart, so that two best responses give 0. With
    `norm_adv_by_std_in_grpo`, divided by sd + 1e-6 with divisor n - 1. A group of one, which has no
    second response, gives 0. Tang et al. 2025 (arxiv.org/abs/2503.19595); named as in verl.
    """
    rows, found, score = outcome.rows, outcome.statistics, outcome.score
    best, second = group_best_two(score, rows.group, counted(rows), outcome.num_groups)
    lead = jnp.where(found.count > 1, best - second, 0.0)
    if norm_adv_by_std_in_grpo:
        lead = lead / (jnp.sqrt(found.squares / jnp.maximum(found.count - 1.0, 1.0)) + 1e-6)
    return _spread(outcome, jnp.where(score == best[rows.group], lead[rows.group], 0.0))


def rloo(outcome: Outcome) -> AdvantageAndReturn:
    """RLOO: (s - mean) n / (n - 1), i.e. s minus the mean of the others; a group of one keeps s.

    Ahmadian et al. 2024 (arxiv.org/abs/2402.14740), sec. 2.2.
    """
    found = outcome.statistics
    factor = jnp.where(found.count == 1, 1.0, found.count / jnp.maximum(found.count - 1.0, 1.0))
    centred = _centred(outcome, found.mean)
    return _spread(outcome, centred * factor[outcome.rows.group])


def reinforce_plus_plus(outcome: Outcome, *, gamma: float) -> AdvantageAndReturn:
    """REINFORCE++: the discounted reward to go, whitened. Hu 2025 (arxiv.org/abs/2501.03262)."""
    returns = reward_to_go(outcome.reward, outcome.rows, gamma=gamma)
    return whiten(returns, outcome.rows.response_mask), returns


def reinforce_plus_plus_baseline(outcome: Outcome) -> AdvantageAndReturn:
    """REINFORCE++ with a group baseline: s - mean on every token, whitened over the step's tokens.

    Equal scores give exactly 0 before the whitening. Hu 2025 (arxiv.org/abs/2501.03262).
    """
    advantage, returns = dr_grpo(outcome)
    return whiten(advantage, outcome.rows.response_mask), returns


def remax(outcome: Outcome) -> AdvantageAndReturn:
    """ReMax: the reward to go minus the score of the greedy response to the same prompt.

    Li et al. 2024 (arxiv.org/abs/2310.10505), alg. 1.
    """
    rows = outcome.rows
    returns = reward_to_go(outcome.reward, rows)
    baseline = per_token(jnp.where(rows.valid, outcome.baseline, 0.0), rows.segment)
    return jnp.where(rows.response_mask, returns - baseline, 0.0), returns


def gpg(outcome: Outcome) -> AdvantageAndReturn:
    """GPG: (B / number of sequences with s != 0) (s - mean), for B sequences in the step.

    Chu et al. 2025 (arxiv.org/abs/2504.02546).
    """
    counts = counted(outcome.rows)
    total = counts.sum(dtype=jnp.int32).astype(jnp.float32)
    nonzero = (counts & (outcome.score != 0)).sum(dtype=jnp.int32).astype(jnp.float32)
    factor = total / jnp.maximum(nonzero, 1.0)
    return _spread(outcome, factor * _centred(outcome, outcome.statistics.mean))


def opo(outcome: Outcome) -> AdvantageAndReturn:
    """OPO: s - sum(length s) / sum(length) over the group.

    This baseline has the least variance if the gradient's norm grows with the length. Hao et al.
    2025 (arxiv.org/abs/2505.23585).
    """
    rows = outcome.rows
    length = jnp.where(counted(rows), rows.length, 0).astype(jnp.float32)
    weighted = group_sum(length * outcome.relative, rows.group, outcome.num_groups)
    lengths = group_sum(length, rows.group, outcome.num_groups)
    mean = weighted / jnp.maximum(lengths, 1.0)
    return _spread(outcome, _centred(outcome, mean))


def cpgd(outcome: Outcome, *, cpgd_weight: str) -> AdvantageAndReturn:
    """CPGD: s - mean within the group, times one of three weights.

    "std" is GRPO's 1 / (sd + 1e-6), "equal" is 1, and "clip_filter" is min(groups / groups with
    sd != 0, 3); a group of one has sd 1. Liu et al. 2025 (arxiv.org/abs/2505.12504).
    """
    if cpgd_weight == "std":
        return grpo(outcome)
    found = outcome.statistics
    centred = _centred(outcome, found.mean)
    if cpgd_weight == "clip_filter":
        groups = (found.count > 0).sum(dtype=jnp.int32).astype(jnp.float32)
        varied = ~found.equal | (found.count == 1)
        differ = varied.sum(dtype=jnp.int32).astype(jnp.float32)
        centred = centred * jnp.minimum(groups / jnp.maximum(differ, 1.0), 3.0)
    return _spread(outcome, centred)


# f(outcome, **options); ADVANTAGES (config/algorithm_tables.py) has their reads and options
ESTIMATORS: dict[str, Callable[..., AdvantageAndReturn]] = {
    "gae": gae,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "grpo_passk": grpo_passk,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "gpg": gpg,
    "opo": opo,
    "cpgd": cpgd,
}
