"""Groups: which are informative, and which responses of one are the best and the worst."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from distflow_jax.algorithms.groups import best_and_worst, informative_groups

GROUPS = 7
run_pairs = jax.jit(best_and_worst, static_argnames="num_groups")


def scattered(seed):
    """(score, group, sample, valid): groups of 0 to 6 over [4, 8] with holes; many equal scores."""
    rng = np.random.default_rng(seed)
    sizes = [4, 1, 6, 2, 3, 0, 6]
    group = np.repeat(np.arange(GROUPS), sizes)
    sample = np.concatenate([np.arange(n) for n in sizes])
    score = rng.integers(0, 4, len(group)).astype(np.float32)
    score[group == 4] = 0.1
    place = rng.choice(32, len(group), replace=False)
    out = [np.zeros(32, np.float32), np.zeros(32, np.int32), np.zeros(32, np.int32)]
    valid = np.zeros(32, bool)
    for target, value in zip((*out, valid), (score, group, sample, True), strict=True):
        target[place] = value
    return tuple(x.reshape(4, 8) for x in (*out, valid))


@pytest.mark.parametrize("seed", range(5))
def test_best_and_worst_of_each_group(seed):
    score, group, sample, valid = scattered(seed)
    poisoned = np.where(valid, score, np.nan)
    chosen, rejected = run_pairs(poisoned, group, sample, valid, num_groups=GROUPS)
    informative = np.asarray(informative_groups(poisoned, group, valid, GROUPS))
    for g in range(GROUPS):
        mine = sorted(
            (sample[p], score[p], p) for p in map(tuple, np.argwhere(valid & (group == g)))
        )
        scores = [s for _, s, _ in mine]
        got = [[p for *_, p in mine if x[p]] for x in (chosen, rejected)]
        assert informative[g] == (len(set(scores)) > 1)
        if len(set(scores)) > 1:  # of equals the first sample
            wanted = mine[int(np.argmax(scores))][2], mine[int(np.argmin(scores))][2]
            assert got == [[wanted[0]], [wanted[1]]]
        else:
            assert got == [[], []]
    assert not np.asarray(chosen)[~valid].any() and not np.asarray(rejected)[~valid].any()


def test_informative_follows_the_score_alone():
    """A length penalty must not make a group of equal answers worth sampling: two decisions."""
    score, penalty = jnp.array([1.0, 1.0]), jnp.array([0.0, -0.5])
    group, valid = jnp.zeros(2, jnp.int32), jnp.ones(2, bool)
    assert not informative_groups(score, group, valid, 1)[0]
    assert informative_groups(score + penalty, group, valid, 1)[0]
