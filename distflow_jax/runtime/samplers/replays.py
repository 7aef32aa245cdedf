"""Recordings of a run in partial batches, and replays, which train on a recording without a
sampler."""

import functools
import os
import pathlib

import jax
import numpy as np

from distflow_jax.batch import Samples
from distflow_jax.coordinator.batch_metrics import staleness_metrics
from distflow_jax.layout import Metrics
from distflow_jax.parallel import processes
from distflow_jax.parsing.paths import named_path
from distflow_jax.planning.partial_batches.replayed_run import start_of_run
from distflow_jax.planning.plan_run import PreparedRun, config_table, sampler_layout
from distflow_jax.runtime.place import Place
from distflow_jax.runtime.run_state import RunState
from distflow_jax.runtime.sample_source import Still
from distflow_jax.stream.batches.recordings import PartialBatchReplay, Recording, RecordWriter
from distflow_jax.stream.step_groups import StepGroups
from distflow_jax.stream.stream_checks import nodes_ahead


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
) -> RecordWriter:
    """The writer of a run in partial batches, which keeps groups with stream.record. Collective."""
    start = None
    if prepared.config.stream.record:
        settings, digest = config_table(prepared.config), prepared.plan.digest
        start = start_of_run(settings, digest, state.starting_weights, jax.device_count())
    return RecordWriter(folder, state.step, start)


class Recorded(Still):
    """The samples of another run, partial batch by partial batch; see runtime/sample_source.py.

    Attributes:
      taker: hands the groups of a step over.
    """

    def __init__(self, prepared: PreparedRun, place: Place, taker: PartialBatchReplay):
        super().__init__(place)
        self._max_staleness, self.taker = prepared.config.stream.max_staleness, taker

    def begin(self, step: int) -> None:
        """Nothing: no sampler needs weights."""

    update_weights = begin

    def finish(self, step: int) -> None:
        """Ends a step whose groups were taken."""
        self.place.look_at(self.taker.finish(step))

    def measured(self) -> Metrics:
        """Nothing: recorded metrics come with the groups."""
        return {}

    def observe(self, samples: Samples, step: int) -> Metrics:
        """Ages of the samples of a step."""
        return staleness_metrics(samples, step, self._max_staleness)

    def close(self) -> None:
        """Ends nothing: recorded steps are read one by one."""


def make_replay(
    prepared: PreparedRun, recording: Recording, folder: pathlib.Path, state: RunState, place: Place
) -> Recorded:
    """The groups of a recording, for the training of a run in `folder`."""
    plan = prepared.plan
    writers = {task.node.id: task.layout for task in plan.tasks}
    writers |= {None: sampler_layout(prepared.sizes)}
    replay = PartialBatchReplay(
        recording,
        RecordWriter(folder, state.step, None),
        steps=StepGroups({node.id for node in nodes_ahead(plan)}),
        read=functools.partial(recording.read, writers=writers, prompt=prepared.loader.prompt),
    )
    return Recorded(prepared, place, replay)
