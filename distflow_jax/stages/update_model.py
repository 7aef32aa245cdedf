"""Updates: the optimizer steps that one batch gives a model, whatever is optimised."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from distflow_jax.config.algorithm_config import AlgorithmConfig
from distflow_jax.config.algorithm_tables import A3PO
from distflow_jax.models.decoder_config import reward_head_stddev, scalar_model
from distflow_jax.models.parameters import Network
from distflow_jax.parallel.rules import use_mesh
from distflow_jax.stages.stage_context import TrainContext, require, routed_rows
from distflow_jax.training.expert_balance import balanced
from distflow_jax.training.objective import Batch, Objective
from distflow_jax.training.objectives.kto_objective import KtoBatch, kto_objective
from distflow_jax.training.objectives.pair_objectives import (
    PreferenceBatch,
    RewardModelBatch,
    preference_objective,
    reward_model_objective,
)
from distflow_jax.training.objectives.policy_objective import PolicyBatch, policy_objective
from distflow_jax.training.objectives.sft_objective import SftBatch, sft_objective
from distflow_jax.training.objectives.value_objective import ValueBatch, value_objective
from distflow_jax.training.state import TrainState, divided, joined
from distflow_jax.training.update import (
    HAS_SEQUENCES,
    Accumulators,
    OpenState,
    accumulate,
    accumulator_specs,
    finish,
    make_update,
    with_sums,
)

_NONFINITE = "training/nonfinite"  # metric: optimizer steps that changed nothing


class UpdateStage:
    """A stage: mini_batches * epochs optimizer steps on one batch, a number of the config alone.

    A call makes them of a complete batch. The same optimizer step in partial batches is
    `accumulate` for each partial batch, from empty accumulators, and `finish`, once for each
    mini-batch: fields of a partial batch are [1, R, ...], rows of groups of that mini-batch alone.
    `accumulate` is a Stage itself, whose state is an OpenState.
    """

    def __init__(
        self,
        context: TrainContext,
        objective: Objective,
        batch_of: Callable[[dict[str, Any]], Batch],
        temperature: float | None = None,
    ):
        self._context, self._batch_of = context, batch_of
        self._objective = balanced(objective, context.balance_coef)
        self._temperature = jnp.float32(context.temperature if temperature is None else temperature)
        self._updates = context.mini_batches * context.epochs
        self._update = make_update(
            context.optimizer,
            context.schedule,
            shape=context.shape,
            objective=self._objective,
            num_updates=self._updates,
        )

    def __call__(
        self, state: TrainState, fields: dict[str, Any], options: dict[str, Any]
    ) -> tuple[TrainState, dict[str, Any], dict[str, jax.Array]]:
        """The state after all optimizer steps of a batch, no fields, and metrics."""
        batch, model = self._batch_of(fields), self._objective.model
        # what no update changes is no part of the loop, and comes back as the array it was
        state, frozen = divided(model, state)

        def one(state, index):
            state, metrics = self._update(joined(state, frozen), batch, index, self._temperature)
            return divided(model, state)[0], metrics

        state, metrics = jax.lax.scan(one, state, jnp.arange(self._updates, dtype=jnp.int32))
        return joined(state, frozen), {}, self._named(_merge(metrics))

    @property
    def name(self) -> str:
        """The id of its node."""
        return self._context.node.id

    @property
    def network(self) -> Network:
        """The model that it trains."""
        return self._objective.model

    def sums_of(self, state: TrainState, fields: dict[str, Any]) -> Accumulators:
        """Specs of the accumulators of partial batches with such fields; of both only shapes
        count."""
        given = {"shape": self._context.shape, "objective": self._objective}
        return accumulator_specs(state.params, jax.eval_shape(self._partial_batch, fields), **given)

    def accumulate(
        self, state: OpenState, fields: dict[str, Any], options: dict[str, Any]
    ) -> tuple[OpenState, dict[str, Any], dict[str, jax.Array]]:
        """The state with the rows of a partial batch added, no fields, and no metrics."""
        given = {"shape": self._context.shape, "objective": self._objective}
        with use_mesh(self._context.shape.mesh):
            sums = accumulate(
                state.params, state.sums, self._partial_batch(fields), self._temperature, **given
            )
        return with_sums(state, sums), {}, {}

    def finish(self, state: OpenState) -> tuple[TrainState, dict[str, jax.Array]]:
        """The state after the optimizer step, and its metrics, scalars."""
        context = self._context
        with use_mesh(context.shape.mesh):
            state, metrics = finish(state, context.optimizer, context.schedule, self._objective)
        return state, self._named(metrics)

    def _partial_batch(self, fields: dict[str, Any]) -> Batch:
        return jax.tree.map(lambda x: jnp.squeeze(x, 0), self._batch_of(fields))

    def _named(self, metrics: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The metrics under the names that a run reports."""
        kept = (_NONFINITE, HAS_SEQUENCES)
        # on all devices, so that every process has all of an array's numbers
        whole = NamedSharding(self._context.shape.mesh, PartitionSpec())
        found = {
            f"{self._context.prefix}{k}": jax.lax.with_sharding_constraint(x, whole)
            if x.ndim
            else x
            for k, x in metrics.items()
            if k not in kept
        }
        if HAS_SEQUENCES in metrics:  # for the merging of several updates
            found[HAS_SEQUENCES] = metrics[HAS_SEQUENCES]
        return found | {f"{_NONFINITE}/{self._context.node.id}": metrics[_NONFINITE]}


