"""Group advantages against plain float64 NumPy, and what must not change them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from distflow_jax.algorithms.advantages import ADVANTAGES

GROUPS = 7


def reference(name, scores):
    """Advantages of one group's scores, straight from the definitions."""
    s = np.asarray(scores, np.float64)
    n = len(s)
    if n == 1:
        return s / (1 + 1e-6) if name == "grpo" else s
    if s.max() == s.min():
        return np.zeros(n)
    if name == "grpo":
        return (s - s.mean()) / (s.std(ddof=1) + 1e-6)
    if name == "dr_grpo":
        return s - s.mean()
    if name == "rloo":  # the mean of the others is the baseline
        return np.array([s[i] - np.delete(s, i).mean() for i in range(n)])
    raise AssertionError(name)


def compute(name, score, group, valid, groups=GROUPS):
    run = jax.jit(ADVANTAGES[name], static_argnames="num_groups")
    args = jnp.asarray(score, jnp.float32), jnp.asarray(group, jnp.int32), jnp.asarray(valid)
    return np.asarray(run(*args, num_groups=groups))


def scattered(seed):
    """Groups of 1 to 8 scattered over [R, S] with holes; group 5 is empty."""
    rng = np.random.default_rng(seed)
    sizes = [4, 1, 8, 2, 3, 0, 6]
    group = np.concatenate([np.full(n, g) for g, n in enumerate(sizes)])
    score = rng.normal(size=len(group)) + rng.choice([0.0, 30.0], len(group))
    place = rng.choice(30, len(group), replace=False)
    full = np.zeros(30, int), np.zeros(30), np.zeros(30, bool)
    for target, value in zip(full, (group, score, True), strict=True):
        target[place] = value
    return tuple(x.reshape(5, 6) for x in full)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_matches_the_definition(name):
    group, score, valid = scattered(0)
    got = compute(name, score, group, valid)
    for g in range(GROUPS):
        mine = valid & (group == g)
        if mine.any():
            np.testing.assert_allclose(
                got[mine], reference(name, score[mine].astype(np.float32)), rtol=2e-5, atol=2e-5
            )
    np.testing.assert_array_equal(got[~valid], 0)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("poison", [np.inf, -np.inf, np.nan])
def test_places_without_a_sequence_do_not_matter(name, poison):
    group, score, valid = scattered(1)
    clean = compute(name, score, group, valid)
    poisoned = compute(name, np.where(valid, score, poison), group, valid)
    np.testing.assert_array_equal(poisoned, clean)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_order_of_samples_does_not_matter(name):
    group, score, valid = (x.reshape(-1) for x in scattered(2))
    order = np.random.default_rng(3).permutation(group.size)
    straight = compute(name, score, group, valid)
    shuffled = compute(name, score[order], group[order], valid[order])
    np.testing.assert_allclose(shuffled, straight[order], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_numbers_of_groups_do_not_matter(name):
    group, score, valid = scattered(4)
    renamed = np.random.default_rng(5).permutation(GROUPS)[group]
    np.testing.assert_array_equal(
        compute(name, score, renamed, valid), compute(name, score, group, valid)
    )


@pytest.mark.parametrize("name", ADVANTAGES)
def test_equal_scores_give_exactly_zero(name):
    # the mean of seven float32 0.1 is not 0.1: divided by a tiny sd it would be a signal
    values, sizes = [0.0, 1.0, 0.1, 0.7, 1 / 3, -0.3, 1e-8, 3e7], [2, 3, 7, 8]
    pairs = [(value, size) for value in values for size in sizes]
    score = np.concatenate([np.full(size, value) for value, size in pairs])
    group = np.concatenate([np.full(size, g) for g, (_, size) in enumerate(pairs)])
    got = compute(name, score, group, np.ones(len(score), bool), groups=len(pairs))
    np.testing.assert_array_equal(got, 0)


def test_mean_of_equal_scores_does_round():
    """The trap that the test above guards: without a special case 0.1 would not give 0."""
    tenth = np.full(7, 0.1, np.float32)
    assert any(np.sum(tenth[:n], dtype=np.float32) / np.float32(n) != tenth[0] for n in range(2, 8))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_group_of_one_keeps_its_score(name):
    values = np.array([0.0, 0.1, 2.5, -4.0], np.float32)
    got = compute(name, values, np.arange(4), np.ones(4, bool), groups=4)
    np.testing.assert_allclose(got, values, rtol=2e-6)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_sum_over_a_group_is_zero(name):
    group, score, valid = scattered(6)
    got = compute(name, score, group, valid)
    for g in range(GROUPS):
        mine = valid & (group == g)
        if mine.sum() > 1:
            assert abs(got[mine].sum()) < 1e-4


def test_grpo_ignores_scale_and_shift():
    group, score, valid = scattered(7)
    several = valid & (np.bincount(group[valid], minlength=GROUPS)[group] > 1)
    plain = compute("grpo", score, group, valid)
    moved = compute("grpo", 3 * score + 5, group, valid)
    np.testing.assert_allclose(moved[several], plain[several], rtol=1e-4, atol=1e-4)


def test_one_number_for_many_tokens_is_the_same_wherever_the_group_lies():
    """Same scores in one row of eight or in eight rows of one."""
    score = np.random.default_rng(8).normal(size=8)
    zeros, ones = np.zeros(8, int), np.ones(8, bool)
    flat = compute("grpo", score[None], zeros[None], ones[None], groups=1)
    tall = compute("grpo", score[:, None], zeros[:, None], ones[:, None], groups=1)
    np.testing.assert_array_equal(flat.reshape(-1), tall.reshape(-1))
