"""Settings of losses: names of advantages, policy losses and corrections, and their options.

An option that the chosen entry of algorithm_tables.py does not take is an error. None stands for
the default that the table has for it.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from distflow_jax.config.algorithm_tables import (
    A3PO,
    ADVANTAGES,
    AGGREGATIONS,
    CORRECTIONS,
    LOSS_ESTIMATORS,
    POLICY_LOSSES,
    PREFERENCE_LOSSES,
    PROXIMAL,
    REJECTIONS,
    CorrectionKind,
    PolicyLossKind,
)
from distflow_jax.parsing.checked_fields import Kind, above, at_least, between, one_of
from distflow_jax.parsing.setting_checks import Section, setting

_POSITIVE, _NOT_NEGATIVE, _COUNT = above(0), at_least(0), at_least(1)
_ABOVE_ONE = above(1)
_UNIT, _SHARE = between(0, 1), between(0, 1, "(]")


# {key of AlgorithmConfig: {its choice: options that have an effect with it}}
_OPTIONS: dict[str, dict[str, Collection[str]]] = {
    "advantage": {name: kind.options for name, kind in ADVANTAGES.items()},
    "policy_loss": {n: {*kind.options, *kind.select_options} for n, kind in POLICY_LOSSES.items()},
    "correction": {name: kind.bounds for name, kind in CORRECTIONS.items()},
    "rejection": {name: kind.bounds for name, kind in REJECTIONS.items()},
}


def _needs(key: str, option: str) -> dict[str, tuple[str, ...]]:
    """The need of an option: a choice of `key` that takes it."""
    return {key: tuple(name for name, options in _OPTIONS[key].items() if option in options)}


def _loss_option(kind: Kind, option: str) -> float | None:
    """An option of policy losses; None: the loss's own default."""
    return setting(None, kind, needs=_needs("policy_loss", option))


