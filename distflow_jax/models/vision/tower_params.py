"""Declaration of a tower's parameters, by the paths of VisionConfig's docstring."""

from typing import NamedTuple

from distflow_jax.models.vision.vision_config import VisionConfig


class TowerParam(NamedTuple):
    """Declaration of one parameter, see parameters.ParamSpec."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    stddev: float | None  # of initial values; None: ones


def tower_params(c: VisionConfig) -> dict[str, TowerParam]:
    """Declarations of all parameters by their paths below `vision`."""
    t, std = c.traits, 0.02
    d, w, e = c.hidden_size, c.width, c.merged_size
    kernel = (t.frames, c.patch_bytes, d)
    params = {"patch": TowerParam(kernel, ("blocks", "activation", "tower_hidden"), std)}
    if t.patch_bias:
        params["patch_bias"] = TowerParam((d,), ("activation",), 0.0)
    if t.learned:
        params["position"] = TowerParam((c.grid**2, d), ("blocks", "tower_hidden"), std)
    params |= _layers(c)
    if t.final_norm:
        params |= _norm("final_norm", (), d, bias=True)
    if t.projector == "pooled":  # Gemma's norm multiplies by 1 + its parameter
        params["merger/norm"] = TowerParam((d,), ("activation",), 0.0)
    if t.projector == "mlp":
        params |= _norm("merger/norm", (), d, bias=not t.rms)
        params |= _matrix("merger/up", (), (e, e), ("tower_hidden", "tower_mlp"), std)
        params |= _matrix("merger/down", (), (e, w), ("tower_mlp", "tower_hidden"), std)
    else:
        params["merger/down"] = TowerParam((e, w), ("tower_hidden", "activation"), std)
    if c.deepstack:
        count = (len(c.deepstack),)
        params |= _norm("deepstack/norm", count, e, bias=True)
        params |= _matrix("deepstack/up", count, (e, e), ("tower_hidden", "tower_mlp"), std)
        params |= _matrix("deepstack/down", count, (e, w), ("tower_mlp", "tower_hidden"), std)
    return params


def _layers(c: VisionConfig) -> dict[str, TowerParam]:
    t, std, back = c.traits, 0.02, 0.02 / (2 * c.num_layers) ** 0.5
    d, n, h, f, count = c.hidden_size, c.num_heads, c.head_dim, c.mlp_size, (c.num_layers,)
    params = {}
    for name in ("attention_norm", "mlp_norm"):
        params |= _norm(f"layers/{name}", count, d, bias=not t.rms)
    heads = ("tower_heads", "head_dim")
    if t.fused:
        axes = ("tower_hidden", "blocks", *heads)
        params |= _matrix("layers/qkv", count, (d, 3, n, h), axes, std)
    else:
        for name in ("query", "key", "value"):
            axes = ("tower_hidden", *heads)
            params |= _matrix(f"layers/{name}", count, (d, n, h), axes, std)
    params |= _matrix("layers/output", count, (n, h, d), (*heads, "tower_hidden"), back, inputs=2)
    for name in ("gate", "up") if t.gated else ("up",):
        params |= _matrix(f"layers/{name}", count, (d, f), ("tower_hidden", "tower_mlp"), std)
    return params | _matrix("layers/down", count, (f, d), ("tower_mlp", "tower_hidden"), back)


def _norm(path: str, stack: tuple[int, ...], size: int, *, bias: bool) -> dict[str, TowerParam]:
    axes = ("blocks",) * len(stack) + ("activation",)
    params = {path: TowerParam((*stack, size), axes, None)}
    return params | ({f"{path}_bias": TowerParam((*stack, size), axes, 0.0)} if bias else {})


def _matrix(
    path: str,
    stack: tuple[int, ...],
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    stddev: float,
    inputs: int = 1,
) -> dict[str, TowerParam]:
    """A product's weight, its first `inputs` dims summed over, and its bias."""
    first = ("blocks",) * len(stack)
    # a bias is added to whole activations, except to those that devices divide by heads
    rest = tuple("activation" if a == "tower_hidden" else a for a in axes[inputs:])
    return {
        path: TowerParam((*stack, *shape), (*first, *axes), stddev),
        f"{path}_bias": TowerParam((*stack, *shape[inputs:]), (*first, *rest), 0.0),
    }
