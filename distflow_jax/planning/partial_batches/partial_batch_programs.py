"""Before step 1: programs of the units that run on each partial batch, traced for its rows.

A unit that trains adds its rows to accumulators in the model's state, between two small programs:
`begin` makes the accumulators, `finish` makes the optimizer step. Fields that nodes read of the
whole batch wait on the host. A *spec* is a pytree of jax.ShapeDtypeStruct with shardings.
"""

import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from distflow_jax.dag.plan import Plan, Task, Unit
from distflow_jax.dag.plan_walker import Stage
from distflow_jax.layout import Edge, Layout
from distflow_jax.planning.field_specs import FieldSpecs
from distflow_jax.planning.unit_programs import Program, trace_plan
from distflow_jax.programs.launch_log import launched
from distflow_jax.programs.xla_options import compiler_options
from distflow_jax.stages.update_model import UpdateStage
from distflow_jax.training.state import TrainState, divided, joined
from distflow_jax.training.update import Accumulators, OpenState, empty, with_sums


class PartialBatchUpdate:
    """An optimizer step's beginning and end, as compiled programs.

    `state` and `sums` are specs of the model's state and of its accumulators.
    """

    def __init__(self, stage: UpdateStage, state: TrainState, sums: Accumulators, mesh: Mesh):
        self._network, self.mesh, self._name = stage.network, mesh, stage.name
        self.state = with_sums(state, sums)  # specs, while the step lasts
        trained, _ = divided(stage.network, state)

        def step(trained, sums):
            return stage.finish(with_sums(trained, sums))

        layouts = functools.partial(jax.tree.map, lambda x: x.sharding)
        whole = NamedSharding(mesh, PartitionSpec())
        _, metrics = jax.eval_shape(step, trained, sums)
        out = layouts(trained), dict.fromkeys(metrics, whole)
        self._begin = jax.jit(lambda: empty(sums), out_shardings=layouts(sums)).trace()
        self._finish = jax.jit(step, donate_argnums=0, out_shardings=out).trace(trained, sums)

    @functools.cached_property
    def programs(self) -> tuple[Any, Any]:
        """jax.stages.Compiled of begin and finish."""
        options = compiler_options(self.mesh, runs=True)
        begin, finish = (
            traced.lower().compile(compiler_options=options)
            for traced in (self._begin, self._finish)
        )
        return begin, finish

    def begin(self, state: TrainState) -> OpenState:
        """The state with empty accumulators; its arrays stay where they are."""
        launched(f"{self._name}: begin")
        return with_sums(state, self.programs[0]())

    def finish(self, state: OpenState) -> tuple[TrainState, dict[str, jax.Array]]:
        """The state after the optimizer step, and its metrics, scalars.

        Donates the state but for its sums, and for frozen parameters, which another model may
        hold too.
        """
        whole = TrainState(state.params, state.opt_state, state.count)
        trained, frozen = divided(self._network, whole)
        launched(f"{self._name}: finish")
        trained, metrics = self.programs[1](trained, state.sums)
        return joined(trained, frozen), metrics


@dataclasses.dataclass(frozen=True)
class PartialBatchPrograms:
    """Programs of units that take partial batches, and of the optimizer steps among them."""

    units: Mapping[str, Program]  # by the unit's name; updates in them accumulate
    updates: Mapping[str, PartialBatchUpdate]  # by state key

    def compile(self) -> None:
        """Compiles all of them, once."""
        for program in self.units.values():
            program.compile()
        for update in self.updates.values():
            _ = update.programs


def trace_partial_batches(
    plan: Plan,
    stages: Mapping[str, Stage],
    states: Mapping[str, Any],
    specs: FieldSpecs,
    units: Sequence[Unit],
) -> PartialBatchPrograms:
    """The programs of `units`, those of the plan that take partial batches. Pure; compiles nothing.

    Units on hosts among them have no program, and need no stage. `stages` are keyed by node id,
    `states` are specs by state key, and `specs` describe fields of one partial batch, [1, R, ...].
    While a step lasts, the state of a model that a unit trains is an OpenState for all of these
    units. Raises ValueError as unit_programs.trace_unit does, and for a node that keeps a state
    which it does not train.
    """
    units = [unit for unit in units if unit.layout.kind == "mesh"]
    training = [
        t for unit in units for t in unit.tasks if isinstance(stages[t.node.id], UpdateStage)
    ]
    sums: dict[str, Accumulators] = {}

    def looks(task: Task) -> Stage:
        def look(state, fields, options):
            sums[task.state_key] = stages[task.node.id].sums_of(state, fields)
            return state, {}, {}

        return look

    # an update may read fields that only its own program has: a first pass finds their shapes
    trace_plan(plan, {**stages, **{t.node.id: looks(t) for t in training}}, states, specs, units)
    updates = {
        t.state_key: PartialBatchUpdate(
            stages[t.node.id], states[t.state_key], sums[t.state_key], specs.meshes[t.layout]
        )
        for t in training
    }
    adding = {t.node.id: stages[t.node.id].accumulate for t in training}
    during = {key: update.state for key, update in updates.items()}
    programs = trace_plan(plan, {**stages, **adding}, {**states, **during}, specs, units)
    for program in programs.values():
        check_stateless(program.unit, program.states)
    return PartialBatchPrograms(programs, updates)


def check_stateless(unit: Unit, kept: Collection[str]) -> None:
    """Raises ValueError if a unit that takes partial batches keeps a state which it does not train.

    `kept`: keys of the states that it returns. Such a state would change once for each partial
    batch.
    """
    for task in unit.tasks:
        if task.state_key in kept and task.node.type != "MODEL_TRAIN":
            raise ValueError(
                f"node {task.node.id!r} keeps a state, but would run once per partial batch "
                "instead of once per step: give it scope batch"
            )


def deferred(plan: Plan, units: Sequence[Unit]) -> list[Edge]:
    """Edges of fields that `units` on meshes write in partial batches and others read of the whole
    batch; one for each field, to the host."""
    inside = {task.node.id for unit in units for task in unit.tasks if unit.layout.kind == "mesh"}
    found = {
        (edge.source, edge.field): edge
        for unit in plan.units
        if unit not in units
        for edge in unit.inputs
        if edge.source in inside
    }
    host = Layout("host")
    return [dataclasses.replace(e, target_layout=host, move="unpack") for e in found.values()]


def check_deferred(
    plan: Plan, units: Sequence[Unit], programs: Iterable[Program], specs: FieldSpecs
) -> None:
    """Raises ValueError unless all fields that nodes wait for can be moved to the batch.

    `programs` are those of `units`, `specs` describe fields of a partial batch.
    """
    known = {
        value: spec
        for program in programs
        for value, spec in zip(program.unit.outputs, program.outputs, strict=True)
    }
    for edge in deferred(plan, units):
        spec = known[edge.source, edge.field]
        if isinstance(spec, jax.ShapeDtypeStruct) and specs.travels(spec, edge.source_layout):
            continue
        sizes = [math.prod(x.shape) for x in jax.tree.leaves(spec)]
        raise ValueError(
            f"node {edge.source!r}: writes {edge.field!r} as arrays of {sizes} numbers, and node "
            f"{edge.target!r} waits for the whole batch, which requires one number per token or "
            "per sequence; use stream.partial_batches='off'"
        )
