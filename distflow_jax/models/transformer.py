"""The decoder: parameters declared once, layers stacked and scanned, attention passed in.

B batch, T tokens, D hidden, N heads, K key/value heads, H head dim, F mlp, V vocabulary, E experts.
One network serves training (packed rows), prefill and decode: they differ in the attention function
and in what it keeps, never in the layers.
"""

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from distflow_jax.models import lora, rope
from distflow_jax.models.config import DecoderConfig, ScalarModel
from distflow_jax.models.int8 import Int8, lookup, quantised, times
from distflow_jax.models.layer_weights import are_apart, by_input, by_output, set_apart
from distflow_jax.models.moe import Route, mixture
from distflow_jax.models.remat import MLP, OUTPUT, PROJECTION, named, rematerialised
from distflow_jax.parallel.rules import constrain, sharding
from distflow_jax.types import flatten_dict, unflatten_dict

# (q, k, v, layer input) -> (attention output [B, T, N, H], layer output)
Attend = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """Shape, logical dims, standard deviation at birth (None: ones) of one parameter, and over
    which of its dims products sum; of an embedding, those as the head. Norms and biases have none;
    nor has a router, for a sampler keeps it as it is: rounded, it would choose other experts.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    stddev: float | None
    inputs: tuple[int, ...] = ()


Network = DecoderConfig | ScalarModel

EXPERT_PATHS = ("layers/gate", "layers/up", "layers/down")  # that a mixture has once per expert


def param_specs(network: Network) -> dict[str, ParamSpec]:
    """Every parameter of the network by its path."""
    if isinstance(network, ScalarModel):
        trunk = {f"trunk/{path}": spec for path, spec in _decoder_specs(network.trunk).items()}
        size = network.trunk.hidden_size
        return trunk | {"head": ParamSpec((size,), ("activation",), network.head_stddev)}
    return _decoder_specs(network)


def _decoder_specs(c: DecoderConfig) -> dict[str, ParamSpec]:
    """Projections back into the residual stream start smaller by sqrt(2 layers), as in GPT-2
    (Radford et al. 2019, sec. 2.3)."""
    std, back = 0.02, 0.02 / (2 * c.num_layers) ** 0.5
    layers, n, k, h = c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim
    d, f = c.hidden_size, c.mlp_size
    specs = {
        "embed/embedding": ParamSpec((c.vocab_size, d), ("vocab", "hidden"), std, (1,)),
        "layers/attention_norm": ParamSpec((layers, d), ("layers", "activation"), None),
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
        "layers/mlp_norm": ParamSpec((layers, d), ("layers", "activation"), None),
        "layers/gate": ParamSpec((layers, d, f), ("layers", "hidden", "mlp"), std, (1,)),
        "layers/up": ParamSpec((layers, d, f), ("layers", "hidden", "mlp"), std, (1,)),
        "layers/down": ParamSpec((layers, f, d), ("layers", "mlp", "hidden"), back, (1,)),
        "final_norm": ParamSpec((d,), ("activation",), None),
    }
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
            specs[f"layers/{name}_norm"] = ParamSpec((layers, h), ("layers", "head_dim"), None)
    if not c.tie_embeddings:
        specs["head"] = ParamSpec((d, c.vocab_size), ("hidden", "vocab"), std, (0,))
    if c.lora is not None:
        for name in c.lora.targets:
            a, b = _adapter_specs(specs[f"layers/{name}"], c.lora.rank)
            specs |= {f"layers/{name}{lora.A}": a, f"layers/{name}{lora.B}": b}
    return specs


def _adapter_specs(base: ParamSpec, rank: int) -> tuple[ParamSpec, ParamSpec]:
    """A and B of a projection [layers, ...]. B A = 0 at birth (Hu et al. 2021, sec. 4.1); A with
    the spread that PEFT gives it, of a uniform distribution in +-1 / sqrt(inputs)."""

    def part(dims):
        return tuple(base.shape[d] for d in dims), tuple(base.axes[d] for d in dims)

    inputs, input_axes = part(base.inputs)
    outputs, output_axes = part([d for d in range(1, len(base.shape)) if d not in base.inputs])
    layers, layer_axes = part((0,))
    spread = (3 * math.prod(inputs)) ** -0.5
    return (
        ParamSpec(
            (*layers, *inputs, rank), (*layer_axes, *input_axes, "rank"), spread, base.inputs
        ),
        ParamSpec((*layers, rank, *outputs), (*layer_axes, "rank", *output_axes), 0.0, (1,)),
    )


def _per_expert(spec: ParamSpec, experts: int) -> ParamSpec:
    """The same matrices once per expert, in a dim after that of layers."""
    layers, *rest = spec.shape
    return ParamSpec(
        (layers, experts, *rest),
        ("layers", "experts", *spec.axes[1:]),
        spec.stddev,
        tuple(d + 1 for d in spec.inputs),
    )


def param_shardings(config: Network, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Nested dict of NamedShardings, one per parameter. ValueError where a size does not divide."""
    specs = param_specs(config)
    return unflatten_dict({p: sharding(mesh, s.axes, s.shape) for p, s in specs.items()})


