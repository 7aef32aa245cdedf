"""Before step 1: every device unit of a plan, traced and compiled as one program.

`trace_unit` is pure: from specs to a TracedUnit. A Program compiles and runs it. A *spec* is a
pytree of jax.ShapeDtypeStruct with shardings: no tracing touches a value.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from distflow_jax.dag.plan import Plan, Unit
from distflow_jax.dag.plan_walker import Runner, Stage, make_runner
from distflow_jax.layout import OF_GROUP, ROWS, Edge, Layout
from distflow_jax.planning.field_specs import FieldSpecs, Value, per_token_values
from distflow_jax.planning.stage_checks import checked, outline
from distflow_jax.programs.launch_log import launched
from distflow_jax.programs.xla_options import compiler_options

Constant = Mapping[str, tuple[bool, ...] | None]  # state key -> leaves that come back as they are


@dataclasses.dataclass(frozen=True)
class TracedVariant:
    """A unit traced with some of its states absent, which is a program of its own."""

    absent: tuple[str, ...]  # keys of the changing states that are None
    constant: Constant  # of the changing states; None: all leaves are new
    states: Mapping[str, Any]  # specs of the states that it returns
    outputs: tuple[Any, ...]  # specs of Unit.outputs
    traced: Any  # jax.stages.Traced of (moving, fixed, kept, values), see _split; None: specs alone


@dataclasses.dataclass(frozen=True)
class TracedUnit:
    """A unit on a mesh, known by its specs.

    It has one variant, or two where a node makes its state in its first step: without and with that
    state.
    """

    unit: Unit
    mesh: Mesh
    given_states: Mapping[str, Any]  # specs of its states before step 1; None: there is none yet
    inputs: tuple[Any, ...]  # specs of Unit.inputs
    variants: tuple[TracedVariant, ...]  # the last is that of most steps


def trace_unit(
    unit: Unit,
    stages: Mapping[str, Stage],
    states: Mapping[str, Any],
    inputs: Sequence[Any],
    specs: FieldSpecs,
) -> TracedUnit:
    """Traces the stages of a unit as one program. Pure; compiles nothing.

    `states` are the specs of the states of the run, `inputs` those of Unit.inputs. Raises
    ValueError, with the node, for a stage that cannot be traced, or whose state, fields or metrics
    are not as its readers need them.
    """
    named = {t.node.id: checked(stages[t.node.id], t, specs, unit.layout) for t in unit.tasks}
    runner, inputs = make_runner(unit, named), tuple(inputs)
    given = {key: states.get(key) for key in unit.state_keys}
    first = _trace_variant(unit, runner, given, inputs, specs)
    variants = [first]
    # a state that a node makes in its first step is there in the second: another program
    after = given | {k: v for k, v in first.states.items() if given[k] is None}
    if _absent(unit, after) != first.absent:
        variants.append(_trace_variant(unit, runner, after, inputs, specs))
    return TracedUnit(unit, specs.meshes[unit.layout], given, inputs, tuple(variants))


class Program:
    """A traced unit as a compiled program: a Runner of dag/plan_walker.py, once it is compiled.

    States that its nodes train, or have of their own, are donated, but for arrays that they return
    as they are: these stay where they lie, and another state may hold them too.
    """

    def __init__(self, of: TracedUnit):
        self.unit, self.mesh, self.given_states = of.unit, of.mesh, of.given_states
        self.inputs, self.outputs = of.inputs, of.variants[-1].outputs
        self.states = of.variants[-1].states  # specs of the states that it returns, by key
        self._variants = {variant.absent: variant for variant in of.variants}
        self._compiled: dict[tuple[str, ...], Any] = {}
        self._for_costs: dict[tuple[str, ...], Any] = {}  # these never run

    @property
    def traced(self) -> Any:
        """The jax.stages.Traced of the program that most steps run."""
        return list(self._variants.values())[-1].traced

    def compile(self, *, for_costs: bool = False) -> Any:
        """Compiles all variants once; returns the jax.stages.Compiled that most steps run.

        With `for_costs` the program's code is not optimized, since it will not run. XLA's own
        passes, and so the program's memory and traffic, are the same. A program that can run is
        returned for its costs too, but not the other way round.
        """
        new = self._for_costs if for_costs else self._compiled
        known = self._for_costs | self._compiled if for_costs else self._compiled
        for absent, variant in self._variants.items():
            if absent not in known:
                options = compiler_options(self.mesh, runs=not for_costs)
                new[absent] = variant.traced.lower().compile(compiler_options=options)
        last = list(self._variants)[-1]
        return self._compiled.get(last, new.get(last))

    def __call__(
        self, states: Mapping[str, Any], values: Sequence[Any]
    ) -> tuple[dict[str, Any], Sequence[Any], dict[str, Any]]:
        """See dag.plan_walker.Runner."""
        absent = _absent(self.unit, states)
        moving, fixed, kept = _split(self.unit, states, self._variants[absent].constant)
        launched(self.unit.name)
        new, written, metrics = self._compiled[absent](moving, fixed, kept, tuple(values))
        return {key: _joined(s, fixed[key]) for key, s in new.items()}, written, metrics


def trace_plan(
    plan: Plan,
    stages: Mapping[str, Stage],
    states: Mapping[str, Any],
    specs: FieldSpecs,
    units: Sequence[Unit] | None = None,
    like: Mapping[str, Program] | None = None,
) -> dict[str, Program]:
    """The programs of all units on meshes, by the unit's name. Compiles nothing.

    `stages` are keyed by node id, `states` are specs by state key. With `units` these alone, which
    read on meshes only what they write. `like`: programs of the same run on another mesh; a unit
    that has one is not traced if all that it writes has rows, and its program has specs alone.
    Raises ValueError as `trace_unit` does.
    """
    per_token = per_token_values(plan, specs.routed)
    known: dict[Value, Any] = {}  # of what was written on a mesh, where it was written

    def entering(edge: Edge) -> Any:
        if edge.move == "pack":
            if edge.field == ROWS:
                return specs.rows(edge.target_layout)
            return specs.packed(edge.target_layout, per_token.get((edge.source, edge.field)))
        spec = known[edge.source, edge.field]
        return spec if edge.move == "stay" else specs.moved(spec, edge.target_layout)

    programs = {}
    for unit in plan.units if units is None else units:
        if unit.layout.kind == "mesh":
            inputs = [entering(edge) for edge in unit.inputs]
            known_elsewhere = (like or {}).get(unit.name)
            of = known_elsewhere and _moved_unit(known_elsewhere, unit, states, inputs, specs)
            program = Program(of or trace_unit(unit, stages, states, inputs, specs))
            known |= zip(unit.outputs, program.outputs, strict=True)
            programs[unit.name] = program
    return programs


def _moved_unit(
    other: Program,
    unit: Unit,
    states: Mapping[str, Any],
    inputs: Sequence[Any],
    specs: FieldSpecs,
) -> TracedUnit | None:
    """The specs of a unit, from those on another mesh; None if some of its fields have no rows."""
    whole = any(x.sharding.spec == PartitionSpec() for x in jax.tree.leaves(other.outputs))
    if other.unit.outputs != unit.outputs or whole:
        return None
    outputs = tuple(specs.moved(spec, unit.layout) for spec in other.outputs)
    if not specs.travels(outputs, unit.layout):
        return None
    given = {key: states.get(key) for key in unit.state_keys}
    variant = TracedVariant(_absent(unit, given), {}, given, outputs, None)
    return TracedUnit(unit, specs.meshes[unit.layout], given, tuple(inputs), (variant,))


def field_specs(programs: Iterable[Program]) -> dict[tuple[Value, Layout], Any]:
    """((source, field), layout) -> spec of every value that enters or leaves a program."""
    found: dict[tuple[Value, Layout], Any] = {}
    for program in programs:
        unit = program.unit
        values = [(edge.source, edge.field) for edge in unit.inputs] + list(unit.outputs)
        for value, spec in zip(values, (*program.inputs, *program.outputs), strict=True):
            found[value, unit.layout] = spec
    return found


def _trace_variant(
    unit: Unit,
    runner: Runner,
    states: Mapping[str, Any],
    inputs: tuple[Any, ...],
    specs: FieldSpecs,
) -> TracedVariant:
    """Traces a unit with these states, twice.

    The first pass finds what the second has to be given: the shapes of all results, for their
    layouts, and the leaves of states that come back as they are, since these must not be donated.
    """
    constant: dict[str, tuple[bool, ...] | None] = {}
    changing = _changing(unit)

    def watched(states, values):
        new, written, metrics = runner(states, values)
        constant.update((k, _constant(states[k], new.get(k, states[k]))) for k in changing)
        return new, written, metrics

    def run(moving, fixed, kept, values):
        whole = {key: _joined(part, fixed[key]) for key, part in moving.items()}
        new, written, metrics = runner(whole | kept, values)
        return {k: _divided(s, constant[k])[0] for k, s in new.items()}, written, metrics

    run.__name__ = "_".join(task.node.id for task in unit.tasks)
    new, written, metrics = jax.eval_shape(watched, dict(states), inputs)
    _check_states(unit, states, new)
    _check_metrics(unit, metrics)
    everywhere = NamedSharding(specs.meshes[unit.layout], PartitionSpec())
    of_states = {
        key: jax.tree.map(lambda x: everywhere, state)
        if states[key] is None
        else jax.tree.map(lambda x: x.sharding, states[key])
        for key, state in new.items()
    }
    of_values = [specs.shardings(value, unit.layout) for value in written]
    moving = {key: _divided(layout, constant[key])[0] for key, layout in of_states.items()}
    layouts = (moving, of_values, jax.tree.map(lambda x: everywhere, metrics))
    given = (*_split(unit, states, constant), inputs)
    return TracedVariant(
        absent=_absent(unit, states),
        constant=constant,
        states={key: _with(of_states[key], state) for key, state in new.items()},
        outputs=tuple(map(_with, of_values, written)),
        traced=jax.jit(run, donate_argnums=0, out_shardings=layouts).trace(*given),
    )


def _changing(unit: Unit) -> tuple[str, ...]:
    """Keys of the states that a unit may change: those it trains, and those of its own nodes."""
    keys = {
        t.state_key
        for t in unit.tasks
        if t.node.type == "MODEL_TRAIN" or (t.node.type == "COMPUTE" and t.node.model is None)
    }
    return tuple(key for key in unit.state_keys if key in keys)


def _absent(unit: Unit, states: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(key for key in _changing(unit) if states.get(key) is None)


def _split(
    unit: Unit, states: Mapping[str, Any], constant: Constant
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(leaves of the changing states that change, the rest of them, the other states)."""
    changing = _changing(unit)
    parts = {key: _divided(states.get(key), constant.get(key)) for key in changing}
    moving, fixed = ({key: part[i] for key, part in parts.items()} for i in (0, 1))
    return moving, fixed, {k: states.get(k) for k in unit.state_keys if k not in changing}


