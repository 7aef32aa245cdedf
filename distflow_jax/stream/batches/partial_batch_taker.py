"""The groups of a step on one process, partial batch by partial batch: what `GroupStream.take` is
for a whole step."""

import time

from distflow_jax.coordinator.field_store import FieldStore
from distflow_jax.coordinator.rounds import DATA_ENDED, Ended
from distflow_jax.layout import Metrics
from distflow_jax.stream.batches.partial_batch_source import PartialBatchSource
from distflow_jax.stream.batches.partial_batches import PartialBatch
from distflow_jax.stream.batches.recordings import RecordWriter
from distflow_jax.stream.group_stream import GroupStream
from distflow_jax.stream.host_nodes import Group


class PartialBatchTaker:
    """Hands a step's groups to the training, partial batch by partial batch. Call `take` until a
    partial batch is the last one, then `end` and `note`, then `finish` after the step has trained.
    """

    def __init__(
        self,
        stream: GroupStream,
        source: PartialBatchSource,
        records: RecordWriter,
    ):
        self._stream, self._source, self._records = stream, source, records
        self._waited = 0.0  # seconds, for the partial batch that was taken last
        self._groups: list[Group] = []  # of this process, in it
        self._metrics: Metrics = {}

    def take(self, step: int) -> tuple[PartialBatch, FieldStore]:
        """The next partial batch, and the fields of this process's groups in it. Collective.

        Raises Ended where the data have no group for the step, and what a sampler, an
        environment or a node that ran ahead has raised for a group of the step.
        """
        stream, producer, planner = self._stream, self._stream.producer, self._source.planner
        if planner.step != step:
            raise ValueError(
                f"partial batches of step {planner.step} come before those of step {step}"
            )
        if planner.cut.start == planner.cut.end:
            raise Ended(DATA_ENDED)
        begun = time.monotonic()
        with stream.update_times.block("wait"):
            partial_batch = self._source.next(stream.drive)
        self._waited = time.monotonic() - begun
        with producer.lock:
            mine = [c for c in partial_batch.counters if c in producer.groups]
            groups = [producer.groups[counter] for counter in mine]
            # a process without a group in a partial batch has the columns of any other group
            done = [group for group in producer.groups.values() if group.done]
        self._groups = groups
        return partial_batch, stream.steps.fields(partial_batch.counters, groups or done[:1])

    def record(self, partial_batch: PartialBatch, *, rows: int, room: int) -> None:
        """Records a partial batch that was taken last, whose groups lie in so many rows of so
        many."""
        self._records.write(partial_batch, self._groups, rows=rows, room=room, waited=self._waited)

    def end(self) -> tuple[FieldStore, Metrics]:
        """The fields of all of this process's groups in the step, whose last partial batch was
        taken, and metrics of the nodes that ran on them."""
        stream, admission = self._stream, self._stream.producer.admission
        step, cut = self._source.planner.step, self._source.planner.cut

        def decided() -> bool:
            with stream.producer.lock:
                return admission.cut(step).final

        with stream.update_times.block("wait"):
            stream.drive(decided, needs=cut.end)
        return stream.joined(cut)

    def note(self, metrics: Metrics) -> None:
        """Takes metrics of the nodes that ran ahead, over all processes."""
        self._metrics = metrics

    def finish(self, step: int) -> int:
        """Ends a step; returns the first counter that it did not look at. Raises the error of a
        disk that could not take a record of the groups."""
        self._source.finish()
        end = self._stream.finish(step)
        self._records.finish(step, end, self._metrics)
        return end

    def wait(self) -> None:
        """Waits until the groups of all steps are kept, as a checkpoint needs it."""
        self._records.wait()

    def close(self) -> None:
        """Ends the connections, and waits for what is being written."""
        self._source.close()
        self._records.close()