def build_policy_update(context: TrainContext) -> UpdateStage:
    """rows, rollout_logp, advantage; old_logp, ref_logp, prox_alpha, age and routed_experts
    where planned -> metrics."""
    algorithm = context.algorithm
    objective = policy_objective(
        context.model,
        algorithm,
        context.forward,
        max_response=context.shape.max_response,
        max_staleness=context.max_staleness,
        num_groups=context.num_groups,
    )

    def batch_of(fields: dict[str, Any]) -> PolicyBatch:
        require(fields, update_reads(algorithm), _settings(algorithm))
        return PolicyBatch(
            rows=routed_rows(fields),
            advantage=fields["advantage"],
            rollout_logp=fields.get("rollout_logp"),
            old_logp=fields.get("old_logp"),
            ref_logp=fields.get("ref_logp"),
            prox_alpha=fields.get("prox_alpha"),
            age=fields.get("age"),
        )

    return UpdateStage(context, objective, batch_of)


def build_preference_update(context: TrainContext) -> UpdateStage:
    """rows of pairs, ref_logp and routed_experts where planned -> metrics of DPO, IPO or ORPO."""
    preference = context.preference
    objective = preference_objective(context.model, preference, context.forward)

    def batch_of(fields: dict[str, Any]) -> PreferenceBatch:
        reference = fields["ref_logp"] if preference.reads_reference else None
        return PreferenceBatch(routed_rows(fields), reference)

    return UpdateStage(context, objective, batch_of)


def build_kto_update(context: TrainContext) -> UpdateStage:
    """rows of labelled responses, ref_logp, label -> metrics of KTO."""
    objective = kto_objective(context.model, context.preference, context.forward)

    def batch_of(fields: dict[str, Any]) -> KtoBatch:
        return KtoBatch(routed_rows(fields), fields["ref_logp"], fields["label"])

    return UpdateStage(context, objective, batch_of)


def build_sft_update(context: TrainContext) -> UpdateStage:
    """rows -> metrics of supervised fine-tuning on the response tokens."""
    objective = sft_objective(context.model, context.forward)
    # of softmax(logits): there is no sampler whose temperature would count
    return UpdateStage(context, objective, lambda fields: SftBatch(fields["rows"]), 1.0)


def build_value_update(context: TrainContext) -> UpdateStage:
    """rows, value, returns -> metrics of the critic."""
    objective = value_objective(
        scalar_model(context.model),
        context.value,
        context.forward,
        max_response=context.shape.max_response,
    )
    return UpdateStage(
        context,
        objective,
        lambda fields: ValueBatch(fields["rows"], fields["returns"], fields["value"]),
    )


def build_reward_model_update(context: TrainContext) -> UpdateStage:
    """rows of pairs -> metrics of the reward model."""
    model = scalar_model(context.model, head_stddev=reward_head_stddev(context.model))
    objective = reward_model_objective(model, context.reward_model, context.forward)
    return UpdateStage(context, objective, lambda fields: RewardModelBatch(fields["rows"]))


def merged_updates(metrics: Sequence[dict[str, jax.Array]]) -> dict[str, jax.Array]:
    """The metrics of a batch, scalars, from those that `UpdateStage.finish` gave of its updates."""
    return _merge(jax.tree.map(lambda *x: jnp.stack(x), *metrics))


def _settings(algorithm: AlgorithmConfig) -> str:
    """The keys that decide which fields an update reads, for an error."""
    keys = ("policy_loss", "kl_coef", "correction", "rejection", "proximal")
    return " with ".join(f"algorithm.{key}={getattr(algorithm, key)!r}" for key in keys)


def _merge(metrics: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Mean over the updates [n, ...] that had sequences; maxima stay maxima, counts add up."""
    metrics = dict(metrics)
    has = metrics.pop(HAS_SEQUENCES)
    updates, merged = jnp.maximum(has.sum(dtype=jnp.float32), 1.0), {}
    for name, values in metrics.items():
        if name.endswith("_max"):
            merged[name] = values.max()
        elif name.startswith(_NONFINITE):
            merged[name] = values.sum()
        else:
            counts = has.reshape(-1, *[1] * (values.ndim - 1))
            merged[name] = jnp.where(counts, values, 0.0).sum(0) / updates
    return merged


def update_reads(algorithm: AlgorithmConfig) -> tuple[str, ...]:
    """Fields that the actor's update requires, by their names inside the stage.

    With several optimizer steps per batch the update requires old_logp, too.
    """
    off_policy = {algorithm.correction, algorithm.rejection} != {"none"}
    # what is taken over a whole optimizer step is known before its first forward pass
    ahead = algorithm.selects or algorithm.correction_batch_normalize
    wanted = {
        "ref_logp": algorithm.kl_in_loss,
        "rollout_logp": off_policy or algorithm.proximal != "recomputed",
        "old_logp": ahead and algorithm.proximal == "recomputed",
        "prox_alpha": algorithm.proximal in A3PO,
    }
    return ("rows", "advantage", *(name for name, needed in wanted.items() if needed))
