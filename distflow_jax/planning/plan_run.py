"""Preparation of a run: every user error is found here, before any device works.

`plan_run` needs the config alone, `prepare` opens data and rewards too; runtime/build.py builds
from that.
"""

import contextlib
import dataclasses
import datetime
from collections.abc import Callable, Collection, Iterator, Sequence

import jax

from distflow_jax.batch import Prompt
from distflow_jax.cluster import processes
from distflow_jax.cluster.own_code import hashes_of, strings_in
from distflow_jax.config.config_dict import config_table
from distflow_jax.config.graph_settings import with_settings
from distflow_jax.config.run_config import Config
from distflow_jax.coordinator.rounds import UNTIL, Until
from distflow_jax.dag.added_fields import with_response_images
from distflow_jax.dag.graph import DATA, ROLES, Graph
from distflow_jax.dag.graph_yaml import OpenedGraph, open_graph
from distflow_jax.dag.plan import Plan, Unit
from distflow_jax.dag.planner import HOST, plan
from distflow_jax.dag.residency import Residency, describe, plan_residency
from distflow_jax.data.encoded_rows import PromptEncoder
from distflow_jax.data.example import Dataset
from distflow_jax.data.loader import Loader
from distflow_jax.did_you_mean import hint
from distflow_jax.environments.handle import check_environments
from distflow_jax.environments.observed_pictures import ImageSupport
from distflow_jax.environments.registry import (
    CallLimits,
    Environments,
    template_variables,
    with_sandbox,
)
from distflow_jax.images.placing import SeeingTokenizer
from distflow_jax.layout import STEP, Layout
from distflow_jax.models.weights.source import ModelSource, freeze, open_model, open_options
from distflow_jax.parallel.host_memory import check_host_memory
from distflow_jax.planning.chips import CHIPS
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.mesh_sizes import SAMPLERS
from distflow_jax.planning.partial_batches.replayed_run import check_replay, start_of_run
from distflow_jax.planning.partial_batches.streamed_nodes import (
    described,
    nodes_that_need_the_batch,
    streamed_nodes,
    streamed_units,
)
from distflow_jax.planning.run_data import (
    calls_rewards,
    load_eval_prompts,
    open_loader,
    prompt_encoder,
    sampler_share,
)
from distflow_jax.planning.run_models import (
    ModelOfRun,
    models_of,
    samplers_of,
    starting_weights,
)
from distflow_jax.planning.settings_in_use import (
    check_chosen,
    warn_of_unread_rewards,
    warn_of_warmup,
)
from distflow_jax.planning.sizes import Sizes, derive_sizes
from distflow_jax.planning.sizes_table import describe_sizes
from distflow_jax.planning.waiting_groups import WaitingGroups, waiting_groups
from distflow_jax.rewards.pool import RewardPool
from distflow_jax.rewards.prompt_requests import check_references, trial_request
from distflow_jax.rewards.registry import SANDBOXED
from distflow_jax.stages.registry import Demands, settle_graph, takes_policy_ratio
from distflow_jax.stream.batches.recordings import Recording
from distflow_jax.stream.checks import Surroundings, check_plan
from distflow_jax.stream.frames.prompt_frames import prompt_facts
from distflow_jax.stream.links.buffer_addresses import check_listen
from distflow_jax.stream.schedule import Rule
from distflow_jax.stream.tasks import ENVIRONMENT
from distflow_jax.stream.wire.tls import read_wire_tls
from distflow_jax.user_functions import load_function

SAMPLED_ROWS = 32  # whose own programs are run before step 1
CORRECTION = {True: "token_tis", False: "none"}  # by whether tokens of older weights need one


def settle(config: Config, chosen: Collection[str] = ()) -> tuple[Config, Graph]:
    """The config with the settings of its graph, and the graph with the values of that config.

    The graph keeps the optional reads that this run needs, and no others. `chosen` are the config
    keys that the command line gives. Pure in its arguments and the graph's file. Raises ValueError
    or FileNotFoundError.
    """
    config, opened = _opened(config, chosen)
    graph, algorithm = opened.graph_with(config), config.algorithm
    # an update weighs tokens of older weights, and neither the config nor the command line says
    # what becomes of them
    ratio = any(takes_policy_ratio(node) for node in graph.nodes)
    unsaid = (algorithm.rejection, algorithm.proximal) == ("none", "recomputed")
    correction = CORRECTION[config.stream.ahead and ratio and unsaid]
    config = with_settings(config, {"algorithm.correction": correction}, chosen=chosen)
    if not any(node.type == "MODEL_TRAIN" for node in graph.nodes):
        raise ValueError(f"dag {config.dag!r} trains nothing: it has no node of type MODEL_TRAIN")
    demands = Demands(
        config.algorithm,
        config.preference,
        updates=config.training.mini_batches * config.training.epochs,
        ahead=config.stream.ahead,
        environment=bool(config.rollout.environment),
        router_replay=config.training.router_replay,
    )
    with _named(config.dag):
        return config, settle_graph(graph, demands)