def arrange(
    config: DecoderConfig, weights: str, params: dict[str, Any], *, dtype: str = "auto"
) -> dict[str, Any]:
    """Placed parameters as a sampler holds them: `weights` is one of layer_weights.WEIGHTS.

    `dtype`: "auto" (as they come), or "int8": all but norms, biases and routers are rounded, an
    array at a time.
    `params` may be emptied.
    """
    mesh = params["final_norm"].sharding.mesh
    specs = param_specs(config)
    if dtype == "int8":
        for path, spec in specs.items():
            *groups, name = path.split("/")
            group = functools.reduce(dict.__getitem__, groups, params)
            if spec.inputs:
                group[name] = quantised(group.pop(name), spec.inputs, _scales(mesh, spec))
    if not are_apart(weights, mesh.devices.flat[0].platform):
        return params
    return set_apart(params, {path: (spec.axes, spec.inputs) for path, spec in specs.items()})


def _scales(mesh: jax.sharding.Mesh, spec: ParamSpec) -> jax.sharding.NamedSharding:
    kept = [d for d in range(len(spec.shape)) if d not in spec.inputs]
    return sharding(mesh, tuple(spec.axes[d] for d in kept), tuple(spec.shape[d] for d in kept))


def abstract_params(config: Network) -> dict[str, Any]:
    """Nested dict of float32 ShapeDtypeStructs, one per parameter."""
    specs = param_specs(config)
    return unflatten_dict({p: jax.ShapeDtypeStruct(s.shape, jnp.float32) for p, s in specs.items()})


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * scale, in float32. Zhang & Sennrich 2019 (arxiv.org/abs/1910.07467)."""
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    scale = scale.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + scale.shape)
    return (x32 * inverse * scale).astype(x.dtype)


class Table(nnx.Module):
    """A group of parameters; each attribute is one array of the network."""


def _declare(specs: dict[str, ParamSpec], rngs: nnx.Rngs, owner: nnx.Module) -> None:
    for path, spec in specs.items():
        *groups, name = path.split("/")
        module = owner
        for group in groups:
            if not hasattr(module, group):
                setattr(module, group, Table())
            module = getattr(module, group)
        if spec.stddev is None:
            value = jnp.ones(spec.shape, jnp.float32)
        else:
            value = spec.stddev * jax.random.normal(rngs.params(), spec.shape, jnp.float32)
        setattr(module, name, nnx.Param(value))


class Decoder(nnx.Module):
    """The network as a Flax NNX module: `Decoder(config, rngs=nnx.Rngs(0))`.

    Parameters are float32 and named as in DecoderConfig's docstring. Stages hold them as a nested
    dict of arrays (`params_of`) and bind them back with `bind`.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        _declare(param_specs(config), rngs, self)

    def hidden(self, *args: Any, **options: Any) -> tuple[jax.Array, Any]:
        """`hidden_states` of the module's parameters: (tokens, positions, attend), options."""
        return hidden_states(self.config, params_of(self), *args, **options)

    def head_weight(self, dtype: Any = jnp.float32) -> jax.Array:
        """Output projection [V, D]: the embedding itself where tied."""
        return head_weight(self.config, params_of(self), dtype)


