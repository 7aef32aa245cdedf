"""The source of an asynchronous run: each step takes the groups that are due.

The rule in schedule.py alone decides which groups may begin and which of them a step takes, so no
process has to ask another. Processes exchange only whether their groups are complete, and the
filter decisions of a region (batches/agreement.py). With weight updates at boundaries, filter
decisions are exchanged after each round of a region instead (region_rounds.py).

The way of a group:

  the sampling thread (the training thread, InlineLink; one of its own, ThreadLink; or that of a
  worker's connection, BufferService):
    Producer.admit begins it, TaskBuffer.lease leases it to a Worker, which samples it by its
    EpisodeSampler; SampleRequests.submit (submit_here without a connection) takes its samples
  the same thread, or WorkersSide for workers:
    Driver.hand_on takes it out of the buffer (Producer.collect), for the nodes that run on it
  HostThread, and workers for nodes that they run:
    rewards and other nodes on the host; then `group.done`
  the training thread:
    Agreement.next waits for the groups of a partial batch, StepGroups.join makes fields of them

The way of weights: `offer` or `begin`, Publications.publish, then SamplingSide.bring, which loads
them (InlineLink), delivers them to the sampler's thread (ThreadLink), or stores them for workers
(WorkersSide). Link.advance takes delivered or stored ones between two decode calls: Worker.load.
"""

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from distflow_jax.batch import Samples
from distflow_jax.cluster import processes
from distflow_jax.cluster.background_gather import BackgroundGather
from distflow_jax.cluster.peers import Peers
from distflow_jax.config.stream_config import StreamConfig
from distflow_jax.coordinator.batch_metrics import Gaps, staleness_metrics
from distflow_jax.coordinator.coordinator import Coordinator
from distflow_jax.coordinator.field_store import FieldStore
from distflow_jax.coordinator.rounds import DATA_ENDED, Ended, NextRound, no_round
from distflow_jax.layout import Metrics
from distflow_jax.stream.batches.agreement import Agreement
from distflow_jax.stream.batches.partial_batches import PartialBatch, PartialBatchPlanner
from distflow_jax.stream.batches.recordings import RecordWriter
from distflow_jax.stream.driver import ALL, Driver, TrainerCalls
from distflow_jax.stream.evaluations import Evaluated
from distflow_jax.stream.host_nodes import Group, NodesAhead
from distflow_jax.stream.producer import Producer
from distflow_jax.stream.publications import Publications, PublishRule
from distflow_jax.stream.quarantine import Quarantine
from distflow_jax.stream.region_rounds import RegionRounds
from distflow_jax.stream.resume import SampleSaver
from distflow_jax.stream.sampling_side import SamplingSide
from distflow_jax.stream.step_groups import StepGroups

WEIGHT_UPDATES = "weight_update"  # in the place of a node's id


@dataclasses.dataclass(frozen=True)
class KeptGroups:
    """Consumers of a source's groups: checkpoints, per-step records and recordings for replay."""

    place: Any  # of the run in its data, which checkpoints keep: runtime/place.py
    saver: SampleSaver
    recording: RecordWriter
    check_complete: Callable[[int], None] = lambda step: None  # of samples of a checkpoint


