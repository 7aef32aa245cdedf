"""Asynchronous steps of one process: samplers run ahead, the training takes a step's groups.

The rule of schedule.py says which groups may begin and which of them a step takes; nothing else
decides, and no process asks another one. What processes tell each other is that they have their
groups of a step, and a region's filter decisions, once for each step
(parallel/background_gather.py). With weight updates at boundaries filter decisions follow each
round of a region instead (RegionRounds).
"""

import contextlib
import dataclasses
import functools
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import jax

from distflow_jax.coordinator.field_store import FieldStore
from distflow_jax.coordinator.rounds import DATA_ENDED, NO_WORKERS, Ended
from distflow_jax.layout import Metrics, Parts
from distflow_jax.parallel import processes
from distflow_jax.parallel.background_gather import BackgroundGather
from distflow_jax.rollout.sampler import SamplerState
from distflow_jax.stream.delivery import Delivery
from distflow_jax.stream.evaluations import Evaluated, Evaluations, Evaluator
from distflow_jax.stream.exact_order import ExactOrder
from distflow_jax.stream.host_nodes import NodesAhead, Span
from distflow_jax.stream.inline_sampling import InlineSampling
from distflow_jax.stream.lease_monitor import LeaseMonitor
from distflow_jax.stream.producer import Producer
from distflow_jax.stream.resume import SampleSaver
from distflow_jax.stream.sampling_thread import SamplingThread
from distflow_jax.stream.schedule import Cut
from distflow_jax.stream.step_groups import StepGroups
from distflow_jax.stream.stream_config import StreamConfig
from distflow_jax.watchdog.gossip import OTHERS

_NAMES = ("leave", "arrive", "exposed", "hidden")
_BYTES = "bytes"
IDLE_SECONDS = 0.01  # between two looks at what other threads have done
ALL = sys.maxsize  # above every counter
NOTE_SECONDS = 0.5  # between two words to the watchdog on what the training waits for
WEIGHT_UPDATES = "weight_update"  # in the place of a node's id


@dataclasses.dataclass(frozen=True)
class Observer:
    """Calls by which a stream is observed, from any thread."""

    span: Span  # times a block under a name
    note: Callable[[str], None]  # tells the watchdog what the running phase waits for
    # with weight updates at boundaries, for the versions that samplers evaluate when they take them
    evaluator: Evaluator | None = None


