"""What a run is made of, checked before any device works: what a user can get wrong is found here.

`plan_run` needs the config alone, `prepare` opens data and rewards too; runtime/build.py builds
from that.
"""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Collection, Iterator, Sequence

import jax
from flax.traverse_util import flatten_dict

from distflow_jax.batch import Prompt
from distflow_jax.config.config_dict import to_config_dict, to_json
from distflow_jax.config.graph_settings import with_settings
from distflow_jax.config.run_config import Config
from distflow_jax.coordinator.rounds import UNTIL, Until
from distflow_jax.dag.environment_rewards import with_environment_rewards
from distflow_jax.dag.graph import DATA, ROLES, Graph
from distflow_jax.dag.load_graph import open_graph
from distflow_jax.dag.plan import Plan
from distflow_jax.dag.planner import HOST, plan
from distflow_jax.dag.residency import Residency, describe, plan_residency
from distflow_jax.dag.router_replay import with_router_replay
from distflow_jax.data.dataset import open_dataset
from distflow_jax.data.loader import Loader, SamplerShare
from distflow_jax.data.step_columns import ANSWERS
from distflow_jax.did_you_mean import hint
from distflow_jax.environments.registry import Environments, load_environment
from distflow_jax.layout import Layout
from distflow_jax.models.weights.source import ModelSource, open_model
from distflow_jax.parallel import processes
from distflow_jax.parallel.host_memory import check_host_memory
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.run_models import ModelOfRun, models_of, samplers_of
from distflow_jax.planning.sizes import Sizes, derive_sizes
from distflow_jax.planning.sizes_table import describe_sizes
from distflow_jax.rewards.pool import RewardPool
from distflow_jax.rewards.prompt_requests import trial_request
from distflow_jax.stages.registry import Demands, resolve, wanted_reads
from distflow_jax.user_functions import load_function


def settle(config: Config, chosen: Collection[str] = ()) -> tuple[Config, Graph]:
    """The config with the settings of its graph, and the graph with the values of that config.

    The graph keeps the optional reads that this run needs, and no others. `chosen` are the config
    keys that the command line gives. Pure in its arguments and the graph's file. Raises ValueError
    or FileNotFoundError.
    """
    opened = open_graph(config.dag, config)
    config = with_settings(config, opened.settings, chosen=chosen)
    graph = opened.build(config)
    if not any(node.type == "MODEL_TRAIN" for node in graph.nodes):
        raise ValueError(f"dag {config.dag!r} trains nothing: it has no node of type MODEL_TRAIN")
    if config.rollout.environment:
        graph = with_environment_rewards(graph)
    updates = config.training.mini_batches * config.training.epochs
    with _named(config.dag):
        if config.training.router_replay:
            graph = with_router_replay(graph)
        graph = graph.settle(wanted_reads(graph.nodes, Demands(config.algorithm, updates)))
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
    # two nodes in one program would need the models of both
    fuse = config.training.fuse and config.training.offload == "none"
    with _named(config.dag):
        made = plan(graph, role_layouts(sizes), given, fuse=fuse)
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


@dataclasses.dataclass
class RunPlan:
    """What a run would do: `config` has the graph's settings, `models` are by their state's key."""

    config: Config
    graph: Graph
    machine: Machine
    source: ModelSource
    sizes: Sizes
    plan: Plan
    models: dict[str, ModelOfRun]
    # of a pod that is planned for, in the canonical order; None: those of this job
    devices: Sequence[jax.Device] | None = dataclasses.field(default=None, kw_only=True)

    def table(self) -> list[tuple]:
        """The sizes, (name, value, meaning) each."""
        return describe_sizes(self.sizes, self.config, self.source.config, self.machine)

    def text(self) -> str:
        """The plan as tables, with the residency of its nodes if models are offloaded."""
        found = self.residencies
        return self.plan.describe() + (f"\n{describe(found)}" if found else "")

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

    @property
    def residencies(self) -> dict[str, Residency]:
        """The residency of each node by its id, with training.offload; {} without."""
        if self.config.training.offload == "none":
            return {}
        return plan_residency(self.plan, self.samplers)


