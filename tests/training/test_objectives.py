"""Preference, KTO, reward-model, SFT and critic objectives against float64 NumPy over plain lists.

As in test_policy_objective.py the network is a table: one log-prob, value or score for each token
or sequence, so that a gradient has one entry for each wherever it lies.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import formulas
from support.gradients import distance
from support.partial_batches import cut, of_rows, step_in_partial_batches
from support.ragged import QUICK, SHAPE, assert_close, draw, first, pack, random_sequences
from support.tiny_model import TINY

from distflow_jax.batch import token_field
from distflow_jax.config.algorithm_config import (
    PreferenceConfig,
    RewardModelConfig,
    ValueConfig,
)
from distflow_jax.coordinator.batch_metrics import means_by_label
from distflow_jax.models.decoder_config import scalar_model
from distflow_jax.training.forward import ForwardConfig
from distflow_jax.training.objective import at_least_one
from distflow_jax.training.objectives import (
    kto_objective,
    pair_objectives,
    sft_objective,
    value_objective,
)

SEQUENCES = random_sequences(0, sizes=(2, 2, 1, 2, 0, 2, 2))
COUNT = len(SEQUENCES)
STARTS = np.cumsum([0] + [len(s.mask) for s in SEQUENCES])
PAIRS = [(0, 1), (2, 3), (5, 6), (7, 8), (9, 10)]  # number 4 is alone
LOGP, REF = ([x - 3 for x in draw(n, SEQUENCES)] for n in (1, 2))
OLD, RETURNS, ENTROPY = (draw(n, SEQUENCES) for n in (3, 4, 5))
SCORE = np.random.default_rng(6).normal(0, 2, COUNT).astype(np.float32)
PARAMS = {
    "token": np.concatenate(LOGP),
    "entropy": np.concatenate(ENTROPY),
    "score": SCORE,
}
FORWARD, SCALAR = ForwardConfig(), scalar_model(TINY)
KTO = PreferenceConfig(beta=0.3, desirable_weight=1.2, undesirable_weight=0.7)
BELOW = [x - np.float32(0.5) for x in REF]  # a reference of KTO's, so that z0 is above 0
LABEL = np.float32([s.group % 3 == 1 for s in SEQUENCES])  # the same for both of a prompt
OBJECTIVES = {
    "dpo": pair_objectives.preference_objective(TINY, PreferenceConfig("dpo", 0.3), FORWARD),
    "ipo": pair_objectives.preference_objective(TINY, PreferenceConfig("ipo", 0.3), FORWARD),
    "orpo": pair_objectives.preference_objective(TINY, PreferenceConfig("orpo", 0.3), FORWARD),
    "kto": kto_objective.kto_objective(TINY, KTO, FORWARD),
    "reward_model": pair_objectives.reward_model_objective(
        SCALAR, RewardModelConfig(margin=0.2, center_coef=0.05), FORWARD
    ),
    "sft": sft_objective.sft_objective(TINY, FORWARD),
    "value": value_objective.value_objective(
        SCALAR, ValueConfig(clip=0.4), FORWARD, max_response=12
    ),
    "value by sequence": value_objective.value_objective(
        SCALAR, ValueConfig(0.4, "seq-mean-token-sum-norm"), FORWARD, max_response=12
    ),
}


def kept(values, i):
    return np.float64(values[i])[SEQUENCES[i].mask]


def deltas(flat):
    out = []
    for plus, minus in PAIRS:
        gains = [
            (flat[STARTS[i] : STARTS[i + 1]][SEQUENCES[i].mask] - kept(REF, i)).sum()
            for i in (plus, minus)
        ]
        out.append(gains[0] - gains[1])
    return np.array(out)


def means_and_odds(flat):
    """Of all sequences; a mean log-prob of no tokens is 0, whose odds are bounded."""
    tokens = [flat[STARTS[i] : STARTS[i + 1]][SEQUENCES[i].mask] for i in range(COUNT)]
    means = np.array([x.mean() if len(x) else 0.0 for x in tokens])
    p = np.exp(np.minimum(means, -1e-6))
    return means, p / (1 - p)


def orpo(flat):
    means, odds = means_and_odds(flat)
    return np.mean([-means[a] + 0.3 * np.log1p(odds[b] / odds[a]) for a, b in PAIRS])


def gain(flat, i):
    return (flat[STARTS[i] : STARTS[i + 1]][SEQUENCES[i].mask] - kept(BELOW, i)).sum()


OWN = [i for i, s in enumerate(SEQUENCES) if s.sample == 0]
OTHERS = [i for i, s in enumerate(SEQUENCES) if s.sample == 1]


def baseline():
    """z0 of the policy before the step, which no gradient goes through."""
    return max(0.0, np.mean([gain(np.float64(PARAMS["token"]), i) for i in OTHERS]))


def kto_losses(flat):
    found = []
    for i in OWN:
        sign, weight = (1, 1.2) if LABEL[i] else (-1, 0.7)
        value = weight / (1 + np.exp(-sign * 0.3 * (gain(flat, i) - baseline())))
        found.append(weight - value)
    return np.array(found)


def critic_losses(flat):
    out = []
    for i, s in enumerate(SEQUENCES):
        v, old, g = flat[STARTS[i] : STARTS[i + 1]][s.mask], kept(OLD, i), kept(RETURNS, i)
        near = np.clip(v, old - 0.4, old + 0.4)
        out.append(0.5 * np.maximum((v - g) ** 2, (near - g) ** 2))
    return out


def ranking(s):
    losses = [np.log1p(np.exp(-(s[a] - s[b] - 0.2))) + 0.05 * (s[a] + s[b]) ** 2 for a, b in PAIRS]
    return np.mean(losses)


MASK = np.concatenate([s.mask for s in SEQUENCES])
REFERENCES = {  # of the table that the objective reads
    "dpo": lambda x: np.log1p(np.exp(-0.3 * deltas(x))).mean(),
    "ipo": lambda x: ((deltas(x) - 1 / 0.6) ** 2).mean(),
    "orpo": orpo,
    "kto": lambda x: kto_losses(x).mean(),
    "reward_model": ranking,
    "sft": lambda x: -x[MASK].mean(),
    "value": lambda x: formulas.aggregate("token-mean", SEQUENCES, critic_losses(x)),
    "value by sequence": lambda x: formulas.aggregate(
        "seq-mean-token-sum-norm", SEQUENCES, critic_losses(x), 12.0
    ),
}


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def logp(params, model, rows, temperature, forward):
        return tuple(on_tokens(params[key], rows) for key in ("token", "entropy"))

    def on_tokens(table, rows):
        return jnp.where(rows.response_mask, table[rows.tokens], 0.0)

    for module in (kto_objective, pair_objectives, sft_objective):
        monkeypatch.setattr(module, "response_logp", logp)
    monkeypatch.setattr(
        value_objective,
        "response_values",
        lambda params, m, rows, f: on_tokens(params["token"], rows),
    )
    number = np.zeros((7, 2), np.int32)
    for i, s in enumerate(SEQUENCES):
        number[s.group, s.sample] = i
    monkeypatch.setattr(
        pair_objectives,
        "sequence_scores",
        lambda params, m, rows, f: jnp.where(
            rows.valid, params["score"][jnp.asarray(number)[rows.group, rows.member]], 0.0
        ),
    )


def batch_of(name, seed, *, shared, poison=0.0):
    packed = pack(SEQUENCES, seed, shared=shared, together=True)
    ids = [np.arange(a, b) for a, b in zip(STARTS[:-1], STARTS[1:], strict=True)]
    rows = packed.rows
    rows.tokens = jnp.asarray(token_field(packed.table, packed.placement, ids), jnp.int32)
    current = packed.tokens(LOGP, poison)  # what the preview of an objective finds
    ref, old, returns = (packed.tokens(x, poison) for x in (REF, OLD, RETURNS))
    return first(
        {
            "dpo": lambda: pair_objectives.PreferenceBatch(rows, ref),
            "orpo": lambda: pair_objectives.PreferenceBatch(rows),
            "kto": lambda: kto_objective.KtoBatch(
                rows, packed.tokens(BELOW, poison), packed.per_sequence(LABEL, poison), current
            ),
            "reward_model": lambda: pair_objectives.RewardModelBatch(rows),
            "sft": lambda: sft_objective.SftBatch(rows),
            "value": lambda: value_objective.ValueBatch(rows, returns, old),
        }[{"ipo": "dpo", "value by sequence": "value"}.get(name, name)]()
    )


@functools.cache
def compiled(name):
    """(params, batch, rows of the part) -> (loss, gradient, metrics) of a part of the step."""
    objective = OBJECTIVES[name]

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(params, batch, part_R):
        batch, denominators = objective.whole(batch)
        batch = of_rows(batch, part_R)
        gradient = jax.value_and_grad(objective.evaluate, has_aux=True)
        (loss, metrics), slope = gradient(params, batch, denominators, jnp.float32(1))
        return loss, slope, metrics["sum"]

    return run


ALL_ROWS = np.ones(SHAPE.rows, bool)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_value_and_gradient_match_the_formulas(name):
    run = compiled(name)
    loss, slope, metrics = run(PARAMS, batch_of(name, 2, shared=False), ALL_ROWS)
    key = "score" if name == "reward_model" else "token"
    table = np.float64(PARAMS[key])
    assert_close(loss, REFERENCES[name](table), "loss")
    assert_close(slope.pop(key), formulas.gradient(REFERENCES[name], table), "gradient", rtol=2e-5)
    assert all((np.asarray(x) == 0).all() for x in slope.values())

    other = batch_of(name, 3, shared=True, poison=np.nan)
    again, slope, others = run(PARAMS, other, ALL_ROWS)
    assert_close(again, loss, "other rows")
    part = np.random.default_rng(4).random(SHAPE.rows) < 0.5
    halves = [run(PARAMS, other, p) for p in (part, ~part)]
    assert_close(halves[0][0] + halves[1][0], loss, "shards")
    assert_close(halves[0][1][key] + halves[1][1][key], slope[key], "shards")
    for metric, number in metrics.items():
        assert_close(others[metric], number, metric)
        assert_close(halves[0][2][metric] + halves[1][2][metric], number, metric)
    assert run._cache_size() == 1
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves((loss, slope, metrics)))


@pytest.mark.parametrize("name", [name for name, x in OBJECTIVES.items() if not x.waits])
def test_a_step_in_partial_batches_is_the_step_at_once(name):
    """Cut at random, some partial batches empty: gradient and metrics are the step's, in the same
    rows and in others, with poison outside the mask."""
    objective, run = OBJECTIVES[name], step_in_partial_batches(OBJECTIVES[name])
    batch = batch_of(name, 2, shared=False)
    loss, wanted, metrics = compiled(name)(PARAMS, batch, ALL_ROWS)
    for seed, partial_batches in enumerate((1, 3, 16)):
        other = batch_of(name, 3, shared=True, poison=np.nan) if seed % 2 else batch
        got, found = run(PARAMS, other, cut(seed, 7, partial_batches=partial_batches))
        assert distance(got, wanted) < (1e-5 if seed % 2 else 1e-6)
        assert_close(found.pop(f"{objective.name}/loss"), loss, "loss")
        assert found.keys() == metrics.keys()
        for key, value in metrics.items():
            assert_close(found[key], value, key)


def test_a_term_with_another_denominator_has_a_gradient_of_its_own():
    """As the balance of a mixture's experts, which counts sequences beside a loss of tokens."""
    plain = OBJECTIVES["value"]

    def prepare(batch, before=None):
        batch, counts = plain.prepare(batch, None if before is None else before[0])
        return batch, (counts, batch.rows.valid.sum(dtype=jnp.int32))

    def evaluate(params, batch, denominators, temperature):
        loss, metrics = plain.evaluate(params, batch, denominators[0], temperature)
        values = value_objective.response_values(params, SCALAR, batch.rows, FORWARD)
        return loss + 0.3 * (jnp.square(values).sum() / denominators[1]), metrics

    def denominators_of(counts):
        return plain.denominators(counts[0]), at_least_one(counts[1])

    objective = dataclasses.replace(
        plain, prepare=prepare, denominators=denominators_of, evaluate=evaluate
    )
    batch, denominators = objective.whole(batch_of("value", 2, shared=False))
    slope = jax.grad(objective.evaluate, has_aux=True)
    wanted, _ = slope(PARAMS, batch, denominators, jnp.float32(1))
    for partial_batches in (1, 5):
        got, _ = step_in_partial_batches(objective)(
            PARAMS, batch, cut(partial_batches, 7, partial_batches=partial_batches)
        )
        assert distance(got, wanted) < 1e-6


