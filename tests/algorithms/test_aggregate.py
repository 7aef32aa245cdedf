"""Aggregation: weighted sums over one denominator, equal to the definitions however split."""

import jax.numpy as jnp
import numpy as np
import pytest

from distflow_jax.algorithms.aggregate import AGGREGATIONS, denominator, token_weights
from distflow_jax.algorithms.masked import masked_max, masked_sum, safe_divide

NORM = 32.0


def reference(mode, sequences):
    """Over a list of (losses, mask), straight from the definitions."""
    kept = [np.asarray(x, np.float64)[m] for x, m in sequences if m.any()]
    return {
        "token-mean": np.concatenate(kept).mean(),
        "token-sum": np.concatenate(kept).sum(),
        "seq-mean-token-sum": np.mean([x.sum() for x in kept]),
        "seq-mean-token-mean": np.mean([x.mean() for x in kept]),
        "seq-mean-token-sum-norm": np.mean([x.sum() for x in kept]) / NORM,
    }[mode]


def batch(seed, rows=4, per_row=3, length=10):
    """(losses [R, L], mask, length of each token's sequence, list of sequences)."""
    rng = np.random.default_rng(seed)
    loss, mask, lengths, sequences = [], [], [], []
    for _ in range(rows):
        parts = rng.normal(size=(per_row, length)).astype(np.float32)
        masks = rng.random((per_row, length)) < rng.random((per_row, 1))
        masks[0] = masks[0] & (len(sequences) > 0)  # a sequence that is masked out altogether
        sequences += list(zip(parts, masks, strict=True))
        loss.append(parts.ravel())
        mask.append(masks.ravel())
        lengths.append(np.repeat(masks.sum(1), length))
    return np.stack(loss), np.stack(mask), np.stack(lengths).astype(np.int32), sequences


def aggregate(mode, loss, mask, lengths, total):
    weight = token_weights(mode, jnp.asarray(mask), jnp.asarray(lengths))
    return masked_sum(loss * weight, mask) / total


def counts(mode, sequences):
    tokens = jnp.int32(sum(m.sum() for _, m in sequences))
    full = jnp.int32(sum(m.any() for _, m in sequences))
    return denominator(mode, tokens, full, NORM)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_matches_the_definition(mode):
    loss, mask, lengths, sequences = batch(0)
    got = aggregate(mode, loss, mask, lengths, counts(mode, sequences))
    np.testing.assert_allclose(got, reference(mode, sequences), rtol=1e-5)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_micro_batches_add_up(mode):
    """Sums over one denominator: the mean of micro-batch means would be something else."""
    loss, mask, lengths, sequences = batch(1)
    total = counts(mode, sequences)
    whole = aggregate(mode, loss, mask, lengths, total)
    rows = [slice(0, 1), slice(1, 4)]
    parts = sum(aggregate(mode, loss[r], mask[r], lengths[r], total) for r in rows)
    np.testing.assert_allclose(parts, whole, rtol=1e-5)


@pytest.mark.parametrize("mode", AGGREGATIONS)
@pytest.mark.parametrize("poison", [np.inf, np.nan])
def test_masked_losses_do_not_matter(mode, poison):
    loss, mask, lengths, sequences = batch(2)
    total = counts(mode, sequences)
    clean = aggregate(mode, loss, mask, lengths, total)
    bad = np.where(mask, loss, np.float32(poison))
    np.testing.assert_array_equal(aggregate(mode, bad, mask, lengths, total), clean)


def test_masked_reductions():
    x = jnp.array([1.0, np.nan, 5.0, np.inf, -2.0])
    mask = jnp.array([True, False, True, False, True])
    assert masked_sum(x, mask) == 4
    assert masked_max(x, mask) == 5
    assert masked_max(x, jnp.zeros(5, bool)) == -np.inf
    np.testing.assert_array_equal(
        safe_divide(jnp.array([3.0, 3.0]), jnp.array([2.0, 0.0])), [1.5, 0]
    )
