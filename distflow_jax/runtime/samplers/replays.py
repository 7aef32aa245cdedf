"""Recordings of a run in waves, and replays, which train on a recording without a sampler."""

import os
import pathlib

import jax
import numpy as np

from distflow_jax.flow.flow_checks import nodes_ahead
from distflow_jax.flow.waves.recordings import Recording, RecordWriter, drop_later
from distflow_jax.flow.waves.wave_records import WaveRecords
from distflow_jax.flow.waves.wave_replay import WaveReplay
from distflow_jax.parallel import processes
from distflow_jax.parsing.paths import named_path
from distflow_jax.planning.plan_run import PreparedRun, config_table, sampler_layout
from distflow_jax.planning.waves.replayed_run import start_of_run
from distflow_jax.runtime.run_state import RunState


def open_recording(replay: str | os.PathLike, folder: pathlib.Path, done: int) -> Recording:
    """The recording of a run whose training a run in `folder`, after `done` steps, repeats.

    Collective. Raises ValueError or OSError if it cannot be read.
    """
    place = named_path("--replay", replay)
    if place.resolve() == folder.resolve():
        raise ValueError(
            f"--replay and --workdir both name {str(folder)!r}: give another --workdir, for the "
            "repeated run"
        )
    recording = Recording(place, done, processes.process_index(), processes.process_count())
    # of a run that still trains, processes may see other ends
    recording.last = int(processes.all_gather_ints(np.int64(recording.last)).min())
    return recording


def make_record_writer(
    prepared: PreparedRun, folder: pathlib.Path, state: RunState
) -> RecordWriter | None:
    """The writer of a run with flow.record; None for others. Collective.

    Records of steps that are trained again are dropped.
    """
    drop_later(folder, state.step)
    if not prepared.config.flow.record:
        return None
    settings, digest = config_table(prepared.config), prepared.plan.digest
    start = start_of_run(settings, digest, state.starting_weights, jax.device_count())
    return RecordWriter(folder, start)


def make_replay(
    prepared: PreparedRun, recording: Recording, folder: pathlib.Path, state: RunState
) -> WaveReplay:
    """Hands the groups of a recording to the training of a run in `folder`."""
    plan = prepared.plan
    return WaveReplay(
        recording,
        WaveRecords(folder, state.step),
        nodes={node.id for node in nodes_ahead(plan)},
        writers={task.node.id: task.layout for task in plan.tasks}
        | {None: sampler_layout(prepared.sizes)},
        prompt=prepared.loader.prompt,
    )
