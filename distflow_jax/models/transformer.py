"""The decoder: a scan over stacked layers, with the attention function as an argument.

One network serves training (packed rows), prefill and decode. They differ in the attention function
and its layer outputs, never in the layers. parameters.py declares its parameters.

B batch, T tokens, D hidden, N heads, K key/value heads, H head dim, F mlp, V vocabulary, E experts.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from distflow_jax.models import lora, rope
from distflow_jax.models.attention import UNLIMITED
from distflow_jax.models.decoder_config import DecoderConfig, YarnScaling
from distflow_jax.models.int8 import Int8, lookup, times
from distflow_jax.models.matmul_layouts import Turned, by_input, by_output, by_row
from distflow_jax.models.moe import Route, mixture
from distflow_jax.models.parameters import ParamSpec, param_specs
from distflow_jax.models.remat import MLP, OUTPUT, PROJECTION, named, rematerialised
from distflow_jax.parallel.circular_pipeline import Body
from distflow_jax.parallel.pipeline import scan_layers
from distflow_jax.parallel.rules import active_mesh, constrain

# (q, k, v, layer input) -> (attention output [B, T, N, H], layer output). Models with a sliding
# window pass one argument more: the layer's window, int32, UNLIMITED for layers without one.
Attend = Callable[..., tuple[jax.Array, Any]]


def rms_norm(
    x: jax.Array, scale: jax.Array, eps: float, *, offset: bool = False, factor: float = 1.0
) -> jax.Array:
    """RMS norm x / rms(x) * scale over the last dim of x [..., D], with scale [D].

    Computed in float32 and rounded to the dtype of `x`. `offset` multiplies by 1 + scale instead,
    `factor` by a further constant. Zhang & Sennrich 2019 (arxiv.org/abs/1910.07467).
    """
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    scale = scale.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + scale.shape)
    if offset:
        scale = 1 + scale
    if factor != 1.0:
        scale = scale * factor
    return (x32 * inverse * scale).astype(x.dtype)


_ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True)}
_QKV = ("query", "key", "value")
Weights = dict[str, Any]  # of one layer, by the names in DecoderConfig's docstring
Use = Callable[..., Any]  # calls a function of a layer's weights and further arguments


class Seen(NamedTuple):
    """Features of images in place of embeddings: which of S features a row's tokens have.

    Provenance alone decides: the ids of the tokens are never compared.
    """

    patch_BT: jax.Array  # int32: number of the feature; -1: the token's embedding
    features_BSD: jax.Array
    deep_BNSD: jax.Array | None = None  # added to the stream behind the first N layers: DeepStack


class ParameterGroup(nnx.Module):
    """A group of parameters; each attribute is one array of the network."""


def _declare(specs: dict[str, ParamSpec], rngs: nnx.Rngs, owner: nnx.Module) -> None:
    for path, spec in specs.items():
        *groups, name = path.split("/")
        module = owner
        for group in groups:
            if not hasattr(module, group):
                setattr(module, group, ParameterGroup())
            module = getattr(module, group)
        if spec.stddev is None:
            value = jnp.ones(spec.shape, jnp.float32)
        else:
            value = spec.stddev * jax.random.normal(rngs.params(), spec.shape, jnp.float32)
        setattr(module, name, nnx.Param(value))


class Decoder(nnx.Module):
    """The network as a Flax NNX module: `Decoder(config, rngs=nnx.Rngs(0))`.

    Parameters are float32 and named as in DecoderConfig's docstring. `params_of` returns them as a
    nested dict of arrays, `bind` makes a module of such a dict.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        _declare(param_specs(config), rngs, self)

    def hidden(self, *args: Any, **options: Any) -> tuple[jax.Array, Any]:
        """`hidden_states` with the module's parameters; takes its arguments from tokens_BT on."""
        return hidden_states(self.config, params_of(self), *args, **options)

    def head_weight(self, dtype: Any = jnp.float32) -> jax.Array:
        """Output projection [V, D]; the embedding itself if tied."""
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
    seen: Seen | None = None,
    microbatches: int = 0,
    repeats: int = 1,
) -> tuple[jax.Array, Any]:
    """Final hidden states [B, T, D] (normed, in `dtype`) and the stacked layer outputs.

    On a mesh with a pipeline axis (parallel/pipeline.py), `attend` and `route` must be
    `jax.tree_util.Partial`s of arrays with rows as their first dim, layer inputs have rows as their
    second dim, and layer outputs are sums over rows.

    Args:
      params: nested dict; its layers stacked, or apart as a list (matmul_layouts.py).
      position_BT: int32 [B, T], or [B, T, 3] in a model with rope_sections.
      attend: attention function, see Attend.
      layer_inputs: pytree with layers as first dim; each layer's slice goes to `attend`.
      remat: the results that the backward pass recomputes, see remat.py.
      route: chooses the experts instead of `moe.best`; a layer output is then the pair of
        attention's and `route`'s.
      seen: features of images; None: all tokens are text.
      microbatches: number of micro-batches that pass the pipeline stages one after another.
      repeats: number of times that a micro-batch passes all pipeline stages.
    """
    x = lookup(_gathered(params["embed"]["embedding"], dtype), tokens_BT, dtype)
    if c.embed_scale:
        x = x * jnp.asarray(c.hidden_size**0.5, dtype)
    if seen is not None:
        x = jnp.where(seen.patch_BT[..., None] >= 0, _at_tokens(seen, seen.features_BSD, x), x)
    x = _share(x)
    apart = isinstance(params["layers"], list)
    deep = seen if seen is not None and seen.deep_BNSD is not None else None

    def body_of(rows: tuple[jax.Array, Attend, Route | None, Seen | None]) -> Body:
        position, attend, route, deep = rows
        return _Layer(c, attend, _rotations(c, position), apart, route, deep).apply

    rows, windows = (position_BT, attend, route, deep), layer_windows(c)
    if deep is not None:
        windows = windows, jnp.arange(c.num_layers, dtype=jnp.int32)
    again = functools.partial(rematerialised, remat=remat)
    if apart:
        x, kept = _layers_apart(body_of(rows), params["layers"], x, (windows, layer_inputs))
    else:
        x, kept = scan_layers(
            body_of,
            x,
            rows,
            (params["layers"], windows),
            layer_inputs,
            remat=again,
            microbatches=microbatches,
            repeats=repeats,
        )
    x = rms_norm(x, params["final_norm"], c.norm_eps, offset=c.norm_offset)
    return _gather(x), kept


