"""Byte strings of any sizes reach whom they are for, in one process and in several."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest

from distflow_jax.parallel.exchange import Exchange, Traffic, all_gather_ragged

ROOT = pathlib.Path(__file__).parents[2]
WORKER = """
import os
import numpy as np
from distflow_jax.observe.compilations import Compilations
from distflow_jax.parallel import job, processes
from distflow_jax.parallel.exchange import CAPACITIES, Exchange, all_gather_ragged

processes.initialize(job.find(os.environ))
me, count = processes.process_index(), processes.process_count()
exchange = Exchange()
exchange.compile()
compiled = Compilations()
rng = np.random.default_rng(0)
for most in (0, 1, 7, 300, 5000, 200_000, 3 * 4 * CAPACITIES[-1]):
    sizes = rng.integers(0, most + 1, (count, count))
    sizes[rng.random((count, count)) < 0.3] = 0
    blobs = {(p, q): rng.bytes(sizes[p, q]) for p in range(count) for q in range(count)}
    came, traffic = exchange([blobs[me, q] for q in range(count)])
    assert came == [blobs[p, me] for p in range(count)], most
    assert traffic.payload == sum(len(blobs[p, me]) for p in range(count) if p != me)
    biggest = max(len(blob) for (p, q), blob in blobs.items() if p != q)
    # room for the biggest, rounded up to whole pieces
    assert traffic.payload + traffic.padding <= (count - 1) * (1.3 * biggest + 2 * 256 + 64)
parts = all_gather_ragged(np.arange(3 * me, dtype=np.int32).reshape(-1, 3))
assert [len(part) for part in parts] == list(range(count))
assert all((part.ravel() == np.arange(3 * p)).all() for p, part in enumerate(parts))
names = compiled.names()
assert not [name for name in names if "swap" in name], names
processes.shutdown()
"""


def test_alone_everything_stays():
    came, traffic = Exchange()([b"mine"])
    assert came == [b"mine"] and traffic == Traffic(0, 0, 0)
    (part,) = all_gather_ragged(np.zeros((0, 3), np.int32))
    assert part.shape == (0, 3)


@pytest.mark.multiprocess
def test_among_three_processes(tmp_path):
    worker = tmp_path / "exchange_worker.py"
    worker.write_text(WORKER)
    launch = ["scripts/launch_local.py", "--processes=3", "--devices_per_process=2", "--"]
    done = subprocess.run(
        [sys.executable, *launch, str(worker)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-3000:]
