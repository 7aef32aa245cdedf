"""The sampler's engine and the weight sync that feeds it, for training and for answering alone."""

import functools
from collections.abc import Sequence

import jax

from distflow_jax.config.run_config import Config
from distflow_jax.models import lora
from distflow_jax.models.parameters import param_shardings
from distflow_jax.models.weights.source import ModelSource
from distflow_jax.parallel import mesh as mesh_lib
from distflow_jax.planning.sizes import Sizes
from distflow_jax.resharding.weight_sync import WeightSync
from distflow_jax.rollout.engine.engine import RolloutEngine, weight_layout


def make_engine(
    source: ModelSource,
    config: Config,
    sizes: Sizes,
    devices: Sequence[jax.Device] | None = None,
) -> RolloutEngine:
    """This process's engine; of `devices` that are planned for, the first host's."""
    return RolloutEngine(
        source.config,
        sizes.engine,
        _mesh(sizes, devices),
        stop_ids=source.tokenizer.stop_ids,
        seed=config.seed,
        tokenizer=source.tokenizer,
    )


def make_sync(
    source: ModelSource,
    config: Config,
    sizes: Sizes,
    devices: Sequence[jax.Device] | None = None,
) -> WeightSync:
    """The sync from a policy on any training mesh to all samplers, adapters merged.

    This process receives the weights on its own sampler mesh, as `make_engine` has it.
    """
    replica_mesh = mesh_lib.replica_mesh(sizes.rollout_tensor, devices, sizes.sampler_submesh)
    local_mesh = _mesh(sizes, devices)
    layout = weight_layout(source.config, sizes.engine, local_mesh)
    shardings = param_shardings(source.config, replica_mesh)
    return WeightSync(
        shardings,
        local_mesh,
        sizes.engine.dtype,
        layout,
        functools.partial(lora.merged, scale=config.lora.scale),
    )


def _mesh(sizes: Sizes, devices: Sequence[jax.Device] | None) -> jax.sharding.Mesh:
    return mesh_lib.sampler_mesh(sizes.rollout_tensor, devices, sizes.sampler_submesh)
