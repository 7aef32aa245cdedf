"""One optimizer step over packed rows: add up the gradients of its parts, clip, apply, guard.

The same for every objective (training/objectives). Where one part is the whole step, the step's
counts are known before its first gradient, and contributions are divided by the denominators before
they are added up. Of a step in several parts they are known after the last one: the accumulators
hold numerators, one gradient for each denominator of the loss, and `finish` divides. Results differ
in rounding only. A part without rows changes nothing; one that is not finite spoils its step, which
then leaves the state unchanged.

K mini-batches, R rows, L tokens per row.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from distflow_jax.layout import KEPT_WEIGHT
from distflow_jax.models import lora
from distflow_jax.models.parameters import param_shardings
from distflow_jax.parallel.rules import data_ranks, use_mesh
from distflow_jax.programs.bounded_loops import bounded_loop
from distflow_jax.training import microbatch
from distflow_jax.training.objective import Batch, Metrics, Objective, Preview
from distflow_jax.training.quotient import Quotient, divisors_of, named
from distflow_jax.training.state import TrainState, divided, joined, state_shardings

# bool beside the metrics of an optimizer step: whether it had sequences, so that these count
HAS_SEQUENCES = "training/has_sequences"


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Accumulators:
    """Sums of an optimizer step, of its parts so far."""

    gradients: dict[str, Any]  # numerators by denominator, each shaped as the trained parameters
    metrics: dict[str, Any]  # {"sum": {name: Quotient}, "max": {name: array}}
    counts: Any  # the objective's, of all rows so far
    valid: Any  # bool scalar: whether any row had a sequence


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class OpenState(TrainState):
    """A training state in the middle of an optimizer step; checkpoints never hold one."""

    sums: Accumulators


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


def accumulator_specs(
    params: Any, batch: Batch, *, shape: UpdateShape, objective: Objective
) -> Accumulators:
    """Specs (jax.ShapeDtypeStruct with shardings) of the accumulators of parts like `batch`, rows
    [R, ...]; gradients lie as the parameters, all else on every device.

    Raises ValueError for an objective that has to see the whole step before its first gradient.
    """
    if objective.waits:
        raise ValueError(
            f"{objective.waits}, which partial batches do not have; use "
            "stream.partial_batches='off'"
        )

    def one(params, batch):
        batch, counts = objective.prepare(batch)
        micro_batches = microbatch.split(batch, shape.ranks, shape.micro_rows)
        gradient = gradient_of(params, _later(objective, counts), jnp.float32(1.0), objective)
        found = gradient(microbatch.take(micro_batches, 0))
        return Accumulators(*found, counts, batch.rows.valid.any())

    with use_mesh(shape.mesh):
        sums = jax.eval_shape(one, params, batch)
    whole = NamedSharding(shape.mesh, PartitionSpec())
    layouts = dataclasses.replace(
        jax.tree.map(lambda _: whole, sums),
        gradients=dict.fromkeys(sums.gradients, _trained_shardings(objective, shape)),
    )
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), sums, layouts
    )


def empty(specs: Accumulators) -> Accumulators:
    """Accumulators of no rows, arrays shaped as the specs."""
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), specs)
    return dataclasses.replace(zeros, metrics=no_metrics(specs.metrics))


def accumulate(
    params: Any,
    sums: Accumulators,
    batch: Batch,
    temperature: jax.Array,
    *,
    shape: UpdateShape,
    objective: Objective,
) -> Accumulators:
    """The accumulators with the rows of a part added.

    `params` are all parameters of the model, the same for all parts of a step; fields of `batch`
    are [R, L] and [R, S], R a multiple of the micro-batches'; `temperature` is a scalar.
    """
    batch, counts = objective.prepare(batch, sums.counts)
    gradient = gradient_of(params, _later(objective, counts), temperature, objective)
    return _added(sums, gradient, batch, counts, shape, objective)


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
    """Gradient of the loss with respect to the trained parameters, and the metrics, of an optimizer
    step that is one part; as `divide` returns them.

    `batch`: all rows of the step, [R, L] and [R, S]; `first`: whether the step is the first of the
    `updates` that its batch gets, a bool scalar; None: it is. The micro-batch size changes rounding
    only.
    """
    if objective.preview is not None:
        batch = _previewed(params, batch, temperature, shape, objective.preview, (first, updates))
    batch, counts = objective.prepare(batch)
    gradient = gradient_of(params, objective.denominators(counts), temperature, objective)
    micro_batches = microbatch.split(batch, shape.ranks, shape.micro_rows)
    one = jax.eval_shape(gradient, microbatch.take(micro_batches, 0))
    sums = empty(Accumulators(*one, counts, jnp.bool_(False)))
    return divide(_added(sums, gradient, batch, counts, shape, objective), objective)


def divide(sums: Accumulators, objective: Objective) -> tuple[Any, dict[str, jax.Array]]:
    """Gradient of the step's loss with respect to the trained parameters, and the step's metrics,
    once all parts are added up."""
    denominators = named(objective.denominators(sums.counts))
    names = list(sums.gradients)

    def one(*numerators):
        return Quotient(dict(zip(names, numerators, strict=True))).over(denominators)

    grads = jax.tree.map(one, *(sums.gradients[name] for name in names))
    found = {name: x.over(denominators) for name, x in sums.metrics["sum"].items()}
    return grads, objective.finish(found | sums.metrics["max"])


def _later(objective: Objective, counts: Any) -> Any:
    """A Divisor for each denominator of the loss: the counts of all parts are not known yet."""
    return divisors_of(jax.eval_shape(objective.denominators, counts))


def _added(
    sums: Accumulators,
    gradient: Callable[[Any], tuple[dict[str, Any], Metrics]],
    batch: Batch,
    counts: Any,
    shape: UpdateShape,
    objective: Objective,
) -> Accumulators:
    """`sums` with what `gradient` makes of all micro-batches that have a token, and the counts."""
    micro_batches = microbatch.split(batch, shape.ranks, shape.micro_rows)
    shardings = dict.fromkeys(sums.gradients, _trained_shardings(objective, shape))

    def body(index, carry):
        total, metrics = carry
        g, new = gradient(microbatch.take(micro_batches, index))
        # pinned: a replicated gradient would take the full model's memory on every device
        total = jax.lax.with_sharding_constraint(jax.tree.map(jnp.add, total, g), shardings)
        added = jax.tree.map(jnp.add, metrics["sum"], new["sum"])
        maxima = jax.tree.map(jnp.maximum, metrics["max"], new["max"])
        return total, {"sum": added, "max": maxima}

    segment = micro_batches.rows.segment
    trips, most = microbatch.num_filled(segment), segment.shape[1]
    gradients, metrics = bounded_loop(trips, body, (sums.gradients, sums.metrics), most=most)
    counts = jax.tree.map(jnp.add, sums.counts, counts)
    return Accumulators(gradients, metrics, counts, sums.valid | batch.rows.valid.any())


def gradient_of(
    params: Any, divisors: Any, temperature: jax.Array, objective: Objective
) -> Callable[[Any], tuple[dict[str, Any], Metrics]]:
    """micro-batch -> (gradients of the loss's numerators by denominator, metrics' numerators).

    `params` are all parameters; `divisors` the step's denominators, or a Divisor for each, and
    `temperature` a scalar. Metrics are those of Accumulators.
    """
    trained, frozen = lora.divide(objective.model, params)

    def parts_of(trained, micro_batch):
        params = lora.join(trained, frozen)
        loss, metrics = objective.evaluate(params, micro_batch, divisors, temperature)
        loss = Quotient.of(loss)
        sums = metrics["sum"] | {f"{objective.name}/loss": jax.lax.stop_gradient(loss)}
        sums = {name: Quotient.of(x) for name, x in sums.items()}
        return loss.parts, {"sum": sums, "max": metrics["max"]}

    def gradient(micro_batch):
        parts, pull, metrics = jax.vjp(
            functools.partial(parts_of, micro_batch=micro_batch), trained, has_aux=True
        )
        # one backward pass for each denominator that is not known: most losses have one
        gradients = {
            name: pull({other: jnp.float32(other == name) for other in parts})[0] for name in parts
        }
        return gradients, metrics

    return gradient


def no_metrics(abstract: Metrics) -> Metrics:
    """Metrics of no rows, shaped as `abstract`."""
    return {
        "sum": jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract["sum"]),
        "max": jax.tree.map(lambda x: jnp.full(x.shape, -jnp.inf, x.dtype), abstract["max"]),
    }


def _trained_shardings(objective: Objective, shape: UpdateShape) -> Any:
    return lora.divide(objective.model, param_shardings(objective.model, shape.mesh))[0]


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
    """(state, batch, index, temperature) -> (state, metrics), for a trace of the unit's program.

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
                state, grads, metrics, mini.rows.valid.any(), optimizer, schedule, objective
            )

    return update


