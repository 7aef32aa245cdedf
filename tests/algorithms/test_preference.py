"""DPO, IPO, ORPO, KTO and the reward model's loss, and how pairs are found in rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import formulas
from support.ragged import Sequence, assert_close, first, pack

from distflow_jax.algorithms.preference import PREFERENCE_LOSSES, kto, pairs, partner

# rewards of the chosen and the rejected response; ORPO's are mean log-probs, below 0
CHOSEN = np.array([-45.0, -5.0, -0.6, -2.0, -1e-3, -0.1, -1.0, -3e-4])
REJECTED = np.array([-5.0, -2.0, -0.1, -2.0, -2e-3, -0.8, -6.0, -40.0])


def log_odds(logp):
    p = np.exp(logp)
    return np.log(p / (1 - p))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


REFERENCES = {
    "dpo": lambda x, y, beta: -np.log(sigmoid(beta * (x - y))),
    "ipo": lambda x, y, beta: (x - y - 1 / (2 * beta)) ** 2,
    "orpo": lambda x, y, beta: -x - beta * np.log(sigmoid(log_odds(x) - log_odds(y))),
}


@pytest.mark.parametrize("beta", [0.1, 0.5])
@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_losses_match_the_definition(name, beta):
    def total(x):
        out = PREFERENCE_LOSSES[name](x[0], x[1], beta=beta).loss
        return jnp.sum(out), out

    both = np.stack([CHOSEN, REJECTED]).astype(np.float32)
    gradient, loss = jax.grad(total, has_aux=True)(jnp.asarray(both))
    exact = np.float64(both)
    assert_close(loss, REFERENCES[name](*exact, beta))

    def flat(x):
        return REFERENCES[name](*x.reshape(2, -1), beta).sum()

    slope = formulas.gradient(flat, exact.ravel())
    assert_close(gradient, slope.reshape(2, -1), rtol=1e-4)


def test_orpo_is_finite_where_a_response_is_certain():
    """The odds of P = 1 are infinite; they are those of a mean log-prob of -1e-6."""
    loss = PREFERENCE_LOSSES["orpo"]

    def total(x):
        return loss(x[0], x[1], beta=0.1).loss

    for chosen, rejected in ((0.0, -1.0), (-1.0, 0.0), (0.0, 0.0), (-1e6, -1e6)):
        value, slope = jax.value_and_grad(total)(jnp.float32([chosen, rejected]))
        assert np.isfinite([value, *slope]).all()
    near = REFERENCES["orpo"](np.float64(-1e-6), np.float64(-1.0), 0.1)
    assert_close(total(jnp.float32([0.0, -1.0])), near, rtol=1e-3)


@pytest.mark.parametrize("desirable", [True, False])
def test_kto_matches_the_definition(desirable):
    """lambda - v of the paper's value function v, which is flat far from the baseline."""
    reward = np.float32([-300.0, -7.0, -0.5, 0.25, 0.5, 3.0, 300.0])

    def reference(x):
        value = 1.3 * sigmoid(0.4 * (x - 0.25) if desirable else 0.4 * (0.25 - x))
        return (1.3 - value).sum()

    def total(x):
        full = [jnp.full(x.shape, value) for value in (0.25, 1.3, desirable)]
        return kto(x, *full, beta=0.4).sum()

    loss, gradient = jax.value_and_grad(total)(reward)
    assert_close(loss, reference(np.float64(reward)))
    assert_close(gradient, formulas.gradient(reference, np.float64(reward)), rtol=1e-4)


def test_pairs_are_found_wherever_they_lie_in_the_row():
    """Groups of two in one row each; a lone chosen, a lone rejected one and a third sample."""
    ones = np.ones(2, bool)
    groups = {0: (0, 1), 1: (0, 1), 2: (0,), 3: (1,), 4: (0, 1, 2)}
    sequences = [Sequence(g, n, 2, ones) for g, numbers in groups.items() for n in numbers]
    value = np.arange(1, len(sequences) + 1, dtype=np.float32)
    for seed in range(20):
        packed = pack(sequences, seed, shared=True)
        rows = first(packed.rows)
        row = {i: r for (_, r), members in packed.placement.rows() for i in members}
        paired = pairs(rows)
        other = packed.unpack_sequences(partner(first(packed.per_sequence(value)), paired)[None])
        for i, s in enumerate(sequences):
            mate = [j for j, t in enumerate(sequences) if (t.group, t.sample) == (s.group, 1)]
            together = s.sample == 0 and mate and row[mate[0]] == row[i]
            assert other[i] == (value[mate[0]] if together else 0)