@dataclasses.dataclass(frozen=True)
class AlgorithmConfig(Section, name="algorithm"):
    """Choice of advantage, policy loss, KL and correction, in any combination."""

    advantage: str = setting("grpo", one_of(ADVANTAGES))  # advantage estimator
    # discount factor per token
    gamma: float = setting(1.0, _UNIT, needs=_needs("advantage", "gamma"))
    # lambda of gae: 1 is the full return, 0 the one-step estimate
    lam: float = setting(1.0, _UNIT, needs=_needs("advantage", "lam"))
    # weighting of groups in cpgd
    cpgd_weight: str = setting(
        "std", one_of(("std", "equal", "clip_filter")), needs=_needs("advantage", "cpgd_weight")
    )
    # divide the advantages of grpo_passk by the group's standard deviation
    norm_adv_by_std_in_grpo: bool = setting(
        True, needs=_needs("advantage", "norm_adv_by_std_in_grpo")
    )

    policy_loss: str = setting("ppo_clip", one_of(POLICY_LOSSES))  # policy loss per token
    # clip range on both sides; None: the default of the loss, mostly 0.2
    clip: float | None = _loss_option(_POSITIVE, "clip_low")
    # the ratio is clipped below 1 - clip_low; in dppo_tv and dppo_kl, the maximum distance that a
    # token's probability may fall. None: clip
    clip_low: float | None = _loss_option(_POSITIVE, "clip_low")
    # the ratio is clipped above 1 + clip_high; 0.28 is DAPO's clip-higher; in dppo_tv and dppo_kl,
    # the maximum distance that a token's probability may rise. None: clip
    clip_high: float | None = _loss_option(_POSITIVE, "clip_high")
    # upper bound of the ratio for negative advantages; in dppo_tv and dppo_kl for all tokens. None:
    # 3; no bound for gspo; 20 for dppo_tv and dppo_kl
    dual_clip: float | None = _loss_option(_ABOVE_ONE, "dual_clip")
    # steepness of sapo's gate for tokens with a positive advantage; None: 1
    sapo_tau_positive: float | None = _loss_option(_POSITIVE, "sapo_tau_positive")
    # steepness of sapo's gate for all other tokens; None: 1.05
    sapo_tau_negative: float | None = _loss_option(_POSITIVE, "sapo_tau_negative")
    # weight of the drift term in the loss cpgd; 0: no drift term; None: 0.001
    cpgd_drift_coef: float | None = _loss_option(_NOT_NEGATIVE, "cpgd_drift_coef")
    # share of tokens that kl_cov penalizes; None: 0.0002
    kl_cov_share: float | None = _loss_option(_SHARE, "kl_cov_share")
    # weight of kl_cov's penalty |logp - old|; None: 1
    kl_cov_coef: float | None = _loss_option(_POSITIVE, "kl_cov_coef")
    # share of tokens that clip_cov excludes; None: 0.0002
    clip_cov_ratio: float | None = _loss_option(_SHARE, "clip_cov_ratio")
    # minimum covariance of tokens that clip_cov selects; None: 1
    clip_cov_lb: float | None = _loss_option(_POSITIVE, "clip_cov_lb")
    # maximum covariance of tokens that clip_cov selects; None: 5
    clip_cov_ub: float | None = _loss_option(_POSITIVE, "clip_cov_ub")
    # weight of the squared term in dro; None: 0.05
    dro_beta: float | None = _loss_option(_POSITIVE, "dro_beta")
    # averaging of token and sequence losses; "": the default of the loss, mostly token-mean
    aggregation: str = setting("", one_of(("", *AGGREGATIONS)))
    # response tokens per optimizer step, with aggregation=fixed-budget
    token_budget: int = setting(0, _NOT_NEGATIVE)

    # weight of KL(policy || reference); 0: no reference model
    kl_coef: float = setting(0.0, _NOT_NEGATIVE)
    # KL estimator: k2, k3, k1+ or k3+ in the loss; k1, abs, k2 or k3 in the reward
    kl_estimator: str = setting(
        "k3", one_of(("k1", "abs", "k2", "k3", "k1+", "k3+")), needs={"kl_coef": ()}
    )
    # subtract the KL from the rewards instead of adding it to the loss
    kl_in_reward: bool = setting(False, needs={"kl_coef": ()})
    # KL per token, in nats, to which kl_coef adapts; 0: kl_coef is constant
    kl_target: float = setting(0.0, _NOT_NEGATIVE, needs={"kl_in_reward": ()})
    # number of sequences over which kl_coef adapts to kl_target
    kl_horizon: int = setting(10_000, _COUNT, needs={"kl_target": ()})
    entropy_coef: float = 0.0  # weight of the entropy bonus

    # importance weight for the gap between sampler and trainer. With stream.max_staleness,
    # token_tis replaces none, unless rejection or proximal handles the tokens of older weights
    correction: str = setting("none", one_of(("none", *CORRECTIONS)))
    # minimum ratio of token_mis and sequence_mis; None: 0.5 for token_mis, 0 for sequence_mis
    correction_low: float | None = setting(None, _NOT_NEGATIVE, needs=_needs("correction", "low"))
    # maximum ratio of a correction; None: 2, for token_mis 5
    correction_high: float | None = setting(None, _POSITIVE, needs=_needs("correction", "high"))
    # divide the correction's weights by their mean over the optimizer step
    correction_batch_normalize: bool = setting(False, needs={"correction": tuple(CORRECTIONS)})
    # rule that drops tokens or sequences with a large gap between sampler and trainer; none: keep
    # all. Sequences by their mean: geometric, k2, k3; by their sum: seq_sum_k1, seq_sum_k2,
    # seq_sum_k3; by their largest token: seq_max_k2, seq_max_k3. Tokens: token_k1, token_k2,
    # token_k3
    rejection: str = setting("none", one_of(("none", *REJECTIONS)))
    # minimum ratio of geometric (mean), token_k1 and seq_sum_k1 (product); None: 0.99, 0.5, 0.5
    rejection_low: float | None = setting(None, _NOT_NEGATIVE, needs=_needs("rejection", "low"))
    # maximum ratio of geometric, token_k1 and seq_sum_k1; None: 1.01, 2, 2. For all other rules the
    # maximum KL in nats; None: 0.01 (seq_sum_k2, seq_sum_k3: 1; tokens, seq_max: 0.25)
    rejection_high: float | None = setting(None, _POSITIVE, needs=_needs("rejection", "high"))
    # source of the old log-probs
    proximal: str = setting("recomputed", one_of(PROXIMAL))

    def __post_init__(self):
        super().__post_init__()
        for check in _CHECKS:
            check(self)

    # -- for the stages ----------------------------------------------------------------------------

    @property
    def loss_kind(self) -> PolicyLossKind:
        """The entry of POLICY_LOSSES."""
        return POLICY_LOSSES[self.policy_loss]

    @property
    def policy_options(self) -> dict[str, float | None]:
        """Keyword arguments of the policy loss."""
        return self._filled(self.loss_kind.options)

    @property
    def select_options(self) -> dict[str, float]:
        """Keyword arguments of the policy loss's token selection."""
        return self._filled(self.loss_kind.select_options)

    @property
    def selects(self) -> bool:
        """Whether the loss chooses among the tokens of an optimizer step, by the current policy."""
        return bool(self.loss_kind.select_options)

    @property
    def loss_aggregation(self) -> str:
        """The aggregation in effect: the setting, or the loss's own."""
        return self.aggregation or self.loss_kind.aggregation

    @property
    def kl_in_loss(self) -> bool:
        """Whether the loss has a KL term."""
        return self.kl_coef > 0 and not self.kl_in_reward

    @property
    def correction_bounds(self) -> dict[str, float]:
        """Keyword arguments of the correction."""
        return self._bounds("correction", CORRECTIONS)

    @property
    def rejection_bounds(self) -> dict[str, float]:
        """Keyword arguments of the rejection."""
        return self._bounds("rejection", REJECTIONS)

    def _filled(self, defaults: Mapping[str, float | None]) -> dict[str, Any]:
        filled = {}
        for name, default in defaults.items():
            value = getattr(self, name)
            if value is None and name in ("clip_low", "clip_high"):
                value = self.clip
            filled[name] = default if value is None else value
        return filled

    def _bounds(self, key: str, table: Mapping[str, CorrectionKind]) -> dict[str, float]:
        """Keyword arguments of the entry of `table` that the setting `key` chooses."""
        chosen = getattr(self, key)
        defaults = table[chosen].bounds if chosen != "none" else {}
        settings = {side: getattr(self, f"{key}_{side}") for side in defaults}
        return {
            side: defaults[side] if value is None else value for side, value in settings.items()
        }


