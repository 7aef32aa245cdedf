"""What a run is made of: everything checked first, then everything built on the devices.

`prepare` runs before any device works and finds what a user can get wrong; `build` makes meshes,
engine, stages and coordinator from what it found.
"""

import collections
import contextlib
import dataclasses
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

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
from distflow_jax.dag.worker import Runner, make_runner
from distflow_jax.hints import hint
from distflow_jax.models.transformer import param_shardings
from distflow_jax.models.weights.source import ModelSource, open_model
from distflow_jax.observe.spans import Spans
from distflow_jax.parallel import mesh as mesh_lib
from distflow_jax.parallel import processes
from distflow_jax.parallel.transfer import WeightSync
from distflow_jax.plugins import load_function
from distflow_jax.rewards.pool import RewardPool, RewardRequest
from distflow_jax.rollout.engine import RolloutEngine
from distflow_jax.settings import with_settings
from distflow_jax.stages.context import ResponseListener, Stage, StageContext
from distflow_jax.stages.table import Demands, first_state_of, resolve, wanted_reads
from distflow_jax.states import ModelOfRun, States, models_of, optimizer_of, samplers_of
from distflow_jax.tracing import FieldSpecs, Program, per_token_values, trace_plan
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
        """State key of each sampler -> that of the policy whose weights it has.

        Evaluation samples too: of the one policy that is trained, if there is one.
        """
        keys = samplers_of(self.plan)
        policies = [m.key for m in self.models.values() if m.trained and m.is_policy]
        if not keys and self.config.eval.dataset and policies:
            keys["rollout"] = "actor" if "actor" in policies else policies[0]
        return keys


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
    with _named(config.dag):
        wanted = wanted_reads(graph.nodes, Demands(config.algorithm, updates))
        graph = graph.settle(wanted)
        resolve(graph.nodes)
    return config, graph


def make_plan(config: Config, graph: Graph, sizes: Sizes) -> Plan:
    """The plan of a settled graph, with the layouts of its nodes; its models and its region can be.

    Pure in its arguments and the functions that the graph names.
    """
    known = {*ROLES, *(n.model for n in graph.nodes if n.model)}
    for name in sizes.role_meshes:
        if name not in known:
            raise ValueError(
                f"mesh.roles.{name}: no role or model of dag {config.dag!r} is called so "
                f"({hint(name, known)})"
            )
    given = dict.fromkeys(DATA[graph.data], sampler_layout(sizes))
    with _named(config.dag):
        made = plan(graph, role_layouts(sizes), given, fuse=config.training.fuse)
        models_of(made)
        until_of(config, made)
    return made


@contextlib.contextmanager
def _named(dag: str) -> Iterator[None]:
    """Puts the graph's name before what a user did wrong in it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"dag {dag!r}: {error}") from error
    except FileNotFoundError as error:
        raise FileNotFoundError(f"dag {dag!r}: {error}") from error


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


@dataclasses.dataclass(frozen=True)
class Planned:
    """What a run would do: `config` has the graph's settings, `models` are by their state's key."""

    config: Config
    graph: Graph
    source: ModelSource
    sizes: Sizes
    plan: Plan
    models: dict[str, ModelOfRun]

    def table(self, machine: Machine) -> list[tuple]:
        """The sizes, (name, value, meaning) each."""
        return self.sizes.table(self.config, self.source.config, machine)


def plan_run(config: Config, machine: Machine, chosen: Collection[str] = ()) -> Planned:
    """Settles and plans a run for a machine, this one or another; opens the model and no data.

    `chosen` are the config keys that the command line gives; see `settle`. Raises ValueError or
    FileNotFoundError.
    """
    config, graph = settle(config, chosen)
    source = open_model(config.model.source, cache_dir=config.model.cache_dir or None)
    sizes = derive_sizes(config, source.config, machine, graph)
    the_plan = make_plan(config, graph, sizes)
    return Planned(config, graph, source, sizes, the_plan, models_of(the_plan))


def prepare(config: Config, chosen: Collection[str] = ()) -> Setup:
    """Opens and checks everything a run needs. Raises ValueError or FileNotFoundError.

    `chosen` are the config keys that the command line gives; see `settle`.
    """
    machine = Machine.current()
    planned = plan_run(config, machine, chosen)
    config, graph, source = planned.config, planned.graph, planned.source
    sizes, the_plan = planned.sizes, planned.plan
    builders = resolve(task.node for task in the_plan.tasks)
    until = until_of(config, the_plan)
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
        models=planned.models,
        builders=builders,
        until=until,
        loader=loader,
        eval_prompts=eval_prompts,
        rewards=rewards,
    )


def until_of(config: Config, plan: Plan) -> Until | None:
    """What tells whether a round's groups are worth training on, where the plan has a region.

    Raises ValueError or FileNotFoundError for what does not exist or can never be true.
    """
    if plan.region is None:
        return None
    name = plan.region.until
    if name in UNTIL:
        if config.rollout.num_samples < 2:
            raise ValueError(
                f"region: it samples until groups are {name}, and the scores of "
                f"rollout.num_samples={config.rollout.num_samples} response cannot differ: use at "
                "least 2"
            )
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
    sampled. `runners` are keyed by the plan's units, `programs` are those of them on meshes."""

    runners: dict[str, Runner]
    programs: dict[str, Program]
    first_states: dict[str, Any]  # of nodes that begin with one of their own
    coordinator: Coordinator
    engine: RolloutEngine | None
    sync: WeightSync | None
    meshes: dict[Layout, jax.sharding.Mesh]
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
    stages, first = contexts.stages()
    states = States(setup.models, setup.source, config, meshes)
    programs = trace(setup.plan, sizes, stages, states, first, meshes)
    hosted = {unit.name: make_runner(unit, stages) for unit in setup.plan.units}
    return Machinery(
        runners=hosted | programs,
        programs=programs,
        first_states=first,
        coordinator=_coordinator(setup, meshes, spans.span),
        engine=engine,
        sync=sync,
        meshes=meshes,
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

    def stages(self) -> tuple[dict[str, Stage], dict[str, Any]]:
        """(stage of every node, first states of nodes that begin with one of their own)."""
        stages, first = {}, {}
        for task in self._setup.plan.tasks:
            context = self.of(task)
            stages[task.node.id] = self._setup.builders[task.node.id](context)
            state = first_state_of(task.node, context)
            if state is not None:
                first[task.state_key] = state
        return stages, first

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


def trace(
    plan: Plan,
    sizes: Sizes,
    stages: Mapping[str, Stage],
    states: States,
    first_states: Mapping[str, Any],
    meshes: Mapping[Layout, jax.sharding.Mesh],
) -> dict[str, Program]:
    """The programs of a plan's units on meshes, not compiled yet; see tracing.trace_plan."""
    layouts = {task.state_key: task.layout for task in plan.tasks}
    own = {
        key: jax.ShapeDtypeStruct(
            np.shape(value),
            np.asarray(value).dtype,
            sharding=NamedSharding(meshes[layouts[key]], PartitionSpec()),
        )
        for key, value in first_states.items()
        if layouts[key].kind == "mesh"
    }
    specs = FieldSpecs(sizes.packing, meshes)
    return trace_plan(plan, stages, states.specs() | own, specs)


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
    per_token = per_token_values(setup.plan)
    return Coordinator(setup.sizes.packing, meshes, writers, packs, per_token, span=span)


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
