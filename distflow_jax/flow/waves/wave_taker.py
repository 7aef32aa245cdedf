"""The groups of a step on one process, wave by wave: what `Flow.take` is for a whole step."""

import time

from distflow_jax.coordinator.field_store import FieldStore
from distflow_jax.coordinator.rounds import DATA_ENDED, Ended
from distflow_jax.flow.flow import Flow
from distflow_jax.flow.host_nodes import Group
from distflow_jax.flow.waves.recordings import RecordWriter
from distflow_jax.flow.waves.step_record import StepRecord
from distflow_jax.flow.waves.wave_planner import Wave
from distflow_jax.flow.waves.wave_records import WaveRecords
from distflow_jax.flow.waves.wave_source import WaveSource
from distflow_jax.layout import Metrics


class WaveTaker:
    """Hands a step's groups to the training, wave by wave. Call `take` until a wave is the last
    one, then `end` and `note`, then `finish` after the step has trained."""

    def __init__(
        self,
        flow: Flow,
        source: WaveSource,
        records: WaveRecords,
        writer: RecordWriter | None = None,
    ):
        """`writer`: keeps the groups of each step for a replay; None: nothing does."""
        self._flow, self._source = flow, source
        self._records, self._waited = records, 0.0
        self._writer = writer
        self._waves: list[Wave] = []  # of the step, if they are kept
        self._groups: list[Group] = []  # of this process, in these waves
        self._metrics: Metrics = {}

    def take(self, step: int) -> tuple[Wave, FieldStore]:
        """The next wave, and the fields of this process's groups in it. Collective.

        Raises Ended where the data have no group for the step, and what a sampler, an
        environment or a node that ran ahead has raised for a group of the step.
        """
        flow, producer, planner = self._flow, self._flow.producer, self._source.planner
        if planner.step != step:
            raise ValueError(f"waves of step {planner.step} come before those of step {step}")
        if planner.cut.start == planner.cut.end:
            raise Ended(DATA_ENDED)
        begun = time.monotonic()
        with flow.swaps.block("wait"):
            wave = self._source.next(flow.drive)
        self._waited = time.monotonic() - begun
        with producer.lock:
            mine = [c for c in wave.counters if c in producer.groups]
            groups = [producer.groups[counter] for counter in mine]
            # a process without a group in a wave has the columns of any other group
            done = [group for group in producer.groups.values() if group.done]
        if self._writer is not None:
            self._waves.append(wave)
            self._groups += groups
        return wave, flow.steps.fields(wave.counters, groups or done[:1])

    def record(self, wave: Wave, *, rows: int, room: int) -> None:
        """Records a wave that was taken last, whose groups lie in so many rows of so many."""
        self._records.write(wave, rows=rows, room=room, waited=self._waited)

    def end(self) -> tuple[FieldStore, Metrics]:
        """The fields of all of this process's groups in the step, whose last wave was taken, and
        metrics of the nodes that ran on them."""
        flow, admission = self._flow, self._flow.producer.admission
        step, cut = self._source.planner.step, self._source.planner.cut

        def decided() -> bool:
            with flow.producer.lock:
                return admission.cut(step).final

        with flow.swaps.block("wait"):
            flow.drive(decided, needs=cut.end)
        return flow.joined(cut)

    def note(self, metrics: Metrics) -> None:
        """Takes metrics of the nodes that ran ahead, over all processes."""
        self._metrics = metrics

    def finish(self, step: int) -> int:
        """Ends a step; returns the first counter that it did not look at. Raises the error of a
        disk that could not take a record of the groups."""
        self._source.finish()
        end = self._flow.finish(step)
        if self._writer is not None:
            groups = sorted(self._groups, key=lambda group: group.counter)
            waves, self._waves, self._groups = self._waves, [], []
            self._writer.add(StepRecord(step, tuple(waves), tuple(groups), end, self._metrics))
        return end

    def wait(self) -> None:
        """Waits until the groups of all steps are kept, as a checkpoint needs it."""
        if self._writer is not None:
            self._writer.wait()

    def close(self) -> None:
        """Ends the connections, and waits for what is being written."""
        self._source.close()
        if self._writer is not None:
            self._writer.close()
