"""How many slots a sampler has, and what its cache takes."""

import dataclasses
import math
from collections.abc import Callable, Mapping

import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding

from distflow_jax.config.rollout_config import RolloutConfig
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.moe import recorded_dtype
from distflow_jax.models.parameters import param_specs
from distflow_jax.parallel.rules import partition_spec
from distflow_jax.programs.units import format_bytes
from distflow_jax.rollout.decode_state import EngineConfig, num_pages, stored_dtype

ABSURD = 8  # times the memory
SLOT_BYTES = 64  # of a slot, whatever its length
TOKEN_BYTES = 16  # of a token in a batch: its id, mask, log-prob and advantage
FEATURE_BATCHES = 4  # of encoded images that stay: those of prompts that wait to be read


def trajectories(config: RolloutConfig, slots: int) -> int:
    """Most responses under way beside so many slots, over all processes."""
    return (config.max_trajectories or 4 * slots) if config.environment else slots


def with_trajectories(
    engine: EngineConfig, config: RolloutConfig, *, most: int, samplers: int, ranks: int
) -> EngineConfig:
    """A sampler whose `slots` are those that decode, with room for the trajectories that wait: as
    many as rollout.max_trajectories says, and no more than the `most` that may be under way.

    `samplers` of `ranks` data ranks each.
    """
    lanes = engine.slots
    wanted = min(most, trajectories(config, lanes * samplers))
    slots = max(lanes, -(-wanted // (samplers * ranks)) * ranks)
    return dataclasses.replace(engine, slots=slots, lanes=lanes if lanes < slots else 0)


def feature_bytes(model: DecoderConfig, config: EngineConfig) -> int:
    """Bytes of encoded images on each device of a sampler; 0 for a model without a tower."""
    vision, images = model.vision, config.images
    if vision is None or images is None:
        return 0
    of_batch = (1 + len(vision.deepstack)) * images.features * vision.width
    return FEATURE_BATCHES * of_batch * jnp.dtype(config.dtype).itemsize


def page_bytes(model: DecoderConfig, config: EngineConfig, tensor: int) -> int:
    """Bytes of one page on one of `tensor` devices: keys and values of all layers, scales, and the
    experts of its tokens where they are recorded.

    A page before the window of some layers is kept for the others, with the keys of all.
    """
    heads = model.num_kv_heads
    heads = heads // tensor if heads % tensor == 0 else heads  # few heads are copied
    dtype = jnp.dtype(stored_dtype(config))
    scale = 4 if dtype == jnp.int8 else 0
    token = model.head_dim * dtype.itemsize + scale
    experts = 0
    if config.record_experts:
        experts = model.experts_per_token * recorded_dtype(model.num_experts).itemsize
    return model.num_layers * config.page_size * (2 * heads * token + experts)


def cache_bytes(model: DecoderConfig, config: EngineConfig, *, ranks: int, tensor: int) -> int:
    """Bytes of the cache on one device of a sampler with `ranks` data ranks."""
    return num_pages(config, ranks) * page_bytes(model, config, tensor)


def weight_bytes(model: DecoderConfig, config: EngineConfig, tensor: int) -> int:
    """Bytes of a sampler's weights on one of `tensor` devices."""
    mesh = AbstractMesh((1, tensor), ("data", "tensor"))
    item, total = jnp.dtype(config.dtype).itemsize, 0
    for spec in param_specs(model).values():
        shape = NamedSharding(mesh, partition_spec(mesh, spec.axes, spec.shape)).shard_shape(
            spec.shape
        )
        count = math.prod(shape)
        if config.weights_dtype == "int8" and spec.inputs:
            total += count + 4 * math.prod(n for d, n in enumerate(shape) if d not in spec.inputs)
        else:
            total += count * item
    return total


def fitting_slots(
    model: DecoderConfig,
    config: EngineConfig,
    *,
    ranks: int,
    tensor: int,
    budget: int,
    useful: int,
    whole: Callable[[EngineConfig], EngineConfig] = lambda config: config,
) -> int:
    """Slots of a sampler whose cache stays below `budget` bytes on each device.

    `whole`: a sampler with what else its slots ask for.
    A multiple of `ranks`, at most as many as are `useful` (the responses of a step, rounded up).
    Raises ValueError where not one slot of a rank fits.
    """
    for slots in range(math.ceil(useful / ranks), 0, -1):
        trial = whole(dataclasses.replace(config, slots=slots * ranks))
        if cache_bytes(model, trial, ranks=ranks, tensor=tensor) <= budget:
            return slots * ranks
    one = whole(dataclasses.replace(config, slots=ranks))
    need = cache_bytes(model, one, ranks=ranks, tensor=tensor)
    raise ValueError(
        f"rollout.num_slots=0 (as many as fit): a response of {config.max_response} tokens and its "
        f"prompt of {config.max_prompt} take {need / 2**20:.0f} MiB of a device, and "
        f"rollout.cache_fraction leaves {budget / 2**20:.0f} MiB; raise it, or shorten them, or "
        "widen mesh.rollout_tensor"
    )


def check_room(needed: Mapping[str, int], memory: int) -> None:
    """Raises ValueError for what takes several times so many bytes: {its name: its bytes}.

    A bound, not a plan: what is a little too large is planning/memory_plan.py's to find.
    """
    for what, size in needed.items():
        if size > ABSURD * memory:
            raise ValueError(
                f"{what}: takes {format_bytes(size)} or more, but only {format_bytes(memory)} of "
                "memory are available; use less"
            )


def check_sampler_room(
    model: DecoderConfig, engine: EngineConfig, memory: int, *, ranks: int, tensor: int
) -> None:
    """Raises ValueError for a sampler with `ranks` data ranks whose cache or calls no device of so
    many bytes can hold."""
    page, slots = page_bytes(model, engine, tensor), engine.slots // ranks
    cache = (
        f"rollout.num_slots ({engine.decode_slots} on a sampler), rollout.page_size="
        f"{engine.page_size} and rollout.cache_tokens ({engine.cache_tokens}): the cache"
    )
    calls = {
        "prefix_tokens": engine.prefix_tokens * (page // engine.page_size),
        "prefill_tokens": engine.prefill_tokens * model.hidden_size * 2,
        "tokens_per_call": engine.tokens_per_call * slots * TOKEN_BYTES,
        "speculative_tokens": engine.speculative_tokens * slots * 4,
        "speculative_ngram": engine.speculative_ngram * 4 * slots,
    }
    needed = {cache: num_pages(engine, ranks) * page + slots * SLOT_BYTES}
    needed |= {f"rollout.{name}={getattr(engine, name)}": size for name, size in calls.items()}
    check_room(needed, memory)


def check_weight_room(
    model: DecoderConfig, engine: EngineConfig, memory: int, *, tensor: int
) -> None:
    """Raises ValueError for weights of which no device of so many bytes can hold its part."""
    what = (
        f"the model's weights of {model.num_layers} layers, hidden_size={model.hidden_size} and "
        f"vocab_size={model.vocab_size}"
    )
    check_room({what: weight_bytes(model, engine, tensor)}, memory)
