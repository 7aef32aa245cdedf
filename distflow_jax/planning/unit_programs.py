"""Before step 1: every device unit of a plan, evaluated abstractly and compiled as one program.

K mini-batches, R rows, L tokens per row, S sequences per row. A *spec* is a pytree of
jax.ShapeDtypeStruct with shardings: nothing here touches a value.
"""

import dataclasses
import math
import pathlib
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from distflow_jax.batch import ONE_NUMBER, Rows, TokenColumn
from distflow_jax.coordinator.assignment import PackingPlan, data_ranks
from distflow_jax.dag.plan import Plan, Task, Unit
from distflow_jax.dag.plan_walker import Stage, make_runner
from distflow_jax.layout import ROUTED_EXPERTS, ROWS, Edge, Layout
from distflow_jax.parallel.rules import rows_spec
from distflow_jax.programs.xla_options import compiler_options
from distflow_jax.stages.registry import per_token_fields

Value = tuple[str | None, str]  # (source, field)

# what a function does that needs values before there are any
_NOT_TRACEABLE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.UnexpectedTracerError,
)


@dataclasses.dataclass(frozen=True)
class FieldSpecs:
    """What fields look like on the meshes of a run."""

    packing: PackingPlan
    meshes: Mapping[Layout, Mesh]
    routed: TokenColumn | None = None  # what is recorded of a mixture's experts

    def rows(self, layout: Layout) -> Rows:
        """The record of packed tokens, [K, R, L] and [K, R, S]."""
        token, sequence = self._shape(layout, False), self._shape(layout, True)
        ints, bools = jnp.int32, jnp.bool_
        return Rows(
            tokens=self._spec(layout, token, ints),
            segment=self._spec(layout, token, ints),
            position=self._spec(layout, token, ints),
            previous=self._spec(layout, token, ints),
            response_mask=self._spec(layout, token, bools),
            parent=self._spec(layout, sequence, ints),
            group=self._spec(layout, sequence, ints),
            member=self._spec(layout, sequence, ints),
            valid=self._spec(layout, sequence, bools),
            length=self._spec(layout, sequence, ints),
        )

    def packed(self, layout: Layout, column: TokenColumn | None) -> jax.ShapeDtypeStruct:
        """A field from the host: [K, R, L, ...] as `column` says, None: float32 [K, R, S]."""
        shape = self._shape(layout, column is None)
        if column is None:
            return self._spec(layout, shape, jnp.float32)
        return self._spec(layout, (*shape, *column.shape), jnp.dtype(column.dtype))

    def moved(self, spec: Any, layout: Layout) -> Any:
        """The same field on another mesh."""
        rows = self._shape(layout, False)[1]
        return jax.tree.map(
            lambda x: self._spec(layout, (x.shape[0], rows, *x.shape[2:]), x.dtype), spec
        )

    def travels(self, spec: Any, layout: Layout) -> bool:
        """Whether this is what the coordinator can move: [K, R, L] or [K, R, S] throughout."""
        shapes = (self._shape(layout, False), self._shape(layout, True))
        return all(x.shape in shapes for x in jax.tree.leaves(spec))

    def shardings(self, spec: Any, layout: Layout) -> Any:
        """Where a field lies: its rows over the data ranks, what has no rows everywhere."""
        rows, mesh = self._shape(layout, False)[:2], self.meshes[layout]

        def one(x):
            return NamedSharding(mesh, rows_spec(mesh) if x.shape[:2] == rows else PartitionSpec())

        return jax.tree.map(one, spec)

    def _shape(self, layout: Layout, per_sequence: bool) -> tuple[int, int, int]:
        p = self.packing
        last = p.limits.sequences if per_sequence else p.limits.tokens
        return (p.mini_batches, p.rows[layout] * data_ranks(layout), last)

    def _spec(self, layout: Layout, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        mesh = self.meshes[layout]
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, rows_spec(mesh)))


def per_token_values(plan: Plan, routed: TokenColumn | None) -> dict[Value, TokenColumn]:
    """What nodes on the host write with something for every token: one number per response token,
    or what is `routed`."""
    found: dict[Value, TokenColumn] = {}
    for task in plan.tasks:
        node = task.node
        if task.layout.kind == "host":
            found |= {(node.id, field): ONE_NUMBER for field in per_token_fields(node)}
            if routed is not None and node.role == "ROLLOUT" and ROUTED_EXPERTS in node.writes:
                found[node.id, node.writes[ROUTED_EXPERTS]] = routed
    return found


