"""The policy's whole objective against float64 NumPy over plain lists: value and gradient.

Every loss, aggregation, KL estimator, correction, rejection and proximal policy. The network is a
table, logp[token id], with an id of its own for each token of each response: the gradient then has
one entry per token and does not depend on where the token lies.

Nightly: a step cut into partial batches gives the gradient and metrics of the step at once, for
every entry of the algorithm's tables.
"""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import formulas
from support.gradients import distance
from support.partial_batches import cut, of_rows, step_in_partial_batches
from support.ragged import QUICK, SHAPE, assert_close, draw, first, pack, random_sequences
from support.tiny_model import TINY

from distflow_jax.algorithms.whole_batch import loss_waits
from distflow_jax.batch import token_field
from distflow_jax.config.algorithm_config import AlgorithmConfig
from distflow_jax.config.algorithm_tables import (
    A3PO,
    AGGREGATIONS,
    CORRECTIONS,
    LOSS_ESTIMATORS,
    POLICY_LOSSES,
    PROXIMAL,
    REJECTIONS,
)
from distflow_jax.dag.graph import Node
from distflow_jax.stages.reward import build_token_age
from distflow_jax.training.forward import ForwardConfig
from distflow_jax.training.objectives import policy_objective as policy
from distflow_jax.training.objectives.policy_objective import PolicyBatch, policy_objective

MAX_RESPONSE, BUDGET = 14, 30
SEQUENCES = random_sequences(0, sizes=(3, 1, 4, 0, 2))
STARTS = np.cumsum([0] + [len(s.mask) for s in SEQUENCES])
REFERENCES = {
    "ppo_clip": formulas.ppo_clip,
    "gspo": formulas.gspo,
    "cispo": formulas.cispo,
    "sapo": formulas.sapo,
    "gmpo": formulas.gmpo,
    "gpg": formulas.gpg_loss,
    "cpgd": formulas.cpgd,
    "kl_cov": formulas.kl_cov,
    "clip_cov": formulas.clip_cov,
    "dppo_tv": formulas.dppo_tv,
    "dppo_kl": formulas.dppo_kl,
    "dro": formulas.dro,
    "decoupled": formulas.decoupled,
}
ALGORITHMS = {  # several options at once where they have nothing to do with each other
    **{name: {"policy_loss": name} for name in ("ppo_clip", "gspo", "sapo", "gmpo", "gpg")},
    "clip on one side": {"clip": 0.1, "clip_high": 0.28, "dual_clip": 1.5},
    "gspo, wide": {"policy_loss": "gspo", "clip": 0.2},
    "cispo": {"policy_loss": "cispo", "clip_low": 0.3, "aggregation": "seq-mean-token-mean"},
    "cispo, no lower bound": {"policy_loss": "cispo", "clip_low": 1.0, "proximal": "rollout"},
    "cpgd": {"policy_loss": "cpgd", "cpgd_drift_coef": 0.5},
    "cpgd without drift": {
        "policy_loss": "cpgd",
        "cpgd_drift_coef": 0.0,
        "rejection": "seq_sum_k2",
    },
    "kl_cov": {"policy_loss": "kl_cov", "kl_cov_share": 0.25, "kl_cov_coef": 2.0},
    "kl_cov, bypass": {"policy_loss": "kl_cov", "kl_cov_share": 0.25, "proximal": "rollout"},
    # all candidates are chosen; which ones are, of too many, is drawn: a test of its own
    "clip_cov": {
        "policy_loss": "clip_cov",
        "clip_cov_ratio": 1.0,
        "clip_cov_lb": 0.1,
        "clip_cov_ub": 1.0,
        "rejection": "seq_sum_k3",
    },
    "dppo_tv": {"policy_loss": "dppo_tv", "dual_clip": 1.5, "rejection": "token_k1"},
    "dppo_tv, on one side": {
        "policy_loss": "dppo_tv",
        "clip_low": 0.02,
        "clip_high": 0.05,
        "rejection": "token_k2",
    },
    "dppo_kl": {"policy_loss": "dppo_kl", "rejection": "token_k3"},
    "dppo_kl, on one side": {
        "policy_loss": "dppo_kl",
        "clip_low": 0.01,
        "clip_high": 0.03,
        "aggregation": "seq-mean-token-mean",
        "rejection": "seq_max_k2",
    },
    "gspo, dual clip": {"policy_loss": "gspo", "clip": 0.2, "dual_clip": 1.2},
    "gmpo, corrected": {
        "policy_loss": "gmpo",
        "correction": "token_tis",
        "correction_high": 1.05,
        "rejection": "seq_sum_k1",
    },
    "normalised tokens": {
        "correction": "token_tis",
        "correction_high": 1.05,
        "correction_batch_normalize": True,
        "rejection": "seq_max_k3",
    },
    "normalised sequences": {
        "policy_loss": "gmpo",
        "correction": "sequence_mis",
        "correction_low": 0.9,
        "correction_high": 1.1,
        "correction_batch_normalize": True,
    },
    "kl k1+": {"kl_coef": 0.3, "kl_estimator": "k1+"},
    "dro": {"policy_loss": "dro", "dro_beta": 2.0, "aggregation": "token-sum"},
    "decoupled": {"policy_loss": "decoupled", "correction": "token_tis", "correction_high": 1.05},
    "a3po": {"policy_loss": "decoupled", "correction": "sequence_mis", "proximal": "a3po"},
    "a3po without correction": {"proximal": "a3po"},
    "a3po_areal": {"policy_loss": "decoupled", "correction": "token_tis", "proximal": "a3po_areal"},
    "a3po_areal without correction": {"proximal": "a3po_areal"},
    "rollout without correction": {"proximal": "rollout"},
    "kl k2": {
        "kl_coef": 0.3,
        "kl_estimator": "k2",
        "correction": "sequence_tis",
        "correction_high": 1.1,
        "aggregation": "seq-mean-token-sum",
    },
    "kl k3": {
        "kl_coef": 0.3,
        "rejection": "k2",
        "aggregation": "seq-mean-token-sum-norm",
        "entropy_coef": 0.02,
    },
    "reject k3": {"rejection": "k3"},
    "everything": {
        "policy_loss": "kl_cov",
        "kl_cov_share": 0.1,
        "aggregation": "fixed-budget",
        "token_budget": BUDGET,
        "kl_coef": 0.1,
        "kl_estimator": "k3+",
        "correction": "token_mis",
        "rejection": "geometric",
        "entropy_coef": 0.01,
    },
}
# thresholds that some of the sequences below cross
BOUNDS = {
    "geometric": {"low": 0.98, "high": 1.03},
    "k2": {"high": 2e-3},
    "k3": {"high": 2e-3},
    "token_mis": {"low": 0.93, "high": 1.08},
    "token_k1": {"low": 0.93, "high": 1.08},
    "token_k2": {"high": 2e-3},
    "token_k3": {"high": 2e-3},
    "seq_sum_k1": {"low": 0.9, "high": 1.15},
    "seq_sum_k2": {"high": 0.03},
    "seq_sum_k3": {"high": 0.03},
    "seq_max_k2": {"high": 0.01},
    "seq_max_k3": {"high": 0.01},
}


