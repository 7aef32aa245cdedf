"""The sizes of a run as a table of text."""

from distflow_jax.config.run_config import Config
from distflow_jax.config.training_config import LoraConfig
from distflow_jax.models.decoder_config import DecoderConfig, adapted
from distflow_jax.models.parameters import num_active_params, num_params
from distflow_jax.parallel.host_memory import HOST
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.sizes import Sizes
from distflow_jax.programs.units import format_bytes
from distflow_jax.rollout.cache_sizing import cache_bytes, weight_bytes
from distflow_jax.rollout.decode_state import num_pages, waiting_pages


def describe_sizes(
    sizes: Sizes, config: Config, model: DecoderConfig, machine: Machine
) -> list[tuple]:
    """Rows of the table: (name, value, meaning)."""
    p, r = sizes.packing, config.rollout
    rows = p.rows[p.primary] * sizes.mesh_of("ACTOR").ranks
    samplers, *of_samplers = _samplers(sizes, machine)
    others = [
        (f"mesh of {name}", *mesh.describe()) for name, mesh in sorted(sizes.role_meshes.items())
    ]
    return [
        ("parameters", f"{num_params(model):,}", _active(model)),
        *_lora_rows(config.lora, model),
        ("devices", machine.devices, f"{machine.platform}, in {machine.processes} processes"),
        ("training mesh", *sizes.mesh.describe()),
        *others,
        ("samplers", *of_samplers),
        ("sampler's weights", *_weights(sizes, model)),
        (
            "decode slots",
            sizes.engine.decode_slots * samplers,
            _slots(sizes, config, model, machine),
        ),
        *_trajectory_rows(sizes, config, samplers),
        ("compute dtype", sizes.forward.compute_dtype, "parameters are float32"),
        ("prompts per step", p.prompts_per_step, f"x {r.num_samples} samples each"),
        ("sequences per step", p.prompts_per_step * r.num_samples, ""),
        (
            "longest sequence",
            config.data.max_prompt_length + r.max_response_length,
            f"prompt {config.data.max_prompt_length} + response {r.max_response_length} tokens",
        ),
        ("optimizer steps", p.mini_batches * config.training.epochs, "per RL step"),
        *_preview_rows(config),
        ("row", p.limits.tokens, _row(sizes)),
        ("attention in rows", sizes.attention.name, sizes.attention.why),
        *_tower_rows(sizes),
        ("attention of decode steps", sizes.engine.attention, _prefill(sizes)),
        *[("grouped products", sizes.product, sizes.product_why)] * bool(sizes.product),
        ("rows", rows, "per optimizer step at most; empty ones cost nothing"),
        *_partial_batch_rows(sizes, config),
        ("micro-batch", sizes.micro_rows * sizes.mesh.ranks, "rows over all data ranks"),
        *_pipeline_rows(sizes),
        *_offload_rows(config.training.offload, machine),
    ]


def _trajectory_rows(sizes: Sizes, config: Config, samplers: int) -> list[tuple]:
    engine = sizes.engine
    if not engine.lanes:
        return []
    waiting = waiting_pages(engine, sizes.sampler_ranks)
    pages = f"{waiting} pages on each device are reserved for"
    if config.rollout.cache_tokens:
        pages = "cache space that slots do not use is for"
    text = f"maximum in progress; {pages} those that wait for their environment"
    return [("trajectories", engine.slots * samplers, text)]


def _preview_rows(config: Config) -> list[tuple]:
    """Forward passes beside those of the updates, of a loss that chooses tokens."""
    algorithm, training = config.algorithm, config.training
    if not algorithm.selects:
        return []
    updates = training.mini_batches * training.epochs
    if algorithm.proximal == "recomputed":
        passes, first = updates - 1, "none before the first optimizer step"
    else:
        passes, first = updates, "one before each optimizer step"
    what = f"of an optimizer step's rows: {algorithm.policy_loss} chooses by the current policy"
    return [("more forward passes", passes, f"{what}, {first}")]


def _samplers(sizes: Sizes, machine: Machine) -> tuple[int, int | str, str]:
    """(number that is known, of workers 1; number as it is shown; meaning)."""
    tensor, local = sizes.rollout_tensor, machine.local_devices
    if not sizes.workers_sample:
        count, hosts = machine.processes // sizes.sampler_hosts, "one per host"
        if sizes.sampler_hosts > 1:
            hosts = f"of {sizes.sampler_hosts} hosts each"
        return count, count, f"{hosts}, tensor {tensor}"
    meaning = f"one host each, tensor {tensor}"
    if local % tensor:
        meaning += (
            f", which does not fit a host of {local} devices like those here: use other hosts "
            "for workers, or another mesh.rollout_tensor for them"
        )
    return 1, "workers", meaning


