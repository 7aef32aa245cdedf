"""The advantages, policy losses and corrections: which settings each takes, with its defaults.

Their functions have the same names in tables of distflow_jax/algorithms/: those of ADVANTAGES in
ESTIMATORS (advantages.py), of POLICY_LOSSES in LOSSES (policy_losses.py).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class AdvantageKind:
    """An entry of ADVANTAGES: what the estimator reads."""

    reads: tuple[str, ...] = ()  # fields of Outcome used beyond the rewards
    options: tuple[str, ...] = ()  # keys of AlgorithmConfig passed to the estimator


ADVANTAGES: dict[str, AdvantageKind] = {
    "gae": AdvantageKind(reads=("value",), options=("gamma", "lam")),
    "grpo": AdvantageKind(),
    "dr_grpo": AdvantageKind(),
    "grpo_passk": AdvantageKind(options=("norm_adv_by_std_in_grpo",)),
    "rloo": AdvantageKind(),
    "reinforce_plus_plus": AdvantageKind(options=("gamma",)),
    "reinforce_plus_plus_baseline": AdvantageKind(),
    "remax": AdvantageKind(reads=("baseline",)),
    "gpg": AdvantageKind(),
    "opo": AdvantageKind(),
    "cpgd": AdvantageKind(options=("cpgd_weight",)),
}


@dataclasses.dataclass(frozen=True)
class PolicyLossKind:
    """An entry of POLICY_LOSSES.

    `options` are the keys of AlgorithmConfig that the loss takes, with its own defaults;
    `select_options` are those of its token selection, which may share keys with it: it chooses
    among the tokens of an optimizer step, by the policy as it is before that step.
    """

    options: Mapping[str, float | None]  # None: the term of that option is left out
    select_options: Mapping[str, float] = dataclasses.field(default_factory=dict)
    aggregation: str = "token-mean"  # by default
    fixed_aggregation: bool = False  # any other aggregation would be another algorithm
    clips_log_ratio: bool = False  # clip_low bounds the log ratio, so it may be above 1
    corrected: bool = False  # requires a correction weight; without one it is ppo_clip
    of_sequences: bool = False  # one loss per sequence, weighted by one correction per sequence


def _per_sequence(options: Mapping[str, float | None], **traits: Any) -> PolicyLossKind:
    return PolicyLossKind(
        options, aggregation="seq-mean-token-mean", fixed_aggregation=True, **traits
    )


_CLIP = {"clip_low": 0.2, "clip_high": 0.2}

POLICY_LOSSES: dict[str, PolicyLossKind] = {
    "ppo_clip": PolicyLossKind(_CLIP | {"dual_clip": 3.0}),
    "gspo": _per_sequence({"clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": None}),
    "cispo": PolicyLossKind(_CLIP),
    "sapo": _per_sequence({"sapo_tau_positive": 1.0, "sapo_tau_negative": 1.05}),
    "gmpo": _per_sequence(
        {"clip_low": 0.4, "clip_high": 0.4}, clips_log_ratio=True, of_sequences=True
    ),
    "dppo_tv": PolicyLossKind({"clip_low": 0.15, "clip_high": 0.15, "dual_clip": 20.0}),
    "dppo_kl": PolicyLossKind({"clip_low": 0.05, "clip_high": 0.05, "dual_clip": 20.0}),
    "gpg": PolicyLossKind({}),
    "cpgd": PolicyLossKind(_CLIP | {"cpgd_drift_coef": 1e-3}),
    "kl_cov": PolicyLossKind({"kl_cov_coef": 1.0}, {"kl_cov_share": 2e-4}),
    "clip_cov": PolicyLossKind(
        _CLIP, _CLIP | {"clip_cov_ratio": 2e-4, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0}
    ),
    "dro": PolicyLossKind({"dro_beta": 0.05}),
    "decoupled": PolicyLossKind(_CLIP, corrected=True),
}

AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "fixed-budget",
)

# losses of preference pairs, and whether each reads the log-probs of a reference
PREFERENCE_LOSSES = {"dpo": True, "ipo": True, "orpo": False}

LOSS_ESTIMATORS = ("k2", "k3", "k1+", "k3+")  # of the KL, whose gradient is that of a KL


@dataclasses.dataclass(frozen=True)
class CorrectionKind:
    """An entry of CORRECTIONS or REJECTIONS: its bounds with their defaults."""

    bounds: Mapping[str, float]
    per_sequence: bool = False  # all tokens of a sequence have the same weight


# weights made of the ratio itself; one of these may be combined with one of REJECTIONS
CORRECTIONS: dict[str, CorrectionKind] = {
    "token_tis": CorrectionKind({"high": 2.0}),
    "token_mis": CorrectionKind({"low": 0.5, "high": 5.0}),
    "sequence_tis": CorrectionKind({"high": 2.0}, per_sequence=True),
    "sequence_mis": CorrectionKind({"low": 0.0, "high": 2.0}, per_sequence=True),
}

# weights of 0 or 1: what was sampled from a policy too far from the trainer's is left out
REJECTIONS: dict[str, CorrectionKind] = {
    "geometric": CorrectionKind({"low": 0.99, "high": 1.01}, per_sequence=True),
    "k2": CorrectionKind({"high": 0.01}, per_sequence=True),
    "k3": CorrectionKind({"high": 0.01}, per_sequence=True),
    "token_k1": CorrectionKind({"low": 0.5, "high": 2.0}),
    "token_k2": CorrectionKind({"high": 0.25}),
    "token_k3": CorrectionKind({"high": 0.25}),
    "seq_sum_k1": CorrectionKind({"low": 0.5, "high": 2.0}, per_sequence=True),
    "seq_sum_k2": CorrectionKind({"high": 1.0}, per_sequence=True),
    "seq_sum_k3": CorrectionKind({"high": 1.0}, per_sequence=True),
    "seq_max_k2": CorrectionKind({"high": 0.25}, per_sequence=True),
    "seq_max_k3": CorrectionKind({"high": 0.25}, per_sequence=True),
}

# The proximal policy. recomputed: from the trainer's own forward pass before the update (or, with
# one update per batch, the policy itself). rollout: the sampler's log-probs; the loss's own ratio
# is then the correction. A3PO: between the sampler's and the current policy, by the age of the
# token's weights. Its numbers are the age of the proximal policy's weights: 0 are the newest; 1, as
# in AReaL, those before them
A3PO = {"a3po": 0, "a3po_areal": 1}
PROXIMAL = ("recomputed", "rollout", *A3PO)
