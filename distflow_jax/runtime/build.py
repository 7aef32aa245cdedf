"""What lives on the devices of a run and beside them, made from what setup.prepare found."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from distflow_jax.config.run_config import Config
from distflow_jax.coordinator.coordinator import Coordinator
from distflow_jax.dag.graph import Node
from distflow_jax.dag.plan import Task
from distflow_jax.dag.plan_walker import Runner, make_runner
from distflow_jax.environments.registry import Environments
from distflow_jax.layout import Layout
from distflow_jax.models import lora
from distflow_jax.models.decoder_config import DecoderConfig, adapted
from distflow_jax.models.parameters import param_shardings
from distflow_jax.models.weights.source import ModelSource
from distflow_jax.observe.spans import Spans
from distflow_jax.parallel import mesh as mesh_lib
from distflow_jax.parallel import processes
from distflow_jax.planning.plan_run import PreparedRun, RunPlan, sampler_layout
from distflow_jax.planning.run_models import States, optimizer_of
from distflow_jax.planning.sizes import Sizes
from distflow_jax.planning.unit_programs import FieldSpecs, Program, per_token_values, trace_plan
from distflow_jax.resharding.weight_sync import WeightSync
from distflow_jax.rewards.pool import RewardPool
from distflow_jax.rollout.engine.engine import RolloutEngine, held_weights
from distflow_jax.runtime.host_offload import Offload
from distflow_jax.stages.registry import first_state_of, resolve
from distflow_jax.stages.stage_context import ResponseListener, Stage, StageContext
from distflow_jax.training.update import UpdateShape

Span = Callable[[str], AbstractContextManager]


@dataclasses.dataclass
class Runtime:
    """What lives on the devices and beside them. `engine` and `sync` are None where nothing is
    sampled. `runners` are keyed by the plan's units, `programs` are those of them on meshes."""

    runners: dict[str, Runner]
    programs: dict[str, Program]
    first_states: dict[str, Any]  # of nodes that begin with one of their own
    coordinator: Coordinator
    engine: RolloutEngine | None
    sync: WeightSync | None
    meshes: dict[Layout, jax.sharding.Mesh]
    offload: Offload  # holds no state where nothing waits on the host
    member: int  # this process's number among the hosts of its sampler
    hosts: int  # processes that share the sampler

    def compile(self) -> None:
        """Compiles all programs of nodes: what is left of it to step 1 are those of the moves."""
        for program in self.programs.values():
            program.compile()


def build(setup: PreparedRun, spans: Spans) -> Runtime:
    """Meshes, engine, programs to be compiled, and the coordinator; what they do is timed in
    `spans`."""
    config, sizes = setup.config, setup.sizes
    meshes = make_meshes(sizes)
    engine = make_engine(setup.source, config, sizes) if setup.samplers else None
    member = processes.process_index() % sizes.sampler_hosts
    contexts = _Contexts(
        setup,
        meshes,
        engine=engine,
        environments=setup.environments,
        rewards=setup.rewards,
        member=member,
        record=spans.add,
    )
    sync = None if engine is None else make_sync(setup, engine.mesh)
    stages, first = contexts.stages(setup.plan.tasks)
    programs = _trace(setup, stages, first, meshes)
    units = {unit.name: unit for unit in setup.plan.units}
    runners = {name: make_runner(unit, stages) for name, unit in units.items()} | programs
    layouts = {key: found.layout for key, found in setup.models.items()}
    offload = Offload(setup.residencies, layouts, engine.init_decode_state if engine else None)
    for name in setup.residencies.keys() & runners.keys():  # then every unit is one node
        (task,) = units[name].tasks
        runners[name] = offload.wrap(name, task.state_key, runners[name])
    return Runtime(
        runners=runners,
        programs=programs,
        first_states=first,
        coordinator=_coordinator(setup, meshes, spans.span),
        engine=engine,
        sync=sync,
        meshes=meshes,
        offload=offload,
        member=member,
        hosts=sizes.sampler_hosts,
    )


