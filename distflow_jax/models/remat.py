"""What the backward pass finds of a layer's forward pass, and what it computes again, by name.

A layer names the results that cost most to compute again (jax.ad_checkpoint.checkpoint_name); a
policy says which of them stay in memory. Per token and layer, D hidden, N heads, K key/value heads,
H head dim, F mlp:

    none       everything: about 4 D + 4 N H + 4 K H + 4 F, and the scores of masked attention
    dots       products with weights, and attention's results: D + 2 N H + 2 K H + 2 F more or less;
               norms, rotations, activations and masked attention's scores are computed again
    attention  queries, keys, values and attention's results: D + 2 N H + 2 K H; the mlp is computed
               again
    full       the layer's input: D; all of it is computed again, a third more work

A mixture's experts are computed again under each but none.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

# names of results
PROJECTION = "projection"  # queries, keys, values as products give them
ATTENTION = "attention"  # what attention gives, and of tiles their log-sum-exps
OUTPUT = "output"  # the product that goes back into the residual stream after attention
MLP = "mlp"  # the products before the activation

_KEPT = {
    "full": (),
    "attention": (PROJECTION, ATTENTION),
    "dots": (PROJECTION, ATTENTION, OUTPUT, MLP),
}
REMATS = ("none", *_KEPT)


def check_remat(remat: str) -> None:
    """ValueError for what is no policy."""
    if remat not in REMATS:
        raise ValueError(f"training.remat must be one of {', '.join(REMATS)}, got {remat!r}")


def rematerialised(layer: Callable[..., Any], remat: str) -> Callable[..., Any]:
    """`layer`, the body of a scan, whose gradient keeps what the policy says.

    Raises ValueError for an unknown policy.
    """
    check_remat(remat)
    if remat == "none":
        return layer
    policy = jax.checkpoint_policies.save_only_these_names(*_KEPT[remat])
    # a scan's body runs for itself: nothing outside it could be merged with what runs again
    return jax.checkpoint(layer, prevent_cse=False, policy=policy)


def named(name: str, x: jax.Array) -> jax.Array:
    """`x`, which policies know by `name`; nothing else changes."""
    return checkpoint_name(x, name)