def config_of(name, table=ALGORITHMS):
    options = dict(table[name])
    for key in ("correction", "rejection"):
        bounds = BOUNDS.get(options.get(key, ""), {})
        options = {f"{key}_{side}": x for side, x in bounds.items()} | options
    return AlgorithmConfig(**options)


def test_every_name_is_tested():
    tested = [config_of(name) for name in ALGORITHMS]
    assert {c.policy_loss for c in tested} == set(POLICY_LOSSES) == set(REFERENCES)
    assert {c.loss_aggregation for c in tested} == set(AGGREGATIONS)
    assert {c.correction for c in tested} == {"none", *CORRECTIONS}
    assert {c.rejection for c in tested} == {"none", *REJECTIONS}
    assert {c.proximal for c in tested} == set(PROXIMAL)
    assert {c.kl_estimator for c in tested if c.kl_in_loss} == set(LOSS_ESTIMATORS)
    for config in tested:
        options = config.policy_options | config.select_options
        kind = POLICY_LOSSES[config.policy_loss]
        assert options.keys() == {*kind.options, *kind.select_options}


@dataclasses.dataclass
class Fields:
    """Per-token values of the sequences, lists of float32 arrays."""

    logp: list
    entropy: list
    old: list
    roll: list
    ref: list
    advantage: list
    alpha: list