def _check_states(unit: Unit, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    for task in unit.tasks:
        key, node = task.state_key, task.node
        if key not in after:
            continue
        if key not in _changing(unit):
            raise ValueError(
                f"node {node.id!r}: returns a changed state of model {key!r}, but only a node of "
                "type MODEL_TRAIN may do that: return the state unchanged"
            )
        if before[key] is not None and outline(before[key]) != outline(after[key]):
            raise ValueError(
                f"node {node.id!r}: its state changes from {outline(before[key])} to "
                f"{outline(after[key])}, but its shapes and dtypes must stay the same"
            )


def _check_metrics(unit: Unit, metrics: Mapping[str, Any]) -> None:
    for name, value in metrics.items():
        if value.shape != () and not name.endswith(OF_GROUP):
            raise ValueError(
                f"node {unit.name!r}: metric {name!r} has shape {value.shape}, but a "
                "metric is one number: take its mean or maximum"
            )


def _constant(before: Any, after: Any) -> tuple[bool, ...] | None:
    """Which leaves of a traced state are those that were handed in; None: not one of them."""
    if jax.tree.structure(before) != jax.tree.structure(after):
        return None
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    constant = tuple(old is new for old, new in pairs)
    return constant if any(constant) else None


def _divided(tree: Any, constant: tuple[bool, ...] | None) -> tuple[Any, Any]:
    """(tree without its constant leaves, tree with these alone): None stands for the others."""
    if constant is None:
        return tree, None
    leaves, structure = jax.tree.flatten(tree)
    pairs = list(zip(leaves, constant, strict=True))
    moving = structure.unflatten([None if fixed else x for x, fixed in pairs])
    return moving, structure.unflatten([x if fixed else None for x, fixed in pairs])


def _joined(moving: Any, fixed: Any) -> Any:
    """Inverse of _divided."""
    if fixed is None:
        return moving
    return jax.tree.map(
        lambda x, y: y if x is None else x, moving, fixed, is_leaf=lambda x: x is None
    )


def _with(layouts: Any, shapes: Any) -> Any:
    return jax.tree.map(
        lambda x, layout: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout), shapes, layouts
    )
