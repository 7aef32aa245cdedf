"""The table of docs/algorithms.md that compares this package with verl, TRL and AReaL.

Each row is computed on both sides: "here" by the package, the others by the formulas of their
sources in float64 NumPy, with the numbers of the row's cells. A row without a test fails, and so
does a test without a row.
"""

import re
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import formulas
from support.paths import ROOT
from support.ragged import Sequence, assert_close, first, pack
from support.tiny_model import TINY

from distflow_jax.algorithms.advantages import ESTIMATORS, Outcome
from distflow_jax.algorithms.correction import WEIGHTS, a3po_alpha
from distflow_jax.algorithms.kl import KL_ESTIMATORS
from distflow_jax.algorithms.policy_losses import LOSSES, SELECTIONS
from distflow_jax.algorithms.policy_tokens import policy_tokens
from distflow_jax.algorithms.value import value_loss
from distflow_jax.config.algorithm_config import AlgorithmConfig, PreferenceConfig, ValueConfig
from distflow_jax.config.algorithm_tables import (
    A3PO,
    ADVANTAGES,
    CORRECTIONS,
    POLICY_LOSSES,
    REJECTIONS,
)
from distflow_jax.rewards.function_calls import result_from
from distflow_jax.training.forward import ForwardConfig
from distflow_jax.training.objectives import kto_objective, pair_objectives
from distflow_jax.training.objectives import policy_objective as policy

HEADER = "| what | verl | TRL | AReaL | here |"
NONE = "–"


class Row(NamedTuple):
    """Cells of a row."""

    what: str
    verl: str
    trl: str
    areal: str
    here: str


def rows_of_the_page():
    text = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    (after,) = text.split(f"{HEADER}\n")[1:]
    lines = after.split("\n\n")[0].splitlines()[1:]
    rows = [Row(*(cell.strip() for cell in line.strip("|").split(" | "))) for line in lines]
    assert len({row.what for row in rows}) == len(rows)
    return {row.what: row for row in rows}


ROWS = rows_of_the_page()
TESTS = {}


def of(what):
    """Registers the test of a row, by the row's first cell."""

    def register(test):
        assert what not in TESTS, what
        TESTS[what] = test
        return test

    return register


def test_every_test_has_a_row():
    assert set(TESTS) <= set(ROWS)


@pytest.mark.parametrize("what", ROWS)
def test_both_sides(what):
    row = ROWS[what]
    TESTS[what](row)
    assert all(row), f"an empty cell: {row}"


def numbers(cell):
    return [float(x) for x in re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?:e-?\d+)?(?![\w.]*\w)", cell)]


def one(cell):
    (number,) = numbers(cell)
    return number


# -- "here" ----------------------------------------------------------------------------------------


def responses(*lengths, groups=None):
    """Sequences of these numbers of tokens, one group each by default."""
    groups = range(len(lengths)) if groups is None else groups
    members = [list(groups)[:i].count(g) for i, g in enumerate(groups)]
    return [
        Sequence(group, member, 2, np.ones(length, bool))
        for group, member, length in zip(groups, members, lengths, strict=True)
    ]


def masked_out(length=3):
    return Sequence(90, 0, 2, np.zeros(length, bool))


def advantages(name, scores, *, group=None, tokens=2, **options):
    """(advantage of each response, returns of the first), of one group each or all of one."""
    found = responses(*[tokens] * len(scores), groups=[group or 0] * len(scores))
    packed = pack(found, 1, shared=False)
    reward = [np.r_[np.zeros(tokens - 1), score].astype(np.float32) for score in scores]
    extra = {"value": packed.tokens([np.full(tokens, 0.25)] * len(scores))}
    extra = {key: extra[key] for key in ADVANTAGES[name].reads}
    outcome = Outcome(packed.tokens(reward), packed.rows, 91, **extra)
    got, returns = ESTIMATORS[name](outcome, **options)
    return np.array([x[0] for x in packed.unpack(got)]), packed.unpack(returns)[0]


