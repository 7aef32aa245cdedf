"""The decoder: layers stacked and scanned, attention passed in.

B batch, T tokens, D hidden, N heads, K key/value heads, H head dim, F mlp, V vocabulary, E experts.
One network serves training (packed rows), prefill and decode: they differ in the attention function
and in what it keeps, never in the layers. Its parameters: parameters.py.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from distflow_jax.models import lora, rope
from distflow_jax.models.config import DecoderConfig
from distflow_jax.models.int8 import Int8, lookup, times
from distflow_jax.models.layer_weights import by_input, by_output
from distflow_jax.models.moe import Route, mixture
from distflow_jax.models.parameters import ParamSpec, param_specs
from distflow_jax.models.remat import MLP, OUTPUT, PROJECTION, named, rematerialised
from distflow_jax.parallel.pipeline import Body, scan_layers
from distflow_jax.parallel.rules import constrain

# (q, k, v, layer input) -> (attention output [B, T, N, H], layer output)
Attend = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * scale, in float32. Zhang & Sennrich 2019 (arxiv.org/abs/1910.07467)."""
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    scale = scale.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + scale.shape)
    return (x32 * inverse * scale).astype(x.dtype)


_QKV = ("query", "key", "value")
Weights = dict[str, Any]  # of a layer, by the names in DecoderConfig's docstring


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
    microbatches: int = 0,
) -> tuple[jax.Array, Any]:
    """Final hidden states [B, T, D] (normed, in `dtype`) and the attention's layer outputs.

    `params`: nested dict, its layers stacked, or a list of them apart (layer_weights.py).
    `layer_inputs`: pytree with a leading layer dim, handed to `attend` layer by layer. `remat`:
    what the backward pass computes again instead of finding it in memory, see remat.py. `route`:
    chooses the experts in place of `moe.best`; layer outputs are then a pair, the attention's and
    what `route` gave beside its choice. Where the mesh has stages (parallel/pipeline.py), `attend`
    and `route` are `jax.tree_util.Partial`s of arrays with rows in front, layer inputs have rows
    behind the layers, layer outputs are sums over rows, and `microbatches` is the number of those
    that go through the stages one by one.
    """
    frequencies = rope.inverse_frequencies(c.head_dim, c.rope_theta, c.rope_scaling)
    x = lookup(_gathered(params["embed"]["embedding"], dtype), tokens_BT, dtype)
    x = constrain(x, "batch", "length", "activation")
    apart = isinstance(params["layers"], list)

    def body_of(rows: tuple[jax.Array, Attend, Route | None]) -> Body:
        position, attend, route = rows
        tables = rope.rotary_tables(position, frequencies)
        return rematerialised(_Layer(c, attend, tables, apart, route).apply, remat)

    rows = position_BT, attend, route
    if apart:
        body, outputs = body_of(rows), []
        for number, weights in enumerate(params["layers"]):
            extra = jax.tree.map(lambda x, number=number: x[number], layer_inputs)
            x, kept = body(x, (weights, extra))
            outputs.append(kept)
        kept = jax.tree.map(lambda *each: jnp.stack(each), *outputs)
    else:
        given = params["layers"], layer_inputs
        x, kept = scan_layers(body_of, x, rows, *given, microbatches=microbatches)
    return rms_norm(x, params["final_norm"], c.norm_eps), kept


@dataclasses.dataclass(frozen=True, eq=False)
class _Layer:
    """A layer, the body of the scan over them: what is the same for all."""

    config: DecoderConfig
    attend: Attend
    tables: Any  # rope.rotary_tables of the positions
    apart: bool  # whether weights are those of a layer apart
    route: Route | None

    def apply(self, x_BTD: jax.Array, inputs: tuple[Any, Any]) -> tuple[jax.Array, Any]:
        """The residual stream after the layer of `inputs` (weights, layer input); its output."""
        w, extra = inputs
        c = self.config
        h = rms_norm(x_BTD, w["attention_norm"], c.norm_eps)
        h, kept = self.attention(h, w, extra)
        x = x_BTD + h
        h = rms_norm(x, w["mlp_norm"], c.norm_eps)
        if c.num_experts:
            h, routed = mixture(
                h,
                w,
                c.experts_per_token,
                norm_topk=c.norm_topk,
                turned=self.apart,
                route=self.route,
                extra=extra,
            )
            kept = kept if self.route is None else (kept, routed)
        else:
            h = self.mlp(h, w)
        return constrain(x + h, "batch", "length", "activation"), kept

    def attention(self, h_BTD: jax.Array, w: Weights, extra: Any) -> tuple[jax.Array, Any]:
        """What attention adds to the residual stream, and what `attend` keeps."""
        c, h = self.config, _flat(h_BTD)
        q, k, v = (named(PROJECTION, self.project(h, w, name)) for name in _QKV)
        if c.attention_bias:
            q, k, v = (
                x + w[f"{name}_bias"].astype(x.dtype)[None]
                for name, x in zip(_QKV, (q, k, v), strict=True)
            )
        q, k, v = (_unflat(x, h_BTD) for x in (q, k, v))
        if c.qk_norm:
            q = rms_norm(q, w["query_norm"], c.norm_eps)
            k = rms_norm(k, w["key_norm"], c.norm_eps)
        q = constrain(rope.rotate(q, self.tables), "batch", "length", "heads", "head_dim")
        k = constrain(rope.rotate(k, self.tables), "batch", "length", "kv_heads", "head_dim")
        out, kept = self.attend(q, k, v, extra)
        out = out.reshape(-1, c.num_heads * c.head_dim)
        return _unflat(named(OUTPUT, self.project(out, w, "output", inputs=2)), h_BTD), kept

    def mlp(self, h_BTD: jax.Array, w: Weights) -> jax.Array:
        """The gated MLP, [B, T, D]. Shazeer 2020 (arxiv.org/abs/2002.05202), SwiGLU."""
        h = _flat(h_BTD)
        gate, up = (named(MLP, self.project(h, w, name)) for name in ("gate", "up"))
        h = _unflat(jax.nn.silu(gate) * up, h_BTD)
        h = _flat(constrain(h, "batch", "length", "mlp"))
        return _unflat(self.project(h, w, "down"), h_BTD)

    def project(self, x: jax.Array, w: Weights, name: str, inputs: int = 1) -> jax.Array:
        """x [X, I] times a weight of the layer, and its adapter where it has one."""
        product = functools.partial(times, by_output if self.apart else by_input)
        y, adapters = product(x, w[name], inputs=inputs), self.config.lora
        if adapters is None or name not in adapters.targets:
            return y
        low = product(x, w[name + lora.A], inputs=inputs)
        return y + adapters.scale * product(low, w[name + lora.B])


# X = B T: a weight gradient that sums over two dims makes XLA:CPU transpose the activations inside
# the fusion that computes them, which takes longer than the products themselves
def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(-1, *x.shape[2:])


def _unflat(x: jax.Array, like: jax.Array) -> jax.Array:
    return x.reshape(*like.shape[:2], *x.shape[1:])


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
