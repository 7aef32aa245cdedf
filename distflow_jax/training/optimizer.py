"""The optimizer: AdamW with warm-up, constant or cosine schedule, and global-norm clipping."""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from distflow_jax.parsing.setting_checks import check_least, check_one_of
from distflow_jax.training.compressed_moments import MOMENTS, kept_as

_VECTORS = ("norm", "bias")  # suffixes of parameters that are not matrices


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter 2019, arxiv.org/abs/1711.05101) and its schedule."""

    lr: float = 1e-6  # peak learning rate
    schedule: str = "constant"  # after the warm-up: constant, or cosine to min_lr_ratio * lr
    warmup_steps: int = 0  # optimizer steps over which lr rises linearly, from lr/(n+1)
    min_lr_ratio: float = 0.0  # learning rate at the end of the cosine, as a share of lr
    b1: float = 0.9  # decay of the first moment
    b2: float = 0.95  # decay of the second moment; not 0.999: runs are short, gradients noisy
    eps: float = 1e-8  # added to the root of the second moment
    weight_decay: float = 0.0  # decoupled decay of matrices; norms and biases have none
    clip_norm: float = 1.0  # largest global norm of the gradient; 0: no clipping
    # format of both moments: float32 (8 bytes per parameter), bfloat16 (4) or int8 (2.1, with a
    # scale per block; see compressed_moments.py). Arithmetic is float32
    moments: str = "float32"

    def __post_init__(self):
        zeros = ("lr", "warmup_steps", "min_lr_ratio", "eps", "weight_decay", "clip_norm")
        check_least("optimizer", self, 0, *zeros)
        check_one_of("optimizer.schedule", self.schedule, ("constant", "cosine"))
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name} must be in [0, 1), got {getattr(self, name)}")
        check_one_of("optimizer.moments", self.moments, MOMENTS)


def learning_rate(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Schedule step -> learning rate; a run has `total_steps` optimizer steps."""
    warm = config.warmup_steps

    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(
            config.lr, max(1, total_steps - warm), config.min_lr_ratio
        )
    else:
        after = optax.constant_schedule(config.lr)
    # the warm-up does not start at 0, which would waste the first batch
    rise = optax.linear_schedule(config.lr / (warm + 1), config.lr, max(1, warm))
    schedule = optax.join_schedules([rise, after], [warm]) if warm else after
    # optax mixes the step with floats, which strict promotion rejects for integers
    return lambda step: schedule(jnp.asarray(step, jnp.float32))


def make_optimizer(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    """The chain clip -> AdamW, with weight decay on matrices only, not on norms and biases."""
    clip = [optax.clip_by_global_norm(config.clip_norm)] if config.clip_norm else []
    adam = optax.scale_by_adam(b1=config.b1, b2=config.b2, eps=config.eps)
    # optax.adamw, with a choice of the moments' format
    adamw = optax.chain(
        kept_as(config.moments, adam, whole=_VECTORS),
        optax.add_decayed_weights(
            config.weight_decay, mask=_decayed if config.weight_decay else None
        ),
        optax.scale_by_learning_rate(learning_rate(config, total_steps)),
    )
    chain = optax.chain(*clip, adamw)

    def update(grads, state, params):
        # Adam's bias correction in optax mixes float and int, which strict promotion rejects
        with jax.numpy_dtype_promotion("standard"):
            return chain.update(grads, state, params)

    return optax.GradientTransformation(chain.init, update)


def _decayed(params):
    """True for matrices, by name: a stacked bias is [layers, N, H], so its rank does not tell."""

    def walk(tree, name):
        if isinstance(tree, dict):
            return {key: walk(value, key) for key, value in tree.items()}
        return not name.endswith(_VECTORS)

    return walk(params, "")
