"""The optimizer: AdamW with warm-up, constant or cosine schedule, and global-norm clipping."""

import jax
import jax.numpy as jnp
import optax

from distflow_jax.config.training_config import OptimizerConfig
from distflow_jax.training.compressed_moments import kept_as

_VECTORS = ("norm", "bias")  # suffixes of parameters that are not matrices


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
