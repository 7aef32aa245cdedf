"""Update: the optimizer steps of one batch."""

import jax
import jax.numpy as jnp

from distflow_jax.algorithms.config import AlgorithmConfig
from distflow_jax.stages.context import Stage, StageContext, require
from distflow_jax.training.objectives.policy import PolicyBatch, policy_objective
from distflow_jax.training.update import make_update


def build_update(context: StageContext) -> Stage:
    """response (Rows), rollout_logp, advantage, old_logp, ref_logp and prox_alpha where planned ->
    metrics.

    Number of updates: mini_batches * epochs, from the config alone.
    """
    algorithm = context.algorithm
    objective = policy_objective(
        context.model, algorithm, context.forward, max_response=context.shape.max_response
    )
    update = make_update(
        context.optimizer, context.schedule, shape=context.shape, objective=objective
    )
    temperature = jnp.float32(context.rollout.temperature)

    def train(state, fields, options):
        require(fields, algorithm.update_reads, _settings(algorithm))
        batch = PolicyBatch(
            rows=fields["response"],
            advantage=fields["advantage"],
            rollout_logp=fields.get("rollout_logp"),
            old_logp=fields.get("old_logp"),
            ref_logp=fields.get("ref_logp"),
            prox_alpha=fields.get("prox_alpha"),
        )
        results = []
        for _ in range(context.epochs):
            for index in range(context.mini_batches):
                state, metrics = update(state, batch, jnp.int32(index), temperature)
                results.append(metrics)
        return state, {}, _merge(results)

    return train


def _settings(algorithm: AlgorithmConfig) -> str:
    """The keys that decide which fields an update reads, for an error."""
    keys = ("policy_loss", "kl_coef", "correction", "rejection", "proximal")
    return " with ".join(f"algorithm.{key}={getattr(algorithm, key)!r}" for key in keys)


def _merge(results: list[dict[str, jax.Array]]) -> dict[str, jax.Array]:
    """Mean over the updates; maxima stay maxima, counts add up."""
    merged = {}
    for name in results[0]:
        values = jnp.stack([r[name] for r in results])
        if name.endswith("_max"):
            merged[name] = values.max()
        elif name == "training/nonfinite":
            merged[name] = values.sum()
        else:
            merged[name] = values.mean()
    return merged
