"""What a run is made of: everything checked first, then everything built on the devices.

`prepare` runs before any device works and finds what a user can get wrong; `build` makes meshes,
engine, stages and coordinator from what it found.
"""

import collections
import dataclasses
import json
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager

import jax

from distflow_jax.batch import Prompt
from distflow_jax.config import Config, Machine, Sizes, derive_sizes
from distflow_jax.config_dict import to_config_dict, to_json
from distflow_jax.coordinator.coordinator import Coordinator
from distflow_jax.coordinator.dataset import open_dataset
from distflow_jax.coordinator.given import ANSWERS
from distflow_jax.coordinator.loader import Loader, SamplerShare
from distflow_jax.coordinator.rounds import UNTIL, Until
from distflow_jax.dag.graph import DATA, ROLES, Graph, Node
from distflow_jax.dag.pipelines import load_graph
from distflow_jax.dag.planner import HOST, Plan, Task, plan
from distflow_jax.dag.residency import Stay, describe, residency
from distflow_jax.hints import hint
from distflow_jax.models.transformer import param_shardings
from distflow_jax.models.weights.source import ModelSource, open_model
from distflow_jax.observe.spans import Spans
from distflow_jax.offload import Offload
from distflow_jax.parallel import mesh as mesh_lib
from distflow_jax.parallel import processes
from distflow_jax.parallel.host_memory import check_host_memory
from distflow_jax.parallel.transfer import WeightSync
from distflow_jax.plugins import load_function
from distflow_jax.rewards.pool import RewardPool, RewardRequest
from distflow_jax.rollout.engine import RolloutEngine
from distflow_jax.settings import with_settings
from distflow_jax.stages.context import ResponseListener, Stage, StageContext
from distflow_jax.stages.table import Demands, resolve, wanted_reads
from distflow_jax.states import ModelOfRun, models_of, optimizer_of
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
    models: dict[str, ModelOfRun]  # by the key of their state
    builders: dict[str, Callable[[StageContext], Stage]]
    until: Until | None  # where the plan has a region
    loader: Loader
    eval_prompts: list[Prompt]
    rewards: RewardPool

    @property
    def samplers(self) -> dict[str, str]:
        """State key of each sampler -> that of the policy whose weights it has."""
        return samplers_of(self.plan, self.models, self.config)

    @property
    def stays(self) -> dict[str, Stay]:
        """What each node has on its devices, where the rest waits on the host; empty otherwise."""
        return residency_of(self.plan, self.models, self.config)

    def plan_text(self) -> str:
        """The plan as tables for people."""
        stays = self.stays
        return self.plan.describe() + (f"\n{describe(stays)}" if stays else "")


def samplers_of(plan: Plan, models: Mapping[str, ModelOfRun], config: Config) -> dict[str, str]:
    """State key of each sampler -> that of the policy whose weights it has.

    Evaluation samples too: of the one policy that is trained, if there is one.
    """
    keys = {
        t.state_key: t.node.model or "actor"
        for t in plan.tasks
        if t.node.role == "ROLLOUT" and t.node.type == "MODEL_INFERENCE"
    }
    policies = [m.key for m in models.values() if m.trained and m.is_policy]
    if not keys and config.eval.dataset and policies:
        keys["rollout"] = "actor" if "actor" in policies else policies[0]
    return keys


def residency_of(plan: Plan, models: Mapping[str, ModelOfRun], config: Config) -> dict[str, Stay]:
    """What each node has on its devices, where the rest waits on the host; empty otherwise."""
    if config.training.offload == "none":
        return {}
    return residency(plan, samplers_of(plan, models, config))


