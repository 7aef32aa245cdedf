"""The asynchronous side of a run: its flow of groups, made from the prepared run."""

import functools
import logging
import pathlib
import threading
from collections.abc import Sequence

from etils import epath

from distflow_jax.checkpoint.additions import Addition, AdditionWriter, additions
from distflow_jax.checkpoint.checkpointer import Checkpointer
from distflow_jax.environments.episode_sampler import EpisodeSampler
from distflow_jax.flow.flow import Flow, Observer
from distflow_jax.flow.flow_checks import sampling_tasks
from distflow_jax.flow.flow_config import FlowConfig
from distflow_jax.flow.group_records import GroupRecords
from distflow_jax.flow.host_nodes import NodesAhead, units_ahead
from distflow_jax.flow.lag_rule import Admission
from distflow_jax.flow.ledger import Ledger
from distflow_jax.flow.producer import Producer, SamplingNode
from distflow_jax.flow.sample_saver import SampleSaver
from distflow_jax.flow.saved_samples import SavedSamples
from distflow_jax.parallel import processes
from distflow_jax.parallel.background_gather import BackgroundGather
from distflow_jax.planning.plan_run import PreparedRun, flow_rule, sampler_layout
from distflow_jax.runtime.build import Runtime
from distflow_jax.runtime.instruments import Instruments
from distflow_jax.runtime.run_state import RunState
from distflow_jax.stages.rollout import node_sampling

log = logging.getLogger("distflow_jax")


def make_flow(
    prepared: PreparedRun,
    runtime: Runtime,
    state: RunState,
    instruments: Instruments,
    checkpointer: Checkpointer,
) -> Flow | None:
    """The flow of a run whose samplers run ahead; None for other runs. Collective.

    It takes the sampler's state, and the samples of the checkpoint that the run goes on from. The
    samplers must have been started.
    """
    config, plan, loader = prepared.config, prepared.plan, prepared.loader
    added = additions(checkpointer.folder / str(state.step)) if state.step else []
    saved = SavedSamples(added)
    if not config.flow.ahead:
        if saved.end and processes.process_index() == 0:
            log.warning(
                "the checkpoint of step %d holds samples that ran ahead; with flow.max_lag=0 they "
                "are sampled again: give flow.max_lag to train on them",
                state.step,
            )
        return None
    tasks = sampling_tasks(plan)
    contexts = [runtime.contexts.of(task) for task in tasks]
    nodes = [
        SamplingNode(
            context.node,
            node_sampling(context),
            None if prepared.environments is None else context.prefix,
        )
        for context in contexts
    ]
    sampled = frozenset(task.node.id for task in tasks)
    sampler = EpisodeSampler(
        runtime.engine,
        state.models[tasks[0].state_key],
        prepared.environments,
        contexts[0].on_response,
    )
    batch, batches = config.data.prompts_per_step, loader.num_steps
    admission = Admission(
        flow_rule(config, plan),
        step=state.step,
        counter=state.position(batch),
        last=None if batches is None else batches * batch,
        steps=config.training.steps,
        judged=plan.region is not None,
    )
    if saved.end > admission.end(state.step) and processes.process_index() == 0:
        log.warning(
            "the checkpoint of step %d holds samples of prompts up to %d, which a larger "
            "flow.max_lag began: they are trained on in their steps, older than flow.max_lag=%d",
            *(state.step, saved.end - 1, config.flow.max_lag),
        )
    writers = {task.node.id: task.layout for task in plan.tasks}
    producer = Producer(
        sampler,
        admission,
        nodes,
        functools.partial(next, loader, None),
        writers=writers | {None: sampler_layout(prepared.sizes)},
        num_samples=config.rollout.num_samples,
        lock=threading.Condition(),
        saved=saved,
    )
    return Flow(
        producer,
        NodesAhead(sampled, units_ahead(plan, sampled), runtime.runners, prepared.until),
        runtime.sync,
        BackgroundGather(processes.second_exchange()),
        config.flow,
        own_devices=prepared.sizes.samplers_have_own_devices,
        observer=Observer(instruments.spans.span, instruments.phases.note),
        saver=_saver(producer, config.flow, checkpointer.folder, state.step, added),
    )


def _saver(
    producer: Producer,
    config: FlowConfig,
    checkpoints: epath.Path,
    step: int,
    added: Sequence[Addition],
) -> SampleSaver:
    """The saver of a run that goes on after `step`, of whose checkpoint `added` is a part."""
    records = GroupRecords(pathlib.Path(checkpoints).parent, step)
    ledger = Ledger()
    if processes.process_index() == 0:
        ledger = Ledger.restored([addition.facts["ledger"] for addition in added], records.known)
    return SampleSaver(
        producer,
        AdditionWriter(checkpoints),
        records,
        ledger,
        # samples of older weights, which a restart does not have
        steps=config.max_lag if config.swap == "boundary" else None,
    )
