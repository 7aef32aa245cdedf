"""Training state of a model: parameters, optimizer state and number of updates."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec

from distflow_jax.models import lora
from distflow_jax.models.parameters import Network, abstract_params, param_shardings, param_specs
from distflow_jax.training.compressed_moments import is_blocks, layout_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    """Training state; updates donate it, except frozen parameters. Checkpoints store it whole."""

    params: Any
    opt_state: Any  # of the trained parameters only, see lora.divide
    count: Any  # int32 scalar: updates applied


def divided(model: Network, state: TrainState) -> tuple[TrainState, Any]:
    """The state with trained parameters only, and the frozen parameters."""
    trained, frozen = lora.divide(model, state.params)
    return dataclasses.replace(state, params=trained), frozen


def joined(state: TrainState, frozen: Any) -> TrainState:
    """Inverse of `divided`."""
    return dataclasses.replace(state, params=lora.join(state.params, frozen))


def state_shardings(
    model: Network, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh
) -> TrainState:
    """Shardings of the state; moments in any format are sharded like their parameters."""
    params = param_shardings(model, mesh)
    whole = NamedSharding(mesh, PartitionSpec())
    abstract = jax.eval_shape(optimizer.init, lora.divide(model, abstract_params(model))[0])
    opt_state = optax.tree_map_params(
        optimizer,
        layout_of,
        abstract,
        lora.divide(model, params)[0],
        is_leaf=is_blocks,
        transform_non_params=lambda _: whole,
    )
    return TrainState(params, opt_state, whole)


def init_state(
    params: Any,
    model: Network,
    optimizer: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
) -> TrainState:
    """State of `params` with a fresh optimizer state, initialized sharded."""
    layout = state_shardings(model, optimizer, mesh)
    trained, _ = lora.divide(model, params)
    opt_state = jax.jit(optimizer.init, out_shardings=layout.opt_state)(trained)
    return TrainState(params, opt_state, jax.device_put(jnp.zeros((), jnp.int32), layout.count))


def abstract_state(
    model: Network, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh
) -> TrainState:
    """The state as ShapeDtypeStructs with shardings, for restoring a checkpoint."""
    from_specs = abstract_params(model)
    shapes = TrainState(
        from_specs,
        jax.eval_shape(optimizer.init, lora.divide(model, from_specs)[0]),
        jax.ShapeDtypeStruct((), jnp.int32),
    )
    return jax.tree.map(
        lambda x, layout: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout),
        shapes,
        state_shardings(model, optimizer, mesh),
    )


def sharded_params(model: Network, mesh: jax.sharding.Mesh) -> Any:
    """The parameters as ShapeDtypeStructs with shardings."""
    return jax.tree.map(
        lambda x, layout: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout),
        abstract_params(model),
        param_shardings(model, mesh),
    )


def as_stored(
    params: Any, network: Network, compute_dtype: str, *, trained: bool, taken: bool = True
) -> Any:
    """Parameters, arrays or ShapeDtypeStructs, with matrices that no update changes in
    `compute_dtype`, to which products cast them anyway.

    Args:
      trained: whether the network is trained, all of it or what lora.is_trained says.
      taken: whether the arrays are given up. Then each is freed as soon as it is cast, so that one
        at a time lies there twice; else each is copied, since an update donates its state.
    """
    specs, flat = param_specs(network), flatten_dict(params, sep="/")
    for path, x in flat.items():
        short = specs[path].inputs and not (trained and lora.is_trained(network, path))
        dtype = jnp.dtype(compute_dtype) if short else x.dtype
        if isinstance(x, jax.ShapeDtypeStruct):
            flat[path] = x.update(dtype=dtype)
        elif dtype != x.dtype:
            flat[path] = x.astype(dtype)
            if taken:
                x.delete()
        elif not taken:
            flat[path] = x.copy()
    return unflatten_dict(flat, sep="/")