def settle(config: Config, chosen: Collection[str] = ()) -> tuple[Config, Graph]:
    """The configured graph, as this run needs it, and the config with the graph's settings.

    `chosen` are the config keys that the command line gives. Pure in its arguments and the graph's
    file. Raises ValueError or FileNotFoundError.
    """
    graph = load_graph(config.dag, config)
    if not any(node.type == "MODEL_TRAIN" for node in graph.nodes):
        raise ValueError(f"dag {config.dag!r} trains nothing: it has no node of type MODEL_TRAIN")
    config = with_settings(config, graph.settings, chosen=chosen)
    graph = load_graph(config.dag, config)  # what it takes from the config may have been a setting
    updates = config.training.mini_batches * config.training.epochs
    try:
        wanted = wanted_reads(graph.nodes, Demands(config.algorithm, updates))
        graph = graph.settle(wanted)
        resolve(graph.nodes)
    except ValueError as error:
        raise ValueError(f"dag {config.dag!r}: {error}") from error
    return config, graph


def make_plan(config: Config, graph: Graph, sizes: Sizes) -> Plan:
    """The plan of a settled graph, with the layouts of its nodes. Pure in its arguments."""
    known = {*ROLES, *(n.model for n in graph.nodes if n.model)}
    for name in sizes.role_meshes:
        if name not in known:
            raise ValueError(
                f"mesh.roles.{name}: no role or model of dag {config.dag!r} is called so "
                f"({hint(name, known)})"
            )
    given = dict.fromkeys(DATA[graph.data], sampler_layout(sizes))
    try:
        return plan(graph, role_layouts(sizes), given)
    except ValueError as error:
        raise ValueError(f"dag {config.dag!r}: {error}") from error


def sampler_layout(sizes: Sizes) -> Layout:
    """Where prompts enter and responses come out: on the hosts, k by k where k share a sampler."""
    return Layout("host", (("hosts", sizes.sampler_hosts),)) if sizes.sampler_hosts > 1 else HOST


def role_layouts(sizes: Sizes) -> dict[str, Layout]:
    """Layout of every role, and of every model that has one of its own."""
    trainers = {role: sizes.mesh_of(role).layout for role in ("ACTOR", "CRITIC", "REFERENCE")}
    own = {name: mesh.layout for name, mesh in sizes.role_meshes.items()}
    # a reward is computed on the host, unless it is a model
    reward = sizes.mesh_of("REWARD").layout
    models = {"REWARD MODEL_INFERENCE": reward, "REWARD MODEL_TRAIN": reward}
    return trainers | own | models | {"ROLLOUT": sampler_layout(sizes), "REWARD": HOST}


def prepare(config: Config, chosen: Collection[str] = ()) -> Setup:
    """Opens and checks everything a run needs. Raises ValueError or FileNotFoundError.

    `chosen` are the config keys that the command line gives; see `settle`.
    """
    machine = Machine.current()
    config, graph = settle(config, chosen)
    if config.training.offload != "none":
        check_host_memory(f"training.offload={config.training.offload!r}")
    source = open_model(config.model.source, cache_dir=config.model.cache_dir or None)
    sizes = derive_sizes(config, source.config, machine, graph)
    the_plan = make_plan(config, graph, sizes)
    models = models_of(the_plan)
    builders = resolve(task.node for task in the_plan.tasks)
    until = _until(the_plan)
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
        answers=ANSWERS[graph.data] or 0,
        max_answer=config.rollout.max_response_length,
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
    return Setup(
        config=config,
        machine=machine,
        source=source,
        sizes=sizes,
        plan=the_plan,
        models=models,
        builders=builders,
        until=until,
        loader=loader,
        eval_prompts=eval_prompts,
        rewards=rewards,
    )


def _until(plan: Plan) -> Until | None:
    """What tells whether a round's groups are worth training on, where the plan has a region."""
    if plan.region is None:
        return None
    name = plan.region.until
    if name in UNTIL:
        return UNTIL[name]
    if ":" not in name:
        raise ValueError(
            f"region: until is {name!r} ({hint(name, UNTIL)}); or give module:function"
        )
    return load_function(name, "region's until")


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
    """What lives on the devices and beside them. `engine` and `sync` are None where nothing is
    sampled."""

    stages: dict[str, Stage]
    coordinator: Coordinator
    engine: RolloutEngine | None
    sync: WeightSync | None
    meshes: dict[Layout, jax.sharding.Mesh]
    offload: Offload  # holds no state where nothing waits on the host
    member: int  # this process's number among the hosts of its sampler
    hosts: int  # processes that share the sampler


