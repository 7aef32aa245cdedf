"""Sizes of a run, derived from config, model and machine, and checked before any device runs."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

from distflow_jax.batch import TokenColumn
from distflow_jax.config.run_config import Config
from distflow_jax.config.training_config import TrainingConfig
from distflow_jax.coordinator.assignment import PackingPlan
from distflow_jax.coordinator.first_fit import RowLimits, rows_bound
from distflow_jax.dag.graph import Graph
from distflow_jax.data.step_columns import ANSWERS
from distflow_jax.layout import Layout, Submesh
from distflow_jax.models.decoder_config import DecoderConfig, adapted
from distflow_jax.models.grouped_trial import grouped_products
from distflow_jax.models.moe import recorded_dtype
from distflow_jax.models.vision.chunks import patch_room
from distflow_jax.parallel.mesh import MeshSizes, check_hosts, hosts_per_sampler
from distflow_jax.parallel.pipeline import bubble_share, check_pipeline_repeats
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.mesh_sizes import check_width, mesh_sizes
from distflow_jax.planning.room_checks import UNKNOWN_MEMORY, check_batch_room
from distflow_jax.rollout.cache_sizing import (
    check_sampler_room,
    check_weight_room,
    fitting_slots,
    with_trajectories,
)
from distflow_jax.rollout.decode_state import (
    EngineConfig,
    SamplerAttentions,
    check_speculation,
    sampler_attentions,
)
from distflow_jax.rollout.prefill.prefix_cache import check_prefix_cache
from distflow_jax.stages.reward import overlong_tokens
from distflow_jax.training.attention_choice import (
    AttentionSizes,
    RowAttention,
    row_attentions,
    tile_unit,
    tower_form,
)
from distflow_jax.training.forward import ForwardConfig, logits_in_memory
from distflow_jax.training.microbatch import (
    check_pipeline_is_filled,
    pipeline_microbatches,
)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a run, made and checked by derive_sizes."""

    mesh: MeshSizes  # of the training roles that are not in `role_meshes`
    role_meshes: Mapping[str, MeshSizes]  # by role or model
    rollout_tensor: int
    sampler_hosts: int  # processes that share one sampler
    sampler_submesh: Submesh | None  # of every host's devices, on which samplers are; None: all
    workers_sample: bool  # whose devices are their own
    sampler_ranks: int  # devices of one sampler, divided by rollout_tensor
    packing: PackingPlan
    engine: EngineConfig
    forward: ForwardConfig
    attention: RowAttention  # the attention of `forward`, with the reason for the choice
    # those that a trial at the start may find faster, and those of samplers
    other_attentions: tuple[RowAttention, ...]
    sampler_attentions: SamplerAttentions
    micro_rows: int  # rows of a micro-batch per data rank
    microbatches: int  # that go through a pipeline together; 1 without a pipeline
    sampler_attention_why: str = ""  # of a trial
    product: str = ""  # of a mixture's grouped products, the preferred one; "": no mixture
    products: tuple[str, ...] = ()  # those that a trial at the start may find faster, and it
    product_why: str = ""  # of a trial
    routed: TokenColumn | None = None  # the experts that samplers record, with router_replay
    # of a partial batch, if steps are trained on in partial batches
    partial_batch: PackingPlan | None = None

    def mesh_of(self, role: str, model: str | None = None) -> MeshSizes:
        """The mesh of a training role, or of one of its models."""
        return self.role_meshes.get(model or "", self.role_meshes.get(role, self.mesh))

    def rows_at_a_time(self, layout: Layout) -> int:
        """Rows per data rank that a program on a training mesh processes at a time.

        These are one micro-batch, or all that go through a pipeline together.
        """
        ranks = dict(layout.axes).get("pipeline", 1)
        return self.micro_rows * (self.microbatches if ranks > 1 else 1)

    @property
    def samplers_have_own_devices(self) -> bool:
        """Whether samplers have devices that no trainer uses."""
        trained = {mesh.submesh for mesh in (self.mesh, *self.role_meshes.values())}
        return self.workers_sample or self.sampler_submesh not in {None, *trained}

    @property
    def pipeline_ranks(self) -> int:
        """Pipeline ranks of the mesh that has the most."""
        return max(m.pipeline for m in (self.mesh, *self.role_meshes.values()))

    @property
    def bubble_share(self) -> float:
        """Share of a step's compute time in which a device of the longest pipeline is idle."""
        return bubble_share(self.pipeline_ranks, self.microbatches, self.forward.repeats)