class Program:
    """A unit on a mesh as a compiled program: a Runner of dag.worker.

    `compile` makes it ready, before that it is known by its specs alone. States that its nodes
    train, or have of their own, are donated, but for arrays that they hand back as they are: these
    stay where they lie, and another state may hold them too.
    """

    def __init__(
        self,
        unit: Unit,
        stages: Mapping[str, Stage],
        states: Mapping[str, Any],
        inputs: Sequence[Any],
        specs: FieldSpecs,
    ):
        """`states` are the specs of the states of the run, `inputs` those of Unit.inputs.

        Raises ValueError, with the node, for a stage that cannot be traced or does not give what
        its readers need.
        """
        self.unit, self.inputs = unit, tuple(inputs)
        self._specs = specs
        named = {t.node.id: _named(stages[t.node.id], t, specs, unit.layout) for t in unit.tasks}
        self._runner = make_runner(unit, named)
        changing = {
            t.state_key
            for t in unit.tasks
            if t.node.type == "MODEL_TRAIN" or (t.node.type == "COMPUTE" and t.node.model is None)
        }
        self._changing = tuple(k for k in unit.state_keys if k in changing)
        self._kept = tuple(k for k in unit.state_keys if k not in changing)
        self.given_states = first = {key: states.get(key) for key in unit.state_keys}
        self._constant: dict[tuple[str, ...], dict[str, tuple[bool, ...]]] = {}
        self._traced = {self._absent(first): self._trace(first)}
        # what has no state before its first step has one after it: two programs
        after = first | {k: v for k, v in self.states.items() if first[k] is None}
        if self._absent(after) not in self._traced:
            self._traced[self._absent(after)] = self._trace(after)
        self._compiled: dict[tuple[str, ...], Any] = {}

    @property
    def mesh(self) -> Mesh:
        """What it is compiled for."""
        return self._specs.meshes[self.unit.layout]

    @property
    def traced(self) -> Any:
        """The jax.stages.Traced of the program that most steps run."""
        return list(self._traced.values())[-1]

    def compile(self) -> Any:
        """Compiles what is not yet; returns the jax.stages.Compiled of the program that most steps
        run."""
        for absent, traced in self._traced.items():
            if absent not in self._compiled:
                options = compiler_options(self.mesh)
                self._compiled[absent] = traced.lower().compile(compiler_options=options)
        return list(self._compiled.values())[-1]

    def __call__(
        self, states: Mapping[str, Any], values: Sequence[Any]
    ) -> tuple[dict[str, Any], Sequence[Any], dict[str, Any]]:
        """See dag.worker.Runner."""
        run = self._compiled[self._absent(states)]
        moving, fixed, kept = self._split(states)
        new, written, metrics = run(moving, fixed, kept, tuple(values))
        return {key: _joined(s, fixed[key]) for key, s in new.items()}, written, metrics

    def _absent(self, states: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(key for key in self._changing if states.get(key) is None)

    def _split(self, states: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
        """(what changes of the changing states, the rest of them, the other states)."""
        constant = self._constant[self._absent(states)]
        parts = {k: _divided(states.get(k), constant.get(k)) for k in self._changing}
        moving, fixed = ({k: part[i] for k, part in parts.items()} for i in (0, 1))
        return moving, fixed, {k: states.get(k) for k in self._kept}

    def _trace(self, states: Mapping[str, Any]) -> Any:
        """Traces the unit with these states; notes what comes out of it."""

        constant = self._constant[self._absent(states)] = {}

        def watched(states, values):
            new, written, metrics = self._runner(states, values)
            constant.update(
                (k, _constant(states[k], new.get(k, states[k]))) for k in self._changing
            )
            return new, written, metrics

        def run(moving, fixed, kept, values):
            changing = {key: _joined(part, fixed[key]) for key, part in moving.items()}
            new, written, metrics = self._runner(changing | kept, values)
            return {k: _divided(s, constant[k])[0] for k, s in new.items()}, written, metrics

        run.__name__ = "_".join(task.node.id for task in self.unit.tasks)
        whole_states = {key: states.get(key) for key in self.unit.state_keys}
        new, written, metrics = jax.eval_shape(watched, whole_states, self.inputs)
        self._check_states(states, new)
        self._check_metrics(metrics)
        whole = NamedSharding(self.mesh, PartitionSpec())
        of_states = {
            key: jax.tree.map(lambda x: whole, state)
            if states[key] is None
            else jax.tree.map(lambda x: x.sharding, states[key])
            for key, state in new.items()
        }
        of_values = [self._specs.shardings(value, self.unit.layout) for value in written]
        moving = {key: _divided(layout, constant[key])[0] for key, layout in of_states.items()}
        layouts = (moving, of_values, jax.tree.map(lambda x: whole, metrics))
        self.states = {key: _with(of_states[key], state) for key, state in new.items()}
        self.outputs = tuple(map(_with, of_values, written))
        given = (*self._split(states), self.inputs)
        return jax.jit(run, donate_argnums=0, out_shardings=layouts).trace(*given)

    def _check_states(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
        for task in self.unit.tasks:
            key, node = task.state_key, task.node
            if key not in after:
                continue
            if key not in self._changing:
                raise ValueError(
                    f"node {node.id!r}: returns another state of model {key!r}, and only a node of "
                    "type MODEL_TRAIN may: return the state that it was handed"
                )
            if before[key] is not None and _outline(before[key]) != _outline(after[key]):
                raise ValueError(
                    f"node {node.id!r}: its state changes from {_outline(before[key])} to "
                    f"{_outline(after[key])}, and must keep shapes and dtypes from step to step"
                )

    def _check_metrics(self, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            if value.shape != ():
                raise ValueError(
                    f"node {self.unit.name!r}: metric {name!r} has shape {value.shape}, and a "
                    "metric is one number: take its mean, or its maximum"
                )


def trace_plan(
    plan: Plan,
    stages: Mapping[str, Stage],
    states: Mapping[str, Any],
    specs: FieldSpecs,
) -> dict[str, Program]:
    """The programs of all units on meshes, by the unit's name. Compiles nothing.

    `stages` are keyed by node id, `states` are specs by state key. Raises ValueError with the node
    whose stage cannot be traced, or does not give what its readers need.
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
    for unit in plan.units:
        if unit.layout.kind == "mesh":
            program = Program(unit, stages, states, [entering(e) for e in unit.inputs], specs)
            known |= zip(unit.outputs, program.outputs, strict=True)
            programs[unit.name] = program
    return programs


def field_specs(programs: Iterable[Program]) -> dict[tuple[Value, Layout], Any]:
    """((source, field), layout) -> spec of every value that a program takes in or gives out."""
    found: dict[tuple[Value, Layout], Any] = {}
    for program in programs:
        unit = program.unit
        values = [(edge.source, edge.field) for edge in unit.inputs] + list(unit.outputs)
        for value, spec in zip(values, (*program.inputs, *program.outputs), strict=True):
            found[value, unit.layout] = spec
    return found


def num_bytes(spec: Any) -> int:
    """Bytes of all arrays, over all devices, copies not counted."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(spec))


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


def _outline(tree: Any) -> str:
    """Shapes and dtypes of a small pytree, or its number of leaves and their total size."""
    leaves = jax.tree.leaves(tree)
    words = [f"{x.dtype}[{','.join(map(str, x.shape))}]" for x in leaves]
    return ", ".join(words) if len(words) < 8 else f"{words} {jax.tree.structure(tree)}"


def _named(stage: Stage, task: Task, specs: FieldSpecs, layout: Layout) -> Stage:
    """The stage, whose errors while it is traced name its node, and whose fields are checked."""
    node = task.node
    moving = {e.field for e in task.edges_out if e.move != "stay"}

    def run(state, fields, options):
        try:
            after, written, metrics = stage(state, fields, options)
        except _NOT_TRACEABLE as error:
            raise ValueError(
                f"node {node.id!r}: {node.fn or 'its stage'} needs the values of its fields, and "
                "what runs on a mesh is compiled before there are any: use jax.numpy, and no `if` "
                "on values, or let it run on the host, as REWARD COMPUTE "
                f"({_first_line(error)}, {_where(error)})"
            ) from error
        except Exception as error:
            if node.fn is None:
                error.add_note(f"while the stage of node {node.id!r} was traced")
                raise
            raise ValueError(
                f"node {node.id!r}: {node.fn} raised {type(error).__name__}: {_first_line(error)} "
                f"({_where(error)})"
            ) from error
        written = {name: _strong(value) for name, value in written.items()}
        for name, value in written.items():
            field = node.writes.get(name)
            if field in moving and not specs.travels(value, layout):
                kinds = (ONE_NUMBER, None)
                tokens, sequences = (specs.packed(layout, kind).shape for kind in kinds)
                raise ValueError(
                    f"node {node.id!r}: writes {field!r} as {_outline(value)}, and what is read "
                    f"elsewhere has one number per token {list(tokens)}, or per sequence "
                    f"{list(sequences)}"
                )
        metrics = {name: jnp.asarray(value) for name, value in metrics.items()}
        # a number that the function made is an array from the first step on
        state = _strong(after) if after is not state and jnp.isscalar(after) else after
        return state, written, metrics

    return run


def _strong(tree: Any) -> Any:
    """Arrays of the same dtypes, of which none came from a Python number alone."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.asarray(x).dtype), tree)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    jax_folder = str(pathlib.Path(jax.__file__).parent)
    own = [frame for frame in frames if not frame.filename.startswith(jax_folder)]
    return f"{own[-1].filename}, line {own[-1].lineno}"