def policy_loss(name, logp, old, advantage, *, selected=True, **options):
    """(loss of each token of one response, gradient of their mean); all tokens are selected, or
    none."""
    packed = pack(responses(len(logp)), 1, shared=False)
    rows, kind = first(packed.rows), POLICY_LOSSES[name]
    fields = [first(packed.tokens([np.float32(x)])) for x in (logp, old, advantage)]

    @jax.jit
    def total(x):
        chosen = None if name not in SELECTIONS else rows.response_mask & selected
        tokens = policy_tokens(x, *fields[1:], rows, chosen)
        loss = LOSSES[name](tokens, **(kind.options | options)).loss
        return jnp.sum(jnp.where(rows.response_mask, loss, 0.0)) / len(logp), loss

    gradient, loss = jax.grad(total, has_aux=True)(fields[0])
    return tuple(packed.unpack(np.asarray(x)[None])[0] for x in (loss, gradient))


def objective_loss(config, sequences, **fields):
    """Loss of the whole policy objective; fields are logp, entropy, roll, advantage by sequence."""
    packed = pack(sequences, 1, shared=False)
    zeros = [np.zeros(len(s.mask), np.float32) for s in sequences]
    arrays = {key: first(packed.tokens(fields.get(key, zeros))) for key in fields}
    logp = arrays.get("logp", first(packed.tokens(zeros)))
    entropy = arrays.get("entropy", first(packed.tokens(zeros)))
    batch = policy.PolicyBatch(
        first(packed.rows), arrays["advantage"], arrays.get("roll"), logp, arrays.get("ref")
    )
    objective = policy.policy_objective(TINY, config, ForwardConfig(), max_response=8)
    with mock.patch.object(policy, "response_logp", lambda *_: (logp, entropy)):
        batch, denominators = objective.whole(batch)
        return objective.evaluate({}, batch, denominators, jnp.float32(1))[0]


def weights(table, name, log_rho, **bounds):
    """Weights of the tokens of one response."""
    packed = pack(responses(len(log_rho)), 1, shared=False)
    rows, kind = first(packed.rows), table[name]
    found = WEIGHTS[name](first(packed.tokens([np.float32(log_rho)])), rows, **kind.bounds | bounds)
    return packed.unpack(np.asarray(found.weight)[None])[0]


# -- advantages ------------------------------------------------------------------------------------


def z_score(scores, added):
    scores = np.float64(scores)
    return (scores - scores.mean()) / (scores.std(ddof=1) + added)


@of("`grpo`: added to the standard deviation")
def deviation(row):
    scores = np.float32([0, 2e-4, 1e-4, 0])
    got, _ = advantages("grpo", scores)
    assert [one(cell) for cell in row[1:]] == [1e-6, 1e-4, 1e-5, 1e-6]
    assert_close(got, z_score(scores, one(row.here)))
    assert_close(got, z_score(scores, one(row.verl)))
    for other in (row.trl, row.areal):
        share = (scores.std(ddof=1) + 1e-6) / (scores.std(ddof=1) + one(other))
        np.testing.assert_allclose(z_score(scores, one(other)) / got, share, rtol=1e-4)
        assert share < 0.92


@of("`grpo`: equal scores in a group")
def equal_scores(row):
    scores = np.full(12, 0.7, np.float32)
    np.testing.assert_array_equal(advantages("grpo", scores)[0], 0)
    assert row.here == "exactly 0"
    left = float(scores[0] - np.cumsum(scores)[-1] / np.float32(12))  # of a mean in float32
    assert one(row.verl) == 1e-6 and one(row.trl) == 1e-4
    assert abs(left) / one(row.verl) > 1e-2 and abs(left) / one(row.trl) > 1e-4
    wide = np.float64(scores)
    left = abs(wide[0] - np.cumsum(wide)[-1] / 12)
    assert row.areal == "float64 rounding / 1e-5" and left / 1e-5 < 1e-9


@of("`grpo`: a group of one")
def group_of_one(row):
    score = np.float64(np.float32(0.7))
    got, _ = advantages("grpo", [score])
    verl, trl, areal = (score - 0) / (1 + 1e-6), (score - score) / 1e-4, (score - score) / 1.00001
    assert_close(got, [verl])
    assert row.verl == row.here == "its score"
    assert one(row.trl) == trl and one(row.areal) == areal