@dataclasses.dataclass(frozen=True)
class ValueConfig(Section, name="critic.loss"):
    """Loss of a critic."""

    # value clip range: a smaller error beyond this distance from the old value is ignored
    clip: float = setting(0.5, above(0))
    # as algorithm.aggregation, except fixed-budget: a token budget only applies to the policy, and
    # the critic learns from whole responses
    aggregation: str = setting(
        "token-mean", one_of(name for name in AGGREGATIONS if name != "fixed-budget")
    )


@dataclasses.dataclass(frozen=True)
class PreferenceConfig(Section, name="preference"):
    """Loss over pairs of a chosen and a rejected response, and over responses with a label."""

    loss: str = setting("dpo", one_of(PREFERENCE_LOSSES))  # loss of a pair
    # strength of the pull towards the reference; with a smaller value, the policy may move further
    # away. With loss=orpo: weight of the odds ratio, in addition to the loss of the chosen response
    beta: float = setting(0.1, above(0))
    # weight of desirable responses in graph kto. Choose both weights so that (desirable_weight x
    # desirable rows) / (undesirable_weight x undesirable rows) is from 1 to 4/3
    desirable_weight: float = setting(1.0, above(0))
    undesirable_weight: float = setting(1.0, above(0))  # weight of all other responses in graph kto

    @property
    def reads_reference(self) -> bool:
        """Whether the loss reads the log-probs of a reference."""
        return PREFERENCE_LOSSES[self.loss]


@dataclasses.dataclass(frozen=True)
class RewardModelConfig(Section, name="reward_model"):
    """Loss of a reward model."""

    margin: float = setting(0.0, at_least(0))  # required margin of the chosen response's score
    # weight of (s+ + s-)^2, which keeps scores around 0
    center_coef: float = setting(0.0, at_least(0))


