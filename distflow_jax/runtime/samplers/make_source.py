"""Makes the source of a run's samples; samplers that run ahead begin with it."""

import functools
import logging
import math
import pathlib
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

from distflow_jax.checkpoint.additions import Addition, additions
from distflow_jax.checkpoint.checkpointer import Checkpointer
from distflow_jax.cluster import processes
from distflow_jax.config.stream_config import StreamConfig
from distflow_jax.dag.plan import Task
from distflow_jax.environments.episode_sampler import EpisodeSampler
from distflow_jax.planning.plan_run import PreparedRun, sampler_layout, stream_rule
from distflow_jax.planning.step_schedule import StepSchedule
from distflow_jax.rollout.scheduling.sampling_order import ORDERS
from distflow_jax.runtime.build import Runtime
from distflow_jax.runtime.evaluating import EvaluateAhead, EvaluateNow
from distflow_jax.runtime.instruments import Instruments
from distflow_jax.runtime.place import Place
from distflow_jax.runtime.recorder import Recorder
from distflow_jax.runtime.run_state import RunState
from distflow_jax.runtime.sample_source import Synchronous, reads_step
from distflow_jax.runtime.samplers.replays import Recorded, make_record_writer, make_replay
from distflow_jax.runtime.samplers.serve_workers import serve_workers
from distflow_jax.runtime.samplers.trainer_side import (
    PLANNERS,
    make_trainer_calls,
    warn_if_incomplete,
)
from distflow_jax.stages.rollout import node_sampling
from distflow_jax.stream.ahead import Ahead, KeptGroups
from distflow_jax.stream.batches.partial_batches import PartialBatchPlanner
from distflow_jax.stream.checks import nodes_ahead, sampling_tasks
from distflow_jax.stream.driver import TrainerCalls
from distflow_jax.stream.frames.prompt_frames import request_bytes
from distflow_jax.stream.host_nodes import NodesAhead, units_ahead
from distflow_jax.stream.links.local_link import make_local_link
from distflow_jax.stream.producer import Producer, SamplingNode
from distflow_jax.stream.resume import GroupRecords, SampleSaver, TokenAccount
from distflow_jax.stream.sample_requests import SampleRequests, differs
from distflow_jax.stream.sampling_side import SamplingSide
from distflow_jax.stream.saved_samples import SavedSamples
from distflow_jax.stream.schedule import Admission, Rule
from distflow_jax.stream.task_buffer import TaskBuffer
from distflow_jax.stream.tasks import ENVIRONMENT

log = logging.getLogger("distflow_jax")