@functools.cache
def fields(narrow: bool) -> Fields:
    """`narrow`: sequence ratios within a few times gspo's 3e-4."""
    rng = np.random.default_rng(1)
    # log-probs: below 0, as losses of probabilities need them
    old = [np.minimum(x - 2, np.float32(-0.3)) for x in draw(2, SEQUENCES)]
    kinds = np.float32([0, 3e-4] if narrow else [0.02, 0.3, 1.0])
    scales = rng.choice(kinds, len(SEQUENCES))

    def near(seed, size, base=old):
        steps = draw(seed, SEQUENCES)
        return [b + np.float32(size) * s for b, s in zip(base, steps, strict=True)]

    logp = [
        np.minimum(o + c * s, np.float32(-0.05))
        for o, c, s in zip(old, scales, draw(3, SEQUENCES), strict=True)
    ]
    signs = rng.choice([0, 1, 1], len(SEQUENCES))
    return Fields(
        logp=logp,
        entropy=[np.abs(x) for x in draw(4, SEQUENCES)],
        old=old,
        roll=near(5, 0.08),
        ref=near(6, 0.4),
        advantage=[x * np.float32(c) for x, c in zip(draw(7, SEQUENCES), signs, strict=True)],
        alpha=[np.abs(np.sin(x)) for x in draw(8, SEQUENCES)],
    )


def weights_of(config, prox, roll):
    """Weights of the unmasked tokens of each sequence: correction, then rejection."""
    rho = [(p - r)[s.mask] for s, p, r in zip(SEQUENCES, prox, roll, strict=True)]
    some = [i for i, x in enumerate(rho) if len(x)]
    weights = [np.zeros(0)] * len(rho)
    for i in some:
        weights[i] = formulas.correction(config.correction, rho[i], **config.correction_bounds)
    if config.correction_batch_normalize:
        weights = formulas.normalised(weights, config.correction.startswith("sequence"))
    for i in some:
        w = weights[i]
        if config.policy_loss == "gmpo" and config.correction != "none":
            w = np.full(len(w), w.any() * np.exp(np.log(w + 1e-10).mean()))
        keep = formulas.correction(config.rejection, rho[i], **config.rejection_bounds)
        weights[i] = w * keep
    return weights


def reference(name, f: Fields):
    """(loss, its gradient in logp, in entropy), straight from the formulas."""
    config, sequences = config_of(name), SEQUENCES
    f = Fields(*(formulas.wide(getattr(f, x.name)) for x in dataclasses.fields(f)))
    prox = {
        "recomputed": f.old,
        "rollout": f.roll,
        "a3po": [r + a * (p - r) for r, a, p in zip(f.roll, f.alpha, f.logp, strict=True)],
    }[config.proximal.removesuffix("_areal")]
    options = dict(config.policy_options)
    chosen = [np.zeros(len(s.mask), bool) for s in sequences]
    # by the current policy, whatever the old one is
    if config.policy_loss == "kl_cov":
        share = config.select_options["kl_cov_share"]
        chosen = formulas.largest_covariance(sequences, f.advantage, f.logp, share)
    if config.policy_loss == "clip_cov":
        bounds = (config.select_options[f"clip_cov_{side}"] for side in ("lb", "ub"))
        chosen = formulas.covariance_within(sequences, f.advantage, f.logp, prox, *bounds)
    weights = weights_of(config, prox, f.roll)

    def aggregate(values):
        return formulas.aggregate(
            config.loss_aggregation, sequences, values, MAX_RESPONSE, config.token_budget
        )

    def loss_of(flat_logp, flat_entropy):
        pg, kl, entropy = [], [], []
        for i, s in enumerate(sequences):
            m, place = s.mask, slice(STARTS[i], STARTS[i + 1])
            live, held = flat_logp[place][m], f.logp[i][m]
            if not m.any():
                live = held = np.zeros(0)
                pg.append(live), kl.append(live), entropy.append(live)
                continue
            rule = REFERENCES[config.policy_loss]
            args = live, held, prox[i][m], f.advantage[i][m], chosen[i][m]
            pg.append(weights[i] * rule(*args, **options))
            kl.append(formulas.KL[config.kl_estimator](live, held, f.ref[i][m]))
            entropy.append(flat_entropy[place][m])
        total = aggregate(pg) - config.entropy_coef * aggregate(entropy)
        return total + (config.kl_coef * aggregate(kl) if config.kl_coef else 0)

    logp, entropy = np.concatenate(f.logp), np.concatenate(f.entropy)
    return (
        loss_of(logp, entropy),
        formulas.gradient(lambda x: loss_of(x, entropy), logp),
        formulas.gradient(lambda x: loss_of(logp, x), entropy)
        if config.entropy_coef
        else np.zeros(len(entropy)),
    )


def table_network(params, model, rows, temperature, forward):
    """In place of response_logp: what the parameters say of each token's id."""
    mask = rows.response_mask
    return tuple(jnp.where(mask, params[key][rows.tokens], 0.0) for key in ("logp", "entropy"))


