"""Lengths of responses of a known mean, and the rows that they fill."""

import numpy as np
import pytest

from distflow_jax.coordinator.first_fit import RowLimits
from distflow_jax.pods.response_lengths import share_of_rows, spread


@pytest.mark.parametrize("mean", [5, 16, 200, 499.9999, 500, 500.0001, 800, 999, 1000])
def test_the_spread_has_the_mean_and_the_limit(mean):
    lengths = spread(mean, 1000, 100_000)
    assert lengths.mean() == pytest.approx(mean, rel=1e-3)
    assert lengths[0] >= 0 and lengths[-1] <= 1000
    assert (np.diff(lengths) >= 0).all()


def test_spreads_with_a_known_name():
    even = spread(500, 1000, 1000)
    np.testing.assert_allclose(even, (np.arange(1000) + 0.5), rtol=1e-3)
    exponential = spread(10, 1000, 100_000)
    assert (exponential**2).mean() == pytest.approx(2 * 10**2, rel=0.01)
    assert set(spread(1000, 1000, 7)) == {1000.0}


def test_no_spread_of_that_mean_has_a_larger_entropy():
    """Of the density on a grid: any change that keeps sum and mean lowers it."""
    edges = np.linspace(0, 1000, 51)
    share = np.histogram(spread(300, 1000, 1_000_000), edges)[0] / 1_000_000
    at = (edges[1:] + edges[:-1]) / 2

    def entropy(p):
        return -(p * np.log(p)).sum()

    drawn = np.random.default_rng(0)
    for _ in range(50):
        change = drawn.normal(size=50)
        for fixed in (np.ones(50), at - at.mean()):
            change -= fixed * (change @ fixed) / (fixed @ fixed)
        change *= 0.1 * share.min() / np.abs(change).max()
        assert entropy(share + change) < entropy(share) + 1e-9


@pytest.mark.parametrize("shared", [True, False])
def test_short_responses_share_rows(shared):
    limits = RowLimits(tokens=1100, sequences=275, shared=shared)
    full = share_of_rows(64, 8, 100, 1000, 1000, limits)
    half = share_of_rows(64, 8, 100, 500, 1000, limits)
    short = share_of_rows(64, 8, 100, 50, 1000, limits)
    assert full == 1.0 and 0.5 < half < 0.75 and short < half / 2
    least = (50 + (100 / 8 if shared else 100)) / 1100
    assert least <= short < 1.2 * least