def hidden_states(
    c: DecoderConfig,
    params: dict[str, Any],
    tokens_BT: jax.Array,
    position_BT: jax.Array,
    attend: Attend,
    *,
    layer_inputs: Any = None,
    dtype: Any = jnp.float32,
    remat: str = "none",
    route: Route | None = None,
) -> tuple[jax.Array, Any]:
    """Final hidden states [B, T, D] (normed, in `dtype`) and the attention's layer outputs.

    `params`: nested dict, its layers stacked, or a list of them apart (layer_weights.py).
    `layer_inputs`: pytree with a leading layer dim, handed to `attend` layer by layer. `remat`:
    what the backward pass computes again instead of finding it in memory, see remat.py. `route`:
    chooses the experts in place of `moe.best`; layer outputs are then a pair, the attention's and
    what `route` gave beside its choice.
    """
    frequencies = rope.inverse_frequencies(c.head_dim, c.rope_theta, c.rope_scaling)
    tables = rope.rotary_tables(position_BT, frequencies)
    x = lookup(_gathered(params["embed"]["embedding"], dtype), tokens_BT, dtype)
    x = constrain(x, "batch", "length", "activation")
    apart = isinstance(params["layers"], list)
    product = functools.partial(times, by_output if apart else by_input)

    def project(x, w, name, inputs=1):
        y = product(x, w[name], inputs=inputs)
        if c.lora is None or name not in c.lora.targets:
            return y
        low = product(x, w[name + lora.A], inputs=inputs)
        return y + c.lora.scale * product(low, w[name + lora.B])

    # X = B T: a weight gradient that sums over two dims makes XLA:CPU transpose the activations
    # inside the fusion that computes them, which takes longer than the products themselves
    def flat(x):
        return x.reshape(-1, *x.shape[2:])

    def unflat(x):
        return x.reshape(*tokens_BT.shape, *x.shape[1:])

    def layer(x, inputs):
        w, extra = inputs
        h = flat(rms_norm(x, w["attention_norm"], c.norm_eps))
        q, k, v = (named(PROJECTION, project(h, w, name)) for name in ("query", "key", "value"))
        if c.attention_bias:
            q, k, v = (
                x + w[name].astype(x.dtype)[None]
                for name, x in (("query_bias", q), ("key_bias", k), ("value_bias", v))
            )
        q, k, v = map(unflat, (q, k, v))
        if c.qk_norm:
            q = rms_norm(q, w["query_norm"], c.norm_eps)
            k = rms_norm(k, w["key_norm"], c.norm_eps)
        q = constrain(rope.rotate(q, tables), "batch", "length", "heads", "head_dim")
        k = constrain(rope.rotate(k, tables), "batch", "length", "kv_heads", "head_dim")
        out, kept = attend(q, k, v, extra)
        out = out.reshape(-1, c.num_heads * c.head_dim)
        x = x + unflat(named(OUTPUT, project(out, w, "output", inputs=2)))
        h = rms_norm(x, w["mlp_norm"], c.norm_eps)
        if c.num_experts:
            h, routed = mixture(
                h,
                w,
                c.experts_per_token,
                norm_topk=c.norm_topk,
                turned=apart,
                route=route,
                extra=extra,
            )
            kept = kept if route is None else (kept, routed)
        else:
            h = flat(h)
            gate, up = (named(MLP, project(h, w, name)) for name in ("gate", "up"))
            h = jax.nn.silu(gate) * up
            h = flat(constrain(unflat(h), "batch", "length", "mlp"))
            h = unflat(project(h, w, "down"))
        return constrain(x + h, "batch", "length", "activation"), kept

    body = rematerialised(layer, remat)
    if apart:
        outputs = []
        for number, weights in enumerate(params["layers"]):
            extra = jax.tree.map(lambda x, number=number: x[number], layer_inputs)
            x, kept = body(x, (weights, extra))
            outputs.append(kept)
        kept = jax.tree.map(lambda *each: jnp.stack(each), *outputs)
    else:
        x, kept = jax.lax.scan(body, x, (params["layers"], layer_inputs))
    return rms_norm(x, params["final_norm"], c.norm_eps), kept