def settled_config(config: Config, chosen: Collection[str] = ()) -> Config:
    """The config of `settle`, for what answers without training; the graph is not built.

    Raises ValueError or FileNotFoundError.
    """
    return _opened(config, chosen)[0]


def _opened(config: Config, chosen: Collection[str]) -> tuple[Config, OpenedGraph]:
    """The config with the settings of its graph, and the graph's file."""
    opened, where = open_graph(config.dag, config), f"dag {config.dag!r}: "
    return with_settings(config, opened.settings, chosen=chosen, where=where), opened


def make_plan(config: Config, graph: Graph, sizes: Sizes) -> Plan:
    """The plan of a settled graph, with the layouts of its nodes.

    Pure in its arguments and the functions that the graph names.
    """
    known = {*ROLES, *(n.model for n in graph.nodes if n.model)}
    for name in sizes.role_meshes:
        if name not in known:
            raise ValueError(
                f"mesh.roles.{name}: dag {config.dag!r} has no such role or model "
                f"({hint(name, known)})"
            )
    step = [STEP] if any(STEP in node.reads.values() for node in graph.nodes) else []
    given = dict.fromkeys((*DATA[graph.data], *step), sampler_layout(sizes))
    # two nodes in one program would need the models of both
    fuse = config.training.fuse and config.training.offload == "none"
    with _named(config.dag):
        return plan(graph, role_layouts(sizes), given, fuse=fuse)