class GroupStream:
    """The groups of a run on one process, from their prompts to the steps that train them.

    Call `publish` when samplers need the weights, `take` for a step's groups, `finish` after it has
    trained. Samplers with devices of their own sample in a thread; on the trainer's devices this
    thread samples, while it waits in `take`.

    Attributes:
      publications: say which weights samplers need.
      saver: of samples, into checkpoints.
      steps: joins the groups of a step.
      weight updates: times what the training waits for.
      at_rest: makes a block in which the sampler, at a version or later, leaves its arrays alone.
    """

    def __init__(
        self,
        producer: Producer,
        nodes: NodesAhead,
        delivery: Delivery,
        gather: BackgroundGather,
        config: StreamConfig,
        *,
        observer: Observer,
        saver: SampleSaver,
    ):
        """`delivery`: of weights to the sampler. `saver`: of samples, into checkpoints."""
        self.producer, self._nodes, self._config = producer, nodes, config
        self._delivery, self._gather, self._observer = delivery, gather, observer
        self.publications, self.update_times = delivery.publications, WeightUpdateTimes()
        self._lock = producer.lock
        self._told: set[int] = set()  # counters whose filter decisions the others know
        self.steps = StepGroups(nodes.ids)
        self.saver = saver
        self._counts = producer.counts()  # that `counts` has looked at
        self._host = delivery.nodes(nodes, observer.span, self._lock)
        self._next_note = 0.0  # when the watchdog is told again what the training waits for
        self._evaluations: Evaluations | None = None
        if observer.evaluator is not None:
            held = self.publications.newest
            self._evaluations = Evaluations(observer.evaluator, self._host, held=held)
        self._sampling: SamplingThread | LeaseMonitor | InlineSampling
        # with these filter decisions reach all processes after each round, without `take`
        self._rounds = config.weight_update == "boundary" and nodes.until is not None
        if delivery.thread is not None:
            self._sampling = delivery.thread(self._round)
        elif delivery.own_devices:
            order = None
            if config.weight_update == "boundary":
                decisions = gather if self._rounds else None
                order = _exact_order(producer, decisions, self._evaluations)
            self._sampling = SamplingThread(
                producer,
                self._arrive,
                self._round,
                order=order,
                evaluations=self._evaluations,
                cache=config.cache,
                buffers=config.buffers,
                idle=self.publications.note_idle,
            )
        else:
            self._sampling = InlineSampling(
                producer, self._round, cache=config.cache, idle=self.publications.note_idle
            )
        self.at_rest = functools.partial(_held, self._sampling, observer, producer)

    def publish(self, params: Any, version: int) -> None:
        """Gives the sampler the trainer's weights after `version` steps. Collective."""
        if version == self.publications.newest:
            return
        self.publications.newest = version
        with self.update_times.block("leave"):
            self.update_times.moved(self._sampling.bring(self._delivery.sync, params, version))

    def take(self, step: int) -> tuple[FieldStore, Metrics]:
        """The step's groups of this process, complete, once all processes have theirs. Collective.

        Raises Ended where the data have no group for the step, or no worker comes to sample it, and
        what a sampler, an environment or a node that ran ahead has raised for a
        group of the step.
        """
        with self.update_times.block("wait"):
            return self._take(step)

    def _take(self, step: int) -> tuple[FieldStore, Metrics]:
        admission = self.producer.admission
        self._next_note = 0.0

        def decided() -> bool:  # then all groups of the step are done
            with self._lock:
                return admission.cut(step).final

        while True:
            with self._lock:
                cut = admission.cut(step)
            if cut.start == cut.end:
                raise Ended(DATA_ENDED)
            if self._rounds:
                self.drive(decided, needs=cut.end)
            elif not self._agree(cut):
                continue
            with self._lock:
                cut = admission.cut(step)
            if cut.final:
                with self._lock:
                    later = admission.cut(step + 1).end
                self.drive(functools.partial(self.steps.knows, self.producer, cut), needs=later)
                self._sampling.rest()  # devices that it shares are the trainer's from here on
                return self.joined(cut)

    def _agree(self, cut: Cut) -> bool:
        """Tells the others what this process has of a step, when it has its groups or a sampler
        needs newer weights; whether all have theirs. Filter decisions, and weights that some
        sampler needs, are with all processes then. Collective."""
        producer, publications, version = self.producer, self.publications, cut.step - 1

        def due() -> bool:
            news = publications.asked_for(version) or bool(self._sampling.missing_workers)
            if news or _has(producer, cut):
                return True
            with producer.lock:
                return bool(producer.given_up())

        self.drive(due, needs=cut.end)
        asked = publications.asked_for(version)
        told = self._gather.begin(
            [_has(producer, cut), asked, self._news(), self._sampling.missing_workers]
        )
        told.add_done_callback(lambda _: self._wake())
        self.drive(told.done)
        whole, wanted, news, alone = zip(*told.result(), strict=True)
        if nodes := {node for missing in alone for node in missing}:
            raise _starved(self._config, sorted(nodes))
        with self._lock:
            refills = [
                producer.judge(counter, bool(keep)) for theirs in news for counter, keep in theirs
            ]
        publications.agree(version, wanted)
        return all(whole) and not any(refills)

    def finish(self, step: int) -> int:
        """Ends a step that `take` has given; returns the first counter that it did not look at."""
        with self._lock:
            return self.producer.admission.finish(step).end

    def wait(self) -> None:
        """Returns once records of the steps so far are written: there are none."""

    def evaluated(self, version: int, *, end: float = math.inf) -> list[Evaluated] | None:
        """Evaluations up to a version that were not returned before; waits for them.

        Of the versions that the evaluator evaluates; none without an evaluator. With an `end`, a
        time of time.monotonic(), the run ends: samplers begin with no newer version, and if a
        process lacks an evaluation then, all return None. Collective.
        """
        if (evaluations := self._evaluations) is None:
            return []
        if end < math.inf:
            self._sampling.end_with(version)

        for due in evaluations.missing(version):
            ended = functools.partial(_ended, evaluations, due, end)
            self.drive(ended, needs=ALL, waits_for=f"evaluation of step {due}")
        if end < math.inf and any(processes.all_gather_json(evaluations.missing(version))):
            return None
        return evaluations.take(version)

    def counts(self) -> Metrics:
        """Decode calls since the last call of this, and what the producer has measured."""
        with self._lock:
            before, self._counts = self._counts, self.producer.counts()
            more = self.producer.measured()
        calls = self._counts.generate_calls - before.generate_calls
        occupancy = self._counts.occupancy.plus(before.occupancy, -1)
        return {"perf/generate_calls": calls} | occupancy.metrics() | more

    def save(self, step: int) -> None:
        """Adds this process's samples to the checkpoint of a step, see SampleSaver."""
        self.saver.save(step, self.at_rest(0))

    def end_saving(self, end: float) -> None:
        """Waits until the samples of all checkpoints are complete and written, at most until `end`,
        a time of time.monotonic()."""
        self.drive(lambda: self.saver.settled or time.monotonic() > end, needs=ALL)
        self.saver.wait(max(0.0, end - time.monotonic()))

    @contextlib.contextmanager
    def suspended(self) -> Iterator[list[SamplerState]]:
        """A block in which the sampler is free for something else, such as an evaluation.

        It holds the weights that were published last. What is under way is suspended, and goes on
        afterwards; responses in turns end first. The block is given a list with the sampler's
        state, and leaves the state in it.
        """
        sampler = self.producer.sampler
        with self.at_rest(self.publications.newest):
            while sampler.in_turns and sampler.busy:
                self._round()
            state, partials = sampler.suspend()
            held = [state]
            yield held
            sampler.resume(held[0], partials)

    def close(self) -> None:
        """Drops what is under way, unless a sampler's thread is still at it."""
        at_rest = self._sampling.close()
        self._host.close()
        self._gather.close()
        self.publications.close()
        if at_rest:
            self.producer.sampler.close()

    # -- waiting ----------------------------------------------------------------------------------

    def drive(self, until: Callable[[], bool], *, needs: int = 0, waits_for: str = "") -> None:
        """Samples until something is true, for which groups below a counter are needed.

        Raises what a sampler or a node that ran ahead has raised for one of these groups.
        `waits_for`: what it is, for the watchdog; "": the oldest of them.
        """
        while not until():
            self._raise_errors(needs)
            if time.monotonic() >= self._next_note:
                self._observer.note(waits_for or self._missing(needs))
                self._next_note = time.monotonic() + NOTE_SECONDS
            if not self._sampling.round():
                with self._lock:
                    self._lock.wait(IDLE_SECONDS)

    def _wake(self) -> None:
        with self._lock:
            self._lock.notify_all()

    def _round(self) -> None:
        with self._observer.span(self.producer.name):
            groups = self.producer.round()
        for group in groups:
            self._host.submit(group, self.saver.settle)

    @contextlib.contextmanager
    def _arrive(self, left: Any) -> Iterator[Any]:
        """A block in which the sampler does not decode, with the weights that have left."""
        with self.update_times.block("arrive"), self._observer.span("take_weights"):
            yield jax.block_until_ready(self._delivery.sync.arrive(left))

    def _raise_errors(self, needs: int) -> None:
        """Raises what a sampler or a disk has raised, or a node that ran on a group below a
        counter."""
        if not needs:
            return
        self.saver.check()
        self._sampling.raise_error()
        _raise_of_groups(self.producer, needs)

    def _missing(self, needs: int) -> str:
        """The oldest group below a counter that is not done, and the node that it waits for."""
        if not needs:
            return OTHERS
        with self._lock:
            groups = [g for c, g in self.producer.groups.items() if c < needs and not g.done]
            begun = self.producer.begun_up_to(needs)
        oldest = min(groups, key=lambda group: group.counter, default=None)
        if oldest is None:
            return OTHERS if begun else f"{self.producer.name} has not begun"
        if oldest.sampling:
            return f"{min(oldest.sampling)} of prompt {oldest.counter}"
        return self._host.waits_for(oldest)

    def _news(self) -> list[tuple[int, bool]]:
        """Filter decisions of this process that the others do not know."""
        with self._lock:
            given_up = [(counter, False) for counter in self.producer.given_up()]
        if self._nodes.until is None:
            return given_up
        with self._lock:
            groups = [g for g in self.producer.groups.values() if g.done]
        news = [(g.counter, g.keep) for g in groups if g.counter not in self._told]
        self._told |= {counter for counter, _ in news}
        return news + given_up

    def joined(self, cut: Cut) -> tuple[FieldStore, Metrics]:
        """The fields of this process's groups of a step, which is decided, and metrics of the nodes
        that ran on them. The groups are the step's from then on."""
        self.saver.settle()  # while the groups are there
        with self._lock:
            groups = self.producer.forget(cut.counters)
            account = self.saver.took(cut, groups)
        self._told -= set(cut.counters)
        return self.steps.join(
            cut, groups, {WEIGHT_UPDATES: self.update_times.take()} | account.metrics()
        )


