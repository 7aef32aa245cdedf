"""Update: the optimizer steps of one batch."""

import jax
import jax.numpy as jnp

from distflow_jax.stages.context import Stage, StageContext
from distflow_jax.training.loss import MicroBatch
from distflow_jax.training.update import make_update


def build_update(context: StageContext) -> Stage:
    """response (Rows), rollout_logp, advantage, old_logp and ref_logp where planned -> metrics.

    Number of updates: mini_batches * epochs, from the config alone.
    """
    update = make_update(
        context.optimizer,
        context.schedule,
        shape=context.shape,
        model=context.model,
        algorithm=context.algorithm,
        forward=context.forward,
    )
    temperature = jnp.float32(context.rollout.temperature)

    def train(state, fields, options):
        batch = MicroBatch(
            rows=fields["response"],
            advantage=fields["advantage"],
            rollout_logp=fields.get("rollout_logp"),
            old_logp=fields.get("old_logp"),
            ref_logp=fields.get("ref_logp"),
        )
        results = []
        for _ in range(context.epochs):
            for index in range(context.mini_batches):
                state, metrics = update(state, batch, jnp.int32(index), temperature)
                results.append(metrics)
        return state, {}, _merge(results)

    return train


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
