"""Rewards of tokens: score at the end, KL on every token, and the controller of its weight."""

import jax.numpy as jnp
import numpy as np
import pytest
from support import formulas
from support.ragged import assert_close, draw, pack, random_sequences

from distflow_jax.algorithms.kl import (
    KL_ESTIMATORS,
    adapted_coef,
    mean_kl,
    token_rewards,
    with_kl_penalty,
)

SEQUENCES = random_sequences(0)


@pytest.mark.parametrize("shared", [False, True], ids=["own prompts", "shared prompts"])
@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_rewards_with_a_penalty(name, shared):
    packed = pack(SEQUENCES, 1, shared=shared)
    score = np.random.default_rng(2).normal(size=len(SEQUENCES)).astype(np.float32)
    logp, ref = draw(3, SEQUENCES), draw(4, SEQUENCES)
    kl = KL_ESTIMATORS[name](packed.tokens(logp, np.nan), packed.tokens(ref, np.nan))
    plain = token_rewards(packed.per_sequence(score, np.nan), packed.rows)
    got = packed.unpack(with_kl_penalty(plain, kl, packed.rows, 0.3))
    means = []
    for i, s in enumerate(SEQUENCES):
        of_token = formulas.KL[name](*(np.float64(x[i]) for x in (logp, logp, ref)))
        wanted = np.where(s.mask, -0.3 * of_token, 0.0)
        wanted[np.flatnonzero(s.mask)[-1:]] += score[i]
        assert_close(got[i], wanted)
        means += [of_token[s.mask].mean()] if s.mask.any() else []
    assert_close(mean_kl(kl, packed.rows), np.mean(means))
    sums = np.asarray(plain).sum()
    assert_close(sums, score[[s.mask.any() for s in SEQUENCES]].sum(dtype=np.float64))


@pytest.mark.parametrize(
    ("kl", "factor"), [(0.1, 1.0), (0.11, 1.005), (5.0, 1.01), (0.0, 0.99), (0.09, 0.995)]
)
def test_controller_moves_by_a_fifth_per_horizon_at_most(kl, factor):
    new = adapted_coef(
        jnp.float32(0.2), jnp.float32(kl), jnp.float32(500), target=0.1, horizon=10_000.0
    )
    assert_close(new, 0.2 * factor)
