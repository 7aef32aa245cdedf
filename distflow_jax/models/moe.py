"""Mixtures of experts: a router chooses the MLPs that process each token.

    p = softmax(x router),    y = sum over the k experts with the largest p of p_i MLP_i(x),

with the p of the chosen scaled to sum to 1 or not, as in Mixtral (Jiang et al. 2024, sec. 2.1,
arxiv.org/abs/2401.04088) and Qwen3 (Yang et al. 2025, sec. 2, arxiv.org/abs/2505.09388). Experts
have no capacity limit, so no token is dropped and none depends on its neighbours.

Every device sorts the (token, expert) pairs of its own tokens by expert (grouped_matmul.py). The
tensor axis divides every expert. The expert axis divides the experts among the devices of a group:
each gathers the tokens of the whole group, computes the outputs of its own experts, and the sums
are scattered back to the tokens' devices.

A sampler on TPUs sorts nothing while a device has few tokens: every token passes through every
expert, and the weights of experts that it did not choose are 0 (`every_expert`). A decode step
reads nearly all experts anyway, and its products take less time than reading them. The kernel of
`ragged_dot` needs a layer's experts as arrays of their own, so each step would copy them.

B batch, T tokens, X = B T, D hidden, E experts, K experts of a token, M = X K pairs, F mlp.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from distflow_jax.config.implementation_table import PRODUCTS, Need, candidates
from distflow_jax.models.grouped_matmul import grouped_product
from distflow_jax.models.int8 import Int8
from distflow_jax.models.matmul_layouts import Turned, in_order
from distflow_jax.parallel.rules import constrain, local, mesh_axes, platform, width
from distflow_jax.programs.bounded_loops import share

# (probabilities float32 [B, T, E], layer input) -> (experts int32 [B, T, K], layer output)
Route = Callable[[jax.Array, Any], tuple[jax.Array, Any]]

_TOKENS = ("batch", "length", "activation")
# of a device, see `every_expert`. Of Qwen3-30B-A3B on four v5p, products of so many tokens take
# 16 ms at peak, where copies of the experts of all layers took 18 ms
FEW_TOKENS = 512


def best(probability_BTE: jax.Array, count: int) -> jax.Array:
    """The `count` most probable experts of each token, int32 [B, T, count]; ties: the first."""

    def of_device(probability):
        return jax.lax.top_k(probability, count)[1]

    # per device: XLA would gather the tokens of all ranks before top_k
    return local(of_device, (jax.lax.stop_gradient(probability_BTE),), (_TOKENS,), _TOKENS)


def recorded_dtype(num_experts: int) -> np.dtype:
    """Smallest dtype for recorded expert indices, with room for -1, which stands for none."""
    return np.dtype(np.int8 if num_experts <= 128 else np.int16)


def recording(num_experts: int, count: int) -> Route:
    """Route that takes the router's `count` best experts and records them.

    The layer output is the record, [B, T, count] in `recorded_dtype`.
    """
    dtype = recorded_dtype(num_experts)

    def route(probability, extra):
        expert = best(probability, count)
        return expert, expert.astype(dtype)

    return route


def replayed(own_BTK: jax.Array, recorded_BTK: jax.Array) -> jax.Array:
    """The recorded experts of each token, int32 [B, T, K]; the router's own if none are recorded.

    -1 stands for no record. `mixture` still weighs the experts by the router's probabilities, so
    the router gets its gradient. Rollout routing replay: Ma et al. 2025 (arxiv.org/abs/2510.11370).
    """
    return jnp.where(recorded_BTK[..., :1] >= 0, recorded_BTK.astype(jnp.int32), own_BTK)


def replay(count: int) -> Route:
    """Route that takes the experts recorded in the layer input, [B, T, count]; see `replayed`.

    It has no layer output.
    """

    def route(probability, recorded):
        return replayed(best(probability, count), recorded), None

    return jax.tree_util.Partial(route)


def chosen_probability(
    probability_BTE: jax.Array, expert_BTK: jax.Array, *, norm_topk: bool
) -> jax.Array:
    """Probabilities of the chosen experts, float32 [B, T, K]; with `norm_topk` they sum to 1."""
    # a comparison instead of a gather, the gradient of which would be a scatter
    iota = jax.lax.broadcasted_iota(jnp.int32, (1, 1, 1, probability_BTE.shape[-1]), 3)
    weight = jnp.where(expert_BTK[..., None] == iota, probability_BTE[:, :, None], 0.0).sum(-1)
    return weight / weight.sum(-1, keepdims=True) if norm_topk else weight


def mixture(
    h_BTD: jax.Array,
    w: Mapping[str, Any],
    experts_per_token: int,
    *,
    norm_topk: bool,
    turned: bool,
    route: Route | None = None,
    extra: Any = None,
    product: str = "auto",
) -> tuple[jax.Array, Any]:
    """The mixture's output [B, T, D] in the dtype of `h_BTD`, and the layer output of `route`.

    Raises ValueError if a mesh divides the experts and its devices do not divide B.

    Args:
      w: a layer's router [D, E], gate and up [E, D, F], or `Turned` [E, F, D] in a sampler on
        TPUs, and down [E, F, D].
      experts_per_token: K.
      norm_topk: whether the chosen probabilities are scaled to sum to 1.
      turned: whether the last two dims of gate, up and down are swapped (sampler layout "apart").
      route: chooses the experts of each token from the router's probabilities and `extra`, the
        layer input; default `best`, without a layer output. The router's probabilities weigh the
        chosen experts in any case.
      product: DecoderConfig.grouped_product; auto: the one preferred on the mesh's platform.
    """
    across = mesh_axes("experts")
    # an undivided batch would be whole on each device, and its sum would count several times
    if across and h_BTD.shape[0] % width("batch"):
        raise ValueError(
            f"a batch of {h_BTD.shape[0]} is not divisible by the {width('batch')} devices that "
            "share the experts and rows"
        )
    # The router is cast to the sampler's dtype: with float32 weights the trainer would choose
    # other experts than the sampler did. Products and softmax are in float32.
    router = constrain(w["router"].astype(h_BTD.dtype), "activation", "activation")
    logits = jnp.einsum("BTD,DE->BTE", h_BTD, router, preferred_element_type=jnp.float32)
    probability = constrain(jax.nn.softmax(logits, axis=-1), *_TOKENS)
    if route is None:
        expert, seen = best(probability, experts_per_token), None
    else:
        expert, seen = route(probability, extra)
    weight = chosen_probability(probability, expert, norm_topk=norm_topk)
    into, out_of = ("activation", "mlp"), ("mlp", "activation")
    sampled = isinstance(w["gate"], Turned)
    turns = sampled or turned, turned
    weights = [
        _cast_with_dims(w[name], h_BTD.dtype, dims, turn)
        for name, dims, turn in zip(
            ExpertMatrices._fields, (into, into, out_of), (turns[0], *turns), strict=True
        )
    ]
    matrices, axes = (ExpertMatrices(*each) for each in zip(*weights, strict=True))
    if product == "auto":
        need = Need(PRODUCTS, platform(), 0, h_BTD.dtype.name)
        product = next(candidates(need)).name
    mlps = functools.partial(expert_mlps, turned=turns, product=product, across=across)
    y = local(
        functools.partial(_sampled_mlps, mlps) if sampled and not across else mlps,
        (h_BTD, weight, expert, matrices),
        (_TOKENS, _TOKENS, _TOKENS, axes),
        _TOKENS,
        summed="mlp",
        shape=h_BTD.shape,
    )
    return y, seen


class ExpertMatrices(NamedTuple):
    """Matrices of a layer's experts, in the activations' dtype or int8; shapes as in `mixture`."""

    gate: Any
    up: Any
    down: Any


def _cast_with_dims(
    weight: jax.Array | Int8 | Turned, dtype: Any, dims: tuple[str, str], turned: bool
) -> tuple[jax.Array | Int8, Any]:
    """Experts' matrices in the dtype of the products, and their logical dims."""
    weight = weight.weight if isinstance(weight, Turned) else weight
    axes = ("experts", *(reversed(dims) if turned else dims))
    if isinstance(weight, Int8):
        return weight, Int8(axes, ("experts", dims[1]))
    # cast before devices exchange their shards of it
    return weight.astype(dtype), axes