class Ahead:
    """Samples made while earlier steps trained; see runtime/sample_source.py.

    A step is at least one partial batch, with partial_batches=off exactly one. Construct it on all
    processes at once.

    Attributes:
      place: position in the data.
      publications: decide which weights samplers receive.
      saver: adds samples to checkpoints.
      drive: samples while training waits.
    """

    saves_samples = True

    def __init__(
        self,
        producer: Producer,
        nodes: NodesAhead,
        sampling: SamplingSide,
        planner: PartialBatchPlanner,
        config: StreamConfig,
        *,
        trainer: TrainerCalls,
        kept: KeptGroups,
        numbered: bool = False,
    ):
        """`sampling`: not started; `planner`: of the partial batches of steps; `numbered`: whether
        groups get the number of their step."""
        self.producer, self.saver, self._config = producer, kept.saver, config
        self.place = kept.place
        self._sampling, self._planner, self._kept = sampling, planner, kept
        self._trainer, self._lock = trainer, producer.lock
        rule = PublishRule(config.divergence, config.max_staleness)
        self._peers = _peers(producer, spreads=planner.spreads or rule.skips)
        self.publications = Publications(rule, producer, self._peers, self._bring)
        self._steps = StepGroups(nodes.ids, numbered=numbered)
        self._occupancy = producer.requests.occupancy  # that `measured` has looked at
        self._quarantine = Quarantine(producer)
        self._measured: Metrics = {}  # of the nodes that ran ahead, for the present step
        self._partial_batches: list[PartialBatch] = []  # of the present step
        self._groups: list[Group] = []  # of this process, in the last of them
        self._waited = 0.0  # seconds, for the last of them
        # with these filter decisions reach all processes after each round, without partial batches
        by_rounds = config.weight_update == "boundary" and nodes.until is not None
        self._rounds = RegionRounds(producer, _gather()) if by_rounds else None
        self._agreement = Agreement(
            planner,
            producer,
            _gather(),
            self._peers,
            self.publications,
            config,
            judges=not by_rounds,
            missing=lambda: sampling.missing_workers,
        )
        self.driver = Driver(
            producer,
            nodes,
            sampling,
            trainer,
            kept.saver,
            idle=self.publications.note_idle,
            known=self._rounds.known if self._rounds else lambda end: True,
        )
        self._times = self.driver.times

    # -- weights ----------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """Brings the weights of all finished steps to samplers, unless they do without, or `offer`
        has published them."""
        if not self.publications.passed_over(step - 1):
            self.update_weights(step - 1)

    def update_weights(self, version: int) -> None:
        """Brings the weights of `version` finished steps to the sampler. Collective."""
        self.publications.publish(version)

    def _bring(self, version: int) -> None:
        with self._trainer.weights() as params, self._times.block("leave"):
            self._times.moved(self._sampling.bring(params, version))

    def offer(self, step: int, metrics: Mapping[str, Any], *, needed: bool) -> Metrics:
        """Publishes the weights of a step with these metrics, or not; returns metrics of that."""
        if self._trainer.keeps_weights(step):
            return {}
        return self.publications.offer(step, metrics, needed=needed)

    # -- the groups of a step ---------------------------------------------------------------------

    def partial_batches(self, step: int) -> Iterator[tuple[PartialBatch, FieldStore]]:
        """The partial batches of a step, and the fields of this process's groups in each.

        Collective. Raises Ended where the data have no group for the step, or no worker comes to
        sample it, and what a sampler, an environment or a node that ran ahead has raised for a
        group of the step.
        """
        while not self._partial_batches or not self._partial_batches[-1].last:
            number = 1 + len(self._partial_batches)
            with self._trainer.phase("wait_for_samples", partial_batch=number):
                partial_batch, groups = self._next(step)
                store = self._steps.fields(step, partial_batch.counters, groups)
            yield partial_batch, store

    def record(self, partial_batch: PartialBatch, *, rows: int, room: int) -> None:
        """Records a partial batch that was taken last, whose groups lie in so many rows of so
        many."""
        recording, mine = self._kept.recording, self._groups
        recording.write(partial_batch, mine, rows=rows, room=room, waited=self._waited)

    def fill(self, coordinator: Coordinator, step: int) -> NextRound:
        """Waits for the groups of a step and hands them to the coordinator; nodes that ran ahead do
        not run again.

        For the rule the step is finished then (Admission.finish), though nodes have still to train.
        Collective; raises what `partial_batches` does.
        """
        with self._trainer.phase("wait_for_samples"):
            store, metrics = self.take(step)
        coordinator.use(store)
        strict = not self._config.workers  # these choose names, which must not end a run
        self._measured = dict(coordinator.merged(metrics, strict=strict))
        self._finish(step)
        return no_round

    def take(self, step: int) -> tuple[FieldStore, Metrics]:
        """The fields of all of this process's groups of a step, once all its partial batches are
        decided, and metrics of the nodes that ran on them."""
        admission = self.producer.admission

        def decided() -> bool:  # then all groups of the step are done
            with self._lock:
                return admission.cut(step).final

        while not self._partial_batches or not self._partial_batches[-1].last:
            self._next(step)
        cut = self._planner.cut
        with self._times.block("wait"):
            self.driver.wait_until(decided, needs=cut.end)
        self._sampling.rest()  # devices that it shares are the trainer's from here on
        self.saver.add_complete()  # while the groups are there
        with self._lock:
            groups = self.producer.forget(cut.counters)
            account = self.saver.took(cut, groups)
        times = {WEIGHT_UPDATES: self._times.take()}
        return self._steps.join(cut, groups, times | account.metrics())

    def _next(self, step: int) -> tuple[PartialBatch, list[Group]]:
        """The next partial batch, and this process's groups in it, once it is decided and the
        fields of groups are known."""
        if not self._partial_batches and not self._planner.begin(step):
            raise Ended(DATA_ENDED)
        begun = time.monotonic()
        with self._times.block("wait"):
            partial_batch = self._agreement.next(self.driver.wait_until)
            counters = partial_batch.counters
            self.driver.wait_until(
                lambda: self._steps.knows(self.producer, step, counters), needs=ALL
            )
        self._waited = time.monotonic() - begun
        with self._lock:
            mine = [self.producer.groups[c] for c in counters if c in self.producer.groups]
        self._partial_batches.append(partial_batch)
        self._groups = mine
        return partial_batch, mine

    def _finish(self, step: int) -> None:
        """Counts the groups of a step as taken. Raises the error of a disk that could not record
        them."""
        self._agreement.finish()
        with self._lock:
            end = self.producer.admission.finish(step).end
        self.place.look_at(end)
        self._partial_batches = []
        self._kept.recording.finish(step, end, self._measured)

    # -- what a step leaves behind ----------------------------------------------------------------

    def measured(self) -> Metrics:
        """Metrics of the nodes that ran ahead, decode calls since the last call of this, and what
        the producer has measured."""
        with self._lock:
            before, self._occupancy = self._occupancy, self.producer.requests.occupancy
            more = self.producer.measured()
        occupancy = self._occupancy.plus(before, -1)
        found, self._measured = self._measured, {}
        return found | {"perf/generate_calls": occupancy.calls} | occupancy.metrics() | more

    def account_for(self, samples: Samples, step: int, gaps: Gaps) -> Metrics:
        """Accounts for the samples of a step; returns their ages."""
        self._quarantine.look(self.saver.write_groups_line(samples, gaps))
        return staleness_metrics(samples, step, self._config.max_staleness)

    def evaluated(self, version: int, *, end: float = math.inf) -> list[Evaluated]:
        """Evaluations up to a version that were not returned before; waits for them, but not for
        workers that are missing.

        Of the versions that the evaluator evaluates. With an `end`, a time of time.monotonic(), it
        waits no longer, and samplers of this process begin with no newer version. From the first
        one on that a process lacks then, all processes leave them out. Collective.
        """
        evaluations = self.driver.evaluations
        if end < math.inf:
            self._sampling.end_with(version)
            self.saver.end()
        if not evaluations.open(version):
            return []
        for due in evaluations.missing(version):

            def ended(due: int = due) -> bool:
                there = due not in evaluations.missing(due)
                return there or time.monotonic() > end or bool(self._sampling.missing_workers)

            self.driver.wait_until(ended, needs=ALL, waits_for=f"evaluation of step {due}")
        late = itertools.chain(*processes.all_gather_json(evaluations.missing(version)))
        return evaluations.take(min(late, default=version + 1) - 1)

    def evaluated_by(self, step: int) -> int:
        """The version up to which evaluations are recorded after a step. Collective."""
        return self._sampling.evaluated_by(step)

    def not_evaluated(self, version: int) -> list[int]:
        """The versions up to one whose evaluations `evaluated` has not returned; on all processes
        alike."""
        return self.driver.evaluations.open(version)

    # -- the sampler's arrays ---------------------------------------------------------------------

    def at_rest(self) -> contextlib.AbstractContextManager[None]:
        """A block in which no other thread touches an array."""
        return self._noted(self._sampling.hold(0))

    @contextlib.contextmanager
    def free_sampler(self) -> Iterator[None]:
        """A block in which nothing samples, and the run has the sampler's state.

        It holds the weights that were published last. What is under way is suspended, and goes on
        afterwards; responses in turns end first.
        """
        with self._noted(self._sampling.suspended(self.publications.newest)) as held:
            self._trainer.lend(held[0])
            yield
            held[:] = [self._trainer.give_back()]

    @contextlib.contextmanager
    def _noted(self, block: contextlib.AbstractContextManager[Any]) -> Iterator[Any]:
        """A block that waits for a sampler; the watchdog is told of what."""
        self._trainer.note(self.producer.oldest)
        with block as held:
            self._trainer.note("")
            yield held

    # -- checkpoints ------------------------------------------------------------------------------

    def before_save(self, *, with_samples: bool) -> None:
        """Waits for records of steps; accounts for tokens where no samples are saved that do."""
        self._kept.recording.wait()
        account = None if with_samples else self.saver.total_account().to_dict()
        self.place.account = account

    def save(self, step: int) -> None:
        """Adds this process's samples to the checkpoint of a step, see SampleSaver."""
        self.saver.save(step, self.at_rest())

    def status(self) -> str:
        """The workers that sample, for a line of a log on a long wait; "": there are none."""
        return self._sampling.status()

    def stop_waiting(self) -> None:
        """Waits for workers that are missing no longer than a few seconds."""
        self._sampling.stop_waiting()

    def finish_saving(self, step: int, end: float) -> None:
        """Waits until the checkpoint of `step` has its samples, at most until `end`, a time of
        time.monotonic(); warns if it lacks some. Collective."""
        with self._trainer.phase("wait_for_samples"):
            self.end_saving(end)
            self._kept.check_complete(step)

    def end_saving(self, end: float) -> None:
        """Waits until the samples of all checkpoints are complete and written, at most until `end`,
        a time of time.monotonic()."""
        self.driver.wait_until(lambda: self.saver.settled or time.monotonic() > end, needs=ALL)
        self.saver.wait(max(0.0, end - time.monotonic()))

    def close(self) -> None:
        """Drops what is under way, unless a sampler's thread is still at it, and waits for what is
        being written."""
        self.driver.close()
        self._agreement.close()
        if self._rounds is not None:
            self._rounds.close()
        self._peers.close()
        self._kept.recording.close()


def _gather() -> BackgroundGather:
    return BackgroundGather(processes.second_exchange())


def _peers(producer: Producer, *, spreads: bool) -> Peers:
    """Numbers that wake a producer's threads where they rise; without `spreads` they have no
    connections."""
    exchange = processes.second_exchange() if spreads else None
    return Peers(exchange, processes.process_index(), processes.process_count(), producer.wake)
