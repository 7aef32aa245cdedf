"""Makes the source of a run's samples, and starts samplers that run ahead."""

import contextlib
import functools
import logging
import pathlib
import threading
from collections.abc import Callable, Sequence

from distflow_jax.checkpoint.additions import Addition, additions
from distflow_jax.checkpoint.checkpointer import Checkpointer
from distflow_jax.coordinator.assignment import data_ranks
from distflow_jax.dag.plan import Task
from distflow_jax.environments.episode_sampler import EpisodeSampler
from distflow_jax.observe.spans import Spans
from distflow_jax.parallel import processes
from distflow_jax.parallel.background_gather import BackgroundGather
from distflow_jax.parallel.peers import Peers
from distflow_jax.planning.plan_run import PreparedRun, sampler_layout, stream_rule
from distflow_jax.rollout.scheduling.sampling_order import ORDERS
from distflow_jax.runtime.build import Runtime
from distflow_jax.runtime.evaluating import EvaluateNow
from distflow_jax.runtime.instruments import Instruments
from distflow_jax.runtime.place import Place
from distflow_jax.runtime.recorder import Recorder
from distflow_jax.runtime.run_sampler import evaluation_of
from distflow_jax.runtime.run_state import RunState
from distflow_jax.runtime.sample_source import Synchronous
from distflow_jax.runtime.samplers.ahead import Ahead, EvaluateAhead
from distflow_jax.runtime.samplers.replays import Recorded, make_record_writer, make_replay
from distflow_jax.runtime.samplers.run_buffers import deliver_to_workers, make_buffer_sampler
from distflow_jax.runtime.step_schedule import StepSchedule
from distflow_jax.stages.rollout import node_sampling
from distflow_jax.stream.batches.partial_batch_room import PartialBatchRoom
from distflow_jax.stream.batches.partial_batch_source import PartialBatchSource
from distflow_jax.stream.batches.partial_batch_taker import PartialBatchTaker
from distflow_jax.stream.batches.partial_batches import PartialBatchPlanner
from distflow_jax.stream.batches.rollout_budget import RolloutBudget
from distflow_jax.stream.batches.rollout_taker import RolloutTaker
from distflow_jax.stream.buffer_producer import BufferProducer
from distflow_jax.stream.deadlines import Deadlines, begun_by_steps
from distflow_jax.stream.delivery import make_delivery
from distflow_jax.stream.evaluations import Evaluator
from distflow_jax.stream.group_stream import GroupStream, Observer
from distflow_jax.stream.host_nodes import NodesAhead, units_ahead
from distflow_jax.stream.producer import Producer, SamplingNode
from distflow_jax.stream.refills import Refills
from distflow_jax.stream.resume import GroupRecords, SampleSaver, TokenAccount
from distflow_jax.stream.saved_samples import SavedSamples
from distflow_jax.stream.schedule import Admission
from distflow_jax.stream.stream_checks import sampling_tasks
from distflow_jax.stream.stream_config import StreamConfig

log = logging.getLogger("distflow_jax")


def make_source(
    prepared: PreparedRun,
    runtime: Runtime,
    state: RunState,
    place: Place,
    instruments: Instruments,
    checkpointer: Checkpointer,
    recorder: Recorder,
    schedule: StepSchedule,
) -> tuple[Synchronous | Ahead | Recorded, EvaluateNow | EvaluateAhead]:
    """Where a run's samples come from, and how it evaluates. Collective.

    A source whose samplers run ahead takes the sampler's state out of `state`, and the samples of
    the checkpoint that the run goes on from. The samplers must have been started.
    """
    config, phases = prepared.config.stream, instruments.phases

    def now(
        source: Synchronous | Recorded | Ahead,
    ) -> tuple[Synchronous | Recorded | Ahead, EvaluateNow]:
        return source, EvaluateNow(prepared, runtime, state, source, recorder, schedule, phases)

    if prepared.recording is not None:
        folder = checkpointer.folder.parent
        return now(make_replay(prepared, prepared.recording, folder, state, place))
    added = additions(checkpointer.folder / str(state.step)) if state.step else []
    _tell_of_staleness(added, config, state.step)
    if not config.ahead:
        if added or place.account is not None:  # for a run that goes on with samplers ahead
            place.account = _account(checkpointer, state, place, added)[1].to_dict()
        return now(Synchronous(prepared, runtime, state, place, instruments))
    evaluates = _evaluates(config, schedule, recorder, state.step)
    ahead = Ahead(prepared, runtime, state, place, phases, schedule, checkpointer)
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(ahead.close)
        _open(ahead, prepared, runtime, state, instruments, checkpointer, added, evaluates)
        on_failure.pop_all()
    if config.weight_update == "boundary":
        return ahead, EvaluateAhead(prepared, ahead, recorder, schedule, phases)
    return now(ahead)