def build(setup: Setup, spans: Spans) -> Machinery:
    """Meshes, engine, compiled stages and the coordinator; what they do is timed in `spans`."""
    config, sizes, model = setup.config, setup.sizes, setup.source.config
    all_sizes = {m.layout: m for m in (sizes.mesh, *sizes.role_meshes.values())}
    meshes = {layout: mesh_lib.role_mesh(m) for layout, m in all_sizes.items()}
    engine = make_engine(setup.source, config, sizes) if setup.samplers else None
    member = processes.process_index() % sizes.sampler_hosts
    contexts = _Contexts(setup, meshes, engine, member, spans)
    sync = None
    if engine is not None:
        replicas = param_shardings(model, mesh_lib.replica_mesh(sizes.rollout_tensor))
        sync = WeightSync(replicas, engine.mesh, sizes.engine.dtype)
    layouts = {key: found.layout for key, found in setup.models.items()}
    offload = Offload(setup.stays, layouts, engine.init_decode_state if engine else None)
    stages = {}
    for task in setup.plan.tasks:
        stage = setup.builders[task.node.id](contexts.of(task))
        stages[task.node.id] = offload.wrap(task.node.id, task.state_key, stage)
    return Machinery(
        stages=stages,
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
        setup: Setup,
        meshes: Mapping[Layout, jax.sharding.Mesh],
        engine: RolloutEngine | None,
        member: int,
        spans: Spans,
    ):
        self._setup, self._meshes, self._engine = setup, meshes, engine
        self._member, self._spans = member, spans
        self._on_response = ResponseListener()
        self._kinds = collections.Counter(_stage_name(t.node) for t in setup.plan.tasks)

    def of(self, task: Task) -> StageContext:
        """The context of one node."""
        setup, config, node = self._setup, self._setup.config, task.node
        layout = task.layout if task.layout.kind == "mesh" else setup.sizes.mesh.layout
        optimizer, schedule = optimizer_of(config, node.role)
        limit = config.rollout.max_response_length
        return StageContext(
            node=node,
            prefix=f"{node.id}/" if self._kinds[_stage_name(node)] > 1 else "",
            model=setup.source.config,
            tokenizer=setup.source.tokenizer,
            algorithm=config.algorithm,
            forward=setup.sizes.forward,
            shape=UpdateShape(self._meshes[layout], setup.sizes.micro_rows, limit),
            optimizer=optimizer,
            schedule=schedule,
            rollout=config.rollout,
            engine=self._engine,
            value=config.critic.loss,
            preference=config.preference,
            reward_model=config.reward_model,
            reward=config.reward,
            rewards=setup.rewards,
            member=self._member,
            hosts=setup.sizes.sampler_hosts,
            on_response=self._on_response,
            early_rewards=self._early_rewards(task),
            record=self._spans.add,
            prompts_per_step=config.data.prompts_per_step,
            mini_batches=config.training.mini_batches,
            epochs=config.training.epochs,
        )

    def _early_rewards(self, task: Task) -> bool:
        """Whether rewards may begin while the sampler works: they need nothing but its responses,
        and there is no doubt which."""
        tasks = self._setup.plan.tasks
        samplers = [t.node.id for t in tasks if t.node.role == "ROLLOUT"]
        rewards = [t for t in tasks if _stage_name(t.node) == _stage_name(task.node)]
        return (
            self._setup.config.coordinator.overlap_rewards
            and (task.node.role, task.node.type, task.node.fn) == ("REWARD", "COMPUTE", None)
            and task.node.scope != "batch"
            and len(samplers) == len(rewards) == 1
            and {edge.source for edge in task.edges_in} <= {None, *samplers}
        )


def _stage_name(node: Node) -> tuple:
    return (node.fn,) if node.fn else (node.role, node.type)


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
