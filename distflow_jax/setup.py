"""What a run is made of: everything checked first, then everything built on the devices.

`prepare` runs before any device works and finds what a user can get wrong; `build` makes meshes,
engine, stages and coordinator from what it found.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax

from distflow_jax.batch import Prompt
from distflow_jax.config import Config, Machine, Sizes, derive_sizes
from distflow_jax.config_dict import to_config_dict, to_json
from distflow_jax.coordinator.coordinator import Coordinator
from distflow_jax.coordinator.dataset import open_dataset
from distflow_jax.coordinator.loader import Loader, SamplerShare
from distflow_jax.dag.graph import ROLES, hint
from distflow_jax.dag.pipelines import load_graph
from distflow_jax.dag.planner import HOST, Plan, Task, plan
from distflow_jax.inference import load_or_init_params
from distflow_jax.models.transformer import param_shardings
from distflow_jax.models.weights.source import ModelSource, open_model
from distflow_jax.observe.spans import Spans
from distflow_jax.parallel import mesh as mesh_lib
from distflow_jax.parallel import processes
from distflow_jax.parallel.mesh import MeshSizes
from distflow_jax.parallel.transfer import WeightSync
from distflow_jax.rewards.pool import RewardPool, RewardRequest
from distflow_jax.rollout.engine import RolloutEngine
from distflow_jax.stages.context import ResponseListener, Stage, StageContext
from distflow_jax.stages.table import resolve
from distflow_jax.training.optimizer import learning_rate, make_optimizer
from distflow_jax.training.state import TrainState, init_state
from distflow_jax.training.update import UpdateShape
from distflow_jax.types import Layout, flatten_dict

Span = Callable[[str], AbstractContextManager]


@dataclasses.dataclass
class Setup:
    """Everything that was checked before the first device computation."""

    config: Config
    machine: Machine
    source: ModelSource
    sizes: Sizes
    plan: Plan
    builders: dict[str, Callable[[StageContext], Stage]]
    loader: Loader
    eval_prompts: list[Prompt]
    rewards: RewardPool


def make_plan(config: Config, sizes: Sizes) -> Plan:
    """The plan of the configured graph, with its layouts. Pure in (config, sizes)."""
    updates = config.training.mini_batches * config.training.epochs
    graph = load_graph(
        config.dag,
        use_reference=config.algorithm.kl_coef > 0,
        recompute_old_logp=updates > 1,
    )
    trainers = [n for n in graph.nodes if (n.role, n.type) == ("ACTOR", "MODEL_TRAIN")]
    if not trainers:
        raise ValueError(f"dag {config.dag!r} trains nothing: it has no node ACTOR MODEL_TRAIN")
    for field, wanted, why, otherwise in (
        (
            "ref_logp",
            config.algorithm.kl_coef > 0,
            "algorithm.kl_coef is above 0",
            "set algorithm.kl_coef to 0",
        ),
        (
            "old_logp",
            updates > 1,
            f"a batch gets {updates} optimizer steps",
            "set training.mini_batches and training.epochs to 1",
        ),
    ):
        for node in trainers:
            if wanted and field not in node.reads:
                raise ValueError(
                    f"dag {config.dag!r}: node {node.id!r} reads no {field!r}, but {why}; add it "
                    f"to its reads and a node that writes it, or {otherwise}"
                )
    known = {*ROLES, *(n.model for n in graph.nodes if n.model)}
    for name in sizes.role_meshes:
        if name not in known:
            raise ValueError(
                f"mesh.roles.{name}: no role or model of dag {config.dag!r} is called so "
                f"({hint(name, known)})"
            )
    return plan(graph, role_layouts(sizes), {"prompt": sampler_layout(sizes)})


def sampler_layout(sizes: Sizes) -> Layout:
    """Where prompts enter and responses come out: on the hosts, k by k where k share a sampler."""
    return Layout("host", (("hosts", sizes.sampler_hosts),)) if sizes.sampler_hosts > 1 else HOST


def role_layouts(sizes: Sizes) -> dict[str, Layout]:
    """Layout of every role, and of every model that has one of its own."""
    trainers = {role: sizes.mesh_of(role).layout for role in ("ACTOR", "CRITIC", "REFERENCE")}
    own = {name: mesh.layout for name, mesh in sizes.role_meshes.items()}
    return {"ROLLOUT": sampler_layout(sizes), "REWARD": HOST} | trainers | own


def prepare(config: Config) -> Setup:
    """Opens and checks everything a run needs. Raises ValueError or FileNotFoundError."""
    machine = Machine.current()
    source = open_model(config.model.source, cache_dir=config.model.cache_dir or None)
    sizes = derive_sizes(config, source.config, machine)
    the_plan = make_plan(config, sizes)
    builders = resolve(task.node for task in the_plan.tasks)
    dataset = open_dataset(
        config.data.train,
        system_prompt=config.data.system_prompt,
        prompt_suffix=config.data.prompt_suffix,
    )
    loader = Loader(
        dataset,
        source.tokenizer,
        config.data,
        seed=config.seed,
        share=sampler_share(sizes, machine),
    )
    if config.data.epochs and loader.num_steps < config.training.steps:
        raise ValueError(
            f"data.epochs={config.data.epochs} give {loader.num_steps} steps of "
            f"{config.data.prompts_per_step} prompts, fewer than training.steps="
            f"{config.training.steps}; lower that, or raise data.epochs (0 is no limit)"
        )
    eval_prompts = load_eval_prompts(config, source, sizes, machine)
    rewards = RewardPool(config.reward)
    try:
        rewards.check(trial_request(loader.prompt(0)))
        processes.check_agreement(
            {
                "config": config_table(config),
                "plan": plan_table(the_plan),
                "code": processes.code_table(),
                "versions": processes.version_table(),
            }
        )
    except BaseException:
        rewards.close()
        raise
    return Setup(config, machine, source, sizes, the_plan, builders, loader, eval_prompts, rewards)


def config_table(config: Config) -> dict[str, str]:
    """{"training.optimizer.lr": "1e-06", ...}: what processes must have alike."""
    tree = json.loads(to_json(to_config_dict(config)))
    return {key.replace("/", "."): json.dumps(x) for key, x in flatten_dict(tree).items()}


def plan_table(plan: Plan) -> dict[str, str]:
    """{"rollout.layout.kind": "\"host\"", ...}: all of the plan's JSON, by node."""
    tree = json.loads(plan.to_json())
    tasks = {task["node"]["id"]: {"place": i} | task for i, task in enumerate(tree.pop("tasks"))}
    flat = flatten_dict(tree) | flatten_dict(tasks)
    return {key.replace("/", "."): json.dumps(x) for key, x in flat.items()}


