"""How a run makes a step: on the whole batch at once, or partial batch by partial batch.

Both take what the source has of a step, run the units of the plan, and afterwards have, in `batch`,
the numbers that a Coordinator has of a batch. In partial batches the units that stream run on each,
which a coordinator of its own holds, then the others on the whole batch, which the coordinator of
the run holds, and of which statistics and records are made.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import field
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from distflow_jax.batch import ONE_NUMBER
from distflow_jax.cluster import processes
from distflow_jax.coordinator import field_moves
from distflow_jax.coordinator.assignment import Shares, StepLengths, data_ranks
from distflow_jax.coordinator.coordinator import Coordinator, work_of
from distflow_jax.coordinator.field_store import FieldStore, Value
from distflow_jax.dag.plan import Plan, Unit
from distflow_jax.dag.plan_walker import (
    Rehearse,
    Runner,
    Span,
    merge_measured,
    run_step,
    run_units,
)
from distflow_jax.layout import ADVANTAGE, ROWS, Edge, Metrics, Parts
from distflow_jax.models.model_flops import BatchWork
from distflow_jax.planning.partial_batches.partial_batch_programs import (
    PartialBatchPrograms,
    check_stateless,
    deferred,
)
from distflow_jax.planning.plan_run import PreparedRun
from distflow_jax.programs.launch_log import launched
from distflow_jax.runtime.build import Runtime
from distflow_jax.runtime.sample_source import SampleSource, SourceOfPartialBatches
from distflow_jax.stages.partial_batch_metrics import merged_metrics, num_sequences
from distflow_jax.stages.update_model import merged_updates
from distflow_jax.stream.batches.group_facts import step_lengths
from distflow_jax.stream.batches.partial_batches import PartialBatch
from distflow_jax.training.update import without_sums


@dataclasses.dataclass
class StepInPartialBatches:
    """Results of a step in partial batches so far, on this process."""

    # of each partial batch
    metrics: list[Metrics] = field(default_factory=list)
    sequences: list[jax.Array | int] = field(default_factory=list)  # how many, on all processes
    shares: list[Shares] = field(default_factory=list)
    uid: list[np.ndarray] = field(default_factory=list)  # int64 [N, 2]
    # of those that wrote advantages, with the lengths by which rows were assigned
    advantages: list[tuple[FieldStore, StepLengths]] = field(default_factory=list)
    # of all of them
    updates: dict[str, list[Metrics]] = field(default_factory=dict)  # by unit
    ran: set[str | None] = field(default_factory=lambda: {None})  # see run_units
    received: int = 0  # bytes from other processes
    # int64 [5], see Coordinator.image_counts
    images: np.ndarray = field(default_factory=lambda: np.zeros(5, np.int64))
    # entries of this process's responses, in the order of `uid`
    columns: dict[Value, list[Any]] = field(default_factory=dict)

    def column(self, value: Value, uid: np.ndarray) -> list[Any]:
        """The entries of a field in the order of `uid`, int64 [N, 2]."""
        known = np.concatenate(self.uid).tolist()
        entries = dict(zip(map(tuple, known), self.columns[value], strict=True))
        return [entries[key] for key in map(tuple, uid.tolist())]


class PartialBatchSteps:
    """Runs the units that stream on each partial batch, then the others on the whole batch."""

    def __init__(
        self,
        plan: Plan,
        units: Sequence[Unit],
        programs: PartialBatchPrograms,
        runners: Mapping[str, Runner],
        coordinator: Coordinator,
        batch: Coordinator,
        source: SourceOfPartialBatches,
        span: Callable[..., AbstractContextManager[Any]],
    ):
        """`units` stream, the others of `plan` wait; `runners` are those of all units, by name.
        `coordinator` is that of partial batches, `batch` that of the run."""
        self._source, self._span = source, span
        self._plan, self._units = plan, tuple(units)
        self._updates = [  # (unit, state key, update) of those that train
            (unit, unit.tasks[0].state_key, programs.updates[unit.tasks[0].state_key])
            for unit in self._units
            if unit.tasks[0].node.type == "MODEL_TRAIN"
        ]
        self._waiting = tuple(unit for unit in plan.units if unit not in self._units)
        self._runners, self._coordinator, self._batch = dict(runners), coordinator, batch
        for unit in self._units:
            if unit.layout.kind == "host":
                self._runners[unit.name] = _stateless(unit, runners[unit.name])
        self._deferred = deferred(plan, self._units)
        self._awaited = {(e.source, e.field) for unit in self._waiting for e in unit.inputs}
        outputs = {
            value: spec
            for program in programs.units.values()
            for value, spec in zip(program.unit.outputs, program.outputs, strict=True)
        }
        self._dtypes = {(e.source, e.field): outputs[e.source, e.field] for e in self._deferred}
        first = next((i for i, u in enumerate(self._units) if _edge_of_rows(u)), len(self._units))
        # nodes on the host may write columns of the rows until a unit reads these
        self._before, self._after = self._units[:first], self._units[first:]
        self._rows = _edge_of_rows(self._after[0]) if self._after else None
        self._count = self._count_program()
        self._found = StepInPartialBatches()

    def run(
        self, step: int, states: Mapping[str, Any], rehearse: Rehearse | None
    ) -> tuple[dict[str, Any], Metrics]:
        """Runs a step; returns its states and metrics. Collective.

        `rehearse` as of dag.plan_walker.run_step.
        """
        states, self._found = dict(states), StepInPartialBatches()
        self._begin(states)
        for partial_batch, store in self._source.partial_batches(step):
            span = functools.partial(self._span, partial_batch=1 + self.partial_batches)
            self._partial_batch(partial_batch, states, store, span, rehearse)
            self._collect(partial_batch)
            self._source.record(partial_batch, **_filling(self._coordinator.shares))
            if partial_batch.ends_mini_batch:
                self._finish(partial_batch, states, span, rehearsed=rehearse is not None)
        self._source.fill(self._batch, step)
        self._put_columns()
        metrics = self._rest(step, states, rehearse) | self._merged()
        metrics |= {"training/partial_batches": self.partial_batches}
        # workers choose some names of the source's metrics: where one is there twice, ours counts
        return states, self._source.measured() | metrics

    @property
    def batch(self) -> "PartialBatchSteps":
        """The holder of the rows of the step."""
        return self

    @property
    def partial_batches(self) -> int:
        """Partial batches of the last step, as far as they have run."""
        return len(self._found.shares)

    def tokens_per_rank(self) -> np.ndarray:
        """Tokens in the rows of all partial batches, on each of the trainer's data ranks, int64
        [ranks]."""
        shares = self._found.shares
        return sum(one.tokens_per_rank(one.plan.primary) for one in shares)

    def work(self, window: int = 0) -> BatchWork:
        """Tokens and pairs in the rows of all partial batches, see Coordinator.work."""
        works = [dataclasses.astuple(work_of(one, window)) for one in self._found.shares]
        return BatchWork(*map(sum, zip(*works, strict=True)))

    def advantages(self) -> dict[str, list[float | None]]:
        """{"advantage": one number per response of this process}, see Coordinator.advantages.

        Those of partial batches leave the devices here: most steps need none.
        """
        of_batch = self._batch.advantages()
        if of_batch or not self._found.advantages:
            return of_batch
        found: dict[tuple[int, ...], float | None] = {}
        for store, lengths in self._found.advantages:
            self._coordinator.use(store, lengths)
            entries = self._coordinator.advantages()[ADVANTAGE]
            found |= zip(map(tuple, store.uid[store.own].tolist()), entries, strict=True)
        store = self._batch.store
        return {ADVANTAGE: [found[key] for key in map(tuple, store.uid[store.own].tolist())]}

    def bytes_received(self) -> int:
        """Bytes that came to this process from others in this step."""
        return self._found.received + self._batch.bytes_received()

    def image_counts(self) -> np.ndarray:
        """Counts of all partial batches, int64 [5], see Coordinator.image_counts."""
        return self._found.images

    # -- a partial batch --------------------------------------------------------------------------

    def _begin(self, states: dict[str, Any]) -> None:
        for _, key, update in self._updates:
            states[key] = update.begin(states[key])

    def _partial_batch(
        self,
        partial_batch: PartialBatch,
        states: dict[str, Any],
        store: FieldStore,
        span: Span,
        rehearse: Rehearse | None,
    ) -> None:
        coordinator, found = self._coordinator, self._found
        coordinator.use(store, step_lengths(partial_batch.groups))
        step, runners = partial_batch.step, self._runners
        of_partial_batch = step, runners, states, coordinator, span, found.ran, rehearse
        measured = run_units(self._before, *of_partial_batch)
        found.sequences.append(self._count_sequences(partial_batch))
        merge_measured(measured, run_units(self._after, *of_partial_batch), "a node after packing")
        if jax.default_backend() == "cpu":
            # programs of several partial batches in flight, each with collectives, starve each
            # other of XLA:CPU's threads (docs/decisions/decoding.md)
            sums = [states[key] for _, key, _ in self._updates]
            jax.block_until_ready((found.sequences[-1], measured, sums))
        coordinator.merged(measured)  # for its errors; Parts of the whole step are merged later
        found.metrics.append(measured)
        found.shares.append(coordinator.shares)

    def _collect(self, partial_batch: PartialBatch) -> None:
        """Keeps what is needed after the partial batch, on the host but for advantages."""
        coordinator, found = self._coordinator, self._found
        store = coordinator.store
        late = {u.tasks[0].node.id for u in self._units if u.layout.kind == "host"} - store.done
        found.uid.append(store.uid[store.own])
        for edge in self._deferred:
            if (edge.source, edge.field) in store.values:
                _extend(found, (edge.source, edge.field), coordinator.get(edge))
        for name, source in store.sources.items():
            # columns that nobody reads any more are freed, but for those without an entry
            wanted = (source, name) in self._awaited or len(store.columns[name])
            if source in late and wanted:
                _extend(found, (source, name), store.columns[name])
        if store.advantage is not None or ADVANTAGE in store.columns:
            found.advantages.append((store.with_advantages(), step_lengths(partial_batch.groups)))
        found.received += coordinator.bytes_received()
        found.images = found.images + coordinator.image_counts()

    def _finish(
        self, partial_batch: PartialBatch, states: dict[str, Any], span: Span, *, rehearsed: bool
    ) -> None:
        """Ends the optimizer step of a mini-batch, and begins that of the next one."""
        for unit, key, update in self._updates:
            active = unit.condition.active(partial_batch.step)
            if not (active or rehearsed):
                states[key] = without_sums(states[key])
                continue
            with span(unit.name):
                states[key], metrics = update.finish(states[key])
            if active:
                self._found.updates.setdefault(unit.name, []).append(metrics)
        if not partial_batch.last:
            self._begin(states)

    # -- the whole batch --------------------------------------------------------------------------

    def _put_columns(self) -> None:
        """Puts what partial batches wrote into the coordinator of the run."""
        found, store = self._found, self._batch.store
        uid = store.uid[store.own]
        edges = {(edge.source, edge.field): edge for edge in self._deferred}
        columns = {value: found.column(value, uid) for value in found.columns}
        for value, column in columns.items():
            if value not in edges:
                store.put(*value, _as_column(column))
        for value, edge in edges.items():
            if value in columns:
                store.put(*value, self._packed(edge, columns[value]))

    def _packed(self, edge: Edge, column: Sequence[Any]) -> jax.Array:
        """A carried column in the rows of the batch, where it was written partial batch by partial
        batch."""
        spec = self._dtypes[edge.source, edge.field]
        per_token = spec.shape[2] == self._batch.shares.plan.limits.tokens
        dtype = dataclasses.replace(ONE_NUMBER, dtype=spec.dtype.name) if per_token else None
        batch = self._batch
        mesh = batch.meshes[edge.source_layout]
        with processes.coordinating():
            packed = field_moves.pack_as_written(
                batch.store, batch.shares, edge, mesh, column, dtype
            )
        return packed.astype(spec.dtype)

    def _rest(self, step: int, states: dict[str, Any], rehearse: Rehearse | None) -> Metrics:
        batch, ran = self._batch, self._found.ran
        measured = run_units(
            self._waiting, step, self._runners, states, batch, self._span, ran, rehearse
        )
        return dict(batch.merged(measured))

    def _merged(self) -> Metrics:
        """Metrics of the units that ran on partial batches, and of their updates."""
        numbers: list[Metrics] = []
        parts: Metrics = {}
        for measured in self._found.metrics:
            for name, value in measured.items():
                if isinstance(value, Parts):
                    parts[name] = parts[name] + value if name in parts else value
            numbers.append({n: x for n, x in measured.items() if not isinstance(x, Parts)})
        metrics: Metrics = merged_metrics(*jax.device_get((numbers, self._found.sequences)))
        metrics |= self._batch.merged(parts)
        for updates in self._found.updates.values():
            metrics |= merged_updates(updates)
        return metrics

    def _count_sequences(self, partial_batch: PartialBatch) -> jax.Array | int:
        """How many sequences a partial batch has, the same on all processes."""
        if self._rows is None:
            return sum(len(group.responses) for group in partial_batch.groups)
        rows = self._coordinator.get(self._rows)
        launched("partial batch size")
        return self._count(rows)

    def _count_program(self) -> Callable[[Any], jax.Array] | None:
        if self._rows is None:
            return None
        mesh = self._coordinator.meshes[self._rows.target_layout]
        return jax.jit(num_sequences, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _edge_of_rows(unit: Unit) -> Edge | None:
    """The edge by which a unit reads rows; None: it reads none."""
    return next((edge for edge in unit.inputs if edge.field == ROWS), None)


def _stateless(unit: Unit, runner: Runner) -> Runner:
    """The runner of a unit on the host, with an error for a state that it keeps."""

    def run(states, values):
        kept, written, measured = runner(states, values)
        check_stateless(unit, kept)
        return kept, written, measured

    return run


def _filling(shares: Shares) -> dict[str, int]:
    """Rows that a partial batch takes of its room, over all data ranks."""
    layout = shares.plan.primary
    rows = sum(len(mini.rows) for mini in shares.minis)
    return {"rows": rows, "room": shares.plan.rows[layout] * data_ranks(layout)}


def _extend(found: StepInPartialBatches, value: Value, entries: Sequence[Any]) -> None:
    found.columns.setdefault(value, []).extend(entries)


def _as_column(entries: Sequence[Any]) -> Sequence[Any]:
    """A column as a node writes it: an array of numbers, or a list of anything else."""
    return np.array(entries) if entries and not any(map(np.ndim, entries)) else entries


class WholeSteps:
    """Runs each unit of the plan once, on the whole batch."""

    def __init__(
        self,
        plan: Plan,
        runners: Mapping[str, Runner],
        coordinator: Coordinator,
        source: SampleSource,
        span: Callable[..., AbstractContextManager[Any]],
    ):
        self._plan, self._runners, self._source, self._span = plan, runners, source, span
        self.batch = coordinator

    def run(
        self, step: int, states: Mapping[str, Any], rehearse: Rehearse | None
    ) -> tuple[dict[str, Any], Metrics]:
        """Runs a step; returns its states and metrics, see dag.plan_walker.run_step. Collective."""
        next_round = self._source.fill(self.batch, step)
        states, metrics = run_step(
            self._plan,
            step,
            self._runners,
            states,
            self.batch,
            self._span,
            next_round,
            rehearse=rehearse,
        )
        # workers choose some names of the source's metrics: where one is there twice, ours counts
        return states, self._source.measured() | metrics


Steps = WholeSteps | PartialBatchSteps


def make_steps(
    prepared: PreparedRun,
    runtime: Runtime,
    runners: Mapping[str, Runner],
    source: SampleSource,
    span: Callable[..., AbstractContextManager[Any]],
) -> Steps:
    """The steps of a run; `runners` are those of all units."""
    plan, coordinator = prepared.plan, runtime.coordinator
    if runtime.partial_batches is None:
        return WholeSteps(plan, runners, coordinator, source, span)
    return PartialBatchSteps(
        plan,
        prepared.streamed_units,
        runtime.partial_batches,
        runners,
        runtime.partial_batch_coordinator,
        coordinator,
        source,
        span,
    )