def _sampled_mlps(
    mlps: Callable[..., jax.Array],
    h_BTD: jax.Array,
    weight_BTK: jax.Array,
    expert_BTK: jax.Array,
    matrices: ExpertMatrices,
) -> jax.Array:
    """`expert_mlps` as `mlps`, or of few tokens `every_expert`."""
    if h_BTD.shape[0] * h_BTD.shape[1] <= FEW_TOKENS:
        return every_expert(h_BTD, weight_BTK, expert_BTK, matrices)
    # otherwise the stacks of all layers are copied to the layout of the sorted products
    return mlps(h_BTD, weight_BTK, expert_BTK, jax.tree.map(in_order, matrices))


def every_expert(
    h_BTD: jax.Array, weight_BTK: jax.Array, expert_BTK: jax.Array, matrices: ExpertMatrices
) -> jax.Array:
    """As `expert_mlps`, with products of all tokens and all experts, [B, T, D].

    Matrices are [E, F, D], all three. XLA reads a layer's directly from the stack of all layers:
    of a product with experts as its batch dim, and of one that sums over experts and MLPs.
    """
    gate, up, down = matrices
    h_XD, dtype = h_BTD.reshape(-1, h_BTD.shape[-1]), h_BTD.dtype
    experts = (gate.values if isinstance(gate, Int8) else gate).shape[0]
    is_chosen = jax.nn.one_hot(expert_BTK.reshape(len(h_XD), -1), experts, dtype=bool)
    weight_EX = jnp.where(is_chosen, weight_BTK.reshape(len(h_XD), -1, 1), 0.0).sum(1).T
    h_EXD = jnp.broadcast_to(h_XD[None], (experts, *h_XD.shape))
    gated, scaled = (_into_experts(h_EXD, matrix) for matrix in (gate, up))
    weighted = jax.nn.silu(gated) * scaled * weight_EX[..., None]
    # an expert that no token chose may overflow, but its matrices are finite
    inner_EXF = jnp.where(weight_EX[..., None] != 0, weighted, 0.0).astype(dtype)
    if isinstance(down, Int8):  # its scales do not move out of a sum over experts
        down = (down.values.astype(jnp.float32) * down.scale[:, None]).astype(dtype)
    return jnp.einsum("EXF,EFD->XD", inner_EXF, down).reshape(h_BTD.shape)