def _evaluates(
    config: StreamConfig, schedule: StepSchedule, recorder: Recorder, step: int
) -> Callable[[int], bool] | None:
    """Says whether samplers evaluate a version when they take it; None: the training does it.

    Collective. With weight updates at boundaries samplers do, of a run that begins after `step`
    steps. An evaluation of that step whose metrics were not written yet is made again.
    """
    if config.weight_update != "boundary" or schedule.eval_every is None:
        return None
    known = bool(step) and recorder.has_evaluation(step)
    evaluates = schedule.evaluates_version
    return lambda version: evaluates(version) and not (known and version == step)


def _open(
    source: Ahead,
    prepared: PreparedRun,
    runtime: Runtime,
    state: RunState,
    instruments: Instruments,
    checkpointer: Checkpointer,
    added: Sequence[Addition],
    evaluates: Callable[[int], bool] | None,
) -> None:
    """Starts samplers that run ahead. `added`: samples of the checkpoint; `evaluates(version)`:
    whether samplers evaluate a version when they take it; None: they evaluate none. Collective."""
    config, plan, place = prepared.config, prepared.plan, source.place
    tasks = sampling_tasks(plan)
    sampled = frozenset(task.node.id for task in tasks)
    producer = _producer(prepared, runtime, state, place, tasks, added)
    if config.stream.workers:
        delivery = deliver_to_workers(
            prepared,
            state,
            producer,
            runtime.offload,
            checkpointer.folder,
            source.update_weights,
        )
    else:
        delivery = make_delivery(
            config.stream,
            producer,
            runtime.sync,
            source.update_weights,
            own_devices=prepared.sizes.samplers_have_own_devices,
        )
    stream = GroupStream(
        producer,
        NodesAhead(sampled, units_ahead(plan, sampled), runtime.runners, prepared.until),
        delivery,
        BackgroundGather(processes.second_exchange()),
        config.stream,
        observer=Observer(
            instruments.spans.span,
            instruments.phases.note,
            evaluates and _evaluator(prepared, runtime, instruments.spans, evaluates),
        ),
        saver=_saver(producer, config.stream, checkpointer, state, place, added, evaluates),
    )
    source.open(stream)
    if config.stream.in_partial_batches:
        source.take_by(make_partial_batches(prepared, stream, checkpointer.folder.parent, state))
    elif config.stream.round_tokens:
        source.take_by(make_rollouts(prepared, stream))


def make_partial_batches(
    prepared: PreparedRun, stream: GroupStream, folder: pathlib.Path, state: RunState
) -> PartialBatchTaker:
    """Hands a step's groups to the training partial batch by partial batch. Collective."""
    config = prepared.config
    producer, region = stream.producer, prepared.plan.region is not None
    ready = config.stream.partial_batches == "ready"
    room = None
    if ready:
        packing = prepared.sizes.partial_batch
        rows = packing.rows[packing.primary] * data_ranks(packing.primary)
        room = PartialBatchRoom(rows, packing.limits)
    planner = PartialBatchPlanner(
        _admission(prepared, producer.admission.finished, producer.admission.position),
        mini_batches=config.training.mini_batches,
        prompts=None if ready else config.stream.partial_batch_prompts,
        room=room,
    )
    index, count = processes.process_index(), processes.process_count()

    def heard() -> None:
        with producer.lock:
            producer.lock.notify_all()

    source = PartialBatchSource(
        planner,
        producer,
        BackgroundGather(processes.second_exchange()),
        Peers(processes.second_exchange() if ready else None, index, count, heard),
        # with weight updates at boundaries rounds bring filter decisions to the samplers' rule
        judges=region and config.stream.weight_update != "boundary",
        publications=stream.publications,
    )
    return PartialBatchTaker(stream, source, make_record_writer(prepared, folder, state))


def make_rollouts(prepared: PreparedRun, stream: GroupStream) -> RolloutTaker:
    """Hands a step's groups to the training where rollouts have a budget of tokens. Collective."""
    tokens = prepared.config.stream.round_tokens
    producer, count = stream.producer, processes.process_count()
    assert isinstance(producer.admission, Deadlines), "made by `_deadlines`"

    def heard() -> None:
        with producer.lock:
            producer.lock.notify_all()

    budget = RolloutBudget(
        producer,
        producer.admission,
        BackgroundGather(processes.second_exchange()),
        Peers(processes.second_exchange(), processes.process_index(), count, heard),
        tokens=tokens,
    )
    return RolloutTaker(stream, budget, tokens=tokens)