def _starved(config: StreamConfig, nodes: Sequence[str]) -> Ended:
    """The end of a run for want of workers for some nodes."""
    served = f" for {' and '.join(map(repr, nodes))} (worker --nodes)"  # beside those that sample
    missing = f" for {config.no_workers_seconds:g} s{served if config.worker_nodes else ''}"
    return Ended(NO_WORKERS, more=missing, fix="start again, with workers, to go on")


@contextlib.contextmanager
def _held(
    sampling: SamplingThread | LeaseMonitor | InlineSampling,
    observer: Observer,
    producer: Producer,
    version: int,
) -> Iterator[None]:
    """A block in which no round of the sampler runs. The watchdog is told what it waits for."""
    observer.note(producer.oldest)
    with sampling.hold(version):
        observer.note("")
        yield


def _ended(evaluations: Evaluations, version: int, end: float) -> bool:
    """Whether a version's evaluation has ended, or the time for it."""
    return version not in evaluations.missing(version) or time.monotonic() > end


def _raise_of_groups(producer: Producer, needs: int) -> None:
    """Raises what a node has raised that ran on a group below a counter."""
    with producer.lock:
        groups = [g for c, g in producer.groups.items() if c < needs]
    for running in [g.running for g in groups if g.running is not None]:
        if running.done():
            running.result()