def packed_batch(f: Fields, config, seed, *, shared=False, poison=0.0):
    packed = pack(SEQUENCES, seed, shared=shared)
    rows = packed.rows
    ids = [np.arange(a, b) for a, b in zip(STARTS[:-1], STARTS[1:], strict=True)]
    rows.tokens = jnp.asarray(token_field(packed.table, packed.placement, ids), jnp.int32)

    def field(name, wanted=True):
        return packed.tokens(getattr(f, name), poison) if wanted else None

    batch = PolicyBatch(
        rows,
        field("advantage"),
        field("roll"),
        field("old"),
        field("ref", config.kl_coef > 0),
        field("alpha", config.proximal in A3PO),
    )
    return first(batch)


@functools.cache
def compiled(name):
    """(params, batch, whole batch) -> (loss, gradient, metrics) of the first, a part of the whole;
    one program per algorithm."""
    objective = policy_objective(TINY, config_of(name), ForwardConfig(), max_response=MAX_RESPONSE)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(params, batch, part_R):
        if (preview := objective.preview) is not None:
            batch = preview.place(batch, preview.predict(params, batch, jnp.float32(1)))
        batch, denominators = objective.whole(batch)
        # rows that are not of the part are emptied, as if they lay in another micro-batch
        batch = of_rows(batch, part_R)
        gradient = jax.value_and_grad(objective.evaluate, has_aux=True)
        (loss, metrics), slope = gradient(params, batch, denominators, jnp.float32(1))
        return loss, slope, metrics

    return run


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    monkeypatch.setattr(policy, "response_logp", table_network)


ALL_ROWS = np.ones(SHAPE.rows, bool)


def params_of(f):
    return {key: np.concatenate(getattr(f, key)) for key in ("logp", "entropy")}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_value_and_gradient_match_the_formulas(name):
    """Then again with shared prompts in other rows, with poison outside the mask, and in parts:
    the same numbers from the same program."""
    f, config = fields(name == "gspo"), config_of(name)
    run, params = compiled(name), params_of(f)
    loss, slope, metrics = run(params, packed_batch(f, config, 2), ALL_ROWS)
    expected, slope_logp, slope_entropy = reference(name, f)
    assert_close(loss, expected, "loss")
    assert_close(slope["logp"], slope_logp, "gradient")
    assert_close(slope["entropy"], slope_entropy, "gradient of the entropy")
    assert np.abs(slope_logp).max() > 1e-4

    other = packed_batch(f, config, 3, shared=True, poison=np.nan)
    again, slope_again, metrics_again = run(params, other, ALL_ROWS)
    assert_close(again, loss, "other rows")
    assert_close(slope_again["logp"], slope["logp"], "other rows")
    part = np.random.default_rng(4).random(SHAPE.rows) < 0.5
    halves = [run(params, other, p) for p in (part, ~part)]
    assert_close(halves[0][0] + halves[1][0], loss, "shards")
    assert_close(halves[0][1]["logp"] + halves[1][1]["logp"], slope["logp"], "shards")
    for key, value in metrics["sum"].items():
        assert_close(metrics_again["sum"][key], value, key)
        assert_close(halves[0][2]["sum"][key] + halves[1][2]["sum"][key], value, key)
    for key, value in metrics["max"].items():
        assert_close(np.maximum(*(h[2]["max"][key] for h in halves)), value, key)
    assert run._cache_size() == 1
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves((loss, slope, metrics)))


IN_PARTIAL_BATCHES = {  # steps that may be cut; the default tests have one of each kind
    **{name: ALGORITHMS[name] for name in ALGORITHMS if not loss_waits(config_of(name))},
    "fixed-budget": {"aggregation": "fixed-budget", "token_budget": BUDGET, "kl_coef": 0.1},
}
OFTEN = ("fixed-budget", "gmpo, corrected", "a3po")


