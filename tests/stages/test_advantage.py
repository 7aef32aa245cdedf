"""The advantage stage: rewards of tokens from scores and KL, the algorithm, what is reported."""

import dataclasses
import types

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support import formulas
from support.ragged import assert_close, draw, pack, random_sequences
from support.tiny_model import mesh_of

from distflow_jax.algorithms.packed import per_token
from distflow_jax.config.algorithm_config import AlgorithmConfig
from distflow_jax.stages.advantage import build_advantage
from distflow_jax.stages.registry import STAGES, resolve
from distflow_jax.training.update import UpdateShape

MESH = mesh_of(2, 1)
SEQUENCES = random_sequences(0)
COUNTED = np.array([s.mask.any() for s in SEQUENCES])
PACKED = pack(SEQUENCES, 1, shared=True)
SCORE = np.random.default_rng(2).choice(np.float32([0, 1, 0.5]), len(SEQUENCES))
VALUE, OLD, REF = draw(3, SEQUENCES), draw(4, SEQUENCES, 0.1, -3), draw(5, SEQUENCES, 0.1, -3)


def stage_of(**options):
    return build_advantage(
        types.SimpleNamespace(
            algorithm=AlgorithmConfig(**options),
            prompts_per_step=8,
            shape=UpdateShape(MESH, 1, 12),
        )
    )


def fields(*names):
    known = {"value": VALUE, "old_logp": OLD, "ref_logp": REF}
    layout = NamedSharding(MESH, PartitionSpec(None, "fsdp"))
    return jax.device_put(_fields(names, known), layout)


def _fields(names, known):
    return {
        "score": PACKED.per_sequence(SCORE, np.nan),
        "rows": PACKED.rows,
        **{name: PACKED.tokens(known[name], np.nan) for name in names},
    }


def summary(values):
    return {"mean": np.mean(values), "max": np.max(values), "min": np.min(values)}


def on_mask(values):
    return np.concatenate([v[s.mask] for s, v in zip(SEQUENCES, values, strict=True)])


def rewards(kl_coef=0.0):
    out = [np.zeros(len(s.mask)) for s in SEQUENCES]
    for s, r, score, old, ref in zip(SEQUENCES, out, SCORE, OLD, REF, strict=True):
        r[np.flatnonzero(s.mask)[-1:]] = score
        r -= kl_coef * (np.float64(old) - ref) * s.mask
    return out


def assert_reports(metrics, expected):
    for name, values in expected.items():
        for what, number in summary(values).items():
            assert_close(metrics[f"{name}/{what}"], number, f"{name}/{what}")


def test_default_is_grpo_on_the_score():
    state, written, metrics = stage_of()(None, fields(), {})
    assert state is None and written.keys() == {"advantage"}
    expected, returns = formulas.grpo(SEQUENCES, rewards(), None, None)
    assert_close(on_mask(PACKED.unpack(written["advantage"])), on_mask(expected))
    assert_reports(
        metrics,
        {
            "critic/rewards": SCORE[COUNTED],
            "critic/advantages": on_mask(expected),
            "critic/returns": on_mask(returns),
        },
    )


def test_gae_with_kl_in_the_reward_and_an_adaptive_coefficient():
    stage = stage_of(
        advantage="gae",
        lam=0.9,
        kl_coef=0.2,
        kl_estimator="k1",
        kl_in_reward=True,
        kl_target=0.05,
        kl_horizon=100,
    )
    given = fields("value", "old_logp", "ref_logp")
    state, written, metrics = stage(None, given, {})
    advantage, returns = formulas.gae(SEQUENCES, rewards(0.2), VALUE, None, lam=0.9)
    assert_close(on_mask(PACKED.unpack(written["advantage"])), on_mask(advantage))
    assert_close(on_mask(PACKED.unpack(written["returns"])), on_mask(returns))
    assert_reports(
        metrics,
        {
            "critic/rewards": formulas.scores(SEQUENCES, rewards(0.2))[COUNTED],
            "critic/returns": on_mask(returns),
            "critic/values": np.float64(on_mask(VALUE)),
        },
    )
    left, total = (np.var(x, ddof=1) for x in (on_mask(returns) - on_mask(VALUE), on_mask(returns)))
    assert_close(metrics["critic/vf_explained_var"], 1 - left / total)
    # the coefficient of the next step is the node's state
    kl = [
        (np.float64(o) - r)[s.mask].mean()
        for s, o, r in zip(SEQUENCES, OLD, REF, strict=True)
        if s.mask.any()
    ]
    assert_close(metrics["actor/reward_kl_penalty"], np.mean(kl))
    assert_close(metrics["actor/reward_kl_penalty_coeff"], 0.2)
    factor = 1 + np.clip(np.mean(kl) / 0.05 - 1, -0.2, 0.2) * COUNTED.sum() / 100
    assert_close(state, 0.2 * factor)
    _, _, metrics = stage(state, given, {})
    assert_close(metrics["actor/reward_kl_penalty_coeff"], 0.2 * factor)
    assert all(x.dtype == np.float32 for x in jax.tree.leaves(metrics))


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({"advantage": "gae"}, "value"),
        ({"advantage": "remax"}, "baseline"),
        ({"kl_coef": 0.1, "kl_in_reward": True}, "old_logp, ref_logp"),
    ],
)
def test_what_is_missing_is_named(options, missing):
    with pytest.raises(ValueError, match=f"needs {missing}: add that to the node's reads"):
        stage_of(**options)(None, fields(), {})


