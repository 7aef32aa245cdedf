"""The clipped surrogate against plain float64 NumPy, its corners, and poison outside the mask."""

import jax
import numpy as np
import pytest

from distflow_jax.algorithms.masked import masked_sum
from distflow_jax.algorithms.policy_losses import ppo_clip

CLIPS = dict(clip_low=0.2, clip_high=0.28, dual_clip=3.0)


def reference(logp, old, advantage, clip_low, clip_high, dual_clip):
    """(loss, clipped, clipped_lower), token by token."""
    out = []
    for d, a in zip((logp - old).ravel(), advantage.ravel(), strict=True):
        r = np.exp(np.clip(d, -20, 20))
        plain, clipped = -a * r, -a * min(max(r, 1 - clip_low), 1 + clip_high)
        loss = max(plain, clipped)
        lower = a < 0 and loss > -a * dual_clip
        out.append((-a * dual_clip if lower else loss, clipped > plain, lower))
    return np.array(out, np.float64).T.reshape(3, *logp.shape)


@jax.jit
def _loss_and_gradient(logp, old, advantage, mask):
    def total(x):
        loss = ppo_clip(x, old, advantage, mask, **CLIPS).loss
        return masked_sum(loss, mask), loss

    gradient, loss = jax.grad(total, has_aux=True)(logp)
    return loss, gradient


def loss_and_gradient(*arrays):
    """Per-token loss, and the gradient of its masked sum in logp."""
    return tuple(np.asarray(x) for x in _loss_and_gradient(*arrays))


def random_batch(seed, shape=(6, 40)):
    rng = np.random.default_rng(seed)
    old = -rng.exponential(2.0, shape)
    logp = old + rng.normal(0, 0.6, shape) * rng.choice([0.1, 1, 4], shape)
    advantage = rng.normal(0, 1, shape) * rng.choice([0, 1, 1], shape)
    mask = rng.random(shape) < 0.6
    return *(x.astype(np.float32) for x in (logp, old, advantage)), mask


def test_matches_the_definition():
    logp, old, advantage, mask = random_batch(0)
    got = ppo_clip(logp, old, advantage, mask, **CLIPS)
    loss, clipped, lower = reference(
        *(x.astype(np.float64) for x in (logp, old, advantage)), **CLIPS
    )
    np.testing.assert_allclose(np.asarray(got.loss)[mask], loss[mask], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(np.asarray(got.clipped)[mask], clipped[mask])
    np.testing.assert_array_equal(np.asarray(got.clipped_lower)[mask], lower[mask])
    np.testing.assert_allclose(np.asarray(got.log_ratio)[mask], (logp - old)[mask])
    assert 0 < clipped[mask].mean() < 1 and 0 < lower[mask].mean() < 1


def test_gradient_matches_finite_differences():
    logp, old, advantage, mask = random_batch(1)
    got = loss_and_gradient(logp, old, advantage, mask)[1]
    step, wide = 1e-7, [x.astype(np.float64) for x in (logp, old, advantage)]
    up = reference(wide[0] + step, *wide[1:], **CLIPS)[0]
    down = reference(wide[0] - step, *wide[1:], **CLIPS)[0]
    expected = np.where(mask, (up - down) / (2 * step), 0)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


CORNERS = [  # (ratio, advantage, loss, slope in logp)
    (1.0, 2.0, -2.0, -2.0),  # on policy: the gradient of plain policy gradient
    (1.0, -2.0, 2.0, 2.0),
    (1.5, 1.0, -1.28, 0.0),  # too far up: no more gain, no more gradient
    (0.5, 1.0, -0.5, -0.5),  # a good token fell: the gradient brings it back
    (0.5, -1.0, 0.8, 0.0),  # a bad token has fallen far enough
    (1.5, -1.0, 1.5, 1.5),  # a bad token rose
    (5.0, -1.0, 3.0, 0.0),  # dual clip: at most 3 |A|
    (5.0, 0.0, 0.0, 0.0),
]


def test_corners():
    ratio, advantage, loss, slope = np.array(CORNERS, np.float32).T[:, None]
    mask = np.ones(ratio.shape, bool)
    got, gradient = loss_and_gradient(np.log(ratio), np.zeros_like(ratio), advantage, mask)
    np.testing.assert_allclose(got, loss, rtol=1e-5)
    np.testing.assert_allclose(gradient, slope, rtol=1e-5)


def test_equal_policies_clip_nothing():
    logp, _, advantage, mask = random_batch(2)
    got = ppo_clip(logp, logp, advantage, mask, **CLIPS)
    np.testing.assert_array_equal(np.asarray(got.loss)[mask], -advantage[mask])
    for metric in (got.clipped, got.clipped_lower, got.log_ratio):
        np.testing.assert_array_equal(np.asarray(metric)[mask], 0)


def test_huge_log_ratios_stay_finite():
    logp, advantage = np.float32([[1e3, 1e3, -1e3, -1e3]]), np.float32([[1, -1, 1, -1]])
    mask = np.ones(logp.shape, bool)
    for x in loss_and_gradient(logp, np.zeros_like(logp), advantage, mask):
        assert np.isfinite(x).all()


@pytest.mark.parametrize("poison", [np.inf, -np.inf, np.nan, 1e30])
@pytest.mark.parametrize("which", range(3))
def test_masked_values_do_not_matter(poison, which):
    *arrays, mask = random_batch(3)
    clean = loss_and_gradient(*arrays, mask)
    arrays[which] = np.where(mask, arrays[which], np.float32(poison))
    loss, gradient = loss_and_gradient(*arrays, mask)
    np.testing.assert_array_equal(loss[mask], clean[0][mask])
    np.testing.assert_array_equal(gradient, clean[1])
    np.testing.assert_array_equal(gradient[~mask], 0)
