"""Memory that a device needs while each node of a plan runs, computed before any array exists.

Live arrays follow from the specs of states, sampler and batch. Gradients, activations and other
temporaries of a program follow from the compiler's memory_analysis(). All sizes are bytes of one
device, the fullest where they differ.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from distflow_jax.dag.plan import Unit
from distflow_jax.dag.residency import EVALUATE, UPDATE_WEIGHTS, Item, Residency
from distflow_jax.layout import Layout, overlaps
from distflow_jax.models import lora
from distflow_jax.models.decoder_config import adapted
from distflow_jax.parallel import mesh as mesh_lib
from distflow_jax.parallel.rules import device_bytes
from distflow_jax.planning.plan_run import RunPlan
from distflow_jax.planning.run_models import bases_of, network_of
from distflow_jax.planning.unit_programs import Program
from distflow_jax.programs.costs import Costs
from distflow_jax.programs.text_table import text_table
from distflow_jax.programs.units import format_bytes, in_unit_of
from distflow_jax.rollout.cache_sizing import feature_bytes, weight_bytes
from distflow_jax.rollout.decode_state import StateShapes
from distflow_jax.rollout.prefill.prefix_cache import reading_bytes, shared_bytes
from distflow_jax.training.state import TrainState
from distflow_jax.training.update import OpenState

_EVERYWHERE = Layout("mesh")


class Held(NamedTuple):
    """Arrays of a state: their column in the table, their bytes, and the devices that hold them."""

    column: str
    bytes: int
    layout: Layout


@dataclasses.dataclass(frozen=True)
class Segment:
    """Memory of a device, in bytes, while one node, or several nodes in one program, run."""

    name: str
    trains: bool
    parameters: int  # of all models on the device
    optimizer: int  # states of their optimizers
    # of the model that the segment trains; of partial batches, the step's accumulators
    gradients: int
    temporaries: int | None  # activations and other temporaries of its program; None: unknown
    sampler_weights: int
    cache: int  # of the sampler: keys and values, slots, features of images, prompts being read
    batch: int  # fields of the step

    @property
    def live(self) -> int:
        """Arrays that exist before and after the segment."""
        return self.parameters + self.optimizer + self.sampler_weights + self.cache + self.batch

    @property
    def total(self) -> int:
        """All memory of the segment; unknown temporaries count as 0."""
        return self.live + self.gradients + (self.temporaries or 0)


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Memory of a device over a step, in bytes."""

    segments: tuple[Segment, ...]  # in the order of the step
    between: int  # live arrays between two steps
    device: int  # memory of a device; 0 if unknown

    @property
    def fullest(self) -> Segment:
        """The segment that needs the most memory."""
        return max(self.segments, key=lambda segment: segment.total)

    @property
    def unknown(self) -> list[str]:
        """Names of the segments whose temporaries are not known, and not in their sums."""
        return [segment.name for segment in self.segments if segment.temporaries is None]

    def with_sampler(
        self, temporaries: int | None, sync: int | None = None, left_out: Collection[str] = ()
    ) -> "MemoryPlan":
        """A copy with the temporaries of the sampler's programs, which are compiled last.

        `sync`: temporaries of the weight sync, if it was compiled. Segments in `left_out` keep
        unknown temporaries.
        """

        def one(segment: Segment) -> Segment:
            if segment.temporaries is not None or segment.name in left_out:
                return segment
            needed = sync if segment.name == UPDATE_WEIGHTS else temporaries
            return dataclasses.replace(segment, temporaries=needed)

        return dataclasses.replace(self, segments=tuple(map(one, self.segments)))

    def describe(self) -> str:
        """The plan as a table of text."""
        rows = [(*_TITLES.values(), "sum")]
        unit, write = in_unit_of(self.fullest.total)
        for segment in self.segments:
            sizes = (getattr(segment, name) for name in _TITLES if name != "name")
            cells = ["-" if size is None else write(size) for size in sizes]
            rows.append((segment.name, *cells, write(segment.total)))
        has = f"which has {format_bytes(self.device)}" if self.device else "whose memory is unknown"
        return f"memory of a device, {has}; in {unit}\n\n{text_table(rows)}\n"

    def to_tree(self) -> dict[str, Any]:
        """The plan as plain JSON values, in bytes."""
        segments = [dataclasses.asdict(s) | {"total": s.total} for s in self.segments]
        return {
            "device": self.device,
            "between_steps": self.between,
            "fullest": {"segment": self.fullest.name, "total": self.fullest.total},
            "segments": segments,
        }