@contextlib.contextmanager
def _named(dag: str) -> Iterator[None]:
    """Puts the graph's name before the message of an error in it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"dag {dag!r}: {error}") from error
    except FileNotFoundError as error:
        raise FileNotFoundError(f"dag {dag!r}: {error}") from error


def sampler_layout(sizes: Sizes) -> Layout:
    """The layout of prompts and responses: on the hosts, k by k where k share a sampler."""
    return Layout("host", (("hosts", sizes.sampler_hosts),)) if sizes.sampler_hosts > 1 else HOST


def role_layouts(sizes: Sizes) -> dict[str, Layout]:
    """The layout of every role, and of every model with a mesh of its own."""
    trainers = {role: sizes.mesh_of(role).layout for role in ("ACTOR", "CRITIC", "REFERENCE")}
    own = {name: mesh.layout for name, mesh in sizes.role_meshes.items()}
    # a reward is computed on the host, unless it is a model
    reward = sizes.mesh_of("REWARD").layout
    models = {"REWARD MODEL_INFERENCE": reward, "REWARD MODEL_TRAIN": reward}
    return trainers | own | models | {"ROLLOUT": sampler_layout(sizes), "REWARD": HOST}


@dataclasses.dataclass
class RunPlan:
    """Everything that follows from a config and a machine, without data and rewards."""

    config: Config  # with the settings of the graph
    graph: Graph
    machine: Machine
    source: ModelSource
    sizes: Sizes
    plan: Plan
    models: dict[str, ModelOfRun]  # by state key
    until: Until | None  # where the plan has a region
    # False: workers sample, or the run replays recorded samples
    trainers_sample: bool = dataclasses.field(default=True, kw_only=True)
    # of a pod that is planned for, in the canonical order; None: those of this job
    devices: Sequence[jax.Device] | None = dataclasses.field(default=None, kw_only=True)

    def table(self) -> list[tuple]:
        """The sizes, (name, value, meaning) each."""
        return describe_sizes(self.sizes, self.config, self.source.config, self.machine)

    def text(self) -> str:
        """The plan as tables, with the residency of its nodes if models are offloaded, and the host
        memory of asynchronous steps."""
        found, waiting, streamed = self.residencies, self.waiting, self.streamed
        column, reasons = described(streamed) if streamed else ({}, "")
        text = self.plan.describe({"partial_batches": column} if streamed else {})
        text += f"\n{reasons}" if reasons else ""
        text += f"\n{describe(found)}" if found else ""
        return text + (f"\n{waiting.describe()}" if waiting else "")

    @property
    def streamed(self) -> dict[str, str]:
        """Node id -> whether it runs on each partial batch, or why not; {} without them."""
        if not self.config.stream.in_partial_batches:
            return {}
        training = self.config.training
        minis, algorithm = training.mini_batches, self.config.algorithm
        needs_batch = nodes_that_need_the_batch(
            self.plan, algorithm, mini_batches=minis, epochs=training.epochs
        )
        return streamed_nodes(self.plan, needs_batch, mini_batches=minis)

    @property
    def streamed_units(self) -> tuple[Unit, ...]:
        """The units that run on each partial batch; () without partial batches."""
        return streamed_units(self.plan, self.streamed) if self.streamed else ()

    @property
    def waiting(self) -> WaitingGroups | None:
        """Host memory of groups that wait, if samplers run ahead."""
        return waiting_groups(self.config, self.plan, self.sizes, self.source.config, self.machine)

    @property
    def own_samplers(self) -> dict[str, str]:
        """State key of each sampler of the trainers -> that of the policy whose weights it has.

        Evaluation samples too: of the one policy that is trained, if there is one.
        """
        return self.sampled if self.trainers_sample else {}

    @property
    def sampled(self) -> dict[str, str]:
        """As `own_samplers`, whoever samples."""
        keys, policies = samplers_of(self.plan), self.policies
        if not keys and self.config.eval.dataset and policies:
            keys["rollout"] = "actor" if "actor" in policies else policies[0]
        return keys

    @property
    def policies(self) -> list[str]:
        """State keys of the policies that are trained."""
        return [m.key for m in self.models.values() if m.trained and m.is_policy]

    @property
    def residencies(self) -> dict[str, Residency]:
        """The residency of each node by its id, with training.offload; {} without."""
        if self.config.training.offload == "none":
            return {}
        return plan_residency(self.plan, self.sampled, apart=self.samples_apart)

    @property
    def samples_apart(self) -> bool:
        """Whether samplers run ahead on devices of their own."""
        return self.config.stream.ahead and self.sizes.samplers_have_own_devices


@dataclasses.dataclass
class PreparedRun(RunPlan):
    """A run plan with its data and rewards opened: everything is checked, no array exists."""

    loader: Loader
    eval_prompts: list[Prompt]
    rewards: RewardPool
    environments: Environments | None  # None: a response is one turn
    recording: Recording | None = None  # whose training the run repeats
    worker_command: str = ""  # that starts a worker of the run

    @property
    def has_sampler(self) -> bool:
        """Whether anybody samples: the trainers, or workers."""
        return bool(self.sampled) and not self.recording

    def close(self) -> None:
        """Ends the processes of rewards and the threads of environments. May be called twice."""
        self.rewards.close()
        if self.environments is not None:
            self.environments.close()


def plan_run(
    config: Config,
    machine: Machine,
    chosen: Collection[str] = (),
    *,
    searched: Collection[str] = (),
    open_source: Callable[..., ModelSource] = open_model,
) -> RunPlan:
    """Settles and plans a run for a machine, this one or another; opens the model and no data.

    `chosen` are the config keys that the command line gives; see `settle`. `searched`: keys that a
    search gives, which need no effect. `open_source`: `open_shapes` where the plan is all there
    will be. Raises ValueError or FileNotFoundError.
    """
    check_chip(config.mesh.chip, machine)
    config, graph = settle(config, {*chosen, *searched})
    if config.training.device_memory_gib:
        limit = int(config.training.device_memory_gib * 2**30)
        machine = dataclasses.replace(machine, memory=limit)
    source = open_configured(config, open_source)
    if config.training.freeze != "none":
        source = freeze(source, config.training.freeze)
    if config.lora.rank and config.training.freeze == "language":
        raise ValueError(
            f"lora.rank={config.lora.rank} trains adapters of the text model, but training.freeze="
            "language trains only the vision tower; use lora.rank=0, or training.freeze=none"
        )
    if config.lora.rank and source.new_tower:
        raise ValueError(
            f"lora.rank={config.lora.rank} trains only the text model, so the tower of "
            f"model.vision={config.model.vision!r} would stay random; use lora.rank=0, or export "
            "a model whose tower is trained"
        )
    sees = source.config.vision is not None
    check_chosen(config, graph, chosen, sees=sees)
    if config.rollout.environment and sees:
        graph = with_response_images(graph)
    sizes = derive_sizes(config, source.config, machine, graph)
    made = make_plan(config, graph, sizes)
    surroundings = _surroundings(config, sizes)
    check_plan(config.stream, made, surroundings)
    with _named(config.dag):
        models, until = models_of(made), until_of(config, made)
    run = RunPlan(config, graph, machine, source, sizes, made, models, until)
    run.trainers_sample = not config.stream.workers
    if run.waiting is not None:
        run.waiting.check()
    return run


def check_chip(wanted: str, machine: Machine) -> None:
    """Raises ValueError where the sizes of a config are for another chip than the machine has.

    `wanted`: mesh.chip; "" fits all, as does a machine whose chip is unknown.
    """
    if wanted and wanted not in CHIPS:
        raise ValueError(f"mesh.chip={wanted} is not a known chip ({hint(wanted, CHIPS)})")
    if wanted and machine.chip and machine.chip != wanted:
        raise ValueError(
            f"mesh.chip={wanted}: the sizes of this config are for {wanted}, but the devices here "
            f"are {machine.chip}: choose a preset for these (docs/machines.md), or keep the sizes "
            "with --config.mesh.chip="
        )


def _surroundings(config: Config, sizes: Sizes) -> Surroundings:
    return Surroundings(
        config.algorithm,
        sampler_hosts=sizes.sampler_hosts,
        sampler_part=SAMPLERS in config.mesh.roles,
        own_devices=sizes.samplers_have_own_devices,
        offload=config.training.offload,
        mini_prompts=config.data.prompts_per_step // config.training.mini_batches,
        environment=config.rollout.environment,
        stuck_seconds=config.health.stuck_seconds,
    )


def open_configured(
    config: Config, open_source: Callable[..., ModelSource] = open_model
) -> ModelSource:
    """The model of a config, with the config's settings of its chat template and its tools.

    Raises ValueError or FileNotFoundError.
    """
    source = open_source(config.model.source, **open_options(config.model))
    variables, date = config.data.template_kwargs, config.data.date
    if variables and source.tokenizer.chat_template is None:
        raise ValueError(f"data.template_kwargs={variables}: the model has no chat template")
    tokenizer = dataclasses.replace(source.tokenizer, variables=variables, date=date)
    name, kwargs = config.rollout.environment, config.rollout.environment_kwargs
    added = template_variables(name, kwargs, tokenizer)
    tokenizer = dataclasses.replace(tokenizer, variables={**added, **variables})
    return dataclasses.replace(source, tokenizer=tokenizer)


def _dated(run: RunPlan, recorded: str) -> RunPlan:
    """The plan with the date of the run's first start, or today's, if its chat template writes one.
    Collective."""
    tokenizer, data = run.source.tokenizer, run.config.data
    if data.date or "strftime_now" not in (tokenizer.chat_template or ""):
        return run
    today = str(datetime.datetime.now(datetime.UTC).date())
    date = processes.all_gather_json(recorded or today)[0]
    run.config = dataclasses.replace(run.config, data=dataclasses.replace(data, date=date))
    tokenizer = dataclasses.replace(tokenizer, date=date)
    run.source = dataclasses.replace(run.source, tokenizer=tokenizer)
    return run


def prepare(
    config: Config,
    chosen: Collection[str] = (),
    shown: Callable[[str], contextlib.AbstractContextManager] = contextlib.nullcontext,
    recording: Recording | None = None,
    dataset: Dataset | None = None,
    date: str = "",
) -> PreparedRun:
    """Opens and checks everything a run needs. Raises ValueError or FileNotFoundError.

    `chosen` are the config keys that the command line gives; see `settle`. `shown(phase)`: a block
    in which a terminal shows what a run waits for. `recording`: whose training the run repeats.
    `dataset`: in the place of that of data.train. `date`: of the run's first start, if it goes on.
    """
    machine = Machine.current()
    with shown("open_model"):
        run = _dated(plan_run(config, machine, chosen), date)
        if recording is not None:
            weights = starting_weights(run.models, run.source)
            digest, devices = run.plan.digest, machine.devices
            check_replay(
                recording, start_of_run(config_table(run.config), digest, weights, devices)
            )
            run.trainers_sample = False
    config, source = run.config, run.source
    warn_of_warmup(config)
    warn_of_unread_rewards(config.rollout.environment, run.graph)
    if config.training.offload != "none":
        check_host_memory(f"training.offload={config.training.offload!r}")
    if config.stream.workers:
        read_wire_tls()  # files that do not fit are found here
        check_listen("stream.listen", config.stream.listen)
    with shown("open_data"):
        share = sampler_share(run.sizes, machine)
        encoder = prompt_encoder(source, config.data.image_tokens)
        loader = run_loader(run, encoder, dataset)
        first = loader.prompt(0)
        if source.tokenizer.is_chat(first.text):
            source.tokenizer.check_end()
        eval_prompts = load_eval_prompts(config, encoder, share)
    with shown("start_rewards"):
        if config.stream.worker_nodes or (config.stream.workers and config.rollout.environment):
            prompt_facts(first)  # a row that no worker could get is found here
        with contextlib.ExitStack() as on_failure:
            tried = ENVIRONMENT not in config.stream.worker_nodes  # else where these are made
            environments = open_environments(config, encoder, first, on_failure, tried=tried)
            rewards = RewardPool(config.reward, config.sandbox)
            on_failure.callback(rewards.close)
            trained = calls_rewards(run.graph)
            for prompt in [first] if trained else eval_prompts[:1]:
                rewards.check(trial_request(prompt))
            if trained and config.reward.function in SANDBOXED:
                numbers = range(min(SAMPLED_ROWS, len(loader.rows)))
                column = config.reward.kwargs.get("reference", "reference")
                prompts = [loader.prompt(number) for number in numbers]
                check_references(rewards, prompts, column, loader.place)
            tables = {"config": config_table(config), "plan": run.plan.table()}
            tables |= {"files": own_code_table(config, run.plan), "code": processes.code_table()}
            processes.check_agreement(tables | {"versions": processes.version_table()})
            on_failure.pop_all()
    return PreparedRun(
        **vars(run),
        loader=loader,
        eval_prompts=eval_prompts,
        rewards=rewards,
        environments=environments,
        recording=recording,
    )


def run_loader(run: RunPlan, encoder: PromptEncoder, dataset: Dataset | None = None) -> Loader:
    """The loader of a run's training data; see run_data.open_loader."""
    share = sampler_share(run.sizes, run.machine, in_turn=run.config.stream.workers)
    staleness = stream_rule(run.config, run.plan).observed_staleness
    return open_loader(
        run.config,
        run.graph,
        encoder,
        share=share,
        observed_staleness=staleness,
        dataset=dataset,
    )


