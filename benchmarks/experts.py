"""Mixture of experts of one layer: by blocks, by ragged_dot, and by all experts for all tokens.

    python benchmarks/experts.py
    python benchmarks/experts.py --hidden 2048 --mlp 768 --experts 128 --active 8 --tokens 16 4096

Times of the forward pass and of the forward pass with gradient, interleaved, the shortest of
several rounds; temporaries of the latter as reported by the compiler. `one MLP` is a dense MLP as
wide as the active experts together: the same work without routing. Prints a Markdown table.
"""

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from distflow_jax.models import moe


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--mlp", type=int, default=192, help="of an expert")
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--active", type=int, default=4, help="experts of a token")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if not 1 <= args.active <= args.experts:
        parser.error(f"--active must be 1 to {args.experts}, got {args.active}")
    return args


def every_expert(h, weight, expert, gate, up, down):
    """Runs each token through all experts, with weight 0 for those not chosen."""
    iota = jnp.arange(gate.shape[0], dtype=jnp.int32)
    hit = expert[..., None] == iota[None, None, None]
    scale = jnp.where(hit, weight[..., None], 0.0).sum(2)[0]
    x = jax.nn.silu(jnp.einsum("XD,EDF->EXF", h[0], gate)) * jnp.einsum("XD,EDF->EXF", h[0], up)
    y = jnp.einsum("EXF,EFD,XE->XD", x, down, scale.astype(h.dtype))
    return y[None]


def one_mlp(h, weight, expert, gate, up, down):
    """Runs a dense MLP of the active experts' total width."""
    count = expert.shape[-1]

    def wide(x):
        return jnp.concatenate(list(x[:count]), axis=1)

    x = jax.nn.silu(h[0] @ wide(gate)) * (h[0] @ wide(up))
    return (x @ jnp.concatenate(list(down[:count]), axis=0))[None]


def grouped(h, weight, expert, gate, up, down, *, ragged):
    """The library's: pairs sorted by expert."""
    matrices = moe.ExpertMatrices(gate, up, down)
    return moe.expert_mlps(h, weight, expert, matrices, turned=False, ragged=ragged)


WAYS: dict[str, Callable[..., jax.Array]] = {
    "one MLP": one_mlp,
    "blocks": functools.partial(grouped, ragged=False),
    "ragged_dot": functools.partial(grouped, ragged=True),
    "every expert": every_expert,
}


def inputs_of(args: argparse.Namespace, tokens: int) -> tuple[jax.Array, ...]:
    """Inputs of a layer, (h, weight, expert, gate, up, down), with experts drawn at random."""
    rng = np.random.default_rng(0)
    d, f, e, k = args.hidden, args.mlp, args.experts, args.active
    expert = rng.random((1, tokens, e)).argsort(axis=-1)[..., :k]
    shapes = ((1, tokens, d), (e, d, f), (e, d, f), (e, f, d))
    h, gate, up, down = (
        jnp.asarray(0.1 * rng.standard_normal(s), jnp.dtype(args.dtype)) for s in shapes
    )
    weight = jnp.full((1, tokens, k), 1 / k, jnp.float32)
    return h, weight, jnp.asarray(expert, jnp.int32), gate, up, down


def programs_of(way: Callable[..., jax.Array], inputs: Any) -> list[Any]:
    """The compiled forward pass, and the forward pass with the gradient of all floats."""

    def loss(*inputs):
        return jnp.sum(jnp.square(way(*inputs).astype(jnp.float32)))

    gradient = jax.value_and_grad(loss, argnums=(0, 1, 3, 4, 5))
    return [jax.jit(f).lower(*inputs).compile() for f in (way, gradient)]


def main():
    args = arguments()
    print(
        f"{jax.default_backend()}, {args.dtype}, hidden {args.hidden}, {args.experts} experts of "
        f"{args.mlp}, {args.active} of a token"
    )
    print("| tokens | way | forward | with gradient | temporaries |\n|---|---|---|---|---|")
    for tokens in args.tokens:
        inputs = inputs_of(args, tokens)
        compiled = {name: programs_of(way, inputs) for name, way in WAYS.items()}
        shortest = {name: [float("inf")] * 2 for name in WAYS}
        for _ in range(args.rounds):
            for name, programs in compiled.items():
                for i, program in enumerate(programs):
                    start = time.perf_counter()
                    jax.block_until_ready(program(*inputs))
                    shortest[name][i] = min(shortest[name][i], time.perf_counter() - start)
        for name, (forward, both) in shortest.items():
            memory = compiled[name][1].memory_analysis()
            size = "" if memory is None else f"{memory.temp_size_in_bytes / 1e6:,.1f} MB"
            print(
                f"| {tokens} | {name} | {1e3 * forward:.2f} ms | {1e3 * both:.2f} ms | {size} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
