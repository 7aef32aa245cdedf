"""Recordings of a run in partial batches, and replays, which train on a recording without a
sampler."""

import functools
import os
import pathlib
from collections.abc import Iterator

import jax
import numpy as np

from distflow_jax.batch import Samples
from distflow_jax.cluster import processes
from distflow_jax.config.config_dict import config_table
from distflow_jax.coordinator.batch_metrics import Gaps, staleness_metrics
from distflow_jax.coordinator.coordinator import Coordinator
from distflow_jax.coordinator.field_store import FieldStore
from distflow_jax.coordinator.rounds import NextRound, no_round
from distflow_jax.layout import Metrics
from distflow_jax.parsing.paths import named_path
from distflow_jax.planning.partial_batches.replayed_run import start_of_run
from distflow_jax.planning.plan_run import PreparedRun, sampler_layout
from distflow_jax.runtime.place import Place
from distflow_jax.runtime.run_state import RunState
from distflow_jax.runtime.sample_source import NoSamplersAhead, reads_step
from distflow_jax.stream.batches.partial_batches import PartialBatch
from distflow_jax.stream.batches.recordings import PartialBatchReplay, Recording, RecordWriter
from distflow_jax.stream.checks import nodes_ahead
from distflow_jax.stream.step_groups import StepGroups


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


class Recorded(NoSamplersAhead):
    """The samples of another run, partial batch by partial batch; see runtime/sample_source.py."""

    def __init__(self, prepared: PreparedRun, place: Place, replay: PartialBatchReplay):
        super().__init__(place)
        self._max_staleness, self._replay = prepared.config.stream.max_staleness, replay
        self._measured: Metrics = {}

    def begin(self, step: int) -> None:
        """Nothing: no sampler needs weights."""

    update_weights = begin

    def partial_batches(self, step: int) -> Iterator[tuple[PartialBatch, FieldStore]]:
        """The recorded partial batches of a step. Raises Ended after the last recorded step."""
        last = False
        while not last:
            partial_batch, store = self._replay.take(step)
            last = partial_batch.last
            yield partial_batch, store

    def record(self, partial_batch: PartialBatch, *, rows: int, room: int) -> None:
        """Records a partial batch that was taken last."""
        self._replay.record(partial_batch, rows=rows, room=room)

    def fill(self, coordinator: Coordinator, step: int) -> NextRound:
        """Hands the coordinator the groups of all partial batches of a step, and ends it."""
        store, metrics = self._replay.end()
        coordinator.use(store)
        self._measured = dict(coordinator.merged(metrics))
        self.place.look_at(self._replay.finish(step))
        return no_round

    def measured(self) -> Metrics:
        """Recorded metrics of the nodes that ran ahead."""
        found, self._measured = self._measured, {}
        return found

    def account_for(self, samples: Samples, step: int, gaps: Gaps) -> Metrics:
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
    steps = StepGroups({node.id for node in nodes_ahead(plan)}, numbered=reads_step(plan))
    replay = PartialBatchReplay(
        recording,
        RecordWriter(folder, state.step, None),
        steps=steps,
        read=functools.partial(recording.read, writers=writers, prompt=prepared.loader.prompt),
    )
    return Recorded(prepared, place, replay)
