"""A process of the job: makes one run after the other, each in a folder of its name."""

import contextlib
import os
import pathlib
import signal
from collections.abc import Sequence

import jax
from asynchronous.far_cells import FarCell
from asynchronous.real_cells import RealCell
from asynchronous.simulated_run import SimulatedCell

from distflow_jax.checkpoint.checkpointer import Checkpointer
from distflow_jax.cluster import job, processes
from distflow_jax.notebook import load_config
from distflow_jax.planning.plan_run import prepare
from distflow_jax.report.terminal import Terminal
from distflow_jax.run import loop, open_run
from distflow_jax.watchdog.controller import Watchdog
from distflow_jax.watchdog.supervision import stop_on_signals

Cell = SimulatedCell | RealCell
KINDS = {kind.__name__: kind for kind in (SimulatedCell, FarCell, RealCell)}


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
                marked = cell.make_run()
                opened = open_run(prepared, place, saved, watchdog, quiet, build=marked.build)
                loop(files.enter_context(opened), stop, marked.step)
            marked.write_marks(place)
            processes.barrier(f"end of {cell.name}")
    processes.shutdown()
