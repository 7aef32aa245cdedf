"""Decode attention over KV pages: the platform's kernel, the plain form, the memory bandwidth.

    python benchmarks/decode_attention.py
    python benchmarks/decode_attention.py --owners 128 --length 4096 --rows 8 --pages int8

One device. First the kernel is compared with the plain form on the timed case; a difference beyond
rounding ends the program. Decoding is bound by memory, so times are compared with the time to read
the used pages at the bandwidth of a plain copy. A CPU has no kernel: only the plain form is timed.
Prints one JSON object.
"""

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from distflow_jax.models.kernels.decode_attention import implementation_for, partial_attention

CALLS = 16  # in one program, each waiting for the previous one, as the layers of a model do
REPEATS = 7
# of the outputs: rounding of weights and products in the type that multiplies
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2, "int8": 2e-2}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    on_cpu = jax.default_backend() == "cpu"
    parser.add_argument("--owners", type=int, default=8 if on_cpu else 64)
    parser.add_argument("--kv-heads", type=int, default=2 if on_cpu else 8)
    parser.add_argument("--rows", type=int, default=4, help="query rows per key/value head")
    parser.add_argument("--head-dim", type=int, default=64 if on_cpu else 128)
    parser.add_argument("--width", type=int, default=128, help="tokens per page")
    parser.add_argument("--length", type=int, default=256 if on_cpu else 2048, help="longest")
    parser.add_argument("--even", action="store_true", help="every owner is as long as the longest")
    parser.add_argument("--pages", choices=sorted(TOLERANCE), help="type (default: bfloat16)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.pages = args.pages or ("float32" if on_cpu else "bfloat16")
    for name in ("owners", "kv_heads", "rows", "head_dim", "width", "length"):
        if getattr(args, name) < 1:
            parser.error(
                f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}"
            )
    return args


def make_case(args: argparse.Namespace) -> dict[str, jax.Array]:
    """Arguments of `partial_attention`: lengths from 1 to the longest, pages scattered."""
    rng = np.random.default_rng(args.seed)
    slots = -(-args.length // args.width)
    pages = args.owners * slots
    keys = jax.random.split(jax.random.key(args.seed), 5)
    head = (pages, args.kv_heads)
    key_shape = (*head, args.head_dim, args.width)
    value_shape = (*head, args.width, args.head_dim)
    lengths = np.full(args.owners, args.length)
    if not args.even:
        lengths = rng.integers(1, args.length, args.owners, endpoint=True)
        lengths[0] = args.length
    case = {
        "table": jnp.asarray(rng.permutation(pages).reshape(args.owners, slots), jnp.int32),
        "length": jnp.asarray(lengths, jnp.int32),
    }
    q_dtype = jnp.float32 if args.pages == "float32" else jnp.bfloat16
    q_shape = (args.owners, args.kv_heads, args.rows, args.head_dim)
    case["q"] = jax.random.normal(keys[0], q_shape, q_dtype)
    if args.pages == "int8":
        draw = functools.partial(jax.random.randint, minval=-127, maxval=128, dtype=jnp.int8)
        for name, key in (("key_scale", keys[3]), ("value_scale", keys[4])):
            scale = jax.random.uniform(key, (*head, args.width), jnp.float32, 0.5, 1.5)
            case[name] = scale / 80
    else:
        draw = functools.partial(jax.random.normal, dtype=args.pages)
    return case | {
        "key_pages": draw(keys[1], key_shape),
        "value_pages": draw(keys[2], value_shape),
    }


def used_bytes(case: dict[str, jax.Array]) -> int:
    """Bytes of the pages in use (keys, values and scales), which must be read once."""
    width = case["key_pages"].shape[-1]
    used = int(np.sum(-(-np.asarray(case["length"]) // width)))
    names = ("key_pages", "value_pages", "key_scale", "value_scale")
    return used * sum(case[n].nbytes // len(case[n]) for n in names if n in case)


def seconds(run: Callable[[], jax.Array]) -> list[float]:
    """Seconds of each of REPEATS runs, after one that compiles."""
    jax.block_until_ready(run())
    taken = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        taken.append(time.perf_counter() - begin)
    return taken


def time_attention(case: dict[str, jax.Array], implementation: str) -> list[float]:
    """Seconds of one call, measured over CALLS in a row."""

    @jax.jit
    def chain(case):
        def call(_, q):
            out, _ = partial_attention(**case | {"q": q}, implementation=implementation)
            # the next call depends on this one, by an amount that may round away
            return (q.astype(jnp.float32) + 1e-3 * out).astype(q.dtype)

        return jax.lax.fori_loop(0, CALLS, call, case["q"])

    return [taken / CALLS for taken in seconds(lambda: chain(case))]


def copy_bandwidth(bytes_read: int) -> float:
    """Bytes per second, read and written, of passes over at least 256 MiB (64 on a CPU)."""
    least = 2**26 if jax.default_backend() == "cpu" else 2**28
    array = jnp.zeros(max(least, bytes_read) // 4, jnp.float32)

    @jax.jit
    def passes(array):
        # in place: otherwise the first touch of a new array would be timed too
        return jax.lax.fori_loop(0, CALLS, lambda _, x: x + 1, array)

    return 2 * CALLS * array.nbytes / min(seconds(lambda: passes(array)))


def largest_difference(case: dict[str, jax.Array], implementation: str) -> float:
    """Largest difference to the plain form, over outputs and log-sum-exps."""
    results = [
        jax.jit(lambda case, name=name: partial_attention(**case, implementation=name))(case)
        for name in ("reference", implementation)
    ]
    pairs = zip(*[[np.asarray(array) for array in result] for result in results], strict=True)
    return max(float(np.max(np.abs(wanted - got))) for wanted, got in pairs)


def main() -> None:
    args = arguments()
    case = make_case(args)
    kernel = implementation_for(jax.default_backend())
    names = ["reference"] if kernel == "reference" else [kernel, "reference"]
    report = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "case": vars(args) | {"tokens": int(case["length"].sum())},
    }
    if kernel != "reference":
        difference = largest_difference(case, kernel)
        report["largest_difference"] = difference
        if not difference <= TOLERANCE[args.pages]:
            sys.exit(
                f"the {kernel} kernel differs from the plain form by {difference}, more than "
                f"{TOLERANCE[args.pages]} for {args.pages}: {json.dumps(report)}"
            )
    needed = used_bytes(case)
    bandwidth = copy_bandwidth(needed)
    report |= {"used_bytes": needed, "copy_gb_per_second": round(bandwidth / 1e9, 1)}
    for name in names:
        taken = time_attention(case, name)
        report[name] = {
            "us_median": round(1e6 * statistics.median(taken), 1),
            "us_best": round(1e6 * min(taken), 1),
            "gb_per_second": round(needed / min(taken) / 1e9, 1),
            "of_copy_bandwidth": round(needed / min(taken) / bandwidth, 3),
        }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