def _into_experts(h_EXD: jax.Array, matrix: jax.Array | Int8) -> jax.Array:
    """Products with matrices [E, F, D], float32 [E, X, F], rounded as those of `expert_mlps`."""
    values = matrix.values.astype(h_EXD.dtype) if isinstance(matrix, Int8) else matrix
    y = jnp.einsum("EFD,EXD->EXF", values, h_EXD).astype(jnp.float32)
    return y * matrix.scale[:, None] if isinstance(matrix, Int8) else y


def expert_mlps(
    h_BTD: jax.Array,
    weight_BTK: jax.Array,
    expert_BTK: jax.Array,
    matrices: ExpertMatrices,
    *,
    turned: tuple[bool, bool],
    product: str,
    across: tuple[str, ...] = (),
) -> jax.Array:
    """Weighted sum of the chosen experts' outputs on one device, [B, T, D].

    Args:
      weight_BTK: weights of the chosen experts, float32.
      expert_BTK: indices of the chosen experts, int32.
      matrices: of all experts, or with `across` of this device's experts.
      turned: whether outputs precede inputs in gate and up, and in down.
      product: as in `grouped_product`.
      across: mesh axes over which experts are divided; the result sums over all experts.
    """
    gate, up, down = matrices
    experts = (gate.values if isinstance(gate, Int8) else gate).shape[0]
    if across:
        h_BTD, weight_BTK, expert_BTK = (
            jax.lax.all_gather(x, across, axis=0, tiled=True)
            for x in (h_BTD, weight_BTK, expert_BTK)
        )
        expert_BTK = expert_BTK - jax.lax.axis_index(across) * experts
        is_own = (expert_BTK >= 0) & (expert_BTK < experts)
        expert_BTK = jnp.where(is_own, expert_BTK, experts)  # sorted last, outside all groups
    count, size = expert_BTK.shape[-1], h_BTD.shape[-1]
    expert_M = expert_BTK.reshape(-1)
    order = jnp.argsort(expert_M, stable=True).astype(jnp.int32)
    inverse = jnp.argsort(order).astype(jnp.int32)
    iota = jnp.arange(experts, dtype=jnp.int32)
    sizes = jnp.sum(expert_M[:, None] == iota[None], axis=0, dtype=jnp.int32)
    devices = width("experts") if across else 1
    into, out_of = (
        functools.partial(grouped_product, sizes=sizes, turned=turn, by=product) for turn in turned
    )
    once = h_BTD.reshape(-1, 1, size)
    x = jnp.broadcast_to(once, (len(once), count, size)).reshape(-1, size)
    x = _permuted(x, order, inverse)
    if across:  # the product leaves rows outside all groups undefined, and their gradients, too
        x = jnp.where((jnp.arange(len(x), dtype=jnp.int32) < sizes.sum())[:, None], x, 0)
    with share(devices):  # the arrays have room for all pairs of the group of devices
        y = out_of(jax.nn.silu(into(x, gate)) * into(x, up), down)
    y = _permuted(y, inverse, order).reshape(*expert_BTK.shape, size)
    if across:
        y = jnp.where(is_own[..., None], y, 0)
    # summed in float32 and rounded once
    y = jnp.sum(weight_BTK[..., None] * y.astype(jnp.float32), axis=2).astype(h_BTD.dtype)
    return jax.lax.psum_scatter(y, across, scatter_dimension=0, tiled=True) if across else y


@jax.custom_vjp
def _permuted(x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """Rows x[order], with a gradient by `inverse` instead of a scatter."""
    return x.at[order].get(mode="promise_in_bounds", unique_indices=True)


def _permuted_forward(x, order, inverse):
    return _permuted(x, order, inverse), (order, inverse)


def _permuted_backward(residuals, cotangent):
    order, inverse = residuals
    return _permuted(cotangent, inverse, order), None, None


_permuted.defvjp(_permuted_forward, _permuted_backward)
