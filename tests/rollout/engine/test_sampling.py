"""Drawing tokens: truncation against a sort, frequencies against softmax, noise by uid and place.

B slots, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from distflow_jax.programs.hlo import read
from distflow_jax.rollout.engine.sampling import SlotSampling, draw, sample_key, smallest_kept

# two programs of draw in all: compiling is what takes the time here
VOCAB, MANY = 200, 20_000
SLOTS = 64

run_draw = jax.jit(draw)
# one program for all slots' keys
keys_of = jax.jit(jax.vmap(sample_key, in_axes=(None, 0, 0)))


@jax.jit
def run_truncate(logits, top_k, top_p):
    least = smallest_kept(logits, np.ones(len(logits), np.float32), top_k, top_p)
    return jnp.where(logits >= least[:, None], logits, -jnp.inf)


def settings(slots, temperature=1.0, top_k=0, top_p=1.0):
    return SlotSampling(
        np.full(slots, temperature, np.float32),
        np.full(slots, top_k, np.int32),
        np.full(slots, top_p, np.float32),
    )


def keys_for(counter, sample, seed=0):
    return keys_of(
        jax.random.key(seed), np.asarray(counter, np.int32), np.asarray(sample, np.int32)
    )


def softmax(x):
    x = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def kept_by_sorting(logits, top_k, top_p):
    """The tokens of one slot that top-k, then top-p of what is left, keep; ties all kept."""
    vocab = len(logits)
    k = min(top_k, vocab) if top_k else vocab
    keep = logits >= np.sort(logits)[::-1][k - 1]
    if top_p < 1:
        p = np.where(keep, softmax(np.where(keep, logits, -np.inf)), 0)
        ordered = np.sort(p)[::-1]
        least = ordered[np.searchsorted(np.cumsum(ordered), top_p)]
        keep &= p >= least
    return keep


@pytest.mark.parametrize("vocab", [7, 300])
def test_truncation_keeps_what_a_sort_would(vocab):
    rng = np.random.default_rng(vocab)
    slots = 64
    logits = rng.normal(0, 3, (slots, vocab)).astype(np.float32)
    logits[::7] = np.round(logits[::7]) + 0.0  # with ties; + 0.0: -0 would rank below 0
    top_k = rng.choice([0, 1, 2, 5, vocab, vocab + 9], slots).astype(np.int32)
    top_p = rng.choice([1.0, 0.999, 0.9, 0.37, 0.01], slots).astype(np.float32)
    got = np.asarray(run_truncate(logits, top_k, top_p))
    for b in range(slots):
        keep = kept_by_sorting(logits[b], top_k[b], top_p[b])
        np.testing.assert_array_equal(np.isfinite(got[b]), keep, err_msg=f"{top_k[b]} {top_p[b]}")
        np.testing.assert_array_equal(got[b][keep], logits[b][keep])
        assert (got[b][~keep] == -np.inf).all()


def test_truncation_off_is_the_identity():
    logits = np.random.default_rng(0).normal(size=(4, 50)).astype(np.float32)
    got = run_truncate(logits, np.zeros(4, np.int32), np.ones(4, np.float32))
    np.testing.assert_array_equal(got, logits)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (1.6, 0, 1.0), (0.6, 0, 1.0), (1.0, 12, 0.8)]
)
def test_frequencies_follow_the_distribution(temperature, top_k, top_p):
    """Chi-square at a fixed seed; a vocabulary of 200 leaves the last block half empty."""
    rng = np.random.default_rng(1)
    one = rng.normal(0, 1.5, VOCAB).astype(np.float32)
    keys = keys_for(np.arange(MANY) // 8, np.arange(MANY) % 8)
    position = np.full(MANY, 3, np.int32)
    many = settings(MANY, temperature, top_k, top_p)
    drawn = run_draw(np.tile(one, (MANY, 1)), keys, position, many)
    p = softmax(one / np.float32(temperature))
    p = np.where(kept_by_sorting(one / np.float32(temperature), top_k, top_p), p, 0)
    p /= p.sum()
    seen = np.bincount(np.asarray(drawn.token), minlength=VOCAB)
    assert seen[p == 0].sum() == 0
    expected = p * MANY
    often = expected >= 5  # the rest together, as chi-square wants it
    observed = np.append(seen[often], seen[~often].sum())
    expected = np.append(expected[often], expected[~often].sum())
    full = expected > 0
    assert stats.chisquare(observed[full], expected[full]).pvalue > 1e-3
    # log-probs are tempered and not cut, as a trainer's are
    whole = softmax(one / np.float32(temperature))
    np.testing.assert_allclose(drawn.logp, np.log(whole[np.asarray(drawn.token)]), atol=2e-5)


def test_frequencies_within_one_response():
    """Over the positions of one response too: noise of one position says nothing of the next."""
    p, place = np.array([0.5, 0.2, 0.3]), [3, 130, 199]  # in both blocks; nothing else possible
    one = np.full(VOCAB, -np.inf, np.float32)
    one[place] = np.log(p)
    keys = keys_for(np.zeros(MANY), np.zeros(MANY))
    position = np.arange(MANY, dtype=np.int32)
    drawn = run_draw(np.tile(one, (MANY, 1)), keys, position, settings(MANY))
    assert set(np.unique(drawn.token)) == set(place)
    tokens = np.searchsorted(place, drawn.token)
    assert stats.chisquare(np.bincount(tokens, minlength=3), p * MANY).pvalue > 1e-3
    pairs = np.bincount(3 * tokens[:-1] + tokens[1:], minlength=9)
    expected = np.outer(p, p).ravel() * (MANY - 1)
    assert stats.chisquare(pairs, expected).pvalue > 1e-3


def test_temperature_zero_is_greedy():
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(SLOTS, 300)).astype(np.float32)
    keys = keys_for(np.arange(SLOTS), np.zeros(SLOTS))
    # top-k and top-p say nothing about the most likely token
    drawn = run_draw(logits, keys, np.zeros(SLOTS, np.int32), settings(SLOTS, 0.0, 3, 0.1))
    best = logits.argmax(-1)
    np.testing.assert_array_equal(drawn.token, best)
    p = softmax(logits)
    np.testing.assert_allclose(drawn.logp, np.log(p[np.arange(SLOTS), best]), atol=1e-5)
    ordered = np.sort(logits)
    np.testing.assert_allclose(drawn.margin, ordered[:, -1] - ordered[:, -2], atol=1e-5)


def test_noise_depends_on_uid_and_position_alone():
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(SLOTS, 300)).astype(np.float32)
    counter, sample = np.divmod(np.arange(SLOTS), 4)
    position = rng.integers(0, 50, SLOTS).astype(np.int32)
    first = run_draw(logits, keys_for(counter, sample), position, settings(SLOTS))
    # in other slots, beside other neighbours
    mine, order = np.arange(20), rng.permutation(SLOTS)[:20]
    moved = [x.copy() for x in (rng.permutation(logits), counter + 7, sample, position)]
    for target, source in zip(moved, (logits, counter, sample, position), strict=True):
        target[order] = source[mine]
    again = run_draw(moved[0], keys_for(*moved[1:3]), moved[3], settings(SLOTS))
    for a, b in zip(again, first, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[order], np.asarray(b)[mine])
    # and each of the four makes other noise
    for seed, c, s, t in ((1, 0, 0, 0), (0, 100, 0, 0), (0, 0, 100, 0), (0, 0, 0, 100)):
        other = run_draw(
            logits, keys_for(counter + c, sample + s, seed), position + t, settings(SLOTS)
        )
        assert np.mean(np.asarray(other.token) == np.asarray(first.token)) < 0.3
    # counter and sample are not interchangeable
    swapped = run_draw(logits, keys_for(sample, counter), position, settings(SLOTS))
    differ = counter != sample
    same = np.asarray(swapped.token) == np.asarray(first.token)
    assert same[differ].mean() < 0.3 and same[~differ].all()


def test_slots_have_settings_of_their_own():
    rng = np.random.default_rng(4)
    logits = rng.normal(size=(SLOTS, 300)).astype(np.float32)
    choices = [(1, 0, 1), (0, 0, 1), (0.5, 3, 1), (1, 1, 1), (2, 0, 0.2), (1, 0, 0.9)]
    keys, position = keys_for(np.arange(SLOTS), np.zeros(SLOTS)), np.zeros(SLOTS, np.int32)
    which = np.arange(SLOTS) % len(choices)
    t, k, p = np.array(choices)[which].T
    mixed = SlotSampling(np.float32(t), np.int32(k), np.float32(p))
    together = run_draw(logits, keys, position, mixed)
    for i, choice in enumerate(choices):
        alike = run_draw(logits, keys, position, settings(SLOTS, *choice))
        mine = which == i
        for a, b in zip(together[:2], alike[:2], strict=True):
            np.testing.assert_allclose(np.asarray(a)[mine], np.asarray(b)[mine], atol=1e-6)
    only = which == 3
    np.testing.assert_array_equal(np.asarray(together.token)[only], logits[only].argmax(-1))
    whole = np.log(softmax(logits)[only].max(-1))
    np.testing.assert_allclose(np.asarray(together.logp)[only], whole, atol=1e-5)


def test_margin_tells_how_near_the_runner_up_was():
    """A change of the logits by less than half the margin draws the same token."""
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(SLOTS, 300)).astype(np.float32)
    keys, position = keys_for(np.arange(SLOTS), np.zeros(SLOTS)), np.zeros(SLOTS, np.int32)
    drawn = run_draw(logits, keys, position, settings(SLOTS))
    margin = np.asarray(drawn.margin)
    assert (margin > 0).all()
    shift = rng.uniform(-1, 1, logits.shape) * np.minimum(0.45 * margin, 1.0)[:, None]
    moved = run_draw((logits + shift).astype(np.float32), keys, position, settings(SLOTS))
    np.testing.assert_array_equal(moved.token, drawn.token)


def test_the_cost_of_drawing_is_that_without_truncation():
    """As counted: with top-k and top-p, 64 halvings read the logits, or what is made of them."""
    logits, state = np.zeros((SLOTS, VOCAB), np.float32), settings(SLOTS)
    arguments = logits, keys_for([0] * SLOTS, range(SLOTS)), np.zeros(SLOTS, np.int32), state
    text = run_draw.lower(*arguments).compile().as_text()
    marked, dearest = (read(t).bytes_accessed for t in (text, text.replace("/seldom/", "/")))
    assert dearest > marked + 64 * logits.nbytes