@dataclasses.dataclass
class PreparedRun(RunPlan):
    """Everything that was checked before the first device computation."""

    until: Until | None  # where the plan has a region
    loader: Loader
    eval_prompts: list[Prompt]
    rewards: RewardPool
    environments: Environments | None  # None: a response is one turn


def plan_run(
    config: Config,
    machine: Machine,
    chosen: Collection[str] = (),
    *,
    open_source: Callable[..., ModelSource] = open_model,
) -> RunPlan:
    """Settles and plans a run for a machine, this one or another; opens the model and no data.

    `chosen` are the config keys that the command line gives; see `settle`. `open_source`:
    `open_shapes` where the plan is all there will be. Raises ValueError or FileNotFoundError.
    """
    config, graph = settle(config, chosen)
    if config.training.device_memory_gib:
        limit = int(config.training.device_memory_gib * 2**30)
        machine = dataclasses.replace(machine, memory=limit)
    if config.rollout.environment:
        load_environment(config.rollout.environment)
    source = open_source(config.model.source, **config.model.options())
    sizes = derive_sizes(config, source.config, machine, graph)
    the_plan = make_plan(config, graph, sizes)
    return RunPlan(config, graph, machine, source, sizes, the_plan, models_of(the_plan))


def prepare(config: Config, chosen: Collection[str] = ()) -> PreparedRun:
    """Opens and checks everything a run needs. Raises ValueError or FileNotFoundError.

    `chosen` are the config keys that the command line gives; see `settle`.
    """
    machine = Machine.current()
    planned = plan_run(config, machine, chosen)
    config, source, sizes = planned.config, planned.source, planned.sizes
    if config.training.offload != "none":
        check_host_memory(f"training.offload={config.training.offload!r}")
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
        answers=ANSWERS[planned.graph.data] or 0,
        max_answer=config.rollout.max_response_length,
    )
    if config.data.epochs and loader.num_steps < config.training.steps:
        raise ValueError(
            f"data.epochs={config.data.epochs} give {loader.num_steps} steps of "
            f"{config.data.prompts_per_step} prompts, fewer than training.steps="
            f"{config.training.steps}; lower that, or raise data.epochs (0 is no limit)"
        )
    eval_prompts = load_eval_prompts(config, source, sizes, machine)
    environments = open_environments(config, source, loader.prompt(0))
    rewards = RewardPool(config.reward)
    try:
        rewards.check(trial_request(loader.prompt(0)))
        processes.check_agreement(
            {
                "config": config_table(config),
                "plan": plan_table(planned.plan),
                "code": processes.code_table(),
                "versions": processes.version_table(),
            }
        )
    except BaseException:
        rewards.close()
        raise
    return PreparedRun(
        **vars(planned),
        until=until_of(config, planned.plan),
        loader=loader,
        eval_prompts=eval_prompts,
        rewards=rewards,
        environments=environments,
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
    return {key: json.dumps(x) for key, x in flatten_dict(tree, sep=".").items()}


def plan_table(plan: Plan) -> dict[str, str]:
    """{"rollout.layout.kind": "\"host\"", ...}: all of the plan's JSON, by node."""
    tree = json.loads(plan.to_json())
    tasks = {task["node"]["id"]: {"place": i} | task for i, task in enumerate(tree.pop("tasks"))}
    flat = flatten_dict(tree, sep=".") | flatten_dict(tasks, sep=".")
    return {key: json.dumps(x) for key, x in flat.items()}


def open_environments(config: Config, source: ModelSource, prompt: Prompt) -> Environments | None:
    """What the config's responses talk to, tried on one prompt; None where they are one turn.

    Raises ValueError or FileNotFoundError.
    """
    rollout = config.rollout
    if not rollout.environment:
        return None
    environments = Environments(
        rollout.environment,
        rollout.environment_kwargs,
        source.tokenizer,
        seconds=rollout.environment_seconds,
        turn_length=rollout.turn_length,
        max_turns=rollout.max_turns,
    )
    environments.check(prompt)
    return environments


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