# -- checks ---------------------------------------------------------------------------------------


def _check_policy_loss(config: AlgorithmConfig) -> None:
    if None not in (config.clip, config.clip_low, config.clip_high):
        raise ValueError(
            f"algorithm.clip={config.clip} has no effect if clip_low and clip_high are set; "
            "remove one of the three"
        )
    low = config.policy_options.get("clip_low")
    if low and low > 1 and not config.loss_kind.clips_log_ratio:
        raise ValueError(
            f"algorithm.clip_low must be at most 1, got {low}: a ratio is never below 0"
        )
    chosen = config.select_options
    if chosen.get("clip_cov_lb", 0) >= chosen.get("clip_cov_ub", 1):
        raise ValueError(
            f"algorithm.clip_cov_lb={chosen['clip_cov_lb']} must be below "
            f"algorithm.clip_cov_ub={chosen['clip_cov_ub']}"
        )


def _check_aggregation(config: AlgorithmConfig) -> None:
    own = config.loss_kind.aggregation
    if config.loss_kind.fixed_aggregation and config.loss_aggregation != own:
        raise ValueError(
            f"algorithm.policy_loss={config.policy_loss!r} is defined with aggregation {own!r}, "
            f"got algorithm.aggregation={config.aggregation!r}; remove that setting"
        )
    budgeted = config.loss_aggregation == "fixed-budget"
    if budgeted != (config.token_budget > 0):
        raise ValueError(
            f"algorithm.token_budget={config.token_budget} and algorithm.aggregation="
            f"{config.loss_aggregation!r}: aggregation fixed-budget needs a positive budget, all "
            "others need algorithm.token_budget=0"
        )


def _check_kl(config: AlgorithmConfig) -> None:
    if config.kl_in_loss and config.kl_estimator not in LOSS_ESTIMATORS:
        reason = {
            "k1": "has zero expected gradient as a loss",
            "abs": "does not have the gradient of a KL as a loss",
        }[config.kl_estimator]
        raise ValueError(
            f"algorithm.kl_estimator={config.kl_estimator!r} {reason}; use k2, k3, k1+, k3+, or "
            "algorithm.kl_in_reward"
        )


def _check_correction(config: AlgorithmConfig) -> None:
    for key in ("correction", "rejection"):
        bounds = getattr(config, f"{key}_bounds")
        if bounds.get("low", 0) >= bounds.get("high", 1):
            raise ValueError(
                f"algorithm.{key}_low={bounds['low']} must be below "
                f"algorithm.{key}_high={bounds['high']}"
            )
    corrected = (config.correction, config.rejection) != ("none", "none")
    if config.loss_kind.corrected and not corrected:
        raise ValueError(
            f"algorithm.policy_loss={config.policy_loss!r} needs algorithm.correction or "
            "algorithm.rejection: without a weight it is ppo_clip"
        )
    _check_weights(config)
    if corrected and config.proximal == "rollout":
        raise ValueError(
            "algorithm.proximal='rollout' makes every correction weight 1; remove "
            "algorithm.correction and algorithm.rejection, or use proximal='recomputed'"
        )


def _check_weights(config: AlgorithmConfig) -> None:
    """Raises ValueError for weights that cannot be normalised, or do not suit the loss."""
    if config.correction_batch_normalize and config.proximal in A3PO:
        raise ValueError(
            "algorithm.correction_batch_normalize=True needs weights that are known before the "
            f"update, and those of algorithm.proximal={config.proximal!r} are not; use "
            "proximal='recomputed'"
        )
    of_tokens = config.rejection != "none" and not REJECTIONS[config.rejection].per_sequence
    if config.loss_kind.of_sequences and of_tokens:
        raise ValueError(
            f"algorithm.rejection={config.rejection!r} leaves out tokens, and algorithm.policy_loss"
            f"={config.policy_loss!r} has one loss per sequence; use a rejection of sequences, "
            "such as seq_max_k2"
        )


_CHECKS = (_check_policy_loss, _check_aggregation, _check_kl, _check_correction)