@of("whitening divides by")
def whitening(row):
    scores = np.float32([0, 2e-4, 1e-4, 0, 1e-4])
    got, _ = advantages("reinforce_plus_plus", scores, gamma=1.0)
    tokens = np.float64(np.repeat(scores, 2))
    deviation = tokens - tokens.mean()
    added = one(row.here.replace("variance", ""))
    assert row.here == row.verl == f"sqrt(variance + {added:g})".replace("1e-08", "1e-8")
    assert_close(got, (deviation / np.sqrt(tokens.var(ddof=1) + added))[::2])
    areal = deviation / (tokens.std(ddof=1) + one(row.areal))
    assert 0.3 < np.abs(got / areal[::2]).max() < 0.9


@of("whitening of 1e6 + {0, 1}")
def far_from_0(row):
    near = np.float32([0, 1, 1, 0, 1, 0, 0])
    far = np.float32(1e6) + near
    got, _ = advantages("reinforce_plus_plus", far, tokens=1, gamma=1.0)
    wanted = (near - near.mean(dtype=np.float64)) / near.std(ddof=1, dtype=np.float64)
    assert_close(got, wanted)
    in_float32 = (far - far.mean()) / far.std(ddof=1)
    in_float64 = (np.float64(far) - np.float64(far).mean()) / np.float64(far).std(ddof=1)
    np.testing.assert_allclose(in_float64, wanted, rtol=1e-8)
    assert np.abs(in_float32 - wanted).max() > 1e-2
    assert (row.verl, row.areal, row.here) == ("float32", "float64", "float32, of {0, 1}")


@of("`gae`: value after a truncated response")
def value_after_the_end(row):
    """Returns of lambda 1 are the rewards to come and, of AReaL, the value after them."""
    _, returns = advantages("gae", [1.0, 0.0], gamma=1.0, lam=1.0)
    assert_close(returns, [1.0 + one(row.here)] * 2)
    assert one(row.verl) == one(row.here) == 0 and row.areal == "the last value"
    value, target, after = [0.25, 0.25], [], 0.25
    g, ahead = 0.0, after
    for reward, v in zip([1.0, 0.0], value, strict=True):  # from the last token on
        g, ahead = reward + ahead - v + g, v
        target.append(g + v)
    np.testing.assert_allclose(target, [1.25, 1.25])


@of("bounds of scores")
def bounds_of_scores(row):
    bound = one(row.here)
    assert result_from(25.0).score == 25 > np.clip(25, -one(row.areal), one(row.areal)) == 20
    assert result_from(bound).score == bound
    with pytest.raises(ValueError, match="outside ±1e.18"):
        result_from(-1.01 * bound)


# -- losses ----------------------------------------------------------------------------------------


@of("loss: bounds of a token's log-ratio")
def bounds_of_log_ratios(row):
    bound = one(row.here)
    assert bound == numbers(row.verl)[0] == 20 and row.verl.endswith("`clip_cov`, `kl_cov` none")
    for name in ("ppo_clip", "decoupled", "kl_cov", "clip_cov"):
        options = {"dual_clip": 1e30} if name == "ppo_clip" else {}
        for d in (19.0, 21.0, 25.0):
            loss, gradient = policy_loss(name, [d], [0.0], [-1.0], selected=False, **options)
            np.testing.assert_allclose(loss, np.exp(min(d, bound)), rtol=2e-6)
            assert (gradient[0] == 0) == (d > bound)
    assert np.exp(25.0) / loss[0] > 148  # without bounds


