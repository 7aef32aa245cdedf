"""Programs of the units that run wave by wave, traced before step 1.

Their fields have the rows of a wave. A model whose update takes waves is a StreamedState in all of
them: it holds the sums of its optimizer step.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from distflow_jax.dag.plan import Plan, Unit
from distflow_jax.dag.plan_walker import Stage
from distflow_jax.layout import Edge, Layout
from distflow_jax.planning.field_specs import FieldSpecs
from distflow_jax.planning.unit_programs import Program, input_specs, trace_plan
from distflow_jax.programs.xla_options import compiler_options
from distflow_jax.stages.update_model import UpdateStage
from distflow_jax.training.state import TrainState
from distflow_jax.training.streamed_update import StreamedState


@dataclasses.dataclass(frozen=True)
class WaveUpdate:
    """The update of one model in waves; its `accumulate` is the program of the unit."""

    unit: Unit
    state_key: str
    stage: UpdateStage
    state: StreamedState  # specs
    begin: Callable[[TrainState], StreamedState]  # with empty sums


@dataclasses.dataclass(frozen=True)
class WavePrograms:
    """Programs that run on each wave, by the unit's name, and updates in the plan's order."""

    programs: Mapping[str, Program]
    updates: tuple[WaveUpdate, ...]


def trace_waves(
    plan: Plan,
    units: Sequence[Unit],
    stages: Mapping[str, Stage],
    states: Mapping[str, Any],
    specs: FieldSpecs,
) -> WavePrograms:
    """Traces the units that run wave by wave. Compiles nothing.

    `states` are specs by state key, `specs` those of a wave's fields. Raises ValueError as
    `trace_plan` does, and for a field that a node which waits cannot be given.
    """
    trainers = [unit for unit in units if unit.tasks[0].node.type == "MODEL_TRAIN"]
    others = [unit for unit in units if unit not in trainers]
    # of fields only shapes count for the sums, and these do not follow from the states
    first = trace_plan(plan, stages, states, specs, others)
    _check_carried(plan, units, first, specs)
    updates = []
    for unit in trainers:
        inputs = input_specs(plan, unit, first.values(), specs)
        updates.append(_update(unit, stages, states, inputs))
    given = dict(states) | {update.state_key: update.state for update in updates}
    adding = {u.unit.tasks[0].node.id: u.stage.accumulate for u in updates}
    programs = trace_plan(plan, dict(stages) | adding, given, specs, units)
    return WavePrograms(programs, tuple(updates))


def carried(plan: Plan, units: Sequence[Unit]) -> list[Edge]:
    """Edges of fields that units on meshes write wave by wave and others read of the whole batch;
    one for each field, to the host."""
    inside = {task.node.id for unit in units for task in unit.tasks if unit.layout.kind == "mesh"}
    waiting = [unit for unit in plan.units if unit not in units]
    found = {
        (edge.source, edge.field): edge
        for unit in waiting
        for edge in unit.inputs
        if edge.source in inside
    }
    host = Layout("host")
    return [dataclasses.replace(e, target_layout=host, move="unpack") for e in found.values()]


def _update(
    unit: Unit, stages: Mapping[str, Stage], states: Mapping[str, Any], inputs: Sequence[Any]
) -> WaveUpdate:
    (task,) = unit.tasks
    stage = stages[task.node.id]
    if not isinstance(stage, UpdateStage):
        raise ValueError(f"node {task.node.id!r}: its update does not take waves")
    known = {(edge.source, edge.field): x for edge, x in zip(unit.inputs, inputs, strict=True)}
    fields = {edge.field: known[edge.source, edge.field] for edge in task.edges_in}
    fields = {inside: fields[field] for inside, field in task.node.reads.items()}
    spec = stage.begin_specs(states[task.state_key], fields)

    def sums(state):
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), fields)
        return stage.begin(state, nothing).sums

    layouts = jax.tree.map(lambda x: x.sharding, spec.sums)
    mesh = jax.tree.leaves(layouts)[0].mesh
    program = jax.jit(sums, out_shardings=layouts).trace(states[task.state_key]).lower()
    options = compiler_options(mesh, runs=True)
    compiled: list[Any] = []

    def begin(state: TrainState) -> StreamedState:
        if not compiled:  # in the first step
            compiled.append(program.compile(compiler_options=options))
        return StreamedState(state.params, state.opt_state, state.count, compiled[0](state))

    return WaveUpdate(unit, task.state_key, stage, spec, begin)


def _check_carried(
    plan: Plan, units: Sequence[Unit], programs: Mapping[str, Program], specs: FieldSpecs
) -> None:
    """Raises ValueError unless all fields that nodes wait for can be moved to the batch."""
    known = {
        value: spec
        for program in programs.values()
        for value, spec in zip(program.unit.outputs, program.outputs, strict=True)
    }
    for edge in carried(plan, units):
        spec = known[edge.source, edge.field]
        single = isinstance(spec, jax.ShapeDtypeStruct) and specs.travels(spec, edge.source_layout)
        if not single:
            sizes = [math.prod(x.shape) for x in jax.tree.leaves(spec)]
            raise ValueError(
                f"node {edge.source!r}: writes {edge.field!r} as arrays of {sizes} numbers, and "
                f"node {edge.target!r} waits for those of the whole batch, which have one number "
                "per token or per sequence; use flow.waves='off'"
            )
