"""DPO, IPO and the reward model's loss, and how pairs are found in rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import formulas
from support.ragged import Sequence, assert_close, first, pack

from distflow_jax.algorithms.preference import PREFERENCE_LOSSES, pairs, partner, reward_model

DELTA = np.array([-40.0, -3.0, -0.5, 0.0, 1e-3, 0.7, 5.0, 40.0])
REFERENCES = {
    "dpo": lambda x, beta: np.log1p(np.exp(-beta * x)),
    "ipo": lambda x, beta: (x - 1 / (2 * beta)) ** 2,
}


@pytest.mark.parametrize("beta", [0.1, 0.5])
@pytest.mark.parametrize("name", PREFERENCE_LOSSES)
def test_losses_match_the_definition(name, beta):
    def total(x):
        out = PREFERENCE_LOSSES[name](x, beta=beta)
        return jnp.sum(out), out

    gradient, loss = jax.grad(total, has_aux=True)(jnp.asarray(DELTA, jnp.float32))
    exact = np.float64(np.float32(DELTA))
    assert_close(loss, REFERENCES[name](exact, beta))
    slope = formulas.gradient(lambda x: REFERENCES[name](x, beta).sum(), exact)
    assert_close(gradient, slope, rtol=1e-4)


def test_reward_model_matches_the_definition():
    rng = np.random.default_rng(0)
    chosen, rejected = rng.normal(0, 3, (2, 20)).astype(np.float32)

    def reference(x):
        plus, minus = x[:20], x[20:]
        return (np.log1p(np.exp(-(plus - minus - 0.2))) + 0.05 * (plus + minus) ** 2).sum()

    def total(x):
        return jnp.sum(reward_model(x[:20], x[20:], margin=0.2, center_coef=0.05))

    both = np.concatenate([chosen, rejected])
    loss, gradient = jax.value_and_grad(total)(jnp.asarray(both))
    assert_close(loss, reference(np.float64(both)))
    assert_close(gradient, formulas.gradient(reference, np.float64(both)), rtol=1e-4)


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
