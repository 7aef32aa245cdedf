"""The groups of benchmarks/queues.py, and how its processes measure: the same on all sides."""

import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
from peers.paced import peak_resident_gb

MOST_PROCESSES = 16  # of clients
WARM_SECONDS = 1.0
START_SECONDS = 180.0
# (end of a cycle on the clock of time.monotonic, its seconds)
Cycle = tuple[float, float]


class Shape(NamedTuple):
    """Sizes of a group: S samples of T tokens each."""

    samples: int
    mean: int  # tokens of a sample
    most: int  # equal to mean: all samples have as many; else lognormal, sigma 1

    def lengths(self, draw: np.random.Generator) -> np.ndarray:
        """Tokens of the samples of one group, int [S]."""
        if self.mean == self.most:
            return np.full(self.samples, self.mean)
        drawn = draw.lognormal(np.log(self.mean) - 0.5, 1.0, self.samples)
        return np.clip(drawn, 2, self.most).astype(int)


SHAPES = {
    "8 x 200": Shape(8, 200, 1024),
    "8 x 4,000": Shape(8, 4000, 4000),
    "1 x 200": Shape(1, 200, 1024),
    "1 x 4,000": Shape(1, 4000, 4000),
}


class Processes:
    """Processes with a pipe each, the last of which ends first with a `with` block."""

    def __init__(self):
        self._context, self._started = multiprocessing.get_context("spawn"), []

    def start(self, target: Callable[..., None], *values: Any) -> Connection:
        """The pipe of a process that runs target(pipe, *values)."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=target, args=(theirs, *values), daemon=True)
        process.start()
        self._started.append((process, ours))  # which wait for it until they are killed
        return ours

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        for process, _ in reversed(self._started):
            process.kill()
            process.join()


def received(pipe: Connection) -> Any:
    """The next message of a process."""
    if not pipe.poll(START_SECONDS):
        raise RuntimeError("a process of the benchmark does not answer; see its messages above")
    return pipe.recv()


def report(pipe: Connection, cycles: Sequence[Cycle] = ()) -> None:
    """Waits for "begin" and "end"; sends [seconds of cycles, CPU-seconds, peak GiB] between
    them."""
    pipe.recv()
    since, cpu = time.monotonic(), time.process_time()
    pipe.recv()
    until, cpu = time.monotonic(), time.process_time() - cpu
    found = [took for at, took in list(cycles) if since <= at <= until]
    pipe.send([found, cpu, peak_resident_gb()])


def measured(
    servers: Sequence[Connection], clients: Sequence[Connection], seconds: float
) -> dict[str, Any]:
    """What servers and clients report once the latter are ready, and the seconds that it took."""
    for pipe in clients:
        received(pipe)
    everybody = (*servers, *clients)
    time.sleep(WARM_SECONDS)
    for pipe in everybody:
        pipe.send("begin")
    began = time.monotonic()
    time.sleep(seconds)
    for pipe in everybody:
        pipe.send("end")
    took = time.monotonic() - began
    sides = {"servers": servers, "clients": clients}
    return {"seconds": took} | {
        name: [received(pipe) for pipe in pipes] for name, pipes in sides.items()
    }
