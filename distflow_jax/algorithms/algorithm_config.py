"""Algorithm settings: names from the tables of this folder, and their options.

An option that the chosen advantage, loss or correction does not take is an error. None stands for
the default of the chosen entry, which its table holds.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from distflow_jax.algorithms.advantages import ADVANTAGES, CPGD_WEIGHTS
from distflow_jax.algorithms.aggregate import AGGREGATIONS
from distflow_jax.algorithms.correction import A3PO, CORRECTIONS, PROXIMAL, REJECTIONS
from distflow_jax.algorithms.kl import KL_ESTIMATORS, LOSS_ESTIMATORS
from distflow_jax.algorithms.policy_losses import POLICY_LOSSES, PolicyLossKind
from distflow_jax.parsing.setting_checks import check_least, check_one_of, check_positive


@dataclasses.dataclass(frozen=True)
class AlgorithmConfig:
    """Choice of advantage, policy loss, KL and correction, in any combination."""

    # estimator of the advantages: grpo, dr_grpo, grpo_passk, rloo, gae, reinforce_plus_plus,
    # reinforce_plus_plus_baseline, remax, gpg, opo or cpgd
    advantage: str = "grpo"
    gamma: float = 1.0  # discount per token, of gae and reinforce_plus_plus
    lam: float = 1.0  # lambda of gae: 1 is the full return, 0 the one-step estimate
    cpgd_weight: str = "std"  # weight of groups in cpgd: std, equal or clip_filter
    norm_adv_by_std_in_grpo: bool = True  # divide grpo_passk by the group's standard deviation

    # ppo_clip, gspo, cispo, sapo, gmpo, gpg, cpgd, kl_cov, clip_cov, dppo_tv, dppo_kl, dro or
    # decoupled
    policy_loss: str = "ppo_clip"
    clip: float | None = None  # clip range on both sides; None: the loss's own, mostly 0.2
    # the ratio is clipped below 1 - clip_low; of dppo_tv and dppo_kl the farthest that a token may
    # fall; None: clip
    clip_low: float | None = None
    # the ratio is clipped above 1 + clip_high; 0.28 is DAPO's clip-higher; of dppo_tv and dppo_kl
    # the farthest that a token may rise; None: clip
    clip_high: float | None = None
    # bound of the ratio for negative advantages, in dppo_tv and dppo_kl for all; None: 3, for gspo
    # no bound, for dppo_tv and dppo_kl 20
    dual_clip: float | None = None
    sapo_tau_positive: float | None = None  # steepness of sapo's gate, advantage above 0; None: 1
    # steepness of sapo's gate for all other tokens; None: 1.05
    sapo_tau_negative: float | None = None
    # weight of the drift term of the loss cpgd; 0: without it; None: 0.001
    cpgd_drift_coef: float | None = None
    kl_cov_share: float | None = None  # share of tokens that kl_cov penalises; None: 0.0002
    kl_cov_coef: float | None = None  # weight of kl_cov's penalty |logp - old|; None: 1
    clip_cov_ratio: float | None = None  # share of tokens that clip_cov leaves out; None: 0.0002
    clip_cov_lb: float | None = None  # least covariance of tokens that clip_cov selects; None: 1
    clip_cov_ub: float | None = None  # greatest covariance of such tokens; None: 5
    dro_beta: float | None = None  # weight of dro's square; None: 0.05
    # token-mean, token-sum, seq-mean-token-sum, seq-mean-token-mean, seq-mean-token-sum-norm or
    # fixed-budget; "": the loss's own, mostly token-mean
    aggregation: str = ""
    token_budget: int = 0  # response tokens per optimizer step, with aggregation fixed-budget

    kl_coef: float = 0.0  # weight of KL(policy || reference); 0: no reference model
    kl_estimator: str = "k3"  # in the loss k2, k3, k1+ or k3+; in the reward k1, abs, k2 or k3
    kl_in_reward: bool = False  # subtract the KL from the rewards instead of adding it to the loss
    kl_target: float = 0.0  # KL per token, nats, to adapt kl_coef to (kl_in_reward); 0: fixed coef
    kl_horizon: int = 10_000  # sequences over which kl_coef adapts to kl_target
    entropy_coef: float = 0.0  # weight of the entropy bonus

    # weight for the gap between sampler and trainer: none, token_tis, token_mis, sequence_tis or
    # sequence_mis; with stream.max_staleness token_tis takes the place of none, unless rejection
    # or proximal say what becomes of tokens of older weights
    correction: str = "none"
    # least ratio of token_mis and sequence_mis; None: 0.5, for sequence_mis 0
    correction_low: float | None = None
    correction_high: float | None = None  # greatest ratio of a correction; None: 2, for token_mis 5
    # divide the correction's weights by their mean over the optimizer step
    correction_batch_normalize: bool = False
    # rule that drops what differs too much between sampler and trainer; none: all are kept;
    # sequences by a mean: geometric, k2, k3; by a sum: seq_sum_k1, seq_sum_k2, seq_sum_k3; by the
    # largest token: seq_max_k2, seq_max_k3; tokens: token_k1, token_k2, token_k3
    rejection: str = "none"
    # least ratio of geometric (mean), token_k1 and seq_sum_k1 (product); None: 0.99, 0.5, 0.5
    rejection_low: float | None = None
    # greatest ratio of these; None: 1.01, 2, 2. Of the others the greatest KL in nats; None: 0.01,
    # for seq_sum_k2 and seq_sum_k3 1, for tokens and seq_max 0.25
    rejection_high: float | None = None
    # source of the old log-probs: recomputed, rollout, a3po or a3po_areal
    proximal: str = "recomputed"

    def __post_init__(self):
        for check in _CHECKS:
            check(self)

    # -- for the stages ----------------------------------------------------------------------------

    @property
    def advantage_options(self) -> dict[str, Any]:
        """Keyword arguments of the advantage."""
        return {name: getattr(self, name) for name in ADVANTAGES[self.advantage].options}

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
        return self.loss_kind.select is not None

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
        return self.bounds("correction", CORRECTIONS)

    @property
    def rejection_bounds(self) -> dict[str, float]:
        """Keyword arguments of the rejection."""
        return self.bounds("rejection", REJECTIONS)

    @property
    def advantage_reads(self) -> tuple[str, ...]:
        """Fields that the advantage stage requires, by their names inside the stage."""
        penalty = ("old_logp", "ref_logp") if self.kl_in_reward else ()
        return ("score", "rows", *ADVANTAGES[self.advantage].reads, *penalty)

    @property
    def update_reads(self) -> tuple[str, ...]:
        """Fields that the actor's update requires, by their names inside the stage.

        With several optimizer steps per batch the update requires old_logp, too.
        """
        off_policy = {self.correction, self.rejection} != {"none"}
        # what is taken over a whole optimizer step is known before its first forward pass
        ahead = self.selects or self.correction_batch_normalize
        wanted = {
            "ref_logp": self.kl_in_loss,
            "rollout_logp": off_policy or self.proximal != "recomputed",
            "old_logp": ahead and self.proximal == "recomputed",
            "prox_alpha": self.proximal in A3PO,
        }
        return ("rows", "advantage", *(name for name, needed in wanted.items() if needed))

    def _filled(self, defaults: Mapping[str, float | None]) -> dict[str, float | None]:
        filled = {}
        for name, default in defaults.items():
            value = getattr(self, name)
            if value is None and name in ("clip_low", "clip_high"):
                value = self.clip
            filled[name] = default if value is None else value
        return filled

    def bounds(self, key: str, table: Mapping[str, Any]) -> dict[str, float]:
        """Keyword arguments of the entry of `table` that the setting `key` chooses."""
        chosen = getattr(self, key)
        defaults = table[chosen].bounds if chosen != "none" else {}
        settings = {side: getattr(self, f"{key}_{side}") for side in defaults}
        return {
            side: defaults[side] if value is None else value for side, value in settings.items()
        }


# -- checks ---------------------------------------------------------------------------------------


def _check_names(config: AlgorithmConfig) -> None:
    for field, table in (
        ("advantage", ADVANTAGES),
        ("cpgd_weight", CPGD_WEIGHTS),
        ("policy_loss", POLICY_LOSSES),
        ("aggregation", ("", *AGGREGATIONS)),
        ("kl_estimator", KL_ESTIMATORS),
        ("correction", ("none", *CORRECTIONS)),
        ("rejection", ("none", *REJECTIONS)),
        ("proximal", PROXIMAL),
    ):
        check_one_of(f"algorithm.{field}", getattr(config, field), sorted(table))


def _check_advantage(config: AlgorithmConfig) -> None:
    for name in ("gamma", "lam"):
        if not 0 <= getattr(config, name) <= 1:
            raise ValueError(f"algorithm.{name} must be from 0 to 1, got {getattr(config, name)}")
    users = {name: kind.options for name, kind in ADVANTAGES.items()}
    for name, default in (
        ("gamma", 1.0),
        ("lam", 1.0),
        ("cpgd_weight", "std"),
        ("norm_adv_by_std_in_grpo", True),
    ):
        if getattr(config, name) != default:
            _check_used(config, name, "advantage", users)


def _check_policy_loss(config: AlgorithmConfig) -> None:
    users = {name: {*kind.options, *kind.select_options} for name, kind in POLICY_LOSSES.items()}
    for name in sorted(set().union(*users.values())):
        if getattr(config, name) is not None:
            _check_used(config, name, "policy_loss", users)
            if name == "cpgd_drift_coef":  # 0: without it
                check_least("algorithm", config, 0, name)
            else:
                check_positive("algorithm", config, name)
    if config.clip is not None:
        clipping = {name: ("clip",) * ("clip_low" in keys) for name, keys in users.items()}
        _check_used(config, "clip", "policy_loss", clipping)
        if config.clip_low is not None and config.clip_high is not None:
            raise ValueError(
                f"algorithm.clip={config.clip} has no effect beside clip_low and clip_high; "
                "remove one of the three"
            )
        check_positive("algorithm", config, "clip")
    _check_ranges(config, config.policy_options | config.select_options)


def _check_ranges(config: AlgorithmConfig, options: Mapping[str, float | None]) -> None:
    """Raises ValueError for options of the policy loss that are out of range."""
    if options.get("clip_low", 0) > 1 and not config.loss_kind.clips_log_ratio:
        raise ValueError(
            f"algorithm.clip_low must be at most 1, got {options['clip_low']}: a ratio is "
            "never below 0"
        )
    dual_clip = options.get("dual_clip")
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"algorithm.dual_clip must be above 1, got {dual_clip}")
    for name in ("kl_cov_share", "clip_cov_ratio"):
        if options.get(name, 0) > 1:
            raise ValueError(f"algorithm.{name} must be at most 1, got {options[name]}")
    if options.get("clip_cov_lb", 0) >= options.get("clip_cov_ub", 1):
        raise ValueError(
            f"algorithm.clip_cov_lb={options['clip_cov_lb']} must be below "
            f"algorithm.clip_cov_ub={options['clip_cov_ub']}"
        )


def _check_aggregation(config: AlgorithmConfig) -> None:
    own = config.loss_kind.aggregation
    if config.loss_kind.fixed_aggregation and config.loss_aggregation != own:
        raise ValueError(
            f"algorithm.policy_loss={config.policy_loss!r} is defined with aggregation {own!r}, "
            f"got algorithm.aggregation={config.aggregation!r}; remove that setting"
        )
    budgeted = config.loss_aggregation == "fixed-budget"
    if config.token_budget < 0 or budgeted != (config.token_budget > 0):
        raise ValueError(
            f"algorithm.token_budget={config.token_budget} and algorithm.aggregation="
            f"{config.loss_aggregation!r}: aggregation fixed-budget needs a positive budget, all "
            "others need algorithm.token_budget=0"
        )


def _check_kl(config: AlgorithmConfig) -> None:
    check_least("algorithm", config, 0, "kl_coef", "kl_target")
    check_least("algorithm", config, 1, "kl_horizon")
    for name, default, needs, there in (
        ("kl_estimator", "k3", "a positive kl_coef", config.kl_coef > 0),
        ("kl_in_reward", False, "a positive kl_coef", config.kl_coef > 0),
        ("kl_target", 0.0, "kl_in_reward", config.kl_in_reward),
        ("kl_horizon", 10_000, "a positive kl_target", config.kl_target > 0),
    ):
        if getattr(config, name) != default and not there:
            raise ValueError(
                f"algorithm.{name}={getattr(config, name)!r} has no effect without {needs}; set "
                f"{needs.split()[-1]}, or remove algorithm.{name}"
            )
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
    for key, table in (("correction", CORRECTIONS), ("rejection", REJECTIONS)):
        users = {name: {f"{key}_{side}" for side in kind.bounds} for name, kind in table.items()}
        for side in ("low", "high"):
            value = getattr(config, f"{key}_{side}")
            if value is None:
                continue
            _check_used(config, f"{key}_{side}", key, users)
            if value < 0 or (value == 0 and side == "high"):
                least = "at least 0" if side == "low" else "above 0"
                raise ValueError(f"algorithm.{key}_{side} must be {least}, got {value}")
        bounds = config.bounds(key, table)
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
    if config.correction_batch_normalize and config.correction == "none":
        raise ValueError(
            "algorithm.correction_batch_normalize=True has no effect without a correction; set "
            "algorithm.correction, or remove algorithm.correction_batch_normalize"
        )
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


def _check_used(config: AlgorithmConfig, key: str, by: str, users: Mapping[str, Any]) -> None:
    """Raises ValueError unless the entry chosen by setting `by` takes the option `key`."""
    if key not in users.get(getattr(config, by), ()):
        takers = sorted(name for name, options in users.items() if key in options)
        raise ValueError(
            f"algorithm.{key}={getattr(config, key)!r} has no effect with algorithm.{by}="
            f"{getattr(config, by)!r}; it belongs to {', '.join(takers)}; remove it"
        )


_CHECKS = (
    _check_names,
    _check_advantage,
    _check_policy_loss,
    _check_aggregation,
    _check_kl,
    _check_correction,
)