@of("`gspo`: mean log-ratio above 10")
def clamp_of_gspo(row):
    d = np.array([11.0, 13.0])
    loss, gradient = policy_loss("gspo", d, [0.0, 0.0], [-1.0, -1.0])
    bound = numbers(row.here)[0]
    assert bound == numbers(row.verl)[0] == 10
    np.testing.assert_allclose(loss, np.exp(bound), rtol=1e-6)
    np.testing.assert_allclose(gradient, np.exp(bound) / 2, rtol=1e-6)

    def of_tokens(x, largest):
        return np.exp(np.minimum(d.mean() + x - d, largest)).mean()  # d held, as by sg

    verl, others = of_tokens(d, bound), of_tokens(d, np.inf)
    np.testing.assert_allclose(verl, np.exp(10.0))
    np.testing.assert_array_equal(formulas.gradient(lambda x: of_tokens(x, bound), d), 0)
    np.testing.assert_allclose(others, np.exp(12.0))
    slope = formulas.gradient(lambda x: of_tokens(x, np.inf), d)
    np.testing.assert_allclose(slope, np.exp(12.0) / 2, rtol=1e-6)


def clip_ranges(name, keys=("clip_low", "clip_high", "dual_clip")):
    options = AlgorithmConfig(policy_loss=name).policy_options
    return [options[key] for key in keys if options.get(key) is not None]


@of("`clip_low`, `clip_high` of `gspo`")
def range_of_gspo(row):
    assert numbers(row.here) == clip_ranges("gspo") == [3e-4, 4e-4]
    loss, _ = policy_loss("gspo", [0.1], [0.0], [1.0])
    assert_close(loss, [-1 - 4e-4])
    for cell in (row.verl, row.trl, row.areal):
        assert min(np.exp(0.1), 1 + numbers(cell)[1]) == np.exp(0.1)  # not clipped


@of("`clip_low`, `clip_high` of `gmpo`")
def range_of_gmpo(row):
    assert numbers(row.here) == clip_ranges("gmpo") == [0.4, 0.4]
    loss, _ = policy_loss("gmpo", [0.3], [0.0], [1.0])
    assert_close(loss, [-np.exp(0.3)])
    assert np.exp(min(0.3, numbers(row.verl)[1])) == np.exp(0.2)


def dppo(row, name, distance):
    """A token at a distance between the two bounds, and a ratio between the two largest ones."""
    low, high, largest = clip_ranges(name)
    assert numbers(row.here) == [low, high, largest]
    _, verl_high, verl_largest = numbers(row.verl)
    p_old, p = 0.3, distance
    loss, _ = policy_loss(name, [np.log(p)], [np.log(p_old)], [1.0])
    moved = {
        "dppo_tv": p - p_old,
        "dppo_kl": p_old * np.log(p_old / p) + (1 - p_old) * np.log((1 - p_old) / (1 - p)),
    }[name]
    assert high < moved <= verl_high and loss[0] == 0  # verl: -ratio log p
    loss, _ = policy_loss(name, [np.log(0.01)], [np.log(0.001)], [1.0])
    assert_close(loss, [-min(10.0, largest) * np.log(0.01)])
    assert min(10.0, verl_largest) == 3


@of("`clip_low`, `clip_high`, `dual_clip` of `dppo_tv`")
def range_of_dppo_tv(row):
    dppo(row, "dppo_tv", 0.48)


@of("`clip_low`, `clip_high`, `dual_clip` of `dppo_kl`")
def range_of_dppo_kl(row):
    dppo(row, "dppo_kl", 0.55)


@of("`dual_clip` of `ppo_clip`")
def dual_clip(row):
    assert clip_ranges("ppo_clip", ["dual_clip"]) == numbers(row.here) == numbers(row.verl) == [3]
    loss, _ = policy_loss("ppo_clip", [np.log(5.0)], [0.0], [-1.0])
    assert_close(loss, [3.0])
    assert "none" in row.trl and "none" in row.areal
    without = max(5.0, np.clip(5.0, 0.8, 1.2))  # -A r and -A clip(r) of TRL and AReaL
    assert without == 5


@of("`cispo`: bounds of the weight")
def bounds_of_cispo(row):
    assert row.here == row.verl == "1 - 0.2, 1 + 0.2"
    assert clip_ranges("cispo") == [0.2, 0.2]
    assert row.trl == "at most `epsilon_high`"
    for ratio, clipped in ((5.0, 1.2), (0.1, 0.8), (8.0, 1.2)):
        logp = np.log(ratio) - 3
        loss, _ = policy_loss("cispo", [logp], [-3.0], [1.0])
        assert_close(loss, [-clipped * logp])
        epsilon_high = 6.0
        trl = -min(ratio, epsilon_high) * logp
        options = {"clip_low": 1.0, "clip_high": epsilon_high - 1}
        assert_close(policy_loss("cispo", [logp], [-3.0], [1.0], **options)[0], [trl])


