"""The asynchronous side of a run: its flow of groups, made from the prepared run."""

import functools
import threading

from distflow_jax.environments.episode_sampler import EpisodeSampler
from distflow_jax.flow.flow import Flow, Observer
from distflow_jax.flow.flow_checks import sampling_tasks
from distflow_jax.flow.host_nodes import NodesAhead, units_ahead
from distflow_jax.flow.lag_rule import Admission
from distflow_jax.flow.producer import Producer, SamplingNode
from distflow_jax.parallel import processes
from distflow_jax.parallel.background_gather import BackgroundGather
from distflow_jax.planning.plan_run import PreparedRun, flow_rule, sampler_layout
from distflow_jax.runtime.build import Runtime
from distflow_jax.runtime.instruments import Instruments
from distflow_jax.runtime.run_state import RunState
from distflow_jax.stages.rollout import node_sampling


def make_flow(
    prepared: PreparedRun, runtime: Runtime, state: RunState, instruments: Instruments
) -> Flow | None:
    """The flow of a run whose samplers run ahead; None for other runs. Collective.

    It takes the sampler's state. The samplers must have been started.
    """
    config, plan, loader = prepared.config, prepared.plan, prepared.loader
    if not config.flow.ahead:
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
    writers = {task.node.id: task.layout for task in plan.tasks}
    producer = Producer(
        sampler,
        admission,
        nodes,
        functools.partial(next, loader, None),
        writers=writers | {None: sampler_layout(prepared.sizes)},
        num_samples=config.rollout.num_samples,
        lock=threading.Condition(),
    )
    return Flow(
        producer,
        NodesAhead(sampled, units_ahead(plan, sampled), runtime.runners, prepared.until),
        runtime.sync,
        BackgroundGather(processes.second_exchange()),
        config.flow,
        own_devices=prepared.sizes.samplers_have_own_devices,
        observer=Observer(instruments.spans.span, instruments.phases.note),
    )