@pytest.mark.parametrize(
    "name",
    [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in IN_PARTIAL_BATCHES],
)
def test_a_step_in_partial_batches_is_the_step_at_once(name):
    """Cut at random into 1 to 16 partial batches, some of them empty: gradient and metrics are the
    step's, in the same rows and in others, with poison outside the mask."""
    f, config = fields(name == "gspo"), config_of(name, IN_PARTIAL_BATCHES)
    objective = policy_objective(TINY, config, ForwardConfig(), max_response=MAX_RESPONSE)
    params, run = params_of(f), step_in_partial_batches(objective)
    whole, denominators = objective.whole(packed_batch(f, config, 2))
    evaluate = jax.jit(jax.grad(objective.evaluate, has_aux=True), compiler_options=QUICK)
    wanted, metrics = evaluate(params, whole, denominators, jnp.float32(1))
    metrics = objective.finish({**metrics["sum"], **metrics["max"]})
    other = packed_batch(f, config, 3, shared=True, poison=np.nan)
    for seed, partial_batches in enumerate((1, 2, 5, 16)):
        parts = cut(
            seed,
            5,
            partial_batches=partial_batches,
            ordered=config.loss_aggregation == "fixed-budget",
        )
        batch, most = (other, 1e-5) if seed % 2 else (packed_batch(f, config, 2), 1e-6)
        got, found = run(params, batch, parts)
        assert distance(got, wanted) < most
        loss = found.pop("actor/loss")
        assert found.keys() == metrics.keys()
        for key, value in metrics.items():
            assert_close(found[key], value, key)
    assert_close(loss, objective.evaluate(params, whole, denominators, jnp.float32(1))[0])


def aged(seed, newest=4, proximal="a3po"):
    """The fields, with the weights of tokens of versions that rise within a response, trained by
    the step after version `newest`; and the ages, [T] each."""
    rng = np.random.default_rng(seed)
    versions = [np.sort(rng.integers(0, newest, len(s.mask), endpoint=True)) for s in SEQUENCES]
    node = Node("ages", "REWARD", "COMPUTE", [], ["version", "step"], ["age", "prox_alpha"])
    given = {"version": versions, "step": np.full(len(versions), newest + 1)}
    context = types.SimpleNamespace(node=node, algorithm=AlgorithmConfig(proximal=proximal))
    _, written, _ = build_token_age(context)(None, given, {})
    return dataclasses.replace(fields(False), alpha=written["prox_alpha"]), written["age"]


@pytest.mark.parametrize("name", A3PO)
def test_ages_of_a_packed_row_weigh_the_proximal_policy(name):
    """Rows whose tokens have several ages; other ages, and none, run the same program."""
    config, run = config_of(name), compiled(name)
    for seed in range(2):
        f, ages = aged(seed, proximal=name)
        assert {age for row in ages for age in row.tolist()} == {0.0, 1.0, 2.0, 3.0, 4.0}
        assert max(len(set(row.tolist())) for row in ages) > 2  # within one response
        by_hand = {
            "a3po": [age / (age + 1) for age in formulas.wide(ages)],
            "a3po_areal": [(age > 0) * (age - 1) / np.maximum(age, 1) for age in ages],
        }[name]
        expected, slope, _ = reference(name, dataclasses.replace(f, alpha=by_hand))
        loss, got, _ = run(params_of(f), packed_batch(f, config, 2), ALL_ROWS)
        assert_close(loss, expected)
        assert_close(got["logp"], slope)
    run(params_of(f), packed_batch(aged(0, newest=0)[0], config, 2), ALL_ROWS)
    assert run._cache_size() == 1


@pytest.mark.parametrize(("proximal", "newest"), [("a3po", 0), ("a3po_areal", 1)])
def test_without_age_the_sampler_is_the_proximal_policy(proximal, newest):
    """Bit for bit: a3po of tokens that the newest weights sampled is proximal=rollout; AReaL's is
    so for those of the weights before, too."""
    f, ages = aged(0, newest, proximal)
    assert {age for row in ages for age in row.tolist()} == set(range(newest + 1))
    found = [
        compiled(name)(params_of(f), packed_batch(f, config_of(name), 2), ALL_ROWS)
        for name in (f"{proximal} without correction", "rollout without correction")
    ]
    (loss, slope, metrics), (_, _, others) = found
    assert np.abs(slope["logp"]).max() > 1e-4 and np.isfinite(loss)
    jax.tree.map(np.testing.assert_array_equal, found[0][:2], found[1][:2])
    for kind in ("sum", "max"):
        for name in metrics[kind].keys() & others[kind].keys():
            np.testing.assert_array_equal(metrics[kind][name], others[kind][name], name)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_probability_of_0_poisons_nothing(name):
    """Log-probs of -inf, of the sampler, the old policy or the reference, or of all three at once:
    the loss and its gradient are those of -1e6, and no metric is nan."""
    f, run, rng = fields(name == "gspo"), compiled(name), np.random.default_rng(9)
    gone = [rng.random(len(x)) < 0.1 for x in f.old]
    for keys in (("roll",), ("old",), ("ref",), ("roll", "old", "ref")):
        found = []
        for least in (-np.inf, -1e6):
            changed = {}
            for key in keys:
                pairs = zip(gone, getattr(f, key), strict=True)
                changed[key] = [np.where(g, np.float32(least), x) for g, x in pairs]
            batch = packed_batch(dataclasses.replace(f, **changed), config_of(name), 2)
            found.append(run(params_of(f), batch, ALL_ROWS))
        (loss, slope, metrics), (same, same_slope, _) = found
        assert np.isfinite(loss) and loss == same, keys
        for key, x in slope.items():
            assert np.isfinite(x).all(), keys
            np.testing.assert_array_equal(x, same_slope[key])
        for kind in ("sum", "max"):
            for key, x in metrics[kind].items():
                assert not np.isnan(x), (keys, key)