# what becomes of samples in a checkpoint that a larger max_staleness began, by whether samplers run
# ahead
_FATES = {
    True: "they are trained on in their steps, some of them older than stream.max_staleness="
    "{config.max_staleness}",
    False: "with stream.max_staleness=0 they are dropped, and sampled again; give a "
    "stream.max_staleness to train on them",
}


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
    the checkpoint that the run goes on from. The samplers must have their first weights.
    """
    config, phases = prepared.config.stream, instruments.phases
    source: Synchronous | Ahead | Recorded
    if prepared.recording is not None:
        source = make_replay(prepared, prepared.recording, checkpointer.folder.parent, state, place)
        return source, EvaluateNow(prepared, runtime, state, source, recorder, schedule, phases)
    added = additions(checkpointer.folder / str(state.step)) if state.step else []
    _tell_of_staleness(added, config, state.step)
    if not config.ahead:
        if added or place.account is not None:  # for a run that goes on with samplers ahead
            account = _account(checkpointer, state, place, added)[1]
            place.account = account.saved(under_way=0).to_dict()
        source = Synchronous(prepared, runtime, state, place, instruments)
        return source, EvaluateNow(prepared, runtime, state, source, recorder, schedule, phases)
    samplers_evaluate = config.workers or config.weight_update == "boundary"
    evaluates = (
        _evaluates(schedule, recorder, state.step) if samplers_evaluate else lambda version: False
    )
    trainer = make_trainer_calls(prepared, runtime, state, instruments, schedule, evaluates)
    source = _make_ahead(prepared, runtime, state, place, trainer, checkpointer, added, evaluates)
    if samplers_evaluate:
        return source, EvaluateAhead(prepared, source, recorder, schedule, phases)
    return source, EvaluateNow(prepared, runtime, state, source, recorder, schedule, phases)


def _evaluates(schedule: StepSchedule, recorder: Recorder, step: int) -> Callable[[int], bool]:
    """Says whether samplers evaluate a version beside the training, of a run that begins after
    `step` steps.

    Collective. An evaluation of that step whose metrics were not written yet is made again.
    """
    known = bool(step) and recorder.has_evaluation(step)
    evaluates = schedule.evaluates_version
    return lambda version: evaluates(version) and not (known and version == step)


def _make_ahead(
    prepared: PreparedRun,
    runtime: Runtime,
    state: RunState,
    place: Place,
    trainer: TrainerCalls,
    checkpointer: Checkpointer,
    added: Sequence[Addition],
    evaluates: Callable[[int], bool],
) -> Ahead:
    """Starts samplers that run ahead. `added`: samples of the checkpoint; `evaluates(version)`:
    whether they evaluate a version. Collective."""
    config, plan = prepared.config, prepared.plan
    tasks, folder = sampling_tasks(plan), checkpointer.folder.parent
    sampled = frozenset(task.node.id for task in tasks)
    rule, saved = stream_rule(config, plan), SavedSamples(added)
    admission, planner = _admission(prepared, state, place, saved, rule)
    producer = _producer(prepared, runtime, state, rule, admission, tasks, saved)
    if config.stream.workers:
        sampling: SamplingSide = serve_workers(
            prepared, state, producer, runtime.offload, checkpointer.folder
        )
    else:
        sampler = EpisodeSampler(
            runtime.engine,
            state.models.pop(tasks[0].state_key),
            prepared.environments,
            runtime.contexts.of(tasks[0]).on_response,
        )
        sampling = make_local_link(
            config.stream,
            sampler,
            producer,
            runtime.sync,
            own_devices=prepared.sizes.samplers_have_own_devices,
        )
    return Ahead(
        producer,
        NodesAhead(sampled, units_ahead(plan, sampled), runtime.runners, prepared.until),
        sampling,
        planner,
        config.stream,
        trainer=trainer,
        kept=KeptGroups(
            place,
            _saver(producer, config.stream, checkpointer, state, place, added, evaluates),
            make_record_writer(prepared, folder, state),
            functools.partial(warn_if_incomplete, checkpointer),
        ),
        numbered=reads_step(plan),
    )


def _tell_of_staleness(added: Sequence[Addition], config: StreamConfig, step: int) -> None:
    """Warns of samples in a checkpoint that a larger max_staleness began, and of their fate."""
    before = max((addition.facts["max_staleness"] for addition in added), default=0)
    if before > config.max_staleness and processes.process_index() == 0:
        log.warning(
            "the checkpoint of step %d holds samples that stream.max_staleness=%d began: %s",
            step,
            before,
            _FATES[config.ahead].format(config=config),
        )


def _producer(
    prepared: PreparedRun,
    runtime: Runtime,
    state: RunState,
    rule: Rule,
    admission: Admission,
    tasks: Sequence[Task],
    saved: SavedSamples,
) -> Producer:
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
    writers = {task.node.id: task.layout for task in plan.tasks}
    elsewhere = config.stream.workers
    buffer = _buffer(prepared, state, rule, {task.node.id for task in tasks})
    return Producer(
        SampleRequests(buffer, lock, contexts[0].on_response if elsewhere else None),
        admission,
        nodes,
        functools.partial(next, loader, None),
        writers=writers | {None: sampler_layout(prepared.sizes)},
        num_samples=config.rollout.num_samples,
        saved=saved,
        size=functools.partial(request_bytes, rows=in_turns) if elsewhere else lambda prompt: 0,
    )


def _buffer(
    prepared: PreparedRun, state: RunState, rule: Rule, sampled: Collection[str]
) -> TaskBuffer:
    """The task buffer of this process; leases of its own worker never end."""
    config, plan = prepared.config.stream, prepared.plan
    ahead = {node.id for node in nodes_ahead(plan)}
    return TaskBuffer(
        rule,
        exact=config.weight_update == "boundary",
        version=state.step,
        lease_seconds=config.lease_seconds if config.workers else math.inf,
        max_tries=config.max_tries,
        served=(ahead - set(sampled) | {ENVIRONMENT}) & set(config.worker_nodes),
        environment_seconds=0.0 if prepared.environments is None else prepared.environments.seconds,
        differs=differs,
    )


def _admission(
    prepared: PreparedRun, state: RunState, place: Place, saved: SavedSamples, rule: Rule
) -> tuple[Admission, PartialBatchPlanner]:
    """The admission of groups of a run that goes on from `state`, by its rule, and what its steps
    take."""
    config, plan, batches = prepared.config, prepared.plan, prepared.loader.num_steps
    bounds: dict[str, Any] = {
        "step": state.step,
        "counter": place.position,
        "last": None if batches is None else batches * config.data.prompts_per_step,
        "steps": config.training.steps,
        "judged": bool(plan.region.nodes),
        "exact": config.stream.weight_update == "boundary",
    }
    # the producer's rule learns of this process's decisions at once; this one of what all know
    known = Admission(rule, **bounds)
    for counter in saved.given_up:
        known.judge(counter, False)
    return Admission(rule, **bounds), PLANNERS[config.stream.partial_batches](prepared, known)


def _saver(
    producer: Producer,
    config: StreamConfig,
    checkpointer: Checkpointer,
    state: RunState,
    place: Place,
    added: Sequence[Addition],
    evaluates: Callable[[int], bool],
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
        evaluates=evaluates,
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