def trial_request(prompt: Prompt) -> RewardRequest:
    """The row on which a reward function is tried before step 1."""
    return RewardRequest(
        data_source=prompt.data_source,
        solution=str(prompt.ground_truth),
        ground_truth=prompt.ground_truth,
        extra_info=prompt.extra_info,
        prompt=prompt.text,
        response_length=1,
    )


def sampler_share(sizes: Sizes, machine: Machine) -> SamplerShare:
    """The sampler that this process belongs to."""
    hosts = sizes.sampler_hosts
    return SamplerShare(processes.process_index() // hosts, machine.processes // hosts, hosts)


def load_eval_prompts(
    config: Config, source: ModelSource, sizes: Sizes, machine: Machine
) -> list[Prompt]:
    """This sampler's share of the evaluation prompts; empty without an evaluation set."""
    if not config.eval.dataset:
        return []
    data = dataclasses.replace(config.data, shuffle=False, epochs=1, prompts_per_step=1)
    dataset = open_dataset(
        config.eval.dataset,
        system_prompt=data.system_prompt,
        prompt_suffix=data.prompt_suffix,
    )
    loader = Loader(dataset, source.tokenizer, data, seed=config.seed)
    count = min(config.eval.num_prompts or len(loader), len(loader))
    if count < machine.processes:
        raise ValueError(
            f"{config.eval.dataset!r} gives {count} evaluation prompts for {machine.processes} "
            f"processes; set config.eval.num_prompts to at least {machine.processes}"
        )
    share = sampler_share(sizes, machine)
    first, last = (count * (share.index + i) // share.count for i in range(2))
    return [loader.prompt(counter) for counter in range(first, last)]


@dataclasses.dataclass
class Machinery:
    """What lives on the devices and beside them."""

    context: StageContext
    stages: dict[str, Stage]
    coordinator: Coordinator
    sync: WeightSync
    meshes: dict[Layout, jax.sharding.Mesh]

    def mesh_of(self, sizes: MeshSizes) -> jax.sharding.Mesh:
        """The mesh of these sizes."""
        return self.meshes[sizes.layout]


def build(setup: Setup, spans: Spans) -> Machinery:
    """Meshes, engine, compiled stages and the coordinator; what they do is timed in `spans`."""
    config, sizes, model = setup.config, setup.sizes, setup.source.config
    all_sizes = {m.layout: m for m in (sizes.mesh, *sizes.role_meshes.values())}
    meshes = {layout: mesh_lib.role_mesh(m) for layout, m in all_sizes.items()}
    engine = make_engine(setup.source, config, sizes)
    updates = config.training.steps * config.training.mini_batches * config.training.epochs
    context = StageContext(
        model=model,
        tokenizer=setup.source.tokenizer,
        algorithm=config.algorithm,
        forward=sizes.forward,
        shape=_update_shape(meshes[sizes.mesh.layout], setup),
        optimizer=make_optimizer(config.training.optimizer, updates),
        schedule=learning_rate(config.training.optimizer, updates),
        rollout=config.rollout,
        engine=engine,
        reward=config.reward,
        rewards=setup.rewards,
        member=processes.process_index() % sizes.sampler_hosts,
        hosts=sizes.sampler_hosts,
        on_response=ResponseListener(),
        early_rewards=False,
        record=spans.add,
        prompts_per_step=config.data.prompts_per_step,
        mini_batches=config.training.mini_batches,
        epochs=config.training.epochs,
    )
    return Machinery(
        context=context,
        stages={
            task.node.id: setup.builders[task.node.id](_context_of(task, context, setup, meshes))
            for task in setup.plan.tasks
        },
        coordinator=_coordinator(setup, meshes, spans.span),
        sync=WeightSync(
            param_shardings(model, mesh_lib.replica_mesh(sizes.rollout_tensor)),
            engine.mesh,
            sizes.engine.dtype,
        ),
        meshes=meshes,
    )


def _update_shape(mesh: jax.sharding.Mesh, setup: Setup) -> UpdateShape:
    return UpdateShape(mesh, setup.sizes.micro_rows, setup.config.rollout.max_response_length)


def _context_of(
    task: Task, context: StageContext, setup: Setup, meshes: Mapping[Layout, jax.sharding.Mesh]
) -> StageContext:
    """The context of one node: on the mesh of its role, rewards early where its inputs allow it."""
    if task.layout.kind == "mesh":
        return dataclasses.replace(context, shape=_update_shape(meshes[task.layout], setup))
    samplers = {t.node.id for t in setup.plan.tasks if t.node.role == "ROLLOUT"}
    sources = {edge.source for edge in task.edges_in}
    early = (
        setup.config.coordinator.overlap_rewards
        and task.node.role == "REWARD"
        and task.node.scope != "batch"
        and len(samplers) == 1
        and sources <= {None, *samplers}
    )
    return dataclasses.replace(context, early_rewards=early)


def _coordinator(
    setup: Setup, meshes: Mapping[Layout, jax.sharding.Mesh], span: Span
) -> Coordinator:
    packs: dict[Layout, set[tuple[str | None, str]]] = {layout: set() for layout in meshes}
    for task in setup.plan.tasks:
        for edge in task.edges_in:
            if edge.move == "pack":
                packs[edge.target_layout].add((edge.source, edge.field))
    writers: dict[str | None, Layout] = {t.node.id: t.layout for t in setup.plan.tasks}
    writers[None] = sampler_layout(setup.sizes)
    return Coordinator(setup.sizes.packing, meshes, writers, packs, span=span)


def make_engine(source: ModelSource, config: Config, sizes: Sizes) -> RolloutEngine:
    """This process's sampler engine."""
    return RolloutEngine(
        source.config,
        sizes.engine,
        mesh_lib.sampler_mesh(sizes.rollout_tensor),
        stop_ids=source.tokenizer.stop_ids,
        seed=config.seed,
        tokenizer=source.tokenizer,
    )


def initial_states(
    setup: Setup, machinery: Machinery, restored: TrainState | None
) -> dict[str, Any]:
    """States by state_key: the actor, and where the plan has one the frozen reference."""
    model, sizes = setup.source.config, setup.sizes
    mesh = machinery.mesh_of(sizes.mesh)
    reference = next((t for t in setup.plan.tasks if t.state_key == "reference"), None)
    states: dict[str, Any] = {}
    if reference is not None:
        own_mesh = machinery.meshes[reference.layout]
        states["reference"] = load_or_init_params(setup.source, setup.config.seed, own_mesh)
    if restored is not None:
        return states | {"actor": restored}
    if reference is not None and reference.layout == sizes.mesh.layout:
        # a copy of its own: the actor's parameters are donated from step to step
        params = jax.tree.map(lambda x: x.copy(), states["reference"])
    else:
        params = load_or_init_params(setup.source, setup.config.seed, mesh)
    return states | {"actor": init_state(params, model, machinery.context.optimizer, mesh)}
