"""One optimizer step over packed rows: accumulate gradients, clip, apply, guard.

The same for every objective (training/objectives). K mini-batches, R rows, L tokens per row.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from distflow_jax.models import lora
from distflow_jax.models.parameters import param_shardings
from distflow_jax.parallel.rules import data_ranks, use_mesh
from distflow_jax.programs.bounded_loops import bounded_loop
from distflow_jax.training import microbatch
from distflow_jax.training.objective import Batch, Metrics, Objective, Preview
from distflow_jax.training.state import TrainState, divided, joined, state_shardings

# bool beside the metrics of an optimizer step: whether it had sequences, so that these count
HAS_SEQUENCES = "training/has_sequences"
# largest weight of a token, of objectives whose corrections and rejections weigh them
KEPT_WEIGHT = "rollout_corr/kept_weight_max"


@dataclasses.dataclass(frozen=True)
class UpdateShape:
    """Static sizes of a training program."""

    mesh: jax.sharding.Mesh
    micro_rows: int  # rows of a micro-batch per data rank; with a pipeline, rows in it at once
    max_response: int  # longest response in tokens

    @property
    def ranks(self) -> int:
        """Data ranks: groups of devices that hold different rows."""
        return data_ranks(self.mesh.shape)


def accumulate_gradients(
    params: Any,
    batch: Batch,
    temperature: jax.Array,
    *,
    shape: UpdateShape,
    objective: Objective,
    first: jax.Array | None = None,
    updates: int = 1,
) -> tuple[Any, dict[str, jax.Array]]:
    """Gradient of a step's loss with respect to the trained parameters, and the step's metrics.

    `params` are all parameters of the model; fields of `batch` are [R, L] and [R, S];
    `temperature` is a scalar. The loop body computes one micro-batch's gradient. Contributions are
    divided by the step's denominators before they are summed, so the micro-batch size changes
    rounding only. `first`: whether the step is the first of the batch's `updates`, a bool scalar;
    None: it is.
    """
    if objective.preview is not None:
        batch = _previewed(params, batch, temperature, shape, objective.preview, (first, updates))
    batch, denominators = objective.whole(batch)
    shardings, _ = lora.divide(objective.model, param_shardings(objective.model, shape.mesh))
    trained, frozen = lora.divide(objective.model, params)

    def contribution(trained, micro_batch):
        params = lora.join(trained, frozen)
        loss, metrics = objective.evaluate(params, micro_batch, denominators, temperature)
        return loss, with_loss(objective, loss, metrics)

    gradient = jax.grad(contribution, has_aux=True)
    micro_batches = microbatch.split(batch, shape.ranks, shape.micro_rows)
    _, abstract = jax.eval_shape(gradient, trained, microbatch.take(micro_batches, 0))
    start = jax.tree.map(jnp.zeros_like, trained), no_metrics(abstract)
    grads, metrics = added_up(
        functools.partial(gradient, trained), micro_batches, start, shardings=shardings
    )
    return grads, objective.finish({**metrics["sum"], **metrics["max"]})


def with_loss(objective: Objective, loss: Any, metrics: Metrics) -> Metrics:
    """The metrics of a micro-batch with its share of the loss, a scalar, among them."""
    sums = metrics["sum"] | {f"{objective.name}/loss": jax.lax.stop_gradient(loss)}
    return {"sum": sums, "max": metrics["max"]}


def no_metrics(abstract: Metrics) -> Metrics:
    """Metrics of no rows, shaped as `abstract`."""
    return {
        "sum": jax.tree.map(jnp.zeros_like, abstract["sum"]),
        "max": jax.tree.map(lambda x: jnp.full(x.shape, -jnp.inf, x.dtype), abstract["max"]),
    }


def added_up(
    gradient: Callable[[Any], tuple[Any, Metrics]],
    micro_batches: Any,
    start: tuple[Any, Metrics],
    *,
    shardings: Any,
) -> tuple[Any, Metrics]:
    """`start`, sums of gradients and metrics, with those of all micro-batches that have a token.

    `gradient(micro_batch)` gives those of one. The sums of gradients lie as `shardings` says.
    """

    def body(index, carry):
        total, metrics = carry
        g, new = gradient(microbatch.take(micro_batches, index))
        # pinned: a replicated gradient would take the full model's memory on every device
        total = jax.lax.with_sharding_constraint(jax.tree.map(jnp.add, total, g), shardings)
        sums = jax.tree.map(jnp.add, metrics["sum"], new["sum"])
        maxima = jax.tree.map(jnp.maximum, metrics["max"], new["max"])
        return total, {"sum": sums, "max": maxima}

    segment = micro_batches.rows.segment
    trips, most = microbatch.num_filled(segment), segment.shape[1]
    return bounded_loop(trips, body, start, most=most)


def _previewed(
    params: Any,
    batch: Batch,
    temperature: jax.Array,
    shape: UpdateShape,
    preview: Preview,
    place: tuple[jax.Array | None, int],
) -> Batch:
    """The batch with the log-probs of the policy as it stands.

    `place` is (whether the update is the first of its batch, number of updates of the batch). The
    first update takes the log-probs that are known, and makes no forward pass.
    """
    first, updates = place
    known = preview.known(batch)
    if known is not None and first is None:
        return preview.place(batch, known)
    micro_batches = microbatch.split(batch, shape.ranks, shape.micro_rows)
    segment = micro_batches.rows.segment
    trips, most = microbatch.num_filled(segment), segment.shape[1]
    if known is None:
        start, idle = jnp.zeros(segment.shape, jnp.float32), None
    else:
        start, idle = microbatch.split(known, shape.ranks, shape.micro_rows), updates
        trips = jnp.where(first, 0, trips)

    def body(index, out):
        logp = preview.predict(params, microbatch.take(micro_batches, index), temperature)
        return microbatch.write(out, logp, index)

    out = bounded_loop(trips, body, start, most=most, idle_once_in=idle)
    return preview.place(batch, jax.lax.stop_gradient(microbatch.join(out)))


def make_update(
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    *,
    shape: UpdateShape,
    objective: Objective,
    num_updates: int | None = None,
):
    """Compiled (state, batch, index, temperature) -> (state, metrics).

    `batch` has the objective's fields [K, R, ...]; `index` int32 is the number of the update among
    the batch's `num_updates` (None: K), whose mini-batch is `index` modulo K. The state is donated.
    A step with a non-finite loss or gradient norm leaves the state unchanged and reports
    `training/nonfinite` = 1. A step without sequences, or whose tokens were all rejected, leaves it
    unchanged, too. Metrics are the objective's, and its {loss, grad_norm, lr}.
    """
    layout = state_shardings(objective.model, optimizer, shape.mesh)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(layout, None))
    def update(state, batch, index, temperature):
        with use_mesh(shape.mesh):
            count = batch.rows.segment.shape[0]
            number = count if num_updates is None else num_updates
            place = index % count if number > count else index
            mini = jax.tree.map(
                lambda x: jax.lax.dynamic_index_in_dim(x, place, axis=0, keepdims=False), batch
            )
            grads, metrics = accumulate_gradients(
                state.params,
                mini,
                temperature,
                shape=shape,
                objective=objective,
                first=None if number == 1 or objective.preview is None else index == 0,
                updates=number,
            )
            return applied(
                state,
                grads,
                metrics,
                mini.rows.valid,
                optimizer=optimizer,
                schedule=schedule,
                objective=objective,
            )

    return update


def applied(
    state: TrainState,
    grads: Any,
    metrics: dict[str, jax.Array],
    valid: jax.Array,
    *,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    objective: Objective,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """The state after an optimizer step by this gradient, and the step's metrics.

    `valid`, bool of any shape: which sequences there are. Without one, where all tokens were
    rejected, and with a gradient or loss that is not finite, the state stays what it was.
    """
    name = objective.name
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(metrics[f"{name}/loss"])
    old, frozen = divided(objective.model, state)
    updates, opt_state = optimizer.update(grads, old.opt_state, old.params)
    params = optax.apply_updates(old.params, updates)
    new = TrainState(params, opt_state, old.count + 1)
    metrics |= {
        f"{name}/grad_norm": norm,
        f"{name}/lr": jnp.asarray(schedule(state.count), jnp.float32),
        "training/nonfinite": (~finite).astype(jnp.float32),
        HAS_SEQUENCES: valid.any(),
    }
    # without sequences, or tokens that count, decaying moments must not move the parameters either
    useful = finite & metrics[HAS_SEQUENCES]
    if KEPT_WEIGHT in metrics:
        useful &= metrics[KEPT_WEIGHT] > 0
    new = jax.tree.map(lambda a, b: jnp.where(useful, a, b), new, old)
    return joined(new, frozen), metrics
