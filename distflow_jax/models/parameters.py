"""Declaration, initialization and placement of a network's parameters.

DecoderConfig documents the paths and shapes.
"""

import dataclasses
import math
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from distflow_jax.models import lora
from distflow_jax.models.decoder_config import DecoderConfig, ScalarModel, decoder_of
from distflow_jax.models.vision.tower_params import tower_params
from distflow_jax.models.vision.vision_config import VISION
from distflow_jax.parallel.rules import sharding

Network = DecoderConfig | ScalarModel


EXPERT_PATHS = ("layers/gate", "layers/up", "layers/down")  # once per expert in a mixture


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """Declaration of one parameter.

    `inputs` are the dims that products sum over, for an embedding those of its use as the head.
    Norms and biases have none. Routers have none either, because samplers quantise only parameters
    with inputs, and a quantised router would choose other experts.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]  # logical dims
    stddev: float | None  # of initial values; None: ones
    inputs: tuple[int, ...] = ()


def param_specs(network: Network) -> dict[str, ParamSpec]:
    """Declarations of all parameters by their paths."""
    if isinstance(network, ScalarModel):
        trunk = {f"trunk/{path}": spec for path, spec in _decoder_specs(network.trunk).items()}
        size = network.trunk.hidden_size
        return trunk | {"head": ParamSpec((size,), ("activation",), network.head_stddev)}
    return _decoder_specs(network)


def _decoder_specs(c: DecoderConfig) -> dict[str, ParamSpec]:
    """Declarations of a decoder's parameters.

    The initial values of projections back into the residual stream are smaller by sqrt(2 layers),
    as in GPT-2 (Radford et al. 2019, sec. 2.3).
    """
    std, back = 0.02, 0.02 / (2 * c.num_layers) ** 0.5
    layers, n, k, h = c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim
    d, f = c.hidden_size, c.mlp_size
    unit = 0.0 if c.norm_offset else None  # initially a norm multiplies by 1
    norm = ParamSpec((layers, d), ("layers", "activation"), unit)
    specs = {
        "embed/embedding": ParamSpec((c.vocab_size, d), ("vocab", "embedding"), std, (1,)),
        "layers/attention_norm": norm,
        "layers/query": ParamSpec(
            (layers, d, n, h), ("layers", "hidden", "heads", "head_dim"), std, (1,)
        ),
        "layers/key": ParamSpec(
            (layers, d, k, h), ("layers", "hidden", "kv_heads", "head_dim"), std, (1,)
        ),
        "layers/value": ParamSpec(
            (layers, d, k, h), ("layers", "hidden", "kv_heads", "head_dim"), std, (1,)
        ),
        "layers/output": ParamSpec(
            (layers, n, h, d), ("layers", "heads", "head_dim", "hidden"), back, (1, 2)
        ),
        "layers/mlp_norm": norm,
        "layers/gate": ParamSpec((layers, d, f), ("layers", "hidden", "mlp"), std, (1,)),
        "layers/up": ParamSpec((layers, d, f), ("layers", "hidden", "mlp"), std, (1,)),
        "layers/down": ParamSpec((layers, f, d), ("layers", "mlp", "hidden"), back, (1,)),
        "final_norm": ParamSpec((d,), ("activation",), unit),
    }
    if c.post_norms:
        specs |= {"layers/attention_post_norm": norm, "layers/mlp_post_norm": norm}
    if c.num_experts:
        specs["layers/router"] = ParamSpec(
            (layers, d, c.num_experts), ("layers", "hidden", "experts"), std
        )
        specs |= {path: _per_expert(specs[path], c.num_experts) for path in EXPERT_PATHS}
    if c.attention_bias:
        for name, count, axis in (
            ("query", n, "heads"),
            ("key", k, "kv_heads"),
            ("value", k, "kv_heads"),
        ):
            specs[f"layers/{name}_bias"] = ParamSpec(
                (layers, count, h), ("layers", axis, "head_dim"), 0.0
            )
    if c.qk_norm:
        for name in ("query", "key"):
            specs[f"layers/{name}_norm"] = ParamSpec((layers, h), ("layers", "head_dim"), unit)
    if not c.tie_embeddings:
        specs["head"] = ParamSpec((d, c.vocab_size), ("embedding", "vocab"), std, (0,))
    if c.lora is not None:
        for name in c.lora.targets:
            a, b = _adapter_specs(specs[f"layers/{name}"], c.lora.rank)
            specs |= {f"layers/{name}{lora.A}": a, f"layers/{name}{lora.B}": b}
    if c.vision is not None:
        specs |= {
            f"{VISION}/{path}": ParamSpec(*param) for path, param in tower_params(c.vision).items()
        }
    return specs


def _adapter_specs(base: ParamSpec, rank: int) -> tuple[ParamSpec, ParamSpec]:
    """A and B of a projection [layers, ...].

    Initially B A = 0 (Hu et al. 2021, sec. 4.1). A has the standard deviation of PEFT, that of a
    uniform distribution in +-1 / sqrt(inputs).
    """

    def select(dims):
        return tuple(base.shape[d] for d in dims), tuple(base.axes[d] for d in dims)

    inputs, input_axes = select(base.inputs)
    outputs, output_axes = select([d for d in range(1, len(base.shape)) if d not in base.inputs])
    layers, layer_axes = select((0,))
    spread = (3 * math.prod(inputs)) ** -0.5
    return (
        ParamSpec(
            (*layers, *inputs, rank), (*layer_axes, *input_axes, "rank"), spread, base.inputs
        ),
        ParamSpec((*layers, rank, *outputs), (*layer_axes, "rank", *output_axes), 0.0, (1,)),
    )


def _per_expert(spec: ParamSpec, experts: int) -> ParamSpec:
    """The spec with a dim of experts after that of layers."""
    layers, *rest = spec.shape
    return ParamSpec(
        (layers, experts, *rest),
        ("layers", "experts", *spec.axes[1:]),
        spec.stddev,
        tuple(d + 1 for d in spec.inputs),
    )


def param_shardings(config: Network, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Nested dict of NamedShardings, one per parameter.

    Raises ValueError if a mesh axis does not divide a dim.
    """
    specs = param_specs(config)
    return unflatten_dict({p: sharding(mesh, s.axes, s.shape) for p, s in specs.items()}, sep="/")


