"""Collectives with which libtpu gathers weights and sums their gradients, by mesh of a pod.

    python benchmarks/pod_collectives.py

Compiles the gradient of 4 layers [8192, 8192] in bfloat16 whose weights are divided over fsdp (and
tensor), for pods without access to them. Prints the table of docs/scaling.md in a minute or two;
needs requirements-tpu-plan.txt.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from distflow_jax.pods.topology import Pod, open_topology
from distflow_jax.programs.costs import costs_of

PODS = (
    ("v5p:4x4x4", {"fsdp": 64}),
    ("v5p:4x4x8", {"fsdp": 128}),
    ("v5p:4x4x4", {"fsdp": 16, "tensor": 4}),
    ("v5p:4x4x4", {"fsdp": 4, "tensor": 16}),
    ("v5e:16x16", {"fsdp": 256}),
    ("v6e:16x16", {"fsdp": 256}),
    ("v5e:16x16", {"fsdp": 16, "tensor": 16}),
)
LAYERS, WIDTH = 4, 8192


def traffic(pod: Pod, axes: dict[str, int]) -> dict[str, dict[str, float]]:
    mesh = Mesh(np.array(pod.devices, dtype=object).reshape(tuple(axes.values())), tuple(axes))
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    tensor = "tensor" if "tensor" in axes else None
    matrices = NamedSharding(mesh, PartitionSpec(None, "fsdp", tensor))
    weights = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.bfloat16, sharding=matrices)
    x = jax.ShapeDtypeStruct((2 * pod.size, WIDTH), jnp.bfloat16, sharding=rows)

    def loss(weights, x):
        def layer(x, weight):
            return jax.lax.with_sharding_constraint(jnp.tanh(x @ weight), rows), None

        return jax.lax.scan(layer, x, weights)[0].astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(loss), out_shardings=matrices).trace(weights, x)
    compiled = traced.lower().compile()
    return costs_of(traced, compiled, axes).to_tree()["bytes_by_axes"]


def main() -> None:
    for name, axes in PODS:
        one = 2 * LAYERS * WIDTH * WIDTH / math.prod(axes.values()) * axes["fsdp"]
        found = traffic(open_topology(name), axes).get("fsdp", {})
        shown = ", ".join(f"{kind} {size / one:.2f}" for kind, size in sorted(found.items()))
        mesh = " x ".join(f"{axis} {size}" for axis, size in axes.items())
        print(f"{name}, {mesh}: over fsdp, times all weights of a tensor rank: {shown}")


if __name__ == "__main__":
    main()
