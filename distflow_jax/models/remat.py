"""Rematerialisation policies: the results of a layer that the backward pass keeps or recomputes.

A layer names the results that are most expensive to recompute (jax.ad_checkpoint.checkpoint_name);
a policy says which of them stay in memory. Numbers kept per token and layer, with D hidden, N
heads, K key/value heads, H head dim, F mlp:

    none       everything: about 4 D + 4 N H + 4 K H + 4 F, and the scores of masked attention
    dots       products with weights, and attention's results: about D + 2 N H + 2 K H + 2 F; norms,
               rotations, activations and masked attention's scores are recomputed
    attention  queries, keys, values and attention's results: D + 2 N H + 2 K H; the MLP is
               recomputed
    full       the layer's input: D; all else is recomputed, which adds a third to the work

All policies but none recompute a mixture's experts.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

# names of results
PROJECTION = "projection"  # results of the query, key and value products
ATTENTION = "attention"  # results of attention, with log-sum-exps if computed by tiles
OUTPUT = "output"  # result of the product from attention back into the residual stream
MLP = "mlp"  # results of the products before the activation

_KEPT = {
    "full": (),
    "attention": (PROJECTION, ATTENTION),
    "dots": (PROJECTION, ATTENTION, OUTPUT, MLP),
}
REMATS = ("none", *_KEPT)


def rematerialised(layer: Callable[..., Any], remat: str) -> Callable[..., Any]:
    """`layer`, the body of a scan, with a gradient that keeps only the results that `remat`, one
    of REMATS, names."""
    if remat == "none":
        return layer
    policy = jax.checkpoint_policies.save_only_these_names(*_KEPT[remat])
    # prevent_cse is not needed: common subexpressions are not merged across a scan's body
    return jax.checkpoint(layer, prevent_cse=False, policy=policy)


def named(name: str, x: jax.Array) -> jax.Array:
    """Returns x, of any shape, marked with the `name` that policies refer to."""
    return checkpoint_name(x, name)