def head_weight(
    c: DecoderConfig, params: dict[str, Any], dtype: Any = jnp.float32
) -> jax.Array | Int8:
    """Output projection [V, D]: the embedding itself where tied. In `dtype`, or int8 as it is."""
    if c.tie_embeddings:
        return _gathered(params["embed"]["embedding"], dtype)
    head = params["head"]
    return _gathered(head if isinstance(params["layers"], list) else head.T, dtype)


def _gathered(table: jax.Array | Int8, dtype: Any) -> jax.Array | Int8:
    if isinstance(table, Int8):  # a sampler's: no data rank has a part of it only
        return table
    # Gathered here, over the data ranks. Left to choose, XLA gathers the tokens of all ranks
    # for the lookup, and the head once per chunk of the loop over the vocabulary's logits.
    return constrain(table.astype(dtype), "vocab", "activation")


def head_logits(c: DecoderConfig, params: dict[str, Any], hidden_XD: jax.Array) -> jax.Array:
    """Next-token logits float32 [X, V] of final hidden states."""
    weight = head_weight(c, params, hidden_XD.dtype)

    def by_rows(x, weight, inputs, dtype):
        return jnp.einsum("XD,VD->XV", x, weight, preferred_element_type=dtype)

    product = by_output if isinstance(params["layers"], list) else by_rows
    return times(product, hidden_XD, weight, dtype=jnp.float32)


def params_of(model: nnx.Module) -> dict[str, Any]:
    """The module's parameters as a nested dict of arrays."""
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def bind(config: DecoderConfig, params: dict[str, Any]) -> Decoder:
    """The module with these arrays as its parameters (no copy; works while tracing)."""
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


def init_params(config: Network, seed: int, shardings: dict[str, Any]) -> dict[str, Any]:
    """Random parameters, the same values whatever the mesh and the number of processes.

    Drawn on the host, one array at a time: the compiled form took 6 CPU-seconds to compile, at the
    start of every test and first experiment.
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

    Every process passes the same full arrays and keeps its own shards only. Raises ValueError where
    the paths are not exactly those of the network.
    """
    specs, layout = param_specs(config), flatten_dict(shardings)
    placed = {}
    for path, value in arrays:
        if path not in specs or tuple(value.shape) != specs[path].shape:
            wanted = specs[path].shape if path in specs else "no such parameter"
            raise ValueError(f"weights for {path} have shape {value.shape}, want {wanted}")
        placed[path] = _placed(np.asarray(value, np.float32), layout[path])
    missing = sorted(set(specs) - set(placed))
    if missing:
        raise ValueError(f"weights set nothing for {missing}")
    return unflatten_dict(placed)


def _placed(value: np.ndarray, layout: jax.sharding.NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(value.shape, layout, lambda index: value[index])


def with_scalar_head(params: dict[str, Any]) -> dict[str, Any]:
    """A decoder's parameters as a scalar model's, which lack its head: see `completed`."""
    return {"trunk": {k: v for k, v in params.items() if k != "head"}}


def completed(
    params: dict[str, Any], network: Network, seed: int, mesh: jax.sharding.Mesh
) -> dict[str, Any]:
    """Parameters that lie on `mesh`, and fresh ones for what they lack: a head, adapters.

    What is there is used as it is, not copied.
    """
    there = flatten_dict(params)
    missing = {p: spec for p, spec in param_specs(network).items() if p not in there}
    layout = flatten_dict(param_shardings(network, mesh))
    placed = {p: _placed(x, layout[p]) for p, x in _random_arrays(missing, seed)}
    return unflatten_dict(there | placed)


def num_params(config: Network) -> int:
    """Number of parameters."""
    return sum(int(np.prod(s.shape)) for s in param_specs(config).values())


def num_active_params(config: Network) -> int:
    """Number of parameters that one token meets: of the experts, those that it goes through."""
    decoder = config.trunk if isinstance(config, ScalarModel) else config
    if not decoder.num_experts:
        return num_params(config)
    specs = _decoder_specs(decoder)
    of_experts = sum(int(np.prod(specs[path].shape)) for path in EXPERT_PATHS)
    rest = decoder.num_experts - decoder.experts_per_token
    return num_params(config) - of_experts // decoder.num_experts * rest
