"""Algorithm settings: names from the tables of this folder, and their options.

An option that the chosen advantage, loss or correction does not take is an error. None stands for
the default of the chosen entry, which its table holds.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from distflow_jax.algorithms.advantages import ADVANTAGES, CPGD_WEIGHTS
from distflow_jax.algorithms.aggregate import AGGREGATIONS
from distflow_jax.algorithms.correction import CORRECTIONS, PROXIMAL, REJECTIONS, CorrectionKind
from distflow_jax.algorithms.kl import KL_ESTIMATORS, LOSS_ESTIMATORS
from distflow_jax.algorithms.policy_losses import POLICY_LOSSES, PolicyLossKind


@dataclasses.dataclass(frozen=True)
class AlgorithmConfig:
    """Choice of advantage, policy loss, KL and correction, in any combination."""

    # estimator of the advantages: grpo, dr_grpo, rloo, gae, reinforce_plus_plus,
    # reinforce_plus_plus_baseline, remax, gpg, opo or cpgd
    advantage: str = "grpo"
    gamma: float = 1.0  # discount per token, of gae and reinforce_plus_plus
    lam: float = 1.0  # lambda of gae: 1 is the full return, 0 the one-step estimate
    cpgd_weight: str = "std"  # weight of groups in cpgd: std, equal or clip_filter

    # ppo_clip, gspo, cispo, sapo, gmpo, gpg, cpgd, kl_cov, dro or decoupled
    policy_loss: str = "ppo_clip"
    clip: float | None = None  # clip range on both sides; None: the loss's own, mostly 0.2
    clip_low: float | None = None  # the ratio is clipped below 1 - clip_low; None: clip
    # the ratio is clipped above 1 + clip_high; 0.28 is DAPO's clip-higher; None: clip
    clip_high: float | None = None
    dual_clip: float | None = None  # bound of the ratio for negative advantages; None: 3
    sapo_tau_positive: float | None = None  # steepness of sapo's gate, advantage above 0; None: 1
    # steepness of sapo's gate for all other tokens; None: 1.05
    sapo_tau_negative: float | None = None
    cpgd_drift_coef: float | None = None  # weight of the drift term of the loss cpgd; None: 0.001
    kl_cov_share: float | None = None  # share of tokens that kl_cov penalises; None: 0.0002
    kl_cov_coef: float | None = None  # weight of kl_cov's penalty |logp - old|; None: 1
    dro_beta: float | None = None  # weight of dro's square; None: 0.05
    # token-mean, token-sum, seq-mean-token-sum, seq-mean-token-mean, seq-mean-token-sum-norm or
    # fixed-budget; "": the loss's own, mostly token-mean
    aggregation: str = ""
    token_budget: int = 0  # response tokens per optimizer step, with aggregation fixed-budget

    kl_coef: float = 0.0  # weight of KL(policy || reference); 0: no reference model
    kl_estimator: str = "k3"  # in the loss k2, k3 or k3+; with kl_in_reward k1, abs, k2 or k3
    kl_in_reward: bool = False  # subtract the KL from the rewards instead of adding it to the loss
    kl_target: float = 0.0  # KL per token, nats, to adapt kl_coef to (kl_in_reward); 0: fixed coef
    kl_horizon: int = 10_000  # sequences over which kl_coef adapts to kl_target
    entropy_coef: float = 0.0  # weight of the entropy bonus

    # weight for the gap between sampler and trainer: none, token_tis, token_mis, sequence_tis or
    # sequence_mis
    correction: str = "none"
    correction_low: float | None = None  # least ratio of token_mis; None: 0.5
    correction_high: float | None = None  # greatest ratio of a correction; None: 2, for token_mis 5
    # rule that leaves out sequences for the gap between sampler and trainer: none, geometric, k2
    # or k3
    rejection: str = "none"
    rejection_low: float | None = None  # least mean ratio of geometric; None: 0.99
    # greatest mean ratio of geometric, greatest KL of k2 and k3; None: 1.01, for k2 and k3 0.01
    # nats
    rejection_high: float | None = None
    proximal: str = "recomputed"  # source of the old log-probs: recomputed, rollout or a3po

    def __post_init__(self):
        self._check_names()
        self._check_advantage()
        self._check_policy_loss()
        self._check_aggregation()
        self._check_kl()
        self._check_correction()

    # -- for the stages ----------------------------------------------------------------------------

    @property
    def advantage_options(self) -> dict[str, Any]:
        """Keyword arguments of the advantage."""
        return {name: getattr(self, name) for name in ADVANTAGES[self.advantage].options}

    @property
    def policy_options(self) -> dict[str, float]:
        """Keyword arguments of the policy loss."""
        return self._filled(self._loss.options)

    @property
    def select_options(self) -> dict[str, float]:
        """Keyword arguments of the policy loss's token selection."""
        return self._filled(self._loss.select_options)

    @property
    def loss_aggregation(self) -> str:
        """The aggregation in effect: the setting, or the loss's own."""
        return self.aggregation or self._loss.aggregation

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
        wanted = {
            "ref_logp": self.kl_in_loss,
            "rollout_logp": off_policy or self.proximal != "recomputed",
            "old_logp": self._loss.select is not None and self.proximal == "recomputed",
            "prox_alpha": self.proximal == "a3po",
        }
        return ("rows", "advantage", *(name for name, needed in wanted.items() if needed))

    @property
    def _loss(self) -> PolicyLossKind:
        return POLICY_LOSSES[self.policy_loss]

    def _filled(self, defaults: Mapping[str, float]) -> dict[str, float]:
        filled = {}
        for name, default in defaults.items():
            value = getattr(self, name)
            if value is None and name in ("clip_low", "clip_high"):
                value = self.clip
            filled[name] = default if value is None else value
        return filled

    def _bounds(self, key: str, table: Mapping[str, CorrectionKind]) -> dict[str, float]:
        chosen = getattr(self, key)
        defaults = table[chosen].bounds if chosen != "none" else {}
        settings = {side: getattr(self, f"{key}_{side}") for side in defaults}
        return {
            side: defaults[side] if value is None else value for side, value in settings.items()
        }

    # -- checks ------------------------------------------------------------------------------------

    def _check_names(self) -> None:
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
            if getattr(self, field) not in table:
                raise ValueError(
                    f"algorithm.{field}={getattr(self, field)!r} is unknown; "
                    f"choose one of {sorted(table)}"
                )

    def _check_advantage(self) -> None:
        for name in ("gamma", "lam"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"algorithm.{name} must be from 0 to 1, got {getattr(self, name)}")
        users = {name: kind.options for name, kind in ADVANTAGES.items()}
        for name, default in (("gamma", 1.0), ("lam", 1.0), ("cpgd_weight", "std")):
            if getattr(self, name) != default:
                self._check_used(name, "advantage", users)

    def _check_policy_loss(self) -> None:
        users = {
            name: {*kind.options, *kind.select_options} for name, kind in POLICY_LOSSES.items()
        }
        for name in sorted(set().union(*users.values())):
            if getattr(self, name) is not None:
                self._check_used(name, "policy_loss", users)
                if getattr(self, name) <= 0:
                    raise ValueError(
                        f"algorithm.{name} must be positive, got {getattr(self, name)}"
                    )
        if self.clip is not None:
            clipping = {name: ("clip",) * ("clip_low" in keys) for name, keys in users.items()}
            self._check_used("clip", "policy_loss", clipping)
            if self.clip_low is not None and self.clip_high is not None:
                raise ValueError(
                    f"algorithm.clip={self.clip} has no effect beside clip_low and clip_high; "
                    "remove one of the three"
                )
            if self.clip <= 0:
                raise ValueError(f"algorithm.clip must be positive, got {self.clip}")
        options = self.policy_options | self.select_options
        if options.get("clip_low", 0) > 1 and not self._loss.clips_log_ratio:
            raise ValueError(
                f"algorithm.clip_low must be at most 1, got {options['clip_low']}: a ratio is "
                "never below 0"
            )
        if options.get("dual_clip", 2) <= 1:
            raise ValueError(f"algorithm.dual_clip must be above 1, got {self.dual_clip}")
        if options.get("kl_cov_share", 0) > 1:
            raise ValueError(f"algorithm.kl_cov_share must be at most 1, got {self.kl_cov_share}")

    def _check_aggregation(self) -> None:
        own = self._loss.aggregation
        if self._loss.fixed_aggregation and self.loss_aggregation != own:
            raise ValueError(
                f"algorithm.policy_loss={self.policy_loss!r} is defined with aggregation {own!r}, "
                f"got algorithm.aggregation={self.aggregation!r}; remove that setting"
            )
        if (self.loss_aggregation == "fixed-budget") != (self.token_budget > 0):
            raise ValueError(
                f"algorithm.token_budget={self.token_budget} and algorithm.aggregation="
                f"{self.loss_aggregation!r}: aggregation fixed-budget needs a positive budget, all "
                "others need algorithm.token_budget=0"
            )

    def _check_kl(self) -> None:
        for name in ("kl_coef", "kl_target"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"algorithm.{name} must not be negative, got {getattr(self, name)}"
                )
        if self.kl_horizon < 1:
            raise ValueError(f"algorithm.kl_horizon must be at least 1, got {self.kl_horizon}")
        for name, default, needs, there in (
            ("kl_estimator", "k3", "a positive kl_coef", self.kl_coef > 0),
            ("kl_in_reward", False, "a positive kl_coef", self.kl_coef > 0),
            ("kl_target", 0.0, "kl_in_reward", self.kl_in_reward),
            ("kl_horizon", 10_000, "a positive kl_target", self.kl_target > 0),
        ):
            if getattr(self, name) != default and not there:
                raise ValueError(
                    f"algorithm.{name}={getattr(self, name)!r} has no effect without {needs}; set "
                    f"{needs.split()[-1]}, or remove algorithm.{name}"
                )
        if self.kl_in_loss and self.kl_estimator not in LOSS_ESTIMATORS:
            reason = {
                "k1": "has zero expected gradient as a loss",
                "abs": "does not have the gradient of a KL as a loss",
            }[self.kl_estimator]
            raise ValueError(
                f"algorithm.kl_estimator={self.kl_estimator!r} {reason}; use k2, k3, k3+, or "
                "algorithm.kl_in_reward"
            )

    def _check_correction(self) -> None:
        for key, table in (("correction", CORRECTIONS), ("rejection", REJECTIONS)):
            users = {
                name: {f"{key}_{side}" for side in kind.bounds} for name, kind in table.items()
            }
            for side in ("low", "high"):
                value = getattr(self, f"{key}_{side}")
                if value is None:
                    continue
                self._check_used(f"{key}_{side}", key, users)
                if value <= 0:
                    raise ValueError(f"algorithm.{key}_{side} must be positive, got {value}")
            bounds = self._bounds(key, table)
            if bounds.get("low", 0) >= bounds.get("high", 1):
                raise ValueError(
                    f"algorithm.{key}_low={bounds['low']} must be below "
                    f"algorithm.{key}_high={bounds['high']}"
                )
        corrected = (self.correction, self.rejection) != ("none", "none")
        if self._loss.corrected and not corrected:
            raise ValueError(
                f"algorithm.policy_loss={self.policy_loss!r} needs algorithm.correction or "
                "algorithm.rejection: without a weight it is ppo_clip"
            )
        if corrected and self.proximal == "rollout":
            raise ValueError(
                "algorithm.proximal='rollout' makes every correction weight 1; remove "
                "algorithm.correction and algorithm.rejection, or use proximal='recomputed'"
            )

    def _check_used(self, key: str, by: str, users: Mapping[str, Any]) -> None:
        """Raises ValueError unless the entry chosen by setting `by` takes the option `key`."""
        if key not in users.get(getattr(self, by), ()):
            takers = sorted(name for name, options in users.items() if key in options)
            raise ValueError(
                f"algorithm.{key}={getattr(self, key)!r} has no effect with algorithm.{by}="
                f"{getattr(self, by)!r}; it belongs to {', '.join(takers)}; remove it"
            )