_TITLES = {
    "name": "node",
    "parameters": "params",
    "optimizer": "optimizer",
    "gradients": "grads",
    "temporaries": "temps",
    "sampler_weights": "sampler",
    "cache": "cache",
    "batch": "batch",
}


def plan_memory(
    planned: RunPlan,
    programs: Mapping[str, Program],
    costs: Mapping[str, Costs],
    residencies: Mapping[str, Residency] | None = None,
) -> MemoryPlan:
    """Computes the memory of a plan on its devices; allocates nothing.

    The accumulators of partial batches (training/update.py) exist from a step's first program on a
    mesh to its last one, beside the gradient of a micro-batch.

    Args:
      planned: the plan.
      programs: its programs, by the unit's name.
      costs: of these programs; temporaries are unknown for programs that were not compiled.
      residencies: by node; None: those of the plan.
    """
    residencies = planned.residencies if residencies is None else residencies
    reading = _reading(planned)
    items = _items(planned, programs)
    sums = [
        Held("gradients", device_bytes(spec), planned.models[key].layout)
        for key, spec in _accumulators(programs).items()
    ]
    batch = _batch_bytes(planned.plan.units, programs)
    units = {unit.name: unit for unit in planned.plan.units}
    samplers = planned.own_samplers
    names = [UPDATE_WEIGHTS] if samplers else []
    names += [n for n, u in units.items() if n in programs or u.tasks[0].state_key in samplers]
    segments = []
    moved = frozenset().union(*(r.uses | r.replaces for r in residencies.values()))
    there = stays = frozenset(items) - moved
    for name in names:
        unit = units.get(name)
        nodes = [name] if unit is None else [task.node.id for task in unit.tasks]
        meanwhile, there = _there(nodes, residencies, there)
        program = programs.get(name)
        where = _EVERYWHERE if unit is None else _samplers_layout(planned)
        trained = () if unit is None else _trained(unit)
        gradients = max((_gradients(planned, key, program) for key in trained), default=0)
        extra = None if program is None else _extra(program, costs[name])
        sampling = program is None and unit is not None
        held = [items[item] for item in meanwhile | stays] + (sums if program else [])
        held += reading if sampling or planned.config.stream.ahead else []
        layout = where if program is None else unit.layout
        segments.append(_segment(name, layout, held, batch.get(name, 0), extra, gradients))
    end = _segment("", _EVERYWHERE, [items[item] for item in there | stays], 0, None, 0)
    return MemoryPlan(tuple(segments), end.live, planned.machine.memory)


def offload_bytes(planned: RunPlan, programs: Mapping[str, Program]) -> tuple[int, int]:
    """(bytes that a device fetches from its host in a step, bytes that it evicts to it).

    A cache is neither: it is empty between two rollouts. A frozen model is evicted once a run.
    """
    moving = [own for name, own in planned.residencies.items() if name != EVALUATE]
    if not moving:
        return 0, 0
    items = _items(planned, programs)
    fetched = [item for own in moving for item in own.prefetch if item[1] != "cache"]
    evicted = {item for own in moving for item in own.evict if item[1] != "cache"}
    frozen = {(key, "params") for key, model in planned.models.items() if not model.trained}
    held = [sum(items[i].bytes for i in what if i in items) for what in (fetched, evicted - frozen)]
    return held[0], held[1]


def _items(planned: RunPlan, programs: Mapping[str, Program]) -> dict[Item, Held]:
    """All arrays that live from step to step."""
    found: dict[Item, Held] = {}
    states = {k: spec for p in programs.values() for k, spec in p.given_states.items()}
    shared = bases_of(planned.models, planned.config)  # weights that other models hold anyway
    for key in states.keys() & planned.models.keys() - shared.keys():
        spec, layout = states[key], planned.models[key].layout
        trained = isinstance(spec, TrainState)
        params = device_bytes(spec.params if trained else spec)
        found[key, "params"] = Held("parameters", params, layout)
        if trained:
            moments = device_bytes((spec.opt_state, spec.count))
            found[key, "moments"] = Held("optimizer", moments, layout)
    if planned.own_samplers:
        model, sizes = planned.source.config, planned.sizes
        layout = _samplers_layout(planned)
        mesh = mesh_lib.sampler_mesh(sizes.rollout_tensor, planned.devices, sizes.sampler_submesh)
        weights = weight_bytes(model, sizes.engine, sizes.rollout_tensor)
        slots = feature_bytes(model, sizes.engine)
        slots += shared_bytes(model, sizes.engine, sizes.rollout_tensor)
        state = StateShapes(model, sizes.engine, mesh).specs()
        slots += device_bytes(state)
        for key in planned.own_samplers:
            found[key, "params"] = Held("sampler_weights", weights, layout)
            found[key, "cache"] = Held("cache", slots, layout)
    return found