def _layers_apart(
    body: Body, weights: Sequence[Weights], x: jax.Array, inputs: Any
) -> tuple[jax.Array, Any]:
    """Layers whose weights are arrays of their own, one after the other.

    On CPUs a scan, which switches to a layer's weights: attention is compiled once for all layers,
    in half of the time. On GPUs each switch would wait for the host.
    """
    mesh = active_mesh()
    if mesh is None or mesh.devices.flat[0].platform != "cpu":
        outputs = []
        for number, of_layer in enumerate(weights):
            window, extra = jax.tree.map(lambda x, number=number: x[number], inputs)
            x, kept = body(x, ((of_layer, window), extra))
            outputs.append(kept)
        return x, jax.tree.map(lambda *each: jnp.stack(each), *outputs)

    def step(x, of_layer):
        number, (window, extra) = of_layer

        def use(part, *args):
            return jax.lax.switch(number, [functools.partial(part, w) for w in weights], *args)

        return body(x, ((None, window), extra), use)

    return jax.lax.scan(step, x, (jnp.arange(len(weights), dtype=jnp.int32), inputs))


def layer_windows(c: DecoderConfig) -> jax.Array | None:
    """Sliding window of each layer in tokens, int32 [layers]; None for models without one."""
    if not c.sliding_window:
        return None
    sizes = [c.sliding_window if windowed else UNLIMITED for windowed in c.windowed]
    return jnp.asarray(sizes, jnp.int32)


Tables = tuple[jax.Array, jax.Array]  # rope.rotary_tables


def _rotations(c: DecoderConfig, position_BT: jax.Array) -> tuple[Tables, Tables | None]:
    """Rotary tables of layers without a window, and of those with one."""
    frequencies = rope.inverse_frequencies(c.head_dim, c.rope_theta, c.rope_scaling, c.rope_factor)
    scale = c.rope_scaling.table_scale if isinstance(c.rope_scaling, YarnScaling) else 1.0
    tables = rope.rotary_tables(position_BT, frequencies, scale, _axes(c))
    if not c.sliding_window:
        return tables, None
    local = rope.inverse_frequencies(c.head_dim, c.rope_local_theta)
    return tables, rope.rotary_tables(position_BT, local)


def _axes(c: DecoderConfig) -> np.ndarray | None:
    """The position that each pair of a head rotates by, int32 [H / 2]; None: there is one."""
    return rope.pair_axes(c.rope_sections, c.rope_interleaved) if c.rope_sections else None