class _Contexts:
    """Makes each node's context: on the mesh of its role, with the optimizer of its model."""

    def __init__(
        self,
        planned: RunPlan,
        meshes: Mapping[Layout, jax.sharding.Mesh],
        *,
        engine: RolloutEngine | None = None,
        environments: Environments | None = None,
        rewards: RewardPool | None = None,
        member: int = 0,
        record: Callable[[str, int, int], None] = lambda name, start, end: None,
    ):
        self._planned, self._meshes, self._engine = planned, meshes, engine
        self._environments = environments
        self._rewards, self._member, self._record = rewards, member, record
        self._on_response = ResponseListener()
        self._kinds = collections.Counter(_stage_name(t.node) for t in planned.plan.tasks)

    def stages(self, tasks: Sequence[Task]) -> tuple[dict[str, Stage], dict[str, Any]]:
        """(stage of each node, first states of those that begin with one of their own)."""
        stages, first = {}, {}
        builders = resolve(task.node for task in tasks)
        for task in tasks:
            context = self.of(task)
            stages[task.node.id] = builders[task.node.id](context)
            state = first_state_of(task.node, context)
            if state is not None:
                first[task.state_key] = state
        return stages, first

    def of(self, task: Task) -> StageContext:
        """The context of one node."""
        setup, config, node = self._planned, self._planned.config, task.node
        layout = task.layout if task.layout.kind == "mesh" else setup.sizes.mesh.layout
        optimizer, schedule = optimizer_of(config, node.role)
        limit = config.rollout.max_response_length
        return StageContext(
            node=node,
            prefix=f"{node.id}/" if self._kinds[_stage_name(node)] > 1 else "",
            model=self._decoder_of(task),
            tokenizer=setup.source.tokenizer,
            algorithm=config.algorithm,
            forward=setup.sizes.forward,
            shape=UpdateShape(self._meshes[layout], setup.sizes.rows_at_a_time(layout), limit),
            optimizer=optimizer,
            schedule=schedule,
            rollout=config.rollout,
            engine=self._engine,
            environments=self._environments,
            value=config.critic.loss,
            preference=config.preference,
            reward_model=config.reward_model,
            reward=config.reward,
            rewards=self._rewards,
            member=self._member,
            hosts=setup.sizes.sampler_hosts,
            on_response=self._on_response,
            early_rewards=self._early_rewards(task),
            record=self._record,
            prompts_per_step=config.data.prompts_per_step,
            mini_batches=config.training.mini_batches,
            epochs=config.training.epochs,
            balance_coef=config.training.balance_coef,
        )

    def _decoder_of(self, task: Task) -> DecoderConfig:
        """The decoder of the node's model: with adapters where it is trained by them."""
        decoder, model = self._planned.source.config, self._planned.models.get(task.state_key)
        if model is None or not model.trained:
            return decoder
        return adapted(decoder, self._planned.config.lora)

    def _early_rewards(self, task: Task) -> bool:
        """Whether rewards may begin while the sampler works: they need nothing but its responses,
        and there is no doubt which."""
        tasks = self._planned.plan.tasks
        samplers = [t.node.id for t in tasks if t.node.role == "ROLLOUT"]
        rewards = [t for t in tasks if _stage_name(t.node) == _stage_name(task.node)]
        return (
            self._planned.config.coordinator.overlap_rewards
            and (task.node.role, task.node.type, task.node.fn) == ("REWARD", "COMPUTE", None)
            and task.node.scope != "batch"
            and len(samplers) == len(rewards) == 1
            and {edge.source for edge in task.edges_in} <= {None, *samplers}
        )


def make_meshes(
    sizes: Sizes, devices: Sequence[jax.Device] | None = None
) -> dict[Layout, jax.sharding.Mesh]:
    """The meshes of the training roles: on the `devices` of a planned pod, or the job's."""
    all_sizes = {m.layout: m for m in (sizes.mesh, *sizes.role_meshes.values())}
    return {layout: mesh_lib.role_mesh(m, devices) for layout, m in all_sizes.items()}


def trace(planned: RunPlan) -> dict[str, Program]:
    """The programs of a plan's units on meshes, not compiled yet; see tracing.trace_plan.

    The plan must have devices, or this process those that are planned for.
    """
    meshes = make_meshes(planned.sizes, planned.devices)
    tasks = [task for task in planned.plan.tasks if task.layout.kind == "mesh"]
    return _trace(planned, *_Contexts(planned, meshes).stages(tasks), meshes)


def _trace(
    planned: RunPlan,
    stages: Mapping[str, Stage],
    first_states: Mapping[str, Any],
    meshes: Mapping[Layout, jax.sharding.Mesh],
) -> dict[str, Program]:
    layouts = {task.state_key: task.layout for task in planned.plan.tasks}
    states = States(planned.models, planned.source, planned.config, meshes).specs()
    for key, value in first_states.items():
        if layouts[key].kind == "mesh":
            whole = NamedSharding(meshes[layouts[key]], PartitionSpec())
            states[key] = jax.ShapeDtypeStruct(np.shape(value), value.dtype, sharding=whole)
    specs = FieldSpecs(planned.sizes.packing, meshes, planned.sizes.routed)
    return trace_plan(planned.plan, stages, states, specs)


def _stage_name(node: Node) -> tuple:
    return (node.fn,) if node.fn else (node.role, node.type)


def _coordinator(
    setup: PreparedRun, meshes: Mapping[Layout, jax.sharding.Mesh], span: Span
) -> Coordinator:
    packs: dict[Layout, set[tuple[str | None, str]]] = {layout: set() for layout in meshes}
    for task in setup.plan.tasks:
        for edge in task.edges_in:
            if edge.move == "pack":
                packs[edge.target_layout].add((edge.source, edge.field))
    writers: dict[str | None, Layout] = {t.node.id: t.layout for t in setup.plan.tasks}
    writers[None] = sampler_layout(setup.sizes)
    per_token = per_token_values(setup.plan, setup.sizes.routed)
    return Coordinator(setup.sizes.packing, meshes, writers, packs, per_token, span=span)


def make_sync(planned: RunPlan, local_mesh: jax.sharding.Mesh) -> WeightSync:
    """What brings a policy's weights to the samplers; this process's lies on `local_mesh`."""
    config, sizes, model = planned.config, planned.sizes, planned.source.config
    replica_mesh = mesh_lib.replica_mesh(sizes.rollout_tensor, planned.devices)
    replicas = param_shardings(model, replica_mesh)
    merge = functools.partial(lora.merged, scale=config.lora.scale)
    holding = held_weights(model, sizes.engine, local_mesh)
    return WeightSync(replicas, local_mesh, sizes.engine.dtype, holding, merge)


def make_engine(
    source: ModelSource,
    config: Config,
    sizes: Sizes,
    devices: Sequence[jax.Device] | None = None,
) -> RolloutEngine:
    """This process's sampler engine; of `devices` that are planned for, the first host's."""
    return RolloutEngine(
        source.config,
        sizes.engine,
        mesh_lib.sampler_mesh(sizes.rollout_tensor, devices),
        stop_ids=source.tokenizer.stop_ids,
        seed=config.seed,
        tokenizer=source.tokenizer,
    )
