"""Cost of a checkpoint's checksums: seconds of a save with and without them.

    python benchmarks/checkpoints.py
    python benchmarks/checkpoints.py --folder=/mnt/disk --rounds=5 --source=random:llama?layers=2

Saves a model's parameters and two moments of them (float32, one device) through Checkpointer, with
and without checksums in turn, each into a fresh folder. Exposed are the seconds until `save`
returns, which a step waits; whole are those until the checkpoint has its name; processor are those
of all threads. The share is that of a save's seconds in which nothing but checksums is computed:
other jobs on the machine lengthen both alike. The files of a save are flushed to the disk between
saves, outside of the times. Prints a Markdown table of the medians.
"""

import argparse
import contextlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from distflow_jax.checkpoint import checkpointer as checkpointer_module
from distflow_jax.checkpoint import checksums
from distflow_jax.checkpoint.checkpointer import CheckpointConfig, Checkpointer
from distflow_jax.models.parameters import init_params, param_shardings
from distflow_jax.models.weights.source import open_model
from distflow_jax.programs.units import format_bytes

SMOLLM2_135M = "random:llama?hidden=576&layers=30&heads=9&kv_heads=3&mlp=1536&vocab=49152&tied=1"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", default=SMOLLM2_135M, help="the model; random weights will do")
    parser.add_argument("--folder", help="where to save; default: a temporary folder")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def state_of(source: str) -> dict:
    """Parameters and Adam's moments of them, with values that do not compress."""
    config = open_model(source).config
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tensor"))
    params = init_params(config, 0, param_shardings(config, mesh))
    moments = optax.scale_by_adam().init(params)
    noise = jax.tree.map(lambda x: jnp.asarray(x) * jnp.pi, (params, params))
    return {"params": params, "opt_state": moments._replace(mu=noise[0], nu=noise[1])}


@contextlib.contextmanager
def without_checksums() -> Iterator[None]:
    with (
        mock.patch.object(checkpointer_module, "_finish", lambda folder: None),
        mock.patch.object(checksums, "write_part", lambda folder, index: None),
    ):
        yield


@contextlib.contextmanager
def timed_checksums(spent: list[float]) -> Iterator[None]:
    """Adds the seconds of each call that computes checksums, which a save waits for, to `spent`."""

    def timed(function):
        def call(*args):
            start = time.perf_counter()
            function(*args)
            spent.append(time.perf_counter() - start)

        return call

    write, part = checkpointer_module._finish, checksums.write_part
    with (
        mock.patch.object(checkpointer_module, "_finish", timed(write)),
        mock.patch.object(checksums, "write_part", timed(part)),
    ):
        yield


def save(folder: Path, state: dict) -> tuple[float, float, float]:
    """(exposed, whole, processor) seconds of one save."""
    saver = Checkpointer(folder, CheckpointConfig())
    start, processor = time.perf_counter(), time.process_time()
    saver.save(1, state, {})
    exposed = time.perf_counter() - start
    saver.wait()
    whole, processor = time.perf_counter() - start, time.process_time() - processor
    saver.close()
    return exposed, whole, processor


def main() -> None:
    args = arguments()
    state = jax.block_until_ready(state_of(args.source))
    size = sum(x.nbytes for x in jax.tree.leaves(state))
    seconds: dict[str, list[tuple[float, float, float]]] = {"without": [], "with": []}
    shares: list[float] = []
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        folder = Path(scratch) / "checkpoints"
        for turn in range(args.rounds + 1):
            for name in sorted(seconds, reverse=turn % 2 == 0):
                spent: list[float] = []
                with without_checksums() if name == "without" else timed_checksums(spent):
                    found = save(folder, state)
                if turn:  # the first warms up
                    seconds[name].append(found)
                    shares += [sum(spent) / found[1]] if spent else []
                shutil.rmtree(folder)
                os.sync()
    print(f"{format_bytes(size)} on {jax.devices()[0].device_kind}, {args.rounds} rounds\n")
    print("| checksums | exposed, s | whole save, s | processor, s |\n|---|---|---|---|")
    for name, found in seconds.items():
        medians = [statistics.median(values) for values in zip(*found, strict=True)]
        print(f"| {name} | {' | '.join(f'{value:.2f}' for value in medians)} |")
    print(f"\nshare of checksums, by round: {', '.join(f'{share:.1%}' for share in shares)}")
    for place, name in ((1, "whole"), (2, "processor")):
        ratios = [
            a[place] / b[place] for a, b in zip(seconds["with"], seconds["without"], strict=True)
        ]
        print(f"\n{name}, with / without, by round: {', '.join(f'{r:.2f}' for r in ratios)}")


if __name__ == "__main__":
    main()
