"""A process of the job, or a worker beside it: makes one run after the other, each in its folder.

A simulated worker is the product's own, with an engine on simulated devices; wire, leases and the
pull of the (tiny) weights are real.
"""

import contextlib
import json
import os
import pathlib
import signal
import time
from collections.abc import Sequence

import jax
from asynchronous.cells import Cell, FarCell, RealCell
from asynchronous.engine import Lane, SimulatedEngine
from asynchronous.marked_run import (
    MarkedRun,
    SimulatedRun,
    SimulatedSync,
    own_cpu_seconds,
    simulated_sampler,
)

from distflow_jax.checkpoint.checkpointer import Checkpointer
from distflow_jax.cluster import job, processes
from distflow_jax.config.run_config import Config
from distflow_jax.models.weights.source import ModelSource
from distflow_jax.notebook import load_config
from distflow_jax.planning.plan_run import prepare
from distflow_jax.planning.sizes import Sizes
from distflow_jax.report.terminal import Terminal
from distflow_jax.run import loop, open_run
from distflow_jax.runtime.samplers.run_worker import run_worker
from distflow_jax.stream.links.buffer_links import Patience
from distflow_jax.watchdog.controller import Watchdog
from distflow_jax.watchdog.supervision import stop_on_signals

START_SECONDS = 300.0  # for trainers to open their servers


def run_cells(cells: Sequence[Cell], folder: pathlib.Path) -> None:
    """Makes all runs. Real ones have this process's core to themselves."""
    found = job.find(os.environ)
    if any(isinstance(cell, RealCell) for cell in cells):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[found.process_id % len(cores)]})
    processes.initialize(found)
    jax.config.update("jax_compilation_cache_dir", str(folder / "programs"))
    with stop_on_signals(signal.SIGTERM) as stop:
        for cell in cells:
            config = load_config(cell.config, cell.settings()).config
            place = folder / cell.name
            place.mkdir(parents=True, exist_ok=True)
            with contextlib.ExitStack() as files:
                saved = Checkpointer(place / "checkpoints", config.checkpoint)
                files.callback(saved.close)
                prepared = prepare(config)
                files.callback(prepared.rewards.close)
                quiet, watchdog = Terminal(enabled=False), Watchdog(config.health, 1)
                marked = MarkedRun() if isinstance(cell, RealCell) else SimulatedRun(cell)
                opened = open_run(prepared, place, saved, watchdog, quiet, build=marked.build)
                loop(files.enter_context(opened), stop, marked.step)
            marked.write_marks(place)
            processes.barrier(f"end of {cell.name}")
    processes.shutdown()


class FarWorker:
    """A worker of a cell, of a number among its workers; `use` is what its devices did."""

    def __init__(self, cell: FarCell, number: int):
        self._cell, self._speed = cell, cell.speeds[number]
        self._lane = Lane(cell.samplers // cell.engines)

    def make(
        self, source: ModelSource, config: Config, sizes: Sizes
    ) -> tuple[SimulatedEngine, SimulatedSync]:
        """Its sampler; see run_worker."""
        self._began, self._cpu = time.perf_counter(), own_cpu_seconds()
        return simulated_sampler(source, sizes, self._cell, self._lane, speed=self._speed)

    def use(self) -> dict[str, float]:
        """CPU-seconds of a second, and the share of the time in which its devices worked."""
        seconds = time.perf_counter() - self._began
        busy = sum(self._lane.busy.values())
        return {"cpu": (own_cpu_seconds() - self._cpu) / seconds, "busy": busy / seconds}


def join_runs(cells: Sequence[Cell], folder: pathlib.Path, number: int) -> None:
    """Samples for the runs of all cells that have a worker of this number, one after the other."""
    patience = Patience(START_SECONDS * (1 + len(cells)), 60.0)
    with stop_on_signals(signal.SIGTERM) as stop:
        for cell in cells:
            if isinstance(cell, FarCell) and number < len(cell.speeds):
                config = load_config(cell.config, cell.settings()).config
                place, worker = folder / cell.name, FarWorker(cell, number)
                place.mkdir(parents=True, exist_ok=True)
                run_worker(config, str(place), stop, patience, make=worker.make)
                (place / f"far-{number}.json").write_text(json.dumps(worker.use()))