def test_metrics_of_pairs():
    """The margin, how often it is right, and who has no partner."""
    metrics = compiled("dpo")(PARAMS, batch_of("dpo", 2, shared=False), ALL_ROWS)[2]
    delta = deltas(np.float64(PARAMS["token"]))
    assert_close(metrics["rewards/margins"], 0.3 * delta.mean())
    assert_close(metrics["rewards/accuracies"], (delta > 0).mean())
    chosen = [(kept(LOGP, i) - kept(REF, i)).sum() for i, _ in PAIRS]
    assert_close(metrics["rewards/chosen"], 0.3 * np.mean(chosen))
    assert_close(metrics["logps/rejected"], np.mean([kept(LOGP, i).sum() for _, i in PAIRS]))
    assert_close(metrics["preference/unpaired_fraction"], 1 / COUNT)
    metrics = compiled("orpo")(PARAMS, batch_of("orpo", 2, shared=True), ALL_ROWS)[2]
    means, odds = means_and_odds(np.float64(PARAMS["token"]))
    assert_close(metrics["preference/nll"], -np.mean([means[a] for a, _ in PAIRS]))
    ratios = [np.log(odds[a] / odds[b]) for a, b in PAIRS]
    assert_close(metrics["preference/log_odds_ratio"], np.mean(ratios))
    assert_close(metrics["rewards/rejected"], 0.3 * np.mean([means[b] for _, b in PAIRS]))
    assert_close(metrics["rewards/accuracies"], np.mean([means[a] > means[b] for a, b in PAIRS]))
    metrics = compiled("reward_model")(PARAMS, batch_of("reward_model", 2, shared=True), ALL_ROWS)
    margin = np.float64([SCORE[a] - SCORE[b] for a, b in PAIRS])
    assert_close(metrics[2]["reward_model/accuracy"], (margin > 0).mean())
    assert_close(metrics[2]["reward_model/score_margin"], margin.mean())


