"""Corners of the policy losses. tests/training/test_policy_objective.py has every loss's values
and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.ragged import QUICK, draw, first, pack, random_sequences

from distflow_jax.algorithms.masked import masked_sum
from distflow_jax.algorithms.policy_losses import LOSSES
from distflow_jax.algorithms.policy_tokens import policy_tokens
from distflow_jax.config.algorithm_tables import POLICY_LOSSES

ALL = pytest.mark.parametrize("name", POLICY_LOSSES)
SEQUENCES = random_sequences(0)
PACKED = pack(SEQUENCES, 1, shared=True)
ROWS = first(PACKED.rows)
MASK = np.asarray(ROWS.response_mask)


@functools.cache
def compiled(name, **options):
    kind = POLICY_LOSSES[name]
    options = {**kind.options, **options}

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(logp, old, advantage, selected):
        def total(x):
            out = LOSSES[name](policy_tokens(x, old, advantage, ROWS, selected), **options)
            return masked_sum(out.loss, ROWS.response_mask), out

        gradient, out = jax.grad(total, has_aux=True)(logp)
        return out, gradient

    return run


def run(name, logp, old, advantage):
    """(PolicyLoss, gradient of its sum over the mask) as NumPy."""
    # chosen tokens have no loss in clip_cov, and a penalty in kl_cov
    chosen = {"kl_cov": True, "clip_cov": False}.get(name)
    selected = None if chosen is None else jnp.full(MASK.shape, chosen)
    return jax.tree.map(np.asarray, compiled(name)(logp, old, advantage, selected))


def on_tokens(values):
    return first(PACKED.tokens(values))


CORNERS = [  # (ratio, advantage, loss, slope in logp)
    (1.0, 2.0, -2.0, -2.0),  # on policy: the gradient of plain policy gradient
    (1.0, -2.0, 2.0, 2.0),
    (1.5, 1.0, -1.2, 0.0),  # too far up: no more gain, no more gradient
    (0.5, 1.0, -0.5, -0.5),  # a good token fell: the gradient brings it back
    (0.5, -1.0, 0.8, 0.0),  # a bad token has fallen far enough
    (1.5, -1.0, 1.5, 1.5),  # a bad token rose
    (5.0, -1.0, 3.0, 0.0),  # dual clip: at most 3 |A|
    (5.0, 0.0, 0.0, 0.0),
]


def test_corners_of_the_clip():
    logp, advantage, loss, slope = (np.zeros(MASK.shape, np.float32) for _ in range(4))
    for place, (ratio, a, wanted, gradient) in zip(np.argwhere(MASK), CORNERS, strict=False):
        at = tuple(place)
        logp[at], advantage[at] = np.log(ratio), a
        loss[at], slope[at] = wanted, gradient
    out, got = run("ppo_clip", logp, np.zeros_like(logp), advantage)
    np.testing.assert_allclose(out.loss, loss, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got, slope, rtol=1e-5, atol=1e-6)
    assert out.clipped_lower.sum() == 1 and out.clipped.sum() == 2


@ALL
def test_equal_policies_clip_nothing_and_follow_the_policy_gradient(name):
    """At logp = old every loss has the gradient -A, but for gmpo, which averages it."""
    logp = on_tokens([x - 2 for x in draw(2, SEQUENCES)])
    per_sequence = np.random.default_rng(3).normal(size=len(SEQUENCES)).astype(np.float32)
    advantage = [np.full(len(s.mask), a) for s, a in zip(SEQUENCES, per_sequence, strict=True)]
    out, gradient = run(name, logp, logp, on_tokens(advantage))
    np.testing.assert_array_equal(out.clipped, 0)
    np.testing.assert_array_equal(out.clipped_lower, 0)
    wanted = -np.asarray(on_tokens(advantage))
    np.testing.assert_allclose(gradient[MASK], wanted[MASK], rtol=2e-5, atol=1e-6)


@ALL
def test_huge_log_ratios_stay_finite(name):
    rng = np.random.default_rng(4)
    logp = rng.choice(np.float32([-1e3, 1e3, 0, -30]), MASK.shape)
    advantage = rng.choice(np.float32([-1, 0, 1]), MASK.shape)
    for x in jax.tree.leaves(run(name, logp, np.zeros_like(logp), advantage)):
        assert np.isfinite(x[MASK]).all() and x.dtype == np.float32


@ALL
@pytest.mark.parametrize("where", ["new", "old", "both"])
def test_a_probability_of_0_has_the_loss_of_a_tiny_one(name, where):
    """A log-prob of -inf, whose differences would be nan, counts as -1e6, and has no gradient."""
    rng = np.random.default_rng(6)
    logp, old, advantage = (rng.normal(size=MASK.shape).astype(np.float32) for _ in range(3))
    gone = MASK & (rng.random(MASK.shape) < 0.2)
    found = []
    for least in (-np.inf, -1e30, -1e6):
        new = np.where(gone & (where != "old"), np.float32(least), logp)
        found.append(
            run(name, new, np.where(gone & (where != "new"), np.float32(least), old), advantage)
        )
    (out, gradient), *others = found
    for x in jax.tree.leaves((out, gradient)):
        assert np.isfinite(x[MASK]).all()
    for other, _ in others:
        for a, b in zip(out, other, strict=True):
            np.testing.assert_array_equal(a[MASK], b[MASK])
    if where != "old":
        np.testing.assert_array_equal(gradient[gone], 0)


@ALL
@pytest.mark.parametrize("size", [1e10, 1e18, 1e25])
def test_huge_advantages_stay_finite(name, size):
    """The largest scores are of 1e18 (rewards/records.py), the largest ratio is e^20."""
    rng = np.random.default_rng(7)
    logp, advantage = (rng.normal(size=MASK.shape).astype(np.float32) for _ in range(2))
    for step in (0.0, 0.5, 30.0, -30.0):
        for x in jax.tree.leaves(run(name, logp, logp - step, advantage * np.float32(size))):
            assert np.isfinite(x[MASK]).all()
