"""The recorded groups of a run's steps, partial batch by partial batch, without samplers."""

from collections import deque
from collections.abc import Callable, Collection, Mapping

from distflow_jax.batch import Prompt
from distflow_jax.coordinator.field_store import FieldStore
from distflow_jax.coordinator.rounds import DATA_ENDED, Ended
from distflow_jax.layout import Layout, Metrics
from distflow_jax.stream.batches.partial_batch_records import PartialBatchRecords
from distflow_jax.stream.batches.partial_batches import PartialBatch
from distflow_jax.stream.batches.recordings import Recording
from distflow_jax.stream.batches.step_record import StepRecord
from distflow_jax.stream.host_nodes import Group
from distflow_jax.stream.schedule import Cut
from distflow_jax.stream.step_groups import StepGroups


class PartialBatchReplay:
    """Hands a step's recorded groups to the training."""

    def __init__(
        self,
        recording: Recording,
        records: PartialBatchRecords,
        *,
        steps: StepGroups,
        writers: Mapping[str | None, Layout],
        prompt: Callable[[int], Prompt],
    ):
        """`records`: of this run's partial batches; `steps`: joins their groups; `writers`,
        `prompt`: see step_record.from_arrays."""
        self._recording, self._records = recording, records
        self._writers, self._prompt = writers, prompt
        self._steps = steps
        self._record = StepRecord(0, (), (), 0, {})  # of the present step
        self._left: deque[PartialBatch] = deque()  # its partial batches
        self._other: list[Group] = []  # any group, for the columns of a partial batch without one

    def take(self, step: int) -> tuple[PartialBatch, FieldStore]:
        """The next partial batch of a step, and the fields of this process's groups in it.

        Raises Ended after the last step of the recording, ValueError for a record that cannot
        be read.
        """
        if not self._left:
            self._begin(step)
        partial_batch = self._left.popleft()
        counters = partial_batch.counters
        return partial_batch, self._steps.fields(step, counters, self._mine(counters))

    def record(self, partial_batch: PartialBatch, *, rows: int, room: int) -> None:
        """Records a partial batch that was taken last, whose groups lie in so many rows of so
        many."""
        self._records.write(partial_batch, rows=rows, room=room, waited=0.0)

    def end(self) -> tuple[FieldStore, Metrics]:
        """The fields of all of this process's groups in the step, whose last partial batch was
        taken, and recorded metrics of the nodes that ran on them."""
        record = self._record
        start = min(record.counters, default=record.end)
        cut = Cut(record.step, start, record.end, record.counters, final=True)
        return self._steps.join(cut, self._mine(record.counters), record.metrics)

    def finish(self, step: int) -> int:
        """Ends a step; returns the first counter that it did not look at."""
        return self._record.end

    def _begin(self, step: int) -> None:
        if step > self._recording.last:
            folder = self._recording.folder
            raise Ended(DATA_ENDED, fix=f"{folder} has no whole record of a later one")
        self._record = self._read(step)
        self._left = deque(self._record.partial_batches)

    def _read(self, step: int) -> StepRecord:
        return self._recording.read(step, self._writers, self._prompt)

    def _mine(self, counters: Collection[int]) -> list[Group]:
        """This process's groups of some counters; without one, any group of the recording."""
        mine = [group for group in self._record.groups if group.counter in counters]
        if mine:
            self._other = mine[:1]
            return mine
        steps = range(self._record.step, self._recording.last + 1)
        if not self._other:
            found = (self._read(step).groups[:1] for step in steps)
            self._other = list(next(filter(None, found), ()))
        return self._other