@pytest.mark.parametrize("labels", ["both", "desirable", "undesirable"])
def test_metrics_of_labelled_responses(labels):
    """Means over the responses of each label; one that no response has is left out."""
    batch = batch_of("kto", 2, shared=True)
    if labels != "both":
        batch = batch._replace(label=jnp.full_like(batch.label, labels == "desirable"))
    loss, slope, sums = compiled("kto")(PARAMS, batch, ALL_ROWS)
    metrics = means_by_label({name: float(x) for name, x in sums.items()})
    label = {"both": LABEL, "desirable": np.ones(COUNT), "undesirable": np.zeros(COUNT)}[labels]
    flat, margins = np.float64(PARAMS["token"]), []
    for name, is_it in (("chosen", 1), ("rejected", 0)):
        which = [i for i in OWN if label[i] == is_it]
        assert metrics[f"kto/{name}_share"] == pytest.approx(len(which) / len(OWN))
        assert (f"rewards/{name}" in metrics) == (f"logps/{name}" in metrics) == bool(which)
        if which:
            margins.append(0.3 * np.mean([gain(flat, i) for i in which]))
            assert metrics[f"rewards/{name}"] == pytest.approx(margins[-1], rel=1e-5)
            wanted = np.mean([kept(LOGP, i).sum() for i in which])
            assert metrics[f"logps/{name}"] == pytest.approx(wanted, rel=1e-5)
    if labels == "both":
        assert metrics["rewards/margins"] == pytest.approx(margins[0] - margins[1], rel=1e-5)
    assert ("rewards/margins" in metrics) == (labels == "both")
    assert metrics["kto/kl"] == pytest.approx(baseline(), rel=1e-5) and baseline() > 0.1
    assert np.isfinite(loss) and np.abs(slope["token"]).max() > 0


