"""Sampler-trainer weights: bounds, and A-3PO's proximal policy.

tests/training/test_policy_objective.py has every one inside the objective, with its gradient.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import formulas
from support.ragged import assert_close, draw, first, pack, random_sequences

from distflow_jax.algorithms.correction import (
    WEIGHTS,
    a3po_alpha,
    a3po_proximal,
    log_rho,
    mean_weight,
    rejected_sequences,
)
from distflow_jax.config.algorithm_tables import A3PO, CORRECTIONS, REJECTIONS

SEQUENCES = random_sequences(0)
ALL = {**CORRECTIONS, **REJECTIONS}


@pytest.mark.parametrize("name", ALL)
def test_weights_match_the_definition(name):
    """Sequences from nearly on-policy to hopeless; with the default bounds each has its part."""
    scale = np.float32(np.random.default_rng(1).choice([0, 1e-3, 0.1, 1.0], len(SEQUENCES)))
    prox = draw(2, SEQUENCES)
    step = zip(prox, scale, draw(3, SEQUENCES), strict=True)
    roll = [p - c * d for p, c, d in step]
    kind = ALL[name]

    @jax.jit
    def run(prox, roll, rows):
        return WEIGHTS[name](log_rho(prox, roll, rows), rows, **kind.bounds)

    results = []
    for seed, shared, poison in ((4, False, 0.0), (5, True, np.nan), (6, True, np.inf)):
        packed = pack(SEQUENCES, seed, shared=shared)
        rows = first(packed.rows)
        found = run(first(packed.tokens(prox, poison)), first(packed.tokens(roll, poison)), rows)
        weight, changed = (packed.unpack(np.asarray(x)[None]) for x in found)
        results.append(np.concatenate(weight))
        for i, s in enumerate(SEQUENCES):
            m = s.mask
            np.testing.assert_array_equal(weight[i][~m], 0)
            assert not changed[i][~m].any()
            if m.any():
                rho = (np.float64(prox[i]) - roll[i])[m]
                assert_close(weight[i][m], formulas.correction(name, rho, **kind.bounds))
    assert 0 < np.concatenate(changed).sum() < sum(s.length for s in SEQUENCES)
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5)
    assert run._cache_size() == 1
    left_out = packed.unpack_sequences(np.asarray(rejected_sequences(found, rows))[None])
    np.testing.assert_array_equal(left_out, [x.any() for x in changed])


def test_batch_normalised_weights_have_mean_one():
    """Over tokens, or over sequences however long they are."""
    packed = pack(SEQUENCES, 9, shared=True)
    rows = first(packed.rows)
    steps = draw(10, SEQUENCES, 0.3)
    log_ratio = first(packed.tokens(steps))
    for name, kind in CORRECTIONS.items():
        weight = WEIGHTS[name](log_ratio, rows, **kind.bounds).weight
        mean = mean_weight(kind, weight, rows)
        mine = packed.unpack(np.asarray(weight / mean)[None])
        mine = [x[s.mask] for x, s in zip(mine, SEQUENCES, strict=True) if s.mask.any()]
        of_sequences = [x.mean() for x in mine]
        values = of_sequences if name.startswith("sequence") else np.concatenate(mine)
        np.testing.assert_allclose(np.mean(values), 1, rtol=1e-5)
        assert abs(float(mean) - 1) > 1e-3
        nothing = mean_weight(kind, jnp.zeros_like(weight), rows)
        assert nothing == 1


@pytest.mark.parametrize("newest", [0, 7, 1000])
@pytest.mark.parametrize("name", A3PO)
def test_alpha_is_the_share_of_versions(name, newest):
    """(v_prox - v_b) / (v - v_b), within 0 and 1, by integers. The newest weights N are the
    proximal ones and N + 1 the current ones; in AReaL, N - 1 and N."""
    proximal = newest - A3PO[name]
    for version in range(newest + 2):  # N + 1 does not occur: weights that are not there yet
        gap = proximal + 1 - version
        wanted = min(max((proximal - version) / gap, 0.0), 1.0) if gap > 0 else 0.0
        got = a3po_alpha(np.float32([newest - version]), A3PO[name])
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, wanted, rtol=1e-7)


def test_alpha_of_a_stale_token():
    """Half way where one version lies on either side of the proximal one; the sampler's policy
    where that is the proximal one or newer."""
    age = np.float32([[1, 3, 0, -1]])
    assert_close(a3po_alpha(age, 0), [[1 / 2, 3 / 4, 0, 0]])
    assert_close(a3po_alpha(age, 1), [[0, 2 / 3, 0, 0]])
    alpha = jnp.asarray(a3po_alpha(age, 0))
    logp, roll = jnp.full((1, 4), -1.0), jnp.full((1, 4), -3.0)
    assert_close(a3po_proximal(logp, roll, alpha), [[-2.0, -1.5, -3.0, -3.0]])
    slope = jax.grad(lambda x: a3po_proximal(x, roll, alpha).sum())(logp)
    np.testing.assert_array_equal(slope, 0)