def test_a_node_may_write_returns():
    kind = STAGES["ACTOR", "COMPUTE"]

    def node(*writes):
        reads = dict.fromkeys(kind.reads)
        return types.SimpleNamespace(
            id="a",
            role="ACTOR",
            type="COMPUTE",
            fn=None,
            is_users=False,
            options={},
            reads=reads,
            writes=dict.fromkeys(writes),
        )

    for writes in (("advantage",), ("advantage", "returns")):
        assert resolve([node(*writes)]) == {"a": build_advantage}
    with pytest.raises(ValueError, match="does not write grade"):
        resolve([node("advantage", "grade")])


def test_passk_needs_another_response_to_compare_with():
    algorithm = AlgorithmConfig(advantage="grpo_passk")
    context = types.SimpleNamespace(algorithm=algorithm, num_samples=1)
    with pytest.raises(ValueError, match=r"got rollout.num_samples=1; use at least 2"):
        build_advantage(context)


@pytest.mark.parametrize("kind", ["grpo", "rloo", "reinforce_plus_plus", "gae"])
def test_a_response_without_a_score_leaves_its_group(kind):
    # as if it had no token: neither the others' numbers nor a metric knows of it
    names = ["value"] if kind == "gae" else []
    gone = np.flatnonzero(COUNTED)[::3]
    given = fields(*names)
    score = np.array(SCORE)
    score[gone] = np.nan
    unscored = given | {"score": PACKED.per_sequence(score, np.nan)}
    missing = [
        dataclasses.replace(s, mask=np.zeros_like(s.mask)) if i in gone else s
        for i, s in enumerate(SEQUENCES)
    ]
    packed = pack(missing, 1, shared=True)
    without = given | {"rows": packed.rows}
    stage = stage_of(advantage=kind)
    _, found, metrics = stage(None, unscored, {})
    _, expected, wanted = stage(None, without, {})
    np.testing.assert_array_equal(found["advantage"], expected["advantage"])
    assert {k: float(v) for k, v in metrics.items()} == {k: float(v) for k, v in wanted.items()}
    assert np.isfinite(np.asarray(found["advantage"])).all()
    if kind == "gae":  # the critic learns nothing from it
        left = np.asarray(given["rows"].response_mask & ~packed.rows.response_mask)
        value = np.asarray(given["value"])
        assert left.any() and (np.asarray(found["returns"])[left] == value[left]).all()


def test_a_response_without_its_baseline_is_not_learned_from():
    """A greedy response whose environment failed says nothing about those that were drawn."""
    gone = np.flatnonzero(COUNTED)[::3]
    baseline = np.zeros(len(SEQUENCES))
    given = fields() | {"baseline": PACKED.per_sequence(baseline, np.nan)}
    baseline[gone] = np.nan
    missing = given | {"baseline": PACKED.per_sequence(baseline, np.nan)}
    stage = stage_of(advantage="remax")
    wanted = np.asarray(stage(None, given, {})[1]["advantage"])
    found = np.asarray(stage(None, missing, {})[1]["advantage"])
    of_gone = PACKED.per_sequence(np.isin(np.arange(len(SEQUENCES)), gone).astype(float), 0.0)
    of_gone = np.asarray(per_token(of_gone > 0, PACKED.rows.segment))
    np.testing.assert_array_equal(found, np.where(of_gone, 0.0, wanted))
    assert wanted[of_gone].any() and found.any()