@pytest.mark.parametrize("shift", [-2.0, 2.0])
def test_the_baseline_of_kto_is_a_kl_of_at_least_0(shift):
    """The responses of other rows alone make it, and gradients leave it alone."""
    current = [
        x + np.float32(shift / max(1, s.length)) for x, s in zip(BELOW, SEQUENCES, strict=True)
    ]
    batch = batch_of("kto", 2, shared=False)
    packed = pack(SEQUENCES, 2, shared=False, together=True)
    batch, count = OBJECTIVES["kto"].prepare(
        batch._replace(current_logp=first(packed.tokens(current)))
    )
    expected = max(0.0, np.mean([shift * bool(SEQUENCES[i].length) for i in OTHERS]))
    np.testing.assert_allclose(batch.baseline, expected, rtol=1e-5)
    assert count == len(OWN)


def test_metrics_of_the_critic():
    metrics = compiled("value")(PARAMS, batch_of("value", 2, shared=False), ALL_ROWS)[2]
    v, old, g = (np.float64(np.concatenate(x))[MASK] for x in (LOGP, OLD, RETURNS))
    clipped = (np.clip(v, old - 0.4, old + 0.4) - g) ** 2 > (v - g) ** 2
    assert 0 < clipped.mean() < 1
    assert_close(metrics["critic/vf_clipfrac"], clipped.mean())
    assert_close(metrics["critic/vpred_mean"], v.mean())