def _at_tokens(seen: Seen, features_BSD: jax.Array, like: jax.Array) -> jax.Array:
    """The feature of each token [B, T, D], an arbitrary one for text; as `like` in its dtype."""
    index = jnp.maximum(seen.patch_BT, 0)[..., None]
    found = jnp.take_along_axis(features_BSD.astype(like.dtype), index, axis=1)
    return constrain(found, "batch", "length", "activation")


@dataclasses.dataclass(frozen=True, eq=False)
class _Layer:
    """A layer, the body of the scan; its fields are the same for all layers."""

    config: DecoderConfig
    attend: Attend
    rotations: tuple[Tables, Tables | None]  # see _rotations
    apart: bool  # whether weights have the layout "apart", see matmul_layouts.py
    route: Route | None
    deep: Seen | None  # features that are added behind the first layers

    def apply(
        self, x_BTD: jax.Array, inputs: tuple[Any, ...], use: Use | None = None
    ) -> tuple[jax.Array, Any]:
        """The residual stream [B, T, D] after the layer, and the layer output.

        `inputs` is ((weights, window), layer input). Devices of a tensor group divide the stream's
        tokens: each norms its own shard, gathers all tokens before a product, and gets its shard of
        the sum after it (sequence parallelism, Korthikanti et al. 2022, arxiv.org/abs/2205.05198).
        """
        (w, window), extra = inputs
        number = None
        if self.deep is not None:
            window, number = window
        use = use or (lambda part, *args: part(w, *args))
        q, k, v = use(self.projected, x_BTD, window)
        out, attended = self.attend(q, k, v, extra, *([] if window is None else [window]))
        x, routed = use(self.after_attention, x_BTD, out, extra)
        kept = attended if self.route is None else (attended, routed)
        return x if number is None else self.deepened(x, number), kept

    def deepened(self, x_BTD: jax.Array, number: jax.Array) -> jax.Array:
        """The stream [B, T, D] behind layer `number`, int32 scalar, with its features added.

        Meng et al. 2024 (arxiv.org/abs/2406.04334).
        """
        seen = self.deep
        assert seen is not None and seen.deep_BNSD is not None
        count = seen.deep_BNSD.shape[1]
        at = jnp.minimum(number, count - 1)
        features = jax.lax.dynamic_index_in_dim(seen.deep_BNSD, at, axis=1, keepdims=False)
        added = _share(_at_tokens(seen, features, x_BTD))
        is_image = (seen.patch_BT[..., None] >= 0) & (number < count)
        return x_BTD + jnp.where(is_image, added, 0)

    def norm(self, x: jax.Array, scale: jax.Array, factor: float = 1.0) -> jax.Array:
        """`rms_norm` of x [..., D] by scale [D], with the model's settings."""
        c = self.config
        return rms_norm(x, scale, c.norm_eps, offset=c.norm_offset, factor=factor)

    def projected(
        self, w: Weights, x_BTD: jax.Array, window: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [B, T, N, H], keys and values [B, T, K, H], rotated by their positions.

        `window` is an int32 scalar.
        """
        c = self.config
        h_BTD = _gather(self.norm(x_BTD, w["attention_norm"]))
        h = _flat(h_BTD)
        q, k, v = (named(PROJECTION, self.project(h, w, name)) for name in _QKV)
        if c.attention_bias:
            q, k, v = (
                x + w[f"{name}_bias"].astype(x.dtype)[None]
                for name, x in zip(_QKV, (q, k, v), strict=True)
            )
        q, k, v = (_unflat(x, h_BTD) for x in (q, k, v))
        if c.qk_norm:
            # attention itself multiplies scores by 1 / sqrt(head_dim)
            factor = (c.head_dim / c.query_scalar) ** 0.5 if c.query_scalar else 1.0
            q = self.norm(q, w["query_norm"], factor)
            k = self.norm(k, w["key_norm"])
        tables, local = self.rotations
        if local is not None:
            has_window = window < UNLIMITED
            tables = tuple(jnp.where(has_window, *x) for x in zip(local, tables, strict=True))
        q = constrain(rope.rotate(q, tables), "batch", "length", "heads", "head_dim")
        k = constrain(rope.rotate(k, tables), "batch", "length", "kv_heads", "head_dim")
        return q, k, v

    def after_attention(
        self, w: Weights, x_BTD: jax.Array, out: jax.Array, extra: Any
    ) -> tuple[jax.Array, Any]:
        """The residual stream [B, T, D] after attention's output [B, T, N, H] and the MLP, and
        `route`'s layer output. `extra` is the layer input."""
        c = self.config
        out = out.reshape(-1, c.num_heads * c.head_dim)
        h = _share(_unflat(named(OUTPUT, self.project(out, w, "output", inputs=2)), x_BTD))
        if c.post_norms:
            h = self.norm(h, w["attention_post_norm"])
        x, routed = x_BTD + h, None
        h = _gather(self.norm(x, w["mlp_norm"]))
        if c.num_experts:
            h, routed = mixture(
                h,
                w,
                c.experts_per_token,
                norm_topk=c.norm_topk,
                turned=self.apart,
                route=self.route,
                extra=extra,
                product=c.grouped_product,
            )
        else:
            h = self.mlp(h, w)
        h = _share(h)
        if c.post_norms:
            h = self.norm(h, w["mlp_post_norm"])
        return constrain(x + h, "batch", "stream", "activation"), routed

    def mlp(self, h_BTD: jax.Array, w: Weights) -> jax.Array:
        """The gated MLP, [B, T, D]; see decoder_config.ACTIVATIONS."""
        h = _flat(h_BTD)
        gate, up = (named(MLP, self.project(h, w, name)) for name in ("gate", "up"))
        h = _unflat(_ACTIVATIONS[self.config.activation](gate) * up, h_BTD)
        h = _flat(constrain(h, "batch", "length", "mlp"))
        return _unflat(self.project(h, w, "down"), h_BTD)

    def project(self, x: jax.Array, w: Weights, name: str, inputs: int = 1) -> jax.Array:
        """x [X, I] times a weight of the layer and its adapter, if any: [X, *outputs]."""
        product = functools.partial(times, by_output if self.apart else by_input)
        if isinstance(w[name], Turned):
            y = times(by_row, x, w[name].weight, inputs=inputs)
        else:
            y = product(x, w[name], inputs=inputs)
        adapters = self.config.lora
        if adapters is None or name not in adapters.targets:
            return y
        low = product(x, w[name + lora.A], inputs=inputs)
        return y + adapters.scale * product(low, w[name + lora.B])


# Both pin the layout before and after, also that of the cotangent. If a product's result is wanted
# with divided tokens, XLA otherwise gathers the product's operands over the data ranks.
def _gather(x_BTD: jax.Array) -> jax.Array:
    x_BTD = constrain(x_BTD, "batch", "stream", "activation")
    return constrain(x_BTD, "batch", "length", "activation")


def _share(x_BTD: jax.Array) -> jax.Array:
    x_BTD = constrain(x_BTD, "batch", "length", "activation")
    return constrain(x_BTD, "batch", "stream", "activation")


# X = B T. If a weight gradient sums over two dims, XLA:CPU transposes the activations inside the
# fusion that computes them, which takes longer than the products themselves.
def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(-1, *x.shape[2:])


def _unflat(x: jax.Array, like: jax.Array) -> jax.Array:
    return x.reshape(*like.shape[:2], *x.shape[1:])


def head_weight(
    c: DecoderConfig, params: dict[str, Any], dtype: Any = jnp.float32
) -> jax.Array | Int8:
    """Output projection [V, D] in `dtype` or int8; the embedding itself if tied."""
    if c.tie_embeddings:
        return _gathered(params["embed"]["embedding"], dtype)
    head = params["head"]
    if isinstance(head, Turned):
        return _gathered(head.weight, dtype)
    return _gathered(head if isinstance(params["layers"], list) else head.T, dtype)


def _gathered(table: jax.Array | Int8, dtype: Any) -> jax.Array | Int8:
    if isinstance(table, Int8):  # only samplers use int8, and they do not divide it over data ranks
        return table
    # Gathered over the data ranks here. Otherwise XLA gathers the tokens of all ranks for the
    # lookup, and the head once per chunk in the loop over the vocabulary's logits.
    return constrain(table.astype(dtype), "vocab", "activation")


def head_logits(c: DecoderConfig, params: dict[str, Any], hidden_XD: jax.Array) -> jax.Array:
    """Next-token logits float32 [X, V] of final hidden states [X, D]."""
    weight = head_weight(c, params, hidden_XD.dtype)
    product = by_output if isinstance(params["layers"], list) else by_row
    return times(product, hidden_XD, weight, dtype=jnp.float32)


def params_of(model: nnx.Module) -> dict[str, Any]:
    """The module's parameters as a nested dict of arrays."""
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def bind(config: DecoderConfig, params: dict[str, Any]) -> Decoder:
    """A module with these arrays as its parameters, without copies; traceable."""
    model = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)