def finish(
    state: OpenState,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    objective: Objective,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """The state after the step whose parts are added up, and its metrics; see make_update."""
    grads, metrics = divide(state.sums, objective)
    valid = state.sums.valid
    return applied(without_sums(state), grads, metrics, valid, optimizer, schedule, objective)


def applied(
    state: TrainState,
    grads: Any,
    metrics: dict[str, jax.Array],
    valid: jax.Array,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    objective: Objective,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """The state after an optimizer step by this gradient, and the step's metrics.

    `valid`, a bool scalar: whether there are sequences. Without any, where all tokens were
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
        HAS_SEQUENCES: valid,
    }
    # without sequences, or tokens that count, decaying moments must not move the parameters either
    useful = finite & metrics[HAS_SEQUENCES]
    if KEPT_WEIGHT in metrics:
        useful &= metrics[KEPT_WEIGHT] > 0
    new = jax.tree.map(lambda a, b: jnp.where(useful, a, b), new, old)
    return joined(new, frozen), metrics


def without_sums(state: OpenState) -> TrainState:
    """The state before its optimizer step, whose sums are dropped."""
    return TrainState(state.params, state.opt_state, state.count)


def with_sums(state: TrainState, sums: Accumulators) -> OpenState:
    """The state in the middle of a step; both may be specs."""
    return OpenState(state.params, state.opt_state, state.count, sums)
