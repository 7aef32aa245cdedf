"""The runtime of a prepared run: meshes, engine, programs and coordinator."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from distflow_jax.cluster import processes
from distflow_jax.coordinator.assignment import PackingPlan
from distflow_jax.coordinator.coordinator import Coordinator
from distflow_jax.dag.plan_walker import Runner, Stage, make_runner
from distflow_jax.layout import Layout
from distflow_jax.observe.spans import Spans
from distflow_jax.parallel import mesh as mesh_lib
from distflow_jax.planning.compiled_plan import CompiledPlan, compile_plan
from distflow_jax.planning.field_specs import FieldSpecs, per_token_values
from distflow_jax.planning.partial_batches.partial_batch_programs import (
    PartialBatchPrograms,
    check_deferred,
    trace_partial_batches,
)
from distflow_jax.planning.plan_run import PreparedRun, RunPlan, sampler_layout
from distflow_jax.planning.run_models import States
from distflow_jax.planning.sizes import Sizes
from distflow_jax.planning.unit_programs import Program, trace_plan
from distflow_jax.resharding.weight_sync import WeightSync
from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.runtime.contexts import ContextFactory
from distflow_jax.runtime.host_offload import Offload
from distflow_jax.runtime.make_engine import make_engine, make_sync

Span = Callable[[str], contextlib.AbstractContextManager]


@dataclasses.dataclass
class Runtime:
    """All that lives on the devices of a run, and the coordinator beside it.

    `runners` are keyed by the plan's units. `engine` and `sync` are None where nothing is sampled.
    """

    runners: dict[str, Runner]
    compiled: CompiledPlan  # the programs of the units on meshes, their costs and memory
    first_states: dict[str, Any]  # of nodes that begin with one of their own
    coordinator: Coordinator
    engine: RolloutEngine | None
    sync: WeightSync | None
    meshes: dict[Layout, jax.sharding.Mesh]
    offload: Offload  # holds no state where nothing waits on the host
    member: int  # this process's number among the hosts of its sampler
    hosts: int  # processes that share the sampler
    contexts: ContextFactory  # of the plan's nodes
    partial_batches: PartialBatchPrograms | None = None  # of steps in partial batches
    partial_batch_coordinator: Coordinator | None = None  # of one partial batch after the other

    @property
    def programs(self) -> Mapping[str, Program]:
        """The programs of the units on meshes."""
        return self.compiled.programs


def build(
    run: PreparedRun,
    spans: Spans,
    phase: Span = lambda name: contextlib.nullcontext(),
    *,
    sampler: tuple[RolloutEngine, WeightSync] | None = None,
) -> Runtime:
    """Builds meshes, engine and coordinator, and compiles the programs; no array exists yet.

    `spans` times the coordinator's work in every step, `phase` the compilation. `sampler`: an
    engine and the sync that feeds it, in place of those that the config describes.
    """
    sizes = run.sizes
    meshes = make_meshes(sizes)
    engine, sync = sampler or (None, None)
    if sampler is None and run.own_samplers:
        engine = make_engine(run.source, run.config, sizes)
        engine.compile_ahead()
        sync = make_sync(run.source, run.config, sizes)
    member = processes.process_index() % sizes.sampler_hosts
    layouts = {key: found.layout for key, found in run.models.items()}
    offload = Offload(run.residencies, layouts, engine.init_decode_state if engine else None)
    contexts = ContextFactory(
        run,
        meshes,
        engine=engine,
        environments=run.environments,
        rewards=run.rewards,
        member=member,
        waiting=spans.waiting,
    )
    stages, first = contexts.stages(run.plan.tasks)
    coordinator = _coordinator(run, sizes.packing, meshes, spans.span)
    programs, partial_batches = _trace(run, stages, first, meshes)
    units = {unit.name: unit for unit in run.plan.units}
    # on the host make_runner; of a unit on a mesh the program that unit_programs.py has traced
    runners = {name: make_runner(unit, stages) for name, unit in units.items()} | programs
    with phase("compile_programs"):
        compiled = compile_plan(run, programs)
        if partial_batches is not None:
            partial_batches.compile()
    for name in run.residencies.keys() & runners.keys():  # then every unit is one node
        (task,) = units[name].tasks
        runners[name] = offload.wrap(name, task.state_key, runners[name])
    return Runtime(
        runners=runners,
        compiled=compiled,
        first_states=first,
        coordinator=coordinator,
        engine=engine,
        sync=sync,
        meshes=meshes,
        offload=offload,
        member=member,
        hosts=sizes.sampler_hosts,
        contexts=contexts,
        partial_batches=partial_batches,
        partial_batch_coordinator=partial_batches
        and _coordinator(run, sizes.partial_batch, meshes, spans.span),
    )


def make_meshes(
    sizes: Sizes, devices: Sequence[jax.Device] | None = None
) -> dict[Layout, jax.sharding.Mesh]:
    """The meshes of the training roles: on the `devices` of a planned pod, or the job's."""
    all_sizes = {m.layout: m for m in (sizes.mesh, *sizes.role_meshes.values())}
    return {layout: mesh_lib.role_mesh(m, devices) for layout, m in all_sizes.items()}