@of("`kl_cov_coef`")
def coefficient_of_kl_cov(row):
    assert one(row.here) == AlgorithmConfig(policy_loss="kl_cov").policy_options["kl_cov_coef"]
    loss, _ = policy_loss("kl_cov", [0.5], [0.0], [0.0])
    assert_close(loss, [one(row.here) * 0.5])
    assert one(row.verl) * 0.5 == 0.05


@of("`kl_cov`, `clip_cov` choose tokens of")
def selection(row):
    """The least share is one token: of each micro-batch, or of the step."""
    assert (row.verl, row.here) == ("a micro-batch", "an optimizer step")
    sequences = responses(3, 3)
    a, logp = [np.float32([2, -1, 0.5])] * 2, [np.float32([2, -1.5, 0])] * 2
    packed = pack(sequences, 1, shared=False)
    fields = [first(packed.tokens(x)) for x in (logp, logp, a)]
    tokens = policy_tokens(*fields, first(packed.rows))
    options = {
        "kl_cov": {"kl_cov_share": 1e-6},
        "clip_cov": {
            **{"clip_cov_ratio": 1e-6, "clip_cov_lb": 0.1, "clip_cov_ub": 9.0},
            **{"clip_low": 0.2, "clip_high": 0.2},
        },
    }
    for name, chosen in options.items():
        assert SELECTIONS[name](tokens, **chosen).sum() == 1
    parts = [
        formulas.largest_covariance([s], [np.float64(x)], [np.float64(y)], 1e-6)
        for s, x, y in zip(sequences, a, logp, strict=True)
    ]
    assert sum(chosen[0].sum() for chosen in parts) == 2


@of("`sapo`: aggregation")
def aggregation_of_sapo(row):
    config = AlgorithmConfig(policy_loss="sapo")
    assert row.here == row.verl == row.trl == config.loss_aggregation
    sequences, a = responses(1, 3), [np.float32([1]), np.float32([2, 2, 2])]
    loss = objective_loss(config, sequences, advantage=a)
    at_ratio_1 = [-2 * x for x in formulas.wide(a)]  # -A (4 / tau) sigmoid(0), tau 1
    assert_close(loss, formulas.aggregate(row.here, sequences, at_ratio_1))
    assert abs(loss + 3) < 1e-5 and formulas.aggregate(row.areal, sequences, at_ratio_1) == -3.5


@of("`rloo`: ratio of the loss")
def ratio_of_rloo(row):
    assert AlgorithmConfig(advantage="rloo").policy_loss == "ppo_clip"
    d = np.array([0.1, 0.1, 0.1])
    loss, _ = policy_loss("ppo_clip", d, np.zeros(3), np.ones(3))
    assert (row.verl, row.trl, row.here) == ("of a token", "of the response", "of a token")
    assert_close(loss, -np.exp(d))
    assert -min(np.exp(d.sum()), 1.2) == -1.2 < loss.min()


# -- aggregation -----------------------------------------------------------------------------------


@of("seq-mean-*: responses without a token")
def empty_responses(row):
    assert (row.verl, row.trl, row.here) == ("count", "count", "do not count")
    sequences = [*responses(2, 3), masked_out()]
    a = [np.full(len(s.mask), 6.0, np.float32) for s in sequences]
    for mode in ("seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"):
        config = AlgorithmConfig(aggregation=mode)
        values = [-x[s.mask] for s, x in zip(sequences, a, strict=True)]
        got = objective_loss(config, sequences, advantage=a)
        assert_close(got, formulas.aggregate(mode, sequences, values, norm=8.0))
        sums = [v.mean() if mode.endswith("mean") and len(v) else v.sum() for v in values]
        verl = np.sum(sums) / len(sequences) / (8 if mode.endswith("norm") else 1)
        np.testing.assert_allclose(verl, float(got) * 2 / 3, rtol=1e-6)


