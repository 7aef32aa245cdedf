"""Updates: the optimizer steps that one batch gives a model, whatever is optimised."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from distflow_jax.algorithms.algorithm_config import AlgorithmConfig
from distflow_jax.dag.plan_walker import Stage
from distflow_jax.models.decoder_config import reward_head_stddev, scalar_model
from distflow_jax.stages.stage_context import TrainContext, require, routed_rows
from distflow_jax.training.expert_balance import balanced
from distflow_jax.training.objective import Batch, Objective
from distflow_jax.training.objectives.policy_objective import PolicyBatch, policy_objective
from distflow_jax.training.objectives.preference_objective import (
    PreferenceBatch,
    preference_objective,
)
from distflow_jax.training.objectives.reward_model_objective import (
    RewardModelBatch,
    reward_model_objective,
)
from distflow_jax.training.objectives.sft_objective import SftBatch, sft_objective
from distflow_jax.training.objectives.value_objective import ValueBatch, value_objective
from distflow_jax.training.state import divided, joined
from distflow_jax.training.update import make_update


def build_policy_update(context: TrainContext) -> Stage:
    """rows, rollout_logp, advantage; old_logp, ref_logp, prox_alpha, age and routed_experts
    where planned -> metrics."""
    algorithm = context.algorithm
    objective = policy_objective(
        context.model,
        algorithm,
        context.forward,
        max_response=context.shape.max_response,
        max_lag=context.max_lag,
    )

    def batch_of(fields: dict[str, Any]) -> PolicyBatch:
        require(fields, algorithm.update_reads, _settings(algorithm))
        return PolicyBatch(
            rows=routed_rows(fields),
            advantage=fields["advantage"],
            rollout_logp=fields.get("rollout_logp"),
            old_logp=fields.get("old_logp"),
            ref_logp=fields.get("ref_logp"),
            prox_alpha=fields.get("prox_alpha"),
            age=fields.get("age"),
        )

    return _updates(context, objective, batch_of)


def build_preference_update(context: TrainContext) -> Stage:
    """rows of pairs, ref_logp, routed_experts where planned -> metrics of DPO or IPO."""
    objective = preference_objective(context.model, context.preference, context.forward)
    return _updates(
        context, objective, lambda fields: PreferenceBatch(routed_rows(fields), fields["ref_logp"])
    )


def build_sft_update(context: TrainContext) -> Stage:
    """rows -> metrics of supervised fine-tuning on the response tokens."""
    objective = sft_objective(context.model, context.forward)
    # of softmax(logits): there is no sampler whose temperature would count
    return _updates(context, objective, lambda fields: SftBatch(fields["rows"]), 1.0)


def build_value_update(context: TrainContext) -> Stage:
    """rows, value, returns -> metrics of the critic."""
    objective = value_objective(
        scalar_model(context.model),
        context.value,
        context.forward,
        max_response=context.shape.max_response,
    )
    return _updates(
        context,
        objective,
        lambda fields: ValueBatch(fields["rows"], fields["returns"], fields["value"]),
    )


def build_reward_model_update(context: TrainContext) -> Stage:
    """rows of pairs -> metrics of the reward model."""
    model = scalar_model(context.model, head_stddev=reward_head_stddev(context.model))
    objective = reward_model_objective(model, context.reward_model, context.forward)
    return _updates(context, objective, lambda fields: RewardModelBatch(fields["rows"]))


def _updates(
    context: TrainContext,
    objective: Objective,
    batch_of: Callable[[dict[str, Any]], Batch],
    temperature: float | None = None,
) -> Stage:
    """mini_batches * epochs optimizer steps on one batch: a number of the config alone."""
    updates = context.mini_batches * context.epochs
    update = make_update(
        context.optimizer,
        context.schedule,
        shape=context.shape,
        objective=balanced(objective, context.balance_coef),
        num_updates=updates,
    )
    of_logits = jnp.float32(context.temperature if temperature is None else temperature)

    def train(state, fields, options):
        batch = batch_of(fields)
        # what no update changes is no part of the loop, and comes back as the array it was
        state, frozen = divided(objective.model, state)

        def one(state, index):
            state, metrics = update(joined(state, frozen), batch, index, of_logits)
            return divided(objective.model, state)[0], metrics

        state, metrics = jax.lax.scan(one, state, jnp.arange(updates, dtype=jnp.int32))
        merged = _merge(metrics)
        nonfinite = merged.pop("training/nonfinite")
        metrics = {f"{context.prefix}{name}": value for name, value in merged.items()}
        state = joined(state, frozen)
        return state, {}, metrics | {f"training/nonfinite/{context.node.id}": nonfinite}

    return train


def _settings(algorithm: AlgorithmConfig) -> str:
    """The keys that decide which fields an update reads, for an error."""
    keys = ("policy_loss", "kl_coef", "correction", "rejection", "proximal")
    return " with ".join(f"algorithm.{key}={getattr(algorithm, key)!r}" for key in keys)


def _merge(metrics: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Mean over the updates [n]; maxima stay maxima, counts add up."""
    merged = {}
    for name, values in metrics.items():
        if name.endswith("_max"):
            merged[name] = values.max()
        elif name == "training/nonfinite":
            merged[name] = values.sum()
        else:
            merged[name] = values.mean()
    return merged