def derive_sizes(
    config: Config, model: DecoderConfig, machine: Machine, graph: Graph | None = None
) -> Sizes:
    """Derives the sizes of a run, checked against each other and against the machine.

    `graph` None: a graph that trains on all sampled responses. Raises ValueError, which names both
    sides and the fix.
    """
    mesh, roles, submesh = mesh_sizes(config.mesh, model, machine)
    meshes, training, rollout = (mesh, *roles.values()), config.training, config.rollout
    pipelines, tensor = [m.pipeline for m in meshes], config.mesh.rollout_tensor
    dtype = _compute_dtype(training, machine.platform)
    _check_mixture(config, model)
    _check_steps(config, machine.processes)
    _check_row_chunks(config, math.lcm(*(m.row_chunks for m in meshes)))
    micro = _divides(
        "training.micro_batch_rows",
        training.micro_batch_rows or mesh.ranks,
        {"data ranks (mesh.data x mesh.fsdp x mesh.expert)": mesh.ranks},
    )
    check_batch_room(config, model, machine, mesh.ranks)
    of_samplers = _machine_of_samplers(config, submesh, machine)
    check_width("mesh.rollout_tensor", tensor, model, of_samplers.devices)
    _check_lengths(config, model)
    together = pipeline_microbatches(training.pipeline_microbatches, pipelines)
    adapted(model, config.lora)  # raises ValueError for adapters that do not fit the model
    products = grouped_products(config.model.grouped_product, model, machine.platform, dtype)
    check_pipeline_repeats(training.pipeline_repeats, pipelines, model.num_layers)
    check_hosts(tensor, "mesh.rollout_tensor", of_samplers.processes, of_samplers.local_devices)
    hosts = hosts_per_sampler(tensor, of_samplers.local_devices)
    if rollout.environment and hosts > 1:
        raise ValueError(
            f"rollout.environment={rollout.environment!r} needs samplers of one host, but "
            f"mesh.rollout_tensor={tensor} spreads a sampler over {hosts}; use at "
            f"most {of_samplers.local_devices}"
        )
    rows = micro * max((together // n for n in pipelines if n > 1), default=1)
    asked = _attention_sizes(config, model, dtype, rows, meshes)
    packings = _packings(config, graph, (micro, together), mesh, roles)
    attention, *others = row_attentions(training.attention, machine.platform, asked)
    chunk, keep_logits = logits_in_memory(
        training.logp_chunk,
        training.row_tokens,
        rows=rows,
        vocab=model.vocab_size // mesh.tensor,
        remat=training.remat,
        memory=0 if machine.platform == "cpu" else machine.memory,
    )
    in_sampler = sampler_attentions(rollout.attention, model, dtype, machine.platform)
    sizes = Sizes(
        mesh=mesh,
        role_meshes=roles,
        rollout_tensor=tensor,
        sampler_hosts=hosts,
        sampler_submesh=submesh,
        workers_sample=config.stream.workers,
        sampler_ranks=of_samplers.devices // tensor * hosts // of_samplers.processes,
        packing=packings[0],
        engine=_engine_config(config, model, of_samplers, dtype, hosts, in_sampler),
        forward=ForwardConfig(
            dtype,
            chunk,
            training.remat,
            attention.block,
            keep_logits,
            microbatches=together,
            repeats=training.pipeline_repeats,
            attention_by=attention.by,
        ),
        attention=attention,
        other_attentions=tuple(others),
        sampler_attentions=in_sampler,
        micro_rows=micro,
        microbatches=together,
        routed=_routed(model) if training.router_replay else None,
        product=next(iter(products), ""),
        products=products,
        partial_batch=packings[1],
    )
    return _with_images(sizes, config, model, machine.platform)


def _attention_sizes(
    config: Config, model: DecoderConfig, dtype: str, rows: int, meshes: Sequence[MeshSizes]
) -> AttentionSizes:
    """The sizes that the attention of rows must serve, of which a device has `rows` at a time."""
    training, context = config.training, [m.context for m in meshes]
    needed = {
        "shared prompts": training.share_prompts,
        "windows": model.sliding_window,
        "image tokens": model.vision is not None and model.image_both_ways,
        "divided rows": max(context) > 1,
    }
    return AttentionSizes(
        training.row_tokens,
        _longest(config),
        rows,
        model.num_heads // model.num_kv_heads,
        model.head_dim,
        dtype,
        math.lcm(*(m.row_chunks for m in meshes)),
        min(context),
        frozenset(name for name, asked in needed.items() if asked),
    )


def _compute_dtype(training: TrainingConfig, platform: str) -> str:
    """The dtype of training.compute_dtype."""
    if training.compute_dtype != "auto":
        return training.compute_dtype
    return "float32" if platform == "cpu" else "bfloat16"


def _with_images(sizes: Sizes, config: Config, model: DecoderConfig, platform: str) -> Sizes:
    """The sizes with patches beside rows and attention between them, if the model has a tower."""
    vision, engine, dtype = model.vision, sizes.engine, sizes.forward.compute_dtype
    if vision is None:
        return sizes
    # of a row, and of the prompts that a sampler reads together
    images, read = (
        patch_room(
            vision,
            features,
            longest=config.data.max_prompt_length,
            image_tokens=config.data.image_tokens,
            rotary=bool(model.rope_sections),
            tile=tile_unit(platform),
        )
        for features in (
            config.training.row_tokens,
            max(config.data.max_prompt_length, config.rollout.prefill_tokens),
        )
    )
    attention, rows = config.training.attention, sizes.micro_rows * sizes.microbatches
    of_rows = tower_form(attention, platform, vision, dtype, chunk=images.chunk, rows=rows)
    of_prompts = tower_form("auto", platform, vision, dtype, chunk=read.chunk, rows=1)
    return dataclasses.replace(
        sizes,
        packing=dataclasses.replace(sizes.packing, images=images),
        partial_batch=None
        if sizes.partial_batch is None
        else dataclasses.replace(sizes.partial_batch, images=images),
        forward=dataclasses.replace(sizes.forward, tower=of_rows),
        engine=dataclasses.replace(engine, images=read, tower=of_prompts),
    )


def _divides(what: str, value: int, by: dict[str, int]) -> int:
    """value / the product of `by`, {name: number}; ValueError names the nearest values that fit."""
    unit = math.prod(by.values())
    if value % unit:
        low, high = value // unit * unit, -(-value // unit) * unit
        fix = f"use {low} or {high}" if low else f"use {high}"
        factors = {name: number for name, number in by.items() if number > 1}
        names, numbers = " x ".join(factors), " x ".join(map(str, factors.values()))
        product = f"={unit}" if len(factors) > 1 else ""
        raise ValueError(f"{what}={value} is not divisible by {names}={numbers}{product}; {fix}")
    return value // unit


def _longest(config: Config) -> int:
    """Tokens of the longest prompt with the longest trained response."""
    return config.data.max_prompt_length + config.rollout.max_response_length


def _check_lengths(config: Config, model: DecoderConfig) -> None:
    """Raises ValueError unless the longest sequences fit the model's positions and a row."""
    data, rollout, training = config.data, config.rollout, config.training
    longest = _longest(config)
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
    together = features_together(model)
    if together > rollout.prefill_tokens:
        raise ValueError(
            f"rollout.prefill_tokens={rollout.prefill_tokens} cannot hold the {together} tokens "
            f"of an image of {config.model.source}, which attend to each other: use at least "
            f"{together}"
        )
    longest_eval = data.max_prompt_length + config.eval.max_response_length
    if longest_eval > model.max_position:
        raise ValueError(
            f"data.max_prompt_length={data.max_prompt_length} + eval.max_response_length="
            f"{config.eval.max_response_length} exceed the model's {model.max_position} positions"
        )
    if overlong_tokens(config.reward, rollout.max_response_length) > rollout.max_response_length:
        raise ValueError(
            f"reward.overlong_buffer={config.reward.overlong_buffer:g} is above "
            f"rollout.max_response_length={rollout.max_response_length}; use at most that, or 0"
        )


def features_together(model: DecoderConfig) -> int:
    """Tokens that have to be read in one piece, those of an image of Gemma 3; 0: none."""
    if model.vision is None or not model.image_both_ways:
        return 0
    return (model.vision.grid // model.vision.merge) ** 2


def _check_mixture(config: Config, model: DecoderConfig) -> None:
    """Raises ValueError for settings of a mixture of experts if the model has none."""
    product, training = config.model.grouped_product, config.training
    settings = (  # (whether it is one of a mixture, its text, what it is without)
        (product != "auto", f"model.grouped_product={product!r}", "'auto'"),
        (training.balance_coef, f"training.balance_coef={training.balance_coef}", "0"),
        (training.router_replay, "training.router_replay=True", "False"),
    )
    for is_given, setting, without in settings:
        if is_given and not model.num_experts:
            raise ValueError(
                f"{setting} is for a mixture of experts, but {config.model.source} is none; use "
                f"{without}"
            )


def _check_steps(config: Config, processes: int) -> None:
    """Raises ValueError unless mini-batches divide a step's prompts, and each process has some; or
    for a profile of later steps than there are."""
    prompts, training = config.data.prompts_per_step, config.training
    minis = {"training.mini_batches": training.mini_batches}
    _divides("data.prompts_per_step", prompts, minis)
    if prompts < processes:
        raise ValueError(
            f"data.prompts_per_step={prompts} leave some of the {processes} processes without a "
            f"prompt; use at least {processes}"
        )
    if config.observe.profiled and config.observe.profiled[-1] > training.steps:
        raise ValueError(
            f"observe.profile_steps={config.observe.profile_steps!r} ends after training.steps="
            f"{training.steps}: profile earlier steps"
        )


def _check_row_chunks(config: Config, chunks: int) -> None:
    """Raises ValueError unless `chunks` divides rows, for the devices that share a row."""
    training = config.training
    if training.row_tokens % chunks == 0:
        return
    unit = math.lcm(chunks, training.logp_chunk or 1)
    low = training.row_tokens // unit * unit
    fits = [n for n in (low, low + unit) if n >= _longest(config)]
    raise ValueError(
        f"training.row_tokens={training.row_tokens} cannot be divided into {chunks} equal chunks "
        f"(2 x mesh.context); use {' or '.join(map(str, fits))}"
    )


def _machine_of_samplers(config: Config, submesh: Submesh | None, machine: Machine) -> Machine:
    """The devices of samplers: all, or a part of each host. Those of a worker are one host that is
    like the trainers', or has the devices of one sampler."""
    local, tensor = machine.local_devices, config.mesh.rollout_tensor
    if config.stream.workers:
        devices = local if local % tensor == 0 else tensor
        return dataclasses.replace(machine, processes=1, devices=devices, local_devices=devices)
    return machine if submesh is None else machine.submesh(submesh[1] - submesh[0])


def _routed(model: DecoderConfig) -> TokenColumn:
    """The column of each token's experts by layer; -1 where they were not recorded."""
    shape = (model.num_layers, model.experts_per_token)
    return TokenColumn(shape, recorded_dtype(model.num_experts).name, prompt=True, fill=-1)


def _engine_config(
    config: Config,
    model: DecoderConfig,
    machine: Machine,
    dtype: str,
    hosts: int,
    attentions: SamplerAttentions,
) -> EngineConfig:
    """Sizes of one sampler, with rollout.num_slots slots, or as many as fit for 0."""
    data, rollout, tensor = config.data, config.rollout, config.mesh.rollout_tensor
    samplers, all_ranks = machine.processes // hosts, machine.devices // tensor
    ranks, memory = all_ranks // samplers, machine.memory or UNKNOWN_MEMORY
    response = max(rollout.max_response_length, config.eval.max_response_length)
    if rollout.num_slots:
        _divides("rollout.num_slots", rollout.num_slots, {"sampler ranks": all_ranks})
    elif not machine.memory:
        raise ValueError(
            "rollout.num_slots=0 means as many slots as fit, but the memory of this "
            f"{machine.platform} is unknown; set a number"
        )
    engine = EngineConfig(
        slots=rollout.num_slots // samplers or ranks,
        max_prompt=data.max_prompt_length,
        max_response=response,
        tokens_per_call=rollout.tokens_per_call,
        speculative_tokens=rollout.speculative_tokens,
        speculative_ngram=rollout.speculative_ngram,
        page_size=rollout.page_size or (128 if machine.platform == "tpu" else 64),
        attention=attentions.decode[0],
        prefill_by=attentions.prefill[0],
        cache_dtype=rollout.cache_dtype,
        weights_dtype=rollout.weights_dtype,
        cache_tokens=rollout.cache_tokens // samplers,
        prefill_tokens=rollout.prefill_tokens,
        prefix_tokens=rollout.prefix_tokens,
        max_read=_longest_read(config, response),
        group_size=max(rollout.num_samples, config.eval.num_samples),
        dtype=dtype,
        record_experts=config.training.router_replay,
    )
    whole = functools.partial(
        with_trajectories,
        config=rollout,
        most=responses_under_way(config),
        samplers=samplers,
        ranks=ranks,
    )
    check_speculation(engine)
    check_prefix_cache(engine)
    engine = whole(engine) if rollout.num_slots else engine
    check_sampler_room(model, engine, memory, ranks=ranks, tensor=tensor)
    if not rollout.num_slots:
        slots = fitting_slots(
            model,
            engine,
            ranks=ranks,
            tensor=tensor,
            budget=int(machine.memory * rollout.cache_fraction),
            useful=-(-data.prompts_per_step * rollout.num_samples // samplers),
            whole=whole,
        )
        engine = whole(dataclasses.replace(engine, slots=slots))
    check_weight_room(model, engine, memory, tensor=tensor)
    return engine


def responses_under_way(config: Config) -> int:
    """Most responses that may be under way, those of all steps that are sampled at a time."""
    steps = 1 + config.stream.max_staleness
    return steps * config.data.prompts_per_step * config.rollout.num_samples


def _longest_read(config: Config, response: int) -> int:
    """Tokens that a sampler may have to read at once; 0: a prompt's."""
    longest = config.data.max_prompt_length + response
    if config.stream.ahead:  # of a response that was suspended
        return longest
    # after a long observation, all of a response but its last token may be prefilled again
    return longest - 1 if config.rollout.environment else 0


def trains_on_pairs(graph: Graph) -> bool:
    """Whether a loss of the graph compares two responses to a prompt, which must share a row."""
    trainers = [node for node in graph.nodes if node.type == "MODEL_TRAIN"]
    return any(
        node.role == "REWARD" or node.options.get("objective") == "preference" for node in trainers
    )


def _packings(
    config: Config,
    graph: Graph | None,
    micro: tuple[int, int],
    mesh: MeshSizes,
    roles: Mapping[str, MeshSizes],
) -> tuple[PackingPlan, PackingPlan | None]:
    """Rows of every training mesh, a static number: of a mini-batch, and of a partial batch, None
    without these.

    `micro`: (rows of a micro-batch per data rank, micro-batches of a pipeline pass).
    """
    stream, training, meshes = config.stream, config.training, (mesh, *roles.values())
    limits, bounds, size, longest = _row_limits(config, graph)
    actor, together = roles.get("ACTOR", mesh), math.prod(micro)
    by = {"training.micro_batch_rows": mesh.ranks * micro[0]}
    if any(m.pipeline > 1 for m in meshes):
        by["training.pipeline_microbatches"] = micro[1]
    filled = stream.partial_batch_rows  # which whatever is complete fills; 0: any number
    _divides("stream.partial_batch_rows", filled, by)

    def packing(rows: int, mini_batches: int) -> PackingPlan:
        def room(rows: int, ranks: int) -> int:
            return -(-rows // (ranks * together)) * together

        for sizes in meshes:
            check_pipeline_is_filled(sizes, rows, *micro)
        most = room(rows, actor.ranks)
        # other layouts take the same rows unchanged, even where some are not well filled
        others = {m.layout: room(most * actor.ranks, m.ranks) for m in meshes}
        return PackingPlan(
            limits=limits,
            mini_batches=mini_batches,
            prompts_per_step=config.data.prompts_per_step,
            rows=others | {actor.layout: most},
            primary=actor.layout,
            threshold=config.coordinator.balance_threshold,
        )

    prompts = config.data.prompts_per_step // training.mini_batches
    whole = packing(rows_bound(prompts * size, longest, bounds), training.mini_batches)
    if not stream.in_partial_batches:
        return whole, None
    rows = rows_bound(max(1, stream.partial_batch_prompts) * size, longest, bounds)
    if 0 < filled < rows:
        unit = math.prod(by.values())
        raise ValueError(
            f"stream.partial_batch_rows={filled} are too few for the longest group, which takes up "
            f"to {rows} rows of training.row_tokens={training.row_tokens}; use at least "
            f"{-(-rows // unit) * unit}"
        )
    return whole, packing(max(rows, filled), 1)


def _row_limits(config: Config, graph: Graph | None) -> tuple[RowLimits, RowLimits, int, int]:
    """The limits of a row; those for what a prompt's responses are packed as, a pair counting as
    one; how many of these a prompt has; and tokens of the longest."""
    training, prompt = config.training, config.data.max_prompt_length
    response = config.rollout.max_response_length
    pairs = graph is not None and trains_on_pairs(graph)
    limits = RowLimits(
        tokens=training.row_tokens,
        sequences=training.row_sequences or max(1, training.row_tokens // 4),
        shared=training.share_prompts,
        group_size=2 if pairs else 0,
    )
    if not pairs:
        answers = ANSWERS[graph.data].of_step if graph is not None else None
        return limits, limits, answers or config.rollout.num_samples, prompt + response
    longest = prompt + 2 * response if limits.shared else 2 * (prompt + response)
    if longest > limits.tokens or limits.sequences < 2:
        raise ValueError(
            f"a pair of responses must share a row, but the longest takes {longest} tokens "
            f"(data.max_prompt_length={prompt}, rollout.max_response_length={response}): raise "
            f"training.row_tokens={limits.tokens} to that"
        )
    of_pairs = dataclasses.replace(limits, sequences=limits.sequences // 2, group_size=0)
    return limits, of_pairs, 1, longest