def _active(model: DecoderConfig) -> str:
    if not model.num_experts:
        return "of the model"
    return (
        f"of the model; {num_active_params(model):,} per token, in {model.experts_per_token} of "
        f"{model.num_experts} experts"
    )


def _lora_rows(lora: LoraConfig, model: DecoderConfig) -> list[tuple]:
    if not lora.rank:
        return []
    count = num_params(adapted(model, lora)) - num_params(model)
    where = f"adapters of rank {lora.rank} at {', '.join(lora.targets)}"
    return [("trained parameters", f"{count:,}", where)]


def _weights(sizes: Sizes, model: DecoderConfig) -> tuple[str, str]:
    engine = sizes.engine
    kept = engine.dtype if engine.weights_dtype == "auto" else engine.weights_dtype
    size = weight_bytes(model, engine, sizes.rollout_tensor)
    return kept, f"{format_bytes(size)} of a device"


def _slots(sizes: Sizes, config: Config, model: DecoderConfig, machine: Machine) -> str:
    ranks = sizes.sampler_ranks
    size = cache_bytes(model, sizes.engine, ranks=ranks, tensor=sizes.rollout_tensor)
    pages = num_pages(sizes.engine, ranks)
    chosen = ""
    if not config.rollout.num_slots:
        share = f"{config.rollout.cache_fraction:.0%} of {format_bytes(machine.memory)}"
        chosen = f", as many as are useful and fit into {share}"
    kept = "" if sizes.engine.cache_dtype == "auto" else f" of {sizes.engine.cache_dtype}"
    return (
        f"over all samplers; cache of a device {format_bytes(size)}{kept}: {pages} pages of "
        f"{sizes.engine.page_size} tokens{chosen}"
    )


def _row(sizes: Sizes) -> str:
    limits, shards = sizes.packing.limits, sizes.mesh.context
    text = f"tokens, at most {limits.sequences} sequences"
    return text if shards == 1 else f"{text}; {limits.tokens // shards} on each of {shards} devices"


def _prefill(sizes: Sizes) -> str:
    by = "masked" if sizes.engine.prefill_by == "loops" else sizes.engine.prefill_by
    return "; ".join(filter(None, (f"prefill: {by}", sizes.sampler_attention_why)))


def _tower_rows(sizes: Sizes) -> list[tuple]:
    """Attention of the tower, beside rows; a sampler's chunks may have another size."""
    images, form = sizes.packing.images, sizes.forward.tower
    if images is None:
        return []
    patches = f"{images.chunks} chunks of {images.chunk} patches a row"
    if not form.block:
        return [("attention in the tower", "masked", f"{patches}, all scores of a chunk at once")]
    name = "blocks" if form.by == "loops" else "kernel"
    return [("attention in the tower", name, f"{patches}, in tiles of {form.block}")]


def _pipeline_rows(sizes: Sizes) -> list[tuple]:
    if sizes.microbatches == 1:
        return []
    bubble = f"each rank is idle for {sizes.bubble_share:.0%} of the time"
    repeats = sizes.forward.repeats
    rounds = f", {repeats} rounds" if repeats > 1 else ""
    text = f"x {sizes.microbatches} micro-batches{rounds}; {bubble}"
    return [("pipeline", f"{sizes.pipeline_ranks} ranks", text)]


def _partial_batch_rows(sizes: Sizes, config: Config) -> list[tuple]:
    partial_batch = sizes.partial_batch
    if partial_batch is None:
        return []
    rows = partial_batch.rows[partial_batch.primary] * sizes.mesh_of("ACTOR").ranks
    groups = "complete groups that fill it"
    if config.stream.partial_batches == "counter":
        groups = f"{config.stream.partial_batch_prompts} groups at most"
    return [("rows of a partial batch", rows, f"over all data ranks, for {groups}")]


def _offload_rows(offload: str, machine: Machine) -> list[tuple]:
    if offload == "none":
        return []
    same = "; the same memory on a CPU, so nothing is saved" if machine.platform == "cpu" else ""
    return [("unused models", "offloaded to the host", f"in {HOST} memory{same}")]