def metrics_of(name):
    f = fields(False)
    _, _, metrics = compiled(name)(params_of(f), packed_batch(f, config_of(name), 2), ALL_ROWS)
    return {**metrics["sum"], **metrics["max"]}


def flat(f, key):
    values = formulas.wide(getattr(f, key))
    return np.concatenate([x[s.mask] for x, s in zip(values, SEQUENCES, strict=True)])


def test_metrics_of_the_clip():
    f, got = fields(False), metrics_of("clip on one side")
    ratio, a = np.exp(flat(f, "logp") - flat(f, "old")), flat(f, "advantage")
    plain, clipped = -a * ratio, -a * np.clip(ratio, 0.9, 1.28)
    wanted = {
        "actor/pg_clipfrac": clipped > plain,
        "actor/pg_clipfrac_lower": (a < 0) & (np.maximum(plain, clipped) > -a * 1.5),
        "actor/ppo_kl": flat(f, "old") - flat(f, "logp"),
        "actor/entropy": flat(f, "entropy"),
        "rollout_corr/log_ratio_abs_mean": np.abs(flat(f, "old") - flat(f, "roll")),
    }
    for key, values in wanted.items():
        assert 0 < abs(np.mean(values)) < 5
        assert_close(got[key], np.mean(values), key)


def test_a_budget_is_filled_or_the_metric_says_how_far():
    """Masked tokens take no place in it, and none beyond it count."""
    tokens = sum(int(s.mask.sum()) for s in SEQUENCES)
    assert tokens > BUDGET
    assert metrics_of("everything")["actor/budget_share"] == 1.0
    f, config = fields(False), config_of("fixed-budget", IN_PARTIAL_BATCHES)
    large = dataclasses.replace(config, token_budget=2 * tokens)
    objective = policy_objective(TINY, large, ForwardConfig(), max_response=MAX_RESPONSE)
    batch, denominators = objective.whole(packed_batch(f, large, 2))
    _, metrics = objective.evaluate(params_of(f), batch, denominators, jnp.float32(1))
    assert metrics["sum"]["actor/budget_share"] == 0.5


def test_metrics_of_the_correction():
    got = metrics_of("everything")
    f, bounds = fields(False), BOUNDS["token_mis"]
    rho = np.exp(flat(f, "old") - flat(f, "roll"))
    kept = (rho >= bounds["low"]) & (rho <= bounds["high"])
    assert 0.05 < kept.mean() < 0.95
    assert_close(got["rollout_corr/rollout_is_mean"], (rho * kept).mean())
    assert_close(got["rollout_corr/rollout_is_changed_fraction"], 1 - kept.mean())
    assert_close(got["rollout_corr/rollout_is_max"], (rho * kept).max())
    outside, lengths = [], []
    for s, old, roll in zip(SEQUENCES, f.old, f.roll, strict=True):
        if s.mask.any():
            mean = np.exp((formulas.wide([old])[0] - roll)[s.mask].mean())
            bounds = BOUNDS["geometric"]
            outside.append(not bounds["low"] <= mean <= bounds["high"])
            lengths.append(s.length)
    assert 0 < np.mean(outside) < 1
    assert_close(got["rollout_corr/rollout_rs_seq_masked_fraction"], np.mean(outside))
    share = np.average(outside, weights=lengths)
    assert_close(got["rollout_corr/rollout_rs_masked_fraction"], share)


@pytest.mark.parametrize("name", ["a3po", "rollout without correction", "everything"])
def test_the_gap_is_that_of_trainer_and_sampler(name):
    """For every proximal policy: the gap exists even if the sampler is the proximal policy."""
    got, f = metrics_of(name), fields(False)
    trainer = flat(f, "old" if config_of(name).proximal == "recomputed" else "logp")
    sampler = flat(f, "roll")
    assert_close(got["rollout_corr/log_ratio_abs_mean"], np.abs(trainer - sampler).mean())
    assert_close(got["rollout_corr/log_ratio_abs_max"], np.abs(trainer - sampler).max())
    gap = np.abs(np.exp(trainer) - np.exp(sampler))
    assert_close(got["training/rollout_probs_diff_mean"], gap.mean())
    assert_close(got["training/rollout_probs_diff_max"], gap.max())
    assert gap.max() > 1e-3


