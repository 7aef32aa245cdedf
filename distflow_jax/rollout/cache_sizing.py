"""How many slots a sampler has, and what its cache takes."""

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding

from distflow_jax.config.rollout_config import RolloutConfig
from distflow_jax.models.decoder_config import DecoderConfig
from distflow_jax.models.moe import recorded_dtype
from distflow_jax.models.parameters import param_specs
from distflow_jax.parallel.rules import partition_spec
from distflow_jax.rollout.decode_state import EngineConfig, num_pages, stored_dtype

FEATURE_BATCHES = 4  # of encoded images that stay: those of prompts that wait to be read


def trajectories(config: RolloutConfig, slots: int) -> int:
    """Most responses under way beside so many slots, over all processes."""
    return (config.max_trajectories or 4 * slots) if config.environment else slots


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