def _has(producer: Producer, cut: Cut) -> bool:
    """Whether a process's groups of a cut have begun, and are done."""
    with producer.lock:
        groups = [g for c, g in producer.groups.items() if c < cut.end]
        return producer.begun_up_to(cut.end) and all(group.done for group in groups)


def _exact_order(
    producer: Producer, gather: BackgroundGather | None, evaluations: Evaluations | None
) -> ExactOrder:
    """The order of weight updates at boundaries; `gather`: of a region's filter decisions."""
    rounds = None if gather is None else RegionRounds(producer, gather)
    return ExactOrder(
        producer.admission,
        held=producer.sampler.version,
        known=rounds.known if rounds else lambda end: True,
        due=evaluations.due if evaluations else lambda version: False,
    )


class RegionRounds:
    """Tells all processes the filter decisions of a round's groups as soon as these have ended.

    All processes have the same rounds in the same order, each at its own time. One thread uses it.
    """

    def __init__(self, producer: Producer, gather: BackgroundGather):
        """`gather`: nothing else uses it."""
        self._producer, self._gather = producer, gather
        self._known = producer.admission.position  # all filter decisions below are known everywhere
        self._told: tuple[int, Future[list[Any]]] | None = None  # of groups below, on their way

    def known(self, end: int) -> bool:
        """Whether all processes know the filter decisions of all groups below `end`; under the
        lock.

        All of these groups that are this process's have begun. Call it again while it is False.
        """
        if self._told is None:
            if end <= self._known:
                return True
            groups = [g for c, g in self._producer.groups.items() if self._known <= c < end]
            if not all(group.done for group in groups):
                return False
            told = self._gather.begin([(group.counter, group.keep) for group in groups])
            self._told = end, told
            told.add_done_callback(lambda _: self._wake())
        end_of_round, told = self._told
        if not told.done():
            return False
        for counter, keep in (news for theirs in told.result() for news in theirs):
            self._producer.admission.judge(counter, bool(keep))
        self._known, self._told = end_of_round, None
        self._wake()
        return end <= self._known

    def _wake(self) -> None:
        lock = self._producer.lock
        with lock:
            lock.notify_all()


class WeightUpdateTimes:
    """Times both halves of weight updates: weights leave the trainer, and arrive on the sampler's
    devices.

    A second is exposed if it delays the training: the trainer sends weights, or it waits for
    samples while the sampler takes weights in place of decoding. Seconds of the sampler beside a
    trainer at work are hidden. Any thread may begin and end blocks.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter):
        self._now, self._lock = now, threading.Lock()
        self._then = now()
        self._running: list[str] = []  # blocks that have begun and not ended
        self._seconds = dict.fromkeys(_NAMES, 0.0)
        self._bytes = 0

    def moved(self, count: int) -> None:
        """Counts bytes of weights that came to the sampler, or to its host."""
        with self._lock:
            self._bytes += count

    @contextlib.contextmanager
    def block(self, name: str) -> Iterator[None]:
        """A block in which weights "leave" or "arrive", or the training does "wait" for samples."""
        with self._lock:
            self._advance()
            self._running.append(name)
        try:
            yield
        finally:
            with self._lock:
                self._advance()
                self._running.remove(name)

    def take(self) -> Parts:
        """Seconds since the last call, those of blocks that still run included, and bytes."""
        with self._lock:
            self._advance()
            numbers = [*(self._seconds[name] for name in _NAMES), float(self._bytes)]
            self._seconds, self._bytes = dict.fromkeys(_NAMES, 0.0), 0
        return Parts((numbers,), means)

    def _advance(self) -> None:
        now = self._now()
        passed, self._then = now - self._then, now
        leave, arrive = ("leave" in self._running, "arrive" in self._running)
        exposed = leave or (arrive and "wait" in self._running)
        for name, counts in zip(
            _NAMES, (leave, arrive, exposed, arrive and not exposed), strict=True
        ):
            self._seconds[name] += passed * counts


def means(of_all: Sequence[Sequence[float]]) -> dict[str, float]:
    """Metrics `perf/weight_update/*`: means over all processes."""
    return {
        f"perf/weight_update/{name}": sum(values) / len(of_all)
        for name, values in zip((*_NAMES, _BYTES), zip(*of_all, strict=True), strict=True)
    }