def stream_rule(config: Config, plan: Plan) -> Rule:
    """The rule by which samplers of a run begin groups."""
    rounds = plan.region.max_rounds if config.stream.ahead else 1
    return Rule(config.data.prompts_per_step, config.stream.max_staleness, rounds)


def until_of(config: Config, plan: Plan) -> Until | None:
    """The function that decides which groups of a round are kept; None without a region.

    Raises ValueError or FileNotFoundError for what does not exist or can never be true.
    """
    name = plan.region.until
    if not name:
        return None
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
            f"region: unknown until={name!r} ({hint(name, UNTIL)}; or use module:function)"
        )
    return load_function(name, "region's until")


def own_code_table(config: Config, plan: Plan) -> dict[str, str]:
    """{file: hash of its content} of the user's own functions that a run names.

    Trackers are left out: process 0 alone has a use for them.
    """
    named = [config.dag, config.reward.function, plan.region.until, config.rollout.environment]
    options = [[t.node.fn, t.node.options] for t in plan.tasks]
    return hashes_of([*named, *strings_in([options, config.rollout.environment_kwargs])])


def open_environments(
    config: Config,
    encoder: PromptEncoder,
    prompt: Prompt,
    files: contextlib.ExitStack,
    *,
    tried: bool = True,
) -> Environments | None:
    """The environments of the config's responses, if so `tried` on one prompt; None: one turn each.

    `encoder` is of the run's model, see run_data.prompt_encoder. `files` closes them. Raises
    ValueError or FileNotFoundError.
    """
    environments = make_environments(config, encoder, files)
    if environments is not None and tried:
        check_environments(environments, prompt)
    return environments


def make_environments(
    config: Config, encoder: PromptEncoder, files: contextlib.ExitStack
) -> Environments | None:
    """As `open_environments`, but none is tried."""
    rollout, tokenizer, sight = config.rollout, encoder, None
    if not rollout.environment:
        return None
    if isinstance(encoder, SeeingTokenizer):
        tokenizer, sight = encoder.text, ImageSupport(encoder, config.data.max_prompt_length)
    environments = Environments(
        rollout.environment,
        with_sandbox(rollout.environment, rollout.environment_kwargs, config.sandbox),
        tokenizer,
        calls=CallLimits(
            rollout.environment_timeout,
            rollout.environment_retries,
            rollout.environment_threads,
            rollout.max_infra_rate,
        ),
        turn_length=rollout.turn_length,
        max_turns=rollout.max_turns,
        sight=sight,
    )
    files.callback(environments.close)
    return environments