def _tell_of_staleness(added: Sequence[Addition], config: StreamConfig, step: int) -> None:
    """Warns of samples in a checkpoint that a larger max_staleness began."""
    before = max((addition.facts["max_staleness"] for addition in added), default=0)
    if before <= config.max_staleness or processes.process_index():
        return
    if config.ahead:
        log.warning(
            "the checkpoint of step %d holds samples that stream.max_staleness=%d began: they are "
            "trained on in their steps, some of them older than stream.max_staleness=%d",
            step,
            before,
            config.max_staleness,
        )
        return
    log.warning(
        "the checkpoint of step %d holds samples that stream.max_staleness=%d began: with "
        "stream.max_staleness=0 they are dropped, and sampled again; give a stream.max_staleness "
        "to train on them",
        step,
        before,
    )


def _producer(
    prepared: PreparedRun,
    runtime: Runtime,
    state: RunState,
    place: Place,
    tasks: Sequence[Task],
    added: Sequence[Addition],
) -> Producer:
    saved = SavedSamples(added)
    given_up = {counter for one in added for counter in one.facts.get("given_up", ())}
    config, plan, loader = prepared.config, prepared.plan, prepared.loader
    contexts = [runtime.contexts.of(task) for task in tasks]
    in_turns = prepared.environments is not None
    nodes = [
        SamplingNode(
            c.node,
            node_sampling(c),
            c.prefix if in_turns else None,
            ORDERS[config.stream.order],
        )
        for c in contexts
    ]
    lock = threading.Condition()
    if config.stream.workers:
        sampler = make_buffer_sampler(prepared, state, lock, contexts[0].on_response)
    else:
        sampler = EpisodeSampler(
            runtime.engine,
            state.models.pop(tasks[0].state_key),
            prepared.environments,
            contexts[0].on_response,
        )
    admission = _admission(prepared, state.step, place.position)
    if config.stream.round_tokens:
        admission = _deadlines(prepared, state, place, saved)
    writers = {task.node.id: task.layout for task in plan.tasks}
    kind: Callable[..., Producer] = Producer
    if config.stream.workers:
        kind = functools.partial(BufferProducer, given_up=given_up)
    return kind(
        sampler,
        admission,
        nodes,
        functools.partial(next, loader, None),
        writers=writers | {None: sampler_layout(prepared.sizes)},
        num_samples=config.rollout.num_samples,
        lock=lock,
        saved=saved,
    )


def _admission(prepared: PreparedRun, step: int, counter: int) -> Admission:
    """The rule of a run after `step` steps, which did not look at `counter`."""
    config, batches = prepared.config, prepared.loader.num_steps
    refills = config.stream.workers and prepared.plan.region is None
    kind = Refills if refills else Admission
    return kind(
        stream_rule(config, prepared.plan),
        step=step,
        counter=counter,
        last=None if batches is None else batches * config.data.prompts_per_step,
        steps=config.training.steps,
        judged=prepared.plan.region is not None,
    )


def _deadlines(
    prepared: PreparedRun, state: RunState, place: Place, saved: SavedSamples
) -> Deadlines:
    """The rule of a run whose rollouts have a budget of tokens, which goes on from `state`."""
    config, batches = prepared.config, prepared.loader.num_steps
    rule, position = stream_rule(config, prepared.plan), place.position
    return Deadlines(
        rule,
        step=state.step,
        counter=position,
        # samples of a run without a budget belong to the steps that follow
        begun=place.begun or begun_by_steps(rule, state.step, position, saved.counters),
        last=None if batches is None else batches * config.data.prompts_per_step,
        steps=config.training.steps,
    )


def _saver(
    producer: Producer,
    config: StreamConfig,
    checkpointer: Checkpointer,
    state: RunState,
    place: Place,
    added: Sequence[Addition],
    evaluates: Callable[[int], bool] | None,
) -> SampleSaver:
    """The saver of a run that begins, or goes on from a checkpoint of which `added` is a part."""
    records, account = _account(checkpointer, state, place, added)
    return SampleSaver(
        producer,
        checkpointer.additions,
        records,
        account if processes.process_index() == 0 else TokenAccount(),
        # samples of older weights, which a restart does not have
        steps=config.max_staleness if config.weight_update == "boundary" else None,
        evaluates=evaluates or (lambda version: False),
    )


def _account(
    checkpointer: Checkpointer, state: RunState, place: Place, added: Sequence[Addition]
) -> tuple[GroupRecords, TokenAccount]:
    """The records of a run that goes on from `state`, and the token account of all that came
    before: of the checkpoint's samples, or its own. Collective."""
    records = GroupRecords(pathlib.Path(checkpointer.folder).parent, state.step)
    saved = [addition.facts["account"] for addition in added]
    if not saved and place.account is not None:
        saved = [place.account]
    return records, TokenAccount.restored(saved, records.known)


def _evaluator(
    prepared: PreparedRun, runtime: Runtime, spans: Spans, due: Callable[[int], bool]
) -> Evaluator:
    evaluation = evaluation_of(prepared, runtime)
    span = functools.partial(spans.span, "evaluation")
    return Evaluator(due, evaluation.answer, evaluation.score, span)
