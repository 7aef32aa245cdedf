"""Sums over masks, whitening, and the tokens that a budget takes.

tests/training/test_policy_objective.py has every aggregation against its definition.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import formulas
from support.ragged import QUICK, assert_close, draw, first, pack, random_sequences

from distflow_jax.algorithms.aggregate import denominator, token_weights, within_budget
from distflow_jax.algorithms.masked import (
    masked_max,
    masked_mean,
    masked_min,
    masked_sum,
    masked_variance,
    offset,
    safe_divide,
    whiten,
)
from distflow_jax.algorithms.packed import per_token
from distflow_jax.config.algorithm_tables import AGGREGATIONS

SEQUENCES = random_sequences(0)
TOKENS = sum(s.length for s in SEQUENCES)
quick_budget = jax.jit(within_budget, static_argnames="budget", compiler_options=QUICK)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("poison", [0, np.inf, np.nan])
def test_matches_the_definition(mode, poison):
    values, budget = draw(1, SEQUENCES), 40
    packed = pack(SEQUENCES, 2, shared=True)
    rows = first(packed.rows)
    x, mask = first(packed.tokens(values, poison)), rows.response_mask
    if mode == "fixed-budget":
        mask = mask & quick_budget(rows, budget=budget)
    counts = jnp.int32(TOKENS), jnp.int32(sum(s.mask.any() for s in SEQUENCES))
    total = denominator(mode, *counts, norm=32.0, budget=budget)
    got = masked_sum(x * token_weights(mode, mask, per_token(rows.length, rows.segment)), mask)
    kept = [v[s.mask] for s, v in zip(SEQUENCES, formulas.wide(values), strict=True)]
    assert_close(got / total, formulas.aggregate(mode, SEQUENCES, kept, 32.0, budget))


@pytest.mark.parametrize("budget", [1, 17, TOKENS, TOKENS + 5])
def test_budget_takes_exactly_so_many_tokens_wherever_they_lie(budget):
    first_pack, other = pack(SEQUENCES, 3, shared=False), pack(SEQUENCES, 4, shared=True)
    taken = []
    for packed in (first_pack, other):
        chosen = quick_budget(first(packed.rows), budget=budget)
        assert int(chosen.sum()) == min(budget, TOKENS)
        taken.append(np.concatenate(packed.unpack(np.asarray(chosen)[None])))
    np.testing.assert_array_equal(*taken)
    # responses in order, the last one cut: what is taken is a prefix of all response tokens
    mask = np.concatenate([s.mask for s in SEQUENCES])
    np.testing.assert_array_equal(taken[0][mask], np.arange(TOKENS) < budget)


def test_masked_reductions():
    x = jnp.array([1.0, np.nan, 5.0, np.inf, -2.0, -np.inf])
    mask = jnp.array([True, False, True, False, True, False])
    assert masked_sum(x, mask) == 4
    assert masked_max(x, mask) == 5
    assert masked_min(x, mask) == -2
    np.testing.assert_allclose(masked_mean(x, mask), 4 / 3, rtol=1e-6)
    np.testing.assert_allclose(masked_variance(x, mask), np.var([1, 5, -2], ddof=1), rtol=1e-6)
    nothing = jnp.zeros(6, bool)
    assert masked_max(x, nothing) == -np.inf and masked_min(x, nothing) == np.inf
    assert masked_mean(x, nothing) == 0 and masked_variance(x, nothing) == 0
    one = jnp.arange(6) == 2
    assert masked_mean(x, one) == 5 and masked_variance(x, one) == 0
    np.testing.assert_array_equal(
        safe_divide(jnp.array([3.0, 3.0]), jnp.array([2.0, 0.0])), [1.5, 0]
    )


@pytest.mark.parametrize("mean", [0.0, 3.0, -500.0, 1e4, 1e6, -1e6, 2.0**24])
def test_whitened_values_have_mean_0_and_variance_1(mean):
    """Compared in float64 with the float32 numbers that are whitened, however far from 0."""
    rng = np.random.default_rng(5)
    x, mask = (mean + 2 * rng.normal(size=(7, 9))).astype(np.float32), rng.random((7, 9)) < 0.6
    for poison in (np.nan, np.inf, -np.inf, 3e38):
        poisoned = jnp.asarray(np.where(mask, x, np.float32(poison)))
        got, wide = np.asarray(whiten(poisoned, jnp.asarray(mask))), x[mask].astype(np.float64)
        wanted = (wide - wide.mean()) / np.sqrt(wide.var(ddof=1) + 1e-8)
        np.testing.assert_allclose(got[mask], wanted, rtol=1e-5, atol=3e-5)
        np.testing.assert_array_equal(got[~mask], 0)
        np.testing.assert_allclose(got[mask].mean(dtype=np.float64), 0, atol=3e-5)
        np.testing.assert_allclose(got[mask].std(ddof=1), 1, atol=1e-5)
        np.testing.assert_allclose(masked_variance(poisoned, mask), wide.var(ddof=1), rtol=1e-5)


@pytest.mark.parametrize("x", [0.0, 0.1, -0.7, 1e-38, 1e6, -3e7, 1e18, 3e38])
def test_equal_values_are_whitened_to_exactly_zero(x):
    for count in (0, 1, 2, 7, 64):
        mask = jnp.arange(64) < count
        values = jnp.where(mask, jnp.float32(x), jnp.nan)
        np.testing.assert_array_equal(whiten(values, mask), 0)
        assert masked_variance(values, mask) == 0


def test_numbers_near_0_keep_their_bits():
    """An offset is subtracted only where a float32 sum would lose the differences to it."""
    rng = np.random.default_rng(6)
    low = np.float32(rng.normal(size=1000))
    high = low + np.float32(np.abs(low) / 256 * rng.choice([1.01, 2, 1e3], 1000))
    np.testing.assert_array_equal(offset(low, high), 0)
    near = low + np.float32(np.abs(low) / 256 * rng.choice([0, 0.9, 1e-3], 1000))
    np.testing.assert_array_equal(offset(low, near), low)
    # and what is left is exact
    np.testing.assert_array_equal(near - low, np.float64(near) - np.float64(low))