REJECTED = {  # the fourth token is too far from the sampler
    "log_rho": np.log([1.0, 1.5, 1.0, 9.0]),
    "advantage": np.array([1.0, 2.0, 3.0, 4.0]),
}


def rejected_loss(correction, rejection):
    log_rho, a = (np.float32(x) for x in REJECTED.values())
    config = AlgorithmConfig(correction=correction, rejection=rejection)
    return objective_loss(config, responses(4), logp=[log_rho - 3], roll=[0 * a - 3], advantage=[a])


@of("token-mean after a rejection: over")
def after_a_rejection(row):
    kept = -REJECTED["advantage"][:3].sum()
    assert_close(rejected_loss("none", "token_k1"), kept / 4)
    assert (row.verl, row.here) == ("what is left", "all tokens")
    assert row.trl == row.areal == row.here
    assert kept / 3 == -2  # verl


@of("weight of the tokens that a rejection keeps")
def weight_after_a_rejection(row):
    assert one(row.verl) == one(row.here) == 1 and row.trl == row.areal == "rho"
    log_rho, a = REJECTED.values()
    np.testing.assert_array_equal(weights(REJECTIONS, "token_k1", log_rho), [1, 1, 1, 0])
    of_trl = np.where(np.exp(log_rho) <= 5.0, np.exp(log_rho), 0)
    assert_close(weights(CORRECTIONS, "token_mis", log_rho), of_trl)
    assert_close(rejected_loss("token_mis", "none"), -(of_trl * a).sum() / 4)


@of("entropy bonus: mean")
def entropy_bonus(row):
    assert (row.verl, row.trl, row.here) == ("as the loss", "over tokens", "as the loss")
    sequences = responses(1, 3)
    entropy = [np.float32([4]), np.float32([1, 2, 3])]
    zeros = [np.zeros_like(x) for x in entropy]
    for mode in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"):
        config = AlgorithmConfig(aggregation=mode, entropy_coef=1.0)
        got = objective_loss(config, sequences, advantage=zeros, entropy=entropy)
        assert_close(got, -formulas.aggregate(mode, sequences, entropy))
        same = np.isclose(got, -formulas.aggregate("token-mean", sequences, entropy))
        assert same == (mode == "token-mean")


# -- KL --------------------------------------------------------------------------------------------


def estimate(name, d):
    return np.asarray(KL_ESTIMATORS[name](jnp.float32(d), jnp.zeros_like(jnp.float32(d))))


@of("`k3`: bounds of exponent; value")
def bounds_of_k3(row):
    exponent, value = numbers(row.here)
    assert numbers(row.verl) == [exponent, value] == [20, 10] and numbers(row.areal) == [value]
    d = np.array([-25.0, -4.0, -1.0, 0.5, 8.0, 25.0])

    def k3(d, bound):
        return np.exp(-np.clip(d, -bound, bound)) + np.clip(d, -bound, bound) - 1

    assert_close(estimate("k3", d), np.clip(k3(d, exponent), -value, value))
    np.testing.assert_allclose(np.clip(k3(d, np.inf), -10, value), estimate("k3", d), rtol=1e-5)
    trl = k3(d, np.inf)
    np.testing.assert_allclose(trl[[2, 3, 4]], estimate("k3", d)[[2, 3, 4]], rtol=1e-5)
    assert trl[0] > 7e10 and trl[1] > 49 and trl[5] > 24


@of("`k1`, `k2`: bounds of the value")
def bounds_of_k1(row):
    d = np.array([-15.0, -2.0, 0.5, 15.0])
    for name, exact in (("k1", d), ("k2", d**2 / 2)):
        assert_close(estimate(name, d), exact)
        clipped = np.clip(exact, -one(row.areal), one(row.areal))
        np.testing.assert_array_equal(clipped == exact, [False, True, True, False])