def trace(run: RunPlan, like: Mapping[str, Program] | None = None) -> dict[str, Program]:
    """The programs of a plan's units on meshes, not compiled yet; see unit_programs.trace_plan.

    The plan must have devices, or this process those that are planned for.
    """
    meshes = make_meshes(run.sizes, run.devices)
    tasks = [task for task in run.plan.tasks if task.layout.kind == "mesh"]
    return _trace(run, *ContextFactory(run, meshes).stages(tasks), meshes, like)[0]


def _trace(
    run: RunPlan,
    stages: Mapping[str, Stage],
    first_states: Mapping[str, Any],
    meshes: Mapping[Layout, jax.sharding.Mesh],
    like: Mapping[str, Program] | None = None,
) -> tuple[dict[str, Program], PartialBatchPrograms | None]:
    """The programs of all units on meshes, and those of partial batches among them."""
    layouts = {task.state_key: task.layout for task in run.plan.tasks}
    dtype = run.sizes.forward.compute_dtype
    states = States(run.models, run.source, run.config, meshes, dtype).specs()
    for key, value in first_states.items():
        if layouts[key].kind == "mesh":
            whole = NamedSharding(meshes[layouts[key]], PartitionSpec())
            states[key] = jax.ShapeDtypeStruct(np.shape(value), value.dtype, sharding=whole)
    specs = FieldSpecs(run.sizes.packing, meshes, run.sizes.routed)
    if not run.config.stream.in_partial_batches:
        return trace_plan(run.plan, stages, states, specs, like=like), None
    units = run.streamed_units
    of_partial_batch = dataclasses.replace(specs, packing=run.sizes.partial_batch)
    partial_batches = trace_partial_batches(run.plan, stages, states, of_partial_batch, units)
    check_deferred(run.plan, units, partial_batches.units.values(), of_partial_batch)
    programs: dict[str, Program] = {}
    if len(units) < len(run.plan.units):  # fields of those that stream enter the others
        programs = trace_plan(run.plan, stages, states, specs)
    return programs | dict(partial_batches.units), partial_batches


def _coordinator(
    run: PreparedRun,
    packing: PackingPlan,
    meshes: Mapping[Layout, jax.sharding.Mesh],
    span: Span,
) -> Coordinator:
    packs: dict[Layout, set[tuple[str | None, str]]] = {layout: set() for layout in meshes}
    for task in run.plan.tasks:
        for edge in task.edges_in:
            if edge.move == "pack":
                packs[edge.target_layout].add((edge.source, edge.field))
    writers: dict[str | None, Layout] = {t.node.id: t.layout for t in run.plan.tasks}
    writers[None] = sampler_layout(run.sizes)
    per_token = per_token_values(run.plan, run.sizes.routed)
    return Coordinator(packing, meshes, writers, packs, per_token, span=span)
