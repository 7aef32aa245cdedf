"""One optimizer step in waves: begin, accumulate a wave of rows as often as there are, finish.

The same step as training/update.py's, for groups that end one after another. Counts of the step are
known after its last wave, so the accumulators hold numerators, one gradient for each denominator of
the loss, and `finish` divides. The counts themselves add up from wave to wave. Results differ from
those of the step at once in rounding only. A wave without rows changes nothing; a wave that is not
finite spoils the step, which then leaves the state unchanged.

R rows, L tokens per row.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from distflow_jax.models import lora
from distflow_jax.models.parameters import param_shardings
from distflow_jax.parallel.rules import use_mesh
from distflow_jax.training import microbatch
from distflow_jax.training.objective import Batch, Metrics, Objective
from distflow_jax.training.quotient import Quotient, divisors_of, named
from distflow_jax.training.state import TrainState, divided, joined, state_shardings
from distflow_jax.training.update import UpdateShape, added_up, applied, no_metrics, with_loss


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class WaveSums:
    """Accumulators of an optimizer step: what its waves have added up so far."""

    gradients: dict[str, Any]  # numerators by denominator, each shaped as the trained parameters
    metrics: dict[str, Any]  # {"sum": {name: Quotient}, "max": {name: array}}
    counts: Any  # the objective's, of all rows so far
    valid: Any  # bool scalar: whether any row had a sequence


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class StreamedState(TrainState):
    """A training state in the middle of an optimizer step; checkpoints never hold one."""

    sums: WaveSums


@dataclasses.dataclass(frozen=True)
class StreamedUpdate:
    """The programs of an optimizer step in waves; all are pure, and compiled where called.

    Rows of a wave have any static R that micro-batches divide, and R, L and S are those of all
    waves. `params` are the same for all waves of a step: the state changes in `finish` alone.
    """

    # (state, batch) -> StreamedState with empty accumulators; of `batch` only shapes count
    begin: Callable[[TrainState, Batch], StreamedState]
    # (state, batch) -> specs of these accumulators (jax.ShapeDtypeStruct with shardings); of both
    # only shapes count
    specs: Callable[[TrainState, Batch], WaveSums]
    # (state, batch [R, ...], temperature) -> state with the wave's rows added; donates the sums
    accumulate: Callable[[StreamedState, Batch, jax.Array], StreamedState]
    # state -> (state after the optimizer step, metrics as of make_update); donates all but frozen
    # parameters and sums
    finish: Callable[[StreamedState], tuple[TrainState, dict[str, jax.Array]]]


def make_streamed_update(
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    *,
    shape: UpdateShape,
    objective: Objective,
) -> StreamedUpdate:
    """The optimizer step that make_update makes, in waves.

    Raises ValueError for an objective that has to see the whole step before its first gradient.
    """
    if objective.waits:
        raise ValueError(f"{objective.waits}, which waves do not have; use flow.waves='off'")
    layout, _ = divided(objective.model, state_shardings(objective.model, optimizer, shape.mesh))

    given = {"shape": shape, "objective": objective}
    made: dict[Any, tuple[Callable, Callable]] = {}

    def programs(params, batch):
        """Begin and accumulate of such waves; layouts of results are given, or the second wave
        would find other ones than the first, and compile again."""
        leaves, structure = jax.tree.flatten(batch)
        key = structure, tuple((x.shape, jnp.dtype(x.dtype)) for x in leaves)
        if key not in made:
            specs = sums_specs(params, batch, **given)
            layouts = jax.tree.map(lambda x: x.sharding, specs)

            def add(params, sums, batch, temperature):
                with use_mesh(shape.mesh):
                    return add_wave(params, sums, batch, temperature, **given)

            made[key] = (
                jax.jit(lambda: empty(specs), out_shardings=layouts),
                jax.jit(add, donate_argnums=1, out_shardings=layouts),
            )
        return made[key]

    def begin(state, batch):
        return with_sums(state, programs(state.params, batch)[0]())

    def accumulate(state, batch, temperature):
        add = programs(state.params, batch)[1]
        return with_sums(state, add(state.params, state.sums, batch, temperature))

    # no result could take the place of the sums, which the caller drops
    @functools.partial(jax.jit, donate_argnums=0, out_shardings=(layout, None))
    def step(state, sums):
        with use_mesh(shape.mesh):
            grads, metrics = divide(sums, objective)
            return applied(
                state,
                grads,
                metrics,
                sums.valid,
                optimizer=optimizer,
                schedule=schedule,
                objective=objective,
            )

    def finish(state):
        # frozen parameters are not donated: another model may hold them too
        trained, frozen = divided(
            objective.model, TrainState(state.params, state.opt_state, state.count)
        )
        trained, metrics = step(trained, state.sums)
        return joined(trained, frozen), metrics

    def specs(state, batch):
        return sums_specs(state.params, batch, **given)

    return StreamedUpdate(begin, specs, accumulate, finish)


def sums_specs(params: Any, batch: Batch, *, shape: UpdateShape, objective: Objective) -> WaveSums:
    """Specs (jax.ShapeDtypeStruct with shardings) of the accumulators of waves like `batch`, rows
    [R, ...]; gradients lie as the parameters, all else on every device."""

    def one(params, batch):
        batch, counts = objective.prepare(batch)
        micro_batches = microbatch.split(batch, shape.ranks, shape.micro_rows)
        gradient = numerators(params, counts, jnp.float32(1.0), objective)
        return WaveSums(
            *gradient(microbatch.take(micro_batches, 0)), counts, batch.rows.valid.any()
        )

    with use_mesh(shape.mesh):
        sums = jax.eval_shape(one, params, batch)
    whole = NamedSharding(shape.mesh, PartitionSpec())
    layouts = dataclasses.replace(
        jax.tree.map(lambda _: whole, sums),
        gradients=_gradient_shardings(sums, shape, objective),
    )
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), sums, layouts
    )


def add_wave(
    params: Any,
    sums: WaveSums,
    batch: Batch,
    temperature: jax.Array,
    *,
    shape: UpdateShape,
    objective: Objective,
) -> WaveSums:
    """The accumulators with the rows of a wave added.

    `params` are all parameters of the model; fields of `batch` are [R, L] and [R, S];
    `temperature` is a scalar.
    """
    batch, counts = objective.prepare(batch, sums.counts)
    gradient = numerators(params, counts, temperature, objective)
    start = sums.gradients, sums.metrics
    micro_batches = microbatch.split(batch, shape.ranks, shape.micro_rows)
    shardings = _gradient_shardings(sums, shape, objective)
    gradients, metrics = added_up(gradient, micro_batches, start, shardings=shardings)
    counts = jax.tree.map(jnp.add, sums.counts, counts)
    valid = sums.valid | batch.rows.valid.any()
    return WaveSums(gradients, metrics, counts, valid)


def divide(sums: WaveSums, objective: Objective) -> tuple[Any, dict[str, jax.Array]]:
    """(gradient of the step's loss, the step's metrics) once all waves are added up."""
    denominators = named(objective.denominators(sums.counts))
    names = list(sums.gradients)

    def one(*numerators):
        return Quotient(dict(zip(names, numerators, strict=True))).over(denominators)

    grads = jax.tree.map(one, *(sums.gradients[name] for name in names))
    found = {name: x.over(denominators) for name, x in sums.metrics["sum"].items()}
    return grads, objective.finish(found | sums.metrics["max"])


def numerators(
    params: Any, counts: Any, temperature: jax.Array, objective: Objective
) -> Callable[[Any], tuple[dict[str, Any], Metrics]]:
    """micro-batch -> (gradients of the loss's numerators by denominator, metrics' numerators).

    `params` are all parameters, `counts` the shapes of the objective's counts, `temperature` a
    scalar. Metrics are those of WaveSums.
    """
    trained, frozen = lora.divide(objective.model, params)
    divisors = divisors_of(jax.eval_shape(objective.denominators, counts))

    def parts_of(trained, micro_batch):
        params = lora.join(trained, frozen)
        loss, metrics = objective.evaluate(params, micro_batch, divisors, temperature)
        loss = Quotient.of(loss)
        metrics = with_loss(objective, loss, metrics)
        sums = {name: Quotient.of(x) for name, x in metrics["sum"].items()}
        return loss.parts, {"sum": sums, "max": metrics["max"]}

    def gradient(micro_batch):
        parts, pull, metrics = jax.vjp(
            functools.partial(parts_of, micro_batch=micro_batch), trained, has_aux=True
        )
        # one backward pass for each denominator: most losses have one
        gradients = {
            name: pull({other: jnp.float32(other == name) for other in parts})[0] for name in parts
        }
        return gradients, metrics

    return gradient


def _gradient_shardings(sums: WaveSums, shape: UpdateShape, objective: Objective) -> dict[str, Any]:
    trained, _ = lora.divide(objective.model, param_shardings(objective.model, shape.mesh))
    return dict.fromkeys(sums.gradients, trained)


def without_sums(state: StreamedState) -> TrainState:
    """The state before its optimizer step, whose sums are dropped."""
    return TrainState(state.params, state.opt_state, state.count)


def with_sums(state: TrainState, sums: WaveSums) -> StreamedState:
    """The state in the middle of a step; both may be specs."""
    return StreamedState(state.params, state.opt_state, state.count, sums)


def empty(specs: WaveSums) -> WaveSums:
    """Accumulators of no rows, arrays shaped as the specs."""
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), specs)
    return dataclasses.replace(zeros, metrics=no_metrics(specs.metrics))