@of("`kl_coef`, and its place")
def weight_of_the_kl(row):
    config = AlgorithmConfig()
    assert one(row.here) == config.kl_coef == 0 and not config.kl_in_reward
    assert row.here.endswith("loss")
    assert numbers(row.verl) == [0.001] and row.verl.endswith("off")
    assert numbers(row.trl) == [0, 0.05] and numbers(row.areal) == [0.1]
    sequences, a = responses(2), [np.zeros(2, np.float32)]
    logp, ref = [np.float32([-1, -2])], [np.float32([-2, -2.5])]
    for coef in (one(row.verl), one(row.areal)):  # the weights that they would have here
        config = AlgorithmConfig(kl_coef=coef)
        got = objective_loss(config, sequences, advantage=a, logp=logp, ref=ref)
        d = np.array([1.0, 0.5])
        assert_close(got, coef * (np.exp(-d) + d - 1).mean(), rtol=1e-4)


# -- corrections -----------------------------------------------------------------------------------


@of("correction; `correction_high`")
def default_correction(row):
    assert AlgorithmConfig().correction == "none" and row.here.startswith("none")
    highs = {name: kind.bounds["high"] for name, kind in CORRECTIONS.items()}
    token_mis = highs.pop("token_mis")
    assert set(highs.values()) == {2.0} == set(numbers(row.verl))
    assert numbers(row.here) == [2, token_mis] and one(row.areal) == token_mis == 5
    product = np.log(2.5)  # of a response
    assert weights(CORRECTIONS, "sequence_mis", [product])[0] == 0
    kept = weights(CORRECTIONS, "sequence_mis", [product], high=one(row.trl))
    assert "`sequence_mis`" in row.trl
    assert_close(kept, [2.5])
    assert_close(weights(CORRECTIONS, "token_tis", [product]), [2.0])


@of("correction: bounds of log rho")
def bounds_of_log_rho(row):
    assert one(row.verl) == one(row.here) == 20
    got = weights(CORRECTIONS, "token_tis", [25.0], high=1e30)
    np.testing.assert_allclose(got, np.exp(20.0), rtol=1e-6)
    assert np.exp(25.0) / got[0] > 148  # of TRL and AReaL


@of("weight of a sequence: computed from its rhos as")
def weight_of_a_sequence(row):
    log_rho = np.log([1.1, 1.2, 1.3])
    assert row.verl == row.trl == row.here == "product" and row.areal == "geometric mean"
    product, mean = np.exp(log_rho.sum()), np.exp(log_rho.mean())
    for name in ("sequence_tis", "sequence_mis"):
        assert_close(weights(CORRECTIONS, name, log_rho), [product] * 3)
    assert abs(product - mean) > 0.5


@of("bounds of k1 are on")
def bounds_of_rejection(row):
    assert row.verl == "sampler / trainer" and row.areal == row.here == "trainer / sampler"
    rho, low, high = np.array([0.4, 0.6, 1.9, 2.5]), 0.5, 3.0
    got = weights(REJECTIONS, "token_k1", np.log(rho), low=low, high=high)
    np.testing.assert_array_equal(got, (low <= rho) & (rho <= high))
    verl = (low <= 1 / rho) & (1 / rho <= high)
    np.testing.assert_array_equal(verl, [True, True, True, False])
    as_verl = weights(REJECTIONS, "token_k1", np.log(rho), low=1 / high, high=1 / low)
    np.testing.assert_array_equal(as_verl, verl)


@of("A-3PO: alpha at age d")
def alpha(row):
    """By versions: the current policy has the newest weights N in AReaL, and N + 1 in ours."""
    d = np.arange(6)
    newest, sampler = 10, 10 - d
    areal = np.where(d > 0, (newest - 1 - sampler) / np.maximum(newest - sampler, 1), 0.0)
    ours = (newest - sampler) / (newest + 1 - sampler)
    np.testing.assert_allclose(areal, [0, 0, 1 / 2, 2 / 3, 3 / 4, 4 / 5])
    np.testing.assert_allclose(ours, d / (d + 1))
    assert row.areal == "(d - 1) / d"
    assert row.here == "d / (d + 1); `a3po_areal` (d - 1) / d"
    for name, wanted in (("a3po", ours), ("a3po_areal", areal)):
        assert_close(a3po_alpha(np.float32(d), A3PO[name]), wanted)


