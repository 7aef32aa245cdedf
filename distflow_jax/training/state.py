"""State of a model that is trained: parameters, optimizer, and how often it was updated."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from distflow_jax.models.transformer import Network, abstract_params, param_shardings


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    """Donated from update to update; checkpointed as it is."""

    params: Any
    opt_state: Any
    count: Any  # int32 scalar: updates applied


def state_shardings(
    model: Network, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh
) -> TrainState:
    """Layout of every array: the optimizer's moments lie as their parameters do."""
    params = param_shardings(model, mesh)
    whole = NamedSharding(mesh, PartitionSpec())
    abstract = jax.eval_shape(optimizer.init, abstract_params(model))
    opt_state = optax.tree_map_params(
        optimizer,
        lambda _, layout: layout,
        abstract,
        params,
        transform_non_params=lambda _: whole,
    )
    return TrainState(params, opt_state, whole)


def init_state(
    params: Any,
    model: Network,
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
) -> TrainState:
    """Fresh optimizer around `params`, born sharded."""
    layout = state_shardings(model, optimizer, mesh)
    opt_state = jax.jit(optimizer.init, out_shardings=layout.opt_state)(params)
    return TrainState(params, opt_state, jax.device_put(jnp.zeros((), jnp.int32), layout.count))


def abstract_state(
    model: Network, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh
) -> TrainState:
    """ShapeDtypeStructs with shardings, for reading a checkpoint."""
    from_specs = abstract_params(model)
    shapes = TrainState(
        from_specs,
        jax.eval_shape(optimizer.init, from_specs),
        jax.ShapeDtypeStruct((), jnp.int32),
    )
    return jax.tree.map(
        lambda x, layout: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout),
        shapes,
        state_shardings(model, optimizer, mesh),
    )


def sharded_params(model: Network, mesh: jax.sharding.Mesh) -> Any:
    """The parameters' ShapeDtypeStructs with shardings."""
    return jax.tree.map(
        lambda x, layout: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout),
        abstract_params(model),
        param_shardings(model, mesh),
    )