def test_the_gap_is_told_by_group():
    """The size of it, without signs: groups that have no token have none, in parts too."""
    f, config = fields(False), config_of("everything")
    count = max(s.group for s in SEQUENCES) + 3
    objective = policy_objective(
        TINY, config, ForwardConfig(), max_response=MAX_RESPONSE, num_groups=count
    )
    batch = packed_batch(f, config, 2, poison=np.nan)
    if (preview := objective.preview) is not None:
        batch = preview.place(batch, preview.predict(params_of(f), batch, jnp.float32(1)))
    batch, denominators = objective.whole(batch)
    part = np.random.default_rng(4).random(SHAPE.rows) < 0.5
    found = []
    for rows in (part, ~part):
        _, metrics = objective.evaluate(
            params_of(f), of_rows(batch, rows), denominators, jnp.float32(1)
        )
        found.append(metrics["sum"])
    gap, tokens = (
        sum(np.asarray(sums[name]) for sums in found)
        for name in (policy.GAP_OF_GROUP, policy.TOKENS_OF_GROUP)
    )
    wanted = np.zeros((2, count))
    for s, old, roll in zip(SEQUENCES, formulas.wide(f.old), formulas.wide(f.roll), strict=True):
        wanted[:, s.group] += np.abs(old - roll)[s.mask].sum(), s.length
    assert_close(gap, wanted[0] / wanted[1].sum())
    assert_close(tokens, wanted[1] / wanted[1].sum())
    assert (wanted[1] == 0).any() and (wanted[1] > 0).any()


def test_the_gap_is_told_by_age():
    """Rows whose tokens have several ages: shares, the gap of each, and verl's sample size."""
    f, config, oldest = fields(False), config_of("everything"), 3
    ages = [np.arange(len(s.mask), dtype=np.float32) % (oldest + 1) for s in SEQUENCES]
    objective = policy_objective(
        TINY, config, ForwardConfig(), max_response=MAX_RESPONSE, max_staleness=oldest
    )

    @jax.jit
    def told(params, batch):
        if (preview := objective.preview) is not None:
            batch = preview.place(batch, preview.predict(params, batch, jnp.float32(1)))
        batch, denominators = objective.whole(batch)
        _, found = objective.evaluate(params, batch, denominators, jnp.float32(1))
        return objective.finish({**found["sum"], **found["max"]})

    def metrics_by(ages):
        batch = packed_batch(f, config, 2, poison=np.nan)
        age = pack(SEQUENCES, 2, shared=False).tokens(ages, np.nan)
        return told(params_of(f), batch._replace(age=age[0]))

    got = metrics_by(ages)
    flat_ages = np.concatenate([x[s.mask] for x, s in zip(ages, SEQUENCES, strict=True)])
    log_rho = flat(f, "old") - flat(f, "roll")
    terms = {"kl": -log_rho, "k3_kl": np.expm1(log_rho) - log_rho}
    for age in range(oldest + 1):
        here = flat_ages == age
        assert_close(got[f"rollout_corr/tokens_of_age/{age}"], here.mean())
        for name, values in terms.items():
            assert_close(got[f"rollout_corr/{name}/{age}"], np.mean(values * here), name)
    bounds = BOUNDS["token_mis"]
    weight = np.exp(log_rho)
    weight *= (weight >= bounds["low"]) & (weight <= bounds["high"])
    size = weight.mean() ** 2 / (weight**2).mean()
    assert_close(got["rollout_corr/rollout_is_eff_sample_size"], size)
    metrics_by([np.zeros_like(x) for x in ages])
    assert told._cache_size() == 1  # other ages compile nothing


def test_denominators_do_not_shrink_with_what_is_rejected():
    """A loss over what is left, divided by what there was."""
    f = fields(False)
    rejected = compiled("reject k3")(params_of(f), packed_batch(f, config_of("gpg"), 2), ALL_ROWS)
    assert 0 < rejected[2]["sum"]["rollout_corr/rollout_rs_masked_fraction"] < 1
    algorithm = config_of("reject k3")
    _, counts = policy.prepare(packed_batch(f, config_of("gpg"), 2), algorithm=algorithm)
    counts = policy.denominators_of(counts, algorithm=algorithm, max_response=14)
    assert counts.loss == counts.tokens == float(sum(s.length for s in SEQUENCES))
    assert counts.sequences == float(sum(s.mask.any() for s in SEQUENCES))


