"""Options: defaults of what was chosen, and no option without effect."""

import pytest

from distflow_jax.config.algorithm_config import AlgorithmConfig
from distflow_jax.config.algorithm_tables import A3PO, POLICY_LOSSES
from distflow_jax.stages.advantage import advantage_reads
from distflow_jax.stages.update_model import update_reads


@pytest.mark.parametrize(
    ("given", "low", "high"),
    [
        ({}, 0.2, 0.2),
        ({"clip": 0.1}, 0.1, 0.1),
        ({"clip": 0.1, "clip_high": 0.28}, 0.1, 0.28),
        ({"clip_high": 0.28}, 0.2, 0.28),
        ({"policy_loss": "gspo"}, 3e-4, 4e-4),
        ({"policy_loss": "gmpo", "clip": 1.5}, 1.5, 1.5),
    ],
)
def test_one_epsilon_sets_both_sides(given, low, high):
    options = AlgorithmConfig(**given).policy_options
    assert (options["clip_low"], options["clip_high"]) == (low, high)


def test_aggregation_is_the_loss_s_own_unless_given():
    assert AlgorithmConfig().loss_aggregation == "token-mean"
    assert AlgorithmConfig(aggregation="token-sum").loss_aggregation == "token-sum"
    for name in ("gspo", "sapo", "gmpo"):
        assert AlgorithmConfig(policy_loss=name).loss_aggregation == "seq-mean-token-mean"
        AlgorithmConfig(policy_loss=name, aggregation="seq-mean-token-mean")
        with pytest.raises(ValueError, match=f"{name}'.*'token-mean'; remove that setting"):
            AlgorithmConfig(policy_loss=name, aggregation="token-mean")


NORMALIZED = {"correction": "token_tis", "correction_batch_normalize": True}
REFUSED = [
    ({"policy_loss": "gpg", "clip": 0.1}, "no effect with algorithm.policy_loss='gpg'"),
    ({"policy_loss": "clip_cov", "clip_cov_lb": 6.0}, "must be below algorithm.clip_cov_ub=5.0"),
    ({"policy_loss": "cispo", "dual_clip": 3.0}, "dual_clip=3.0 has no effect"),
    ({"clip": 0.1, "clip_low": 0.2, "clip_high": 0.3}, "clip=0.1 has no effect if"),
    ({"clip_low": 1.5}, "clip_low must be at most 1"),
    ({"token_budget": 100}, "token_budget=100 and algorithm.aggregation='token-mean'"),
    ({"aggregation": "fixed-budget"}, "token_budget=0 and algorithm.aggregation='fixed-budget'"),
    ({"kl_coef": 0.1, "kl_estimator": "abs"}, "'abs' does not have the gradient of a KL"),
    (
        {"correction": "token_tis", "correction_low": 0.1},
        "use correction='token_mis' or 'sequence_mis'",
    ),
    (
        {"correction": "token_mis", "correction_low": 2.0, "correction_high": 1.0},
        "correction_low=2.0 must be below algorithm.correction_high=1.0",
    ),
    (NORMALIZED | {"proximal": "a3po"}, "those of algorithm.proximal='a3po' are not"),
    (NORMALIZED | {"proximal": "a3po_areal"}, "those of algorithm.proximal='a3po_areal' are not"),
    ({"policy_loss": "gmpo", "rejection": "token_k1"}, "'token_k1' leaves out tokens, and"),
    ({"policy_loss": "decoupled"}, "needs algorithm.correction or algorithm.rejection"),
    ({"proximal": "rollout", "correction": "token_tis"}, "makes every correction weight 1"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_options_without_effect_or_out_of_range_are_refused(given, message):
    with pytest.raises(ValueError, match=message) as caught:
        AlgorithmConfig(**given)
    assert "\n" not in str(caught.value)


def test_a_default_given_to_its_own_loss_changes_nothing():
    for name, kind in POLICY_LOSSES.items():
        other = {"correction": "token_tis"} if kind.corrected else {}
        own = {**kind.options, **kind.select_options}
        given = AlgorithmConfig(policy_loss=name, **own, **other)
        plain = AlgorithmConfig(policy_loss=name, **other)
        assert given.policy_options == plain.policy_options
        assert given.select_options == plain.select_options


def test_gspo_has_a_dual_clip_only_where_it_is_given():
    assert AlgorithmConfig(policy_loss="gspo").policy_options["dual_clip"] is None
    assert AlgorithmConfig(policy_loss="gspo", dual_clip=3.0).policy_options["dual_clip"] == 3.0
    assert AlgorithmConfig().policy_options["dual_clip"] == 3.0


def test_cpgd_without_a_drift_term():
    options = AlgorithmConfig(policy_loss="cpgd", cpgd_drift_coef=0.0).policy_options
    assert options["cpgd_drift_coef"] == 0


def test_stages_are_told_what_they_need():
    assert advantage_reads(AlgorithmConfig()) == ("score", "rows")
    assert update_reads(AlgorithmConfig()) == ("rows", "advantage")
    gae = AlgorithmConfig(advantage="gae", kl_coef=0.1, kl_in_reward=True)
    assert advantage_reads(gae) == ("score", "rows", "value", "old_logp", "ref_logp")
    assert update_reads(gae) == ("rows", "advantage")
    assert "baseline" in advantage_reads(AlgorithmConfig(advantage="remax"))
    assert "ref_logp" in update_reads(AlgorithmConfig(kl_coef=0.1))
    assert "rollout_logp" in update_reads(AlgorithmConfig(rejection="k2"))
    assert "old_logp" in update_reads(AlgorithmConfig(policy_loss="kl_cov"))
    assert "old_logp" in update_reads(AlgorithmConfig(policy_loss="clip_cov"))
    normalised = AlgorithmConfig(correction="token_tis", correction_batch_normalize=True)
    assert {"old_logp", "rollout_logp"} <= {*update_reads(normalised)}
    bypass = update_reads(AlgorithmConfig(policy_loss="kl_cov", proximal="rollout"))
    assert "old_logp" not in bypass and "rollout_logp" in bypass
    for name in A3PO:
        assert {"prox_alpha", "rollout_logp"} < {*update_reads(AlgorithmConfig(proximal=name))}