# -- preferences, critic ---------------------------------------------------------------------------


@of("`ipo`: log-probs of a response")
def length_of_ipo(row):
    assert (row.trl, row.areal, row.here) == ("mean", "mean", "sum")
    sequences = responses(2, 4, groups=[0, 0])
    logp = [np.float32([-1, -2]), np.float32([-1, -3, -2, -2])]
    packed = pack(sequences, 1, shared=False, together=True)
    batch = pair_objectives.PreferenceBatch(
        first(packed.rows), first(packed.tokens([np.zeros_like(x) for x in logp]))
    )
    config = PreferenceConfig(loss="ipo", beta=0.1)
    objective = pair_objectives.preference_objective(TINY, config, ForwardConfig())
    table = first(packed.tokens(logp))
    with mock.patch.object(pair_objectives, "response_logp", lambda *_: (table, None)):
        batch, count = objective.whole(batch)
        loss, _ = objective.evaluate({}, batch, count, jnp.float32(1))
    sums, means = ([f(x) for x in formulas.wide(logp)] for f in (np.sum, np.mean))
    assert_close(loss, (sums[0] - sums[1] - 5) ** 2)
    assert (means[0] - means[1] - 5) ** 2 == 20.25 != float(loss)


@of("`orpo`: likelihood of; mean over")
def likelihood_of_orpo(row):
    """The share of the likelihood in a loss of two pairs; prompts are a token of log-prob -4."""
    assert (row.trl, row.here) == ("prompts and responses, tokens", "responses, pairs")
    sequences = responses(2, 1, 4, 1, groups=[0, 0, 1, 1])
    logp = [np.float32(x) for x in ([-1, -2], [-3], [-1, -3, -2, -4], [-3])]
    packed = pack(sequences, 1, shared=False, together=True)
    objective = pair_objectives.preference_objective(
        TINY, PreferenceConfig(loss="orpo", beta=0.1), ForwardConfig()
    )
    table = first(packed.tokens(logp))
    with mock.patch.object(pair_objectives, "response_logp", lambda *_: (table, None)):
        batch, count = objective.whole(pair_objectives.PreferenceBatch(first(packed.rows)))
        _, metrics = objective.evaluate({}, batch, count, jnp.float32(1))
    assert_close(metrics["sum"]["preference/nll"], np.mean([1.5, 2.5]))
    assert np.mean([4, 1, 2, 4, 1, 3, 2, 4]) == 2.625


@of("`kto`: z0 is a mean over")
def baseline_of_kto(row):
    """Two mismatched responses, log-ratios 3 and -1: z0 of the step is 1; of each, 3 and 0."""
    assert (row.trl, row.here) == ("a micro-batch", "an optimizer step")
    sequences = responses(1, 1, 1, 1, groups=[0, 0, 1, 1])
    packed = pack(sequences, 1, shared=False, together=True)
    logp, zeros = ([np.float32([x]) for x in values] for values in ((-2, 3, -2, -1), [0] * 4))
    batch = kto_objective.KtoBatch(
        first(packed.rows),
        first(packed.tokens(zeros)),
        first(packed.per_sequence(np.ones(4, np.float32))),
        first(packed.tokens(logp)),
    )
    found = kto_objective.prepare(batch)[0].baseline
    np.testing.assert_array_equal(found, np.ones_like(found))
    assert [max(0, x) for x in (3, -1)] == [3, 0]


@of("`critic.loss.clip`")
def clip_of_the_critic(row):
    clip = ValueConfig().clip
    assert one(row.here) == one(row.verl) == one(row.areal) == clip == 0.5
    value, old, target = 0.4, 0.0, 1.0
    loss = {
        c: 0.5 * max((value - target) ** 2, (np.clip(value, old - c, old + c) - target) ** 2)
        for c in (clip, one(row.trl))
    }
    got = value_loss(*(jnp.float32(x) for x in (value, old, target)), jnp.bool_(True), clip=clip)
    assert_close(got.loss, loss[clip])
    np.testing.assert_allclose([loss[0.5], loss[0.2]], [0.18, 0.32])