def abstract_params(config: Network) -> dict[str, Any]:
    """Nested dict of float32 ShapeDtypeStructs, one per parameter."""
    specs = param_specs(config)
    return unflatten_dict(
        {p: jax.ShapeDtypeStruct(s.shape, jnp.float32) for p, s in specs.items()}, sep="/"
    )


def init_params(config: Network, seed: int, shardings: dict[str, Any]) -> dict[str, Any]:
    """Random parameters; values do not depend on the mesh or the number of processes.

    Drawn on the host, one array at a time. A jitted initializer took 6 CPU-seconds to compile at
    the start of every test and first experiment.
    """
    return place_params(config, _random_arrays(param_specs(config), seed), shardings)


def _random_arrays(specs: dict[str, ParamSpec], seed: int) -> Iterator[tuple[str, np.ndarray]]:
    for path, spec in specs.items():
        if spec.stddev is None:
            yield path, np.ones(spec.shape, np.float32)
        else:
            key = np.array([seed, zlib.crc32(path.encode())], np.uint64)
            rng = np.random.Generator(np.random.Philox(key=key))
            yield path, spec.stddev * rng.standard_normal(spec.shape, np.float32)


def place_params(config: Network, arrays: Any, shardings: dict[str, Any]) -> dict[str, Any]:
    """Puts (path, host array) pairs on the devices, one array at a time.

    Every process passes the same full arrays and keeps only its own shards. Raises ValueError if
    paths or shapes are not exactly those of the network.
    """
    specs, layout = param_specs(config), flatten_dict(shardings, sep="/")
    placed = {}
    for path, value in arrays:
        if path not in specs or tuple(value.shape) != specs[path].shape:
            wanted = specs[path].shape if path in specs else "no such parameter"
            raise ValueError(f"weights for {path} have shape {value.shape}, expected {wanted}")
        placed[path] = _placed(np.asarray(value, np.float32), layout[path])
    missing = sorted(set(specs) - set(placed))
    if missing:
        raise ValueError(f"weights lack the parameters {missing}")
    return unflatten_dict(placed, sep="/")


def _placed(value: np.ndarray, layout: jax.sharding.NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(value.shape, layout, lambda index: value[index])


def with_scalar_head(params: dict[str, Any]) -> dict[str, Any]:
    """A decoder's parameters as those of a scalar model without its head; see `completed`."""
    return {"trunk": {k: v for k, v in params.items() if k != "head"}}


def completed(
    params: dict[str, Any], network: Network, seed: int, mesh: jax.sharding.Mesh
) -> dict[str, Any]:
    """Adds freshly initialized parameters for those that `params`, on `mesh`, lacks.

    Such are a scalar model's head and adapters. Existing arrays are not copied.
    """
    existing = flatten_dict(params, sep="/")
    missing = {p: spec for p, spec in param_specs(network).items() if p not in existing}
    layout = flatten_dict(param_shardings(network, mesh), sep="/")
    placed = {p: _placed(x, layout[p]) for p, x in _random_arrays(missing, seed)}
    return unflatten_dict(existing | placed, sep="/")


def num_params(config: Network) -> int:
    """Number of parameters."""
    return sum(int(np.prod(s.shape)) for s in param_specs(config).values())


def num_active_params(config: Network) -> int:
    """Number of parameters that process one token: of the experts, only the chosen ones."""
    decoder = decoder_of(config)
    if not decoder.num_experts:
        return num_params(config)
    specs = _decoder_specs(decoder)
    of_experts = sum(int(np.prod(specs[path].shape)) for path in EXPERT_PATHS)
    rest = decoder.num_experts - decoder.experts_per_token
    return num_params(config) - of_experts // decoder.num_experts * rest