def test_kl_cov_breaks_ties_by_group_and_sample():
    """All alike: the first tokens of the first group's first response are chosen, wherever."""
    config = config_of("kl_cov")
    f = dataclasses.replace(
        fields(False),
        advantage=[np.ones_like(x) for x in fields(False).old],
        old=[-np.ones_like(x) for x in fields(False).old],
        logp=[-np.ones_like(x) for x in fields(False).old],
    )
    count = int(0.25 * sum(s.length for s in SEQUENCES))
    order = sorted(range(len(SEQUENCES)), key=lambda i: (SEQUENCES[i].group, SEQUENCES[i].sample))
    wanted = [(i, t) for i in order for t in np.flatnonzero(SEQUENCES[i].mask)][:count]
    for seed in (5, 6):
        packed = pack(SEQUENCES, seed, shared=True)
        chosen = chosen_by(config, packed_batch(f, config, seed, shared=True), packed, f)
        assert {(i, t) for i, x in enumerate(chosen) for t in np.flatnonzero(x)} == set(wanted)


def chosen_by(config, batch, packed, f):
    """The tokens that a loss selects, one mask per sequence."""
    batch = batch._replace(current_logp=first(packed.tokens(f.logp)))
    chosen = policy.prepare(batch, algorithm=config)[0].selected
    return packed.unpack(np.asarray(chosen)[None])


def test_clip_cov_draws_among_its_candidates():
    """As many as the share says, the same in any packing, others for other responses."""
    f = fields(False)
    options = ALGORITHMS["clip_cov"] | {"clip_cov_ratio": 0.1}
    config = AlgorithmConfig(**options)
    wide = {name: formulas.wide(getattr(f, name)) for name in ("advantage", "logp", "old")}
    allowed = formulas.covariance_within(SEQUENCES, *wide.values(), 0.1, 1.0)
    number = int(0.1 * sum(s.length for s in SEQUENCES))
    assert 1 < number < sum(x.sum() for x in allowed)

    def draw_from(seed, offset):
        packed = pack(SEQUENCES, seed, shared=True)
        batch = packed_batch(f, config, seed, shared=True)
        tokens = jnp.where(batch.rows.response_mask, batch.rows.tokens + offset, 0)
        batch = batch._replace(rows=dataclasses.replace(batch.rows, tokens=tokens))
        chosen = chosen_by(config, batch, packed, f)
        assert sum(x.sum() for x in chosen) == number
        assert not any((x & ~may).any() for x, may in zip(chosen, allowed, strict=True))
        return tuple((i, t) for i, x in enumerate(chosen) for t in np.flatnonzero(x))

    assert draw_from(5, 0) == draw_from(6, 0)
    assert len({draw_from(5, offset) for offset in range(6)}) > 2


def test_off_policy_metrics():
    """Of the recomputed proximal policy; where there is none, of the current one, as in verl."""
    for name, trainer in (("clip on one side", "old"), ("kl_cov, bypass", "logp")):
        got, f = metrics_of(name), fields(False)
        mine = {
            key: [x[s.mask] for x, s in zip(formulas.wide(getattr(f, key)), SEQUENCES, strict=True)]
            for key in (trainer, "roll")
        }
        wanted = formulas.off_policy(mine[trainer], mine["roll"])
        for key, value in wanted.items():
            assert_close(got[f"rollout_corr/{key}"], value, key)
        assert {f"rollout_corr/{key}" for key in wanted} == {
            key for key in got if key.startswith("rollout_corr/") and "log_ratio" not in key
        }


def test_the_kept_weight_is_zero_where_all_is_rejected():
    f = fields(False)
    for options in (
        {"rejection": "seq_max_k2", "rejection_high": 1e-9},
        {"correction": "token_mis", "correction_low": 5.0, "correction_high": 6.0},
        {"policy_loss": "gmpo", "correction": "sequence_mis", "correction_high": 1e-9},
    ):
        config = AlgorithmConfig(**options)
        batch = packed_batch(f, config, 2)
        _, counts = policy.prepare(batch, algorithm=config)
        counts = policy.denominators_of(counts, algorithm=config, max_response=9)
        _, sums, maxima = policy._correction(*[batch.old_logp] * 2, batch, config, counts)
        assert maxima["rollout_corr/kept_weight_max"] == 0
    assert metrics_of("reject k3")["rollout_corr/kept_weight_max"] == 1