def _reading(planned: RunPlan) -> list[Held]:
    """Long prompts that samplers read; they are there only while responses are sampled."""
    if not planned.own_samplers:
        return []
    sizes, layout = planned.sizes, _samplers_layout(planned)
    size = reading_bytes(planned.source.config, sizes.engine, sizes.rollout_tensor)
    return [Held("cache", size, layout)]


def _samplers_layout(planned: RunPlan) -> Layout:
    return Layout("mesh", submesh=planned.sizes.sampler_submesh)


def _there(
    nodes: Sequence[str], residencies: Mapping[str, Residency], there: frozenset[Item]
) -> tuple[frozenset[Item], frozenset[Item]]:
    """(items on the devices during these nodes, items after them); `there`: items before them."""
    found = [residencies[node] for node in nodes if node in residencies]
    if not found:
        return there, there
    # items of the next node are prefetched while these nodes run
    meanwhile = frozenset().union(*(s.uses | s.replaces | s.prefetch for s in found))
    last = found[-1]
    return meanwhile, ((last.uses | last.replaces) - last.evict) | last.prefetch


def _trained(unit: Unit) -> set[str]:
    return {task.state_key for task in unit.tasks if task.node.type == "MODEL_TRAIN"}


def _accumulators(programs: Mapping[str, Program]) -> dict[str, Any]:
    """Specs of the accumulators of partial batches, by state key, of models that are updated in
    them."""
    return {
        key: state.sums
        for program in programs.values()
        for key, state in program.given_states.items()
        if isinstance(state, OpenState)
    }


def _gradients(planned: RunPlan, key: str, program: Program) -> int:
    """Bytes of a model's gradient; with adapters, of the adapters' gradient."""
    network = network_of(planned.models[key].role, planned.source.config)
    network = adapted(network, planned.config.lora)
    trained, _ = lora.divide(network, program.given_states[key].params)
    return device_bytes(trained)


def _extra(program: Program, cost: Costs) -> int | None:
    """Bytes of a program beyond its arguments and output fields; None if unknown."""
    if cost.temp_bytes is None:
        return None
    if cost.output_bytes is None or cost.alias_bytes is None:  # estimated by formulas
        return cost.temp_bytes
    fresh = cost.output_bytes - cost.alias_bytes - device_bytes(program.outputs)
    return cost.temp_bytes + max(0, fresh)


def _segment(
    name: str, layout: Layout, held: Sequence[Held], batch: int, extra: int | None, gradients: int
) -> Segment:
    """The segment on the fullest device of `layout`."""
    submeshes = {h.layout for h in held if h.layout.submesh and overlaps(h.layout, layout)}
    gradients = gradients if extra is None else min(gradients, extra)

    def on(submesh: Layout) -> Segment:
        columns = ("parameters", "optimizer", "sampler_weights", "cache", "gradients")
        sizes = dict.fromkeys(columns, 0)
        for column, size, where in held:
            sizes[column] += size if overlaps(where, submesh) else 0
        sizes["gradients"] += gradients
        return Segment(
            name=name,
            trains=gradients > 0,
            temporaries=None if extra is None else extra - gradients,
            batch=batch,
            **sizes,
        )

    return max(map(on, submeshes or {layout}), key=lambda segment: segment.total)


def _batch_bytes(units: Iterable[Unit], programs: Mapping[str, Program]) -> dict[str, int]:
    """Bytes of fields on a device while each program runs, by the unit's name."""
    alive: dict[tuple[str | None, str, Layout], int] = {}
    found = {}
    for unit in units:
        program = programs.get(unit.name)
        if program is not None:
            values = [(e.source, e.field) for e in unit.inputs] + list(unit.outputs)
            for (source, field), spec in zip(
                values, (*program.inputs, *program.outputs), strict=True
            ):
                alive[source, field, unit.layout] = device_bytes(spec)
            found[unit.name] = sum(
                size for (*_, where), size in alive.items() if overlaps(where, unit.layout)
            )
        for source, field in unit.frees:
            for key in [k for k in alive if k[:2] == (source, field)]:
                del alive[key]
    return found
