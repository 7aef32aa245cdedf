"""The homes of a run whose groups workers sample: one in each process, with its door."""

import dataclasses
import functools
import pathlib
import secrets
import threading
from collections.abc import Callable
from typing import Any

import jax

from distflow_jax.dag.residency import UPDATE_WEIGHTS
from distflow_jax.flow.flow_checks import nodes_ahead, sampling_tasks
from distflow_jax.flow.frames.frames import FRAME_BYTES
from distflow_jax.flow.homes.home import Home
from distflow_jax.flow.homes.home_door import QUICK, HomeDoor
from distflow_jax.flow.homes.home_nodes import HomeNodes
from distflow_jax.flow.homes.home_producer import HomeProducer
from distflow_jax.flow.homes.home_sampler import HomeSampler, differs
from distflow_jax.flow.homes.home_thread import HomeThread
from distflow_jax.flow.homes.node_tasks import NodeTasks
from distflow_jax.flow.host_nodes import HostThread
from distflow_jax.flow.publishing.delivery import Delivery
from distflow_jax.flow.publishing.publications import Publications
from distflow_jax.flow.publishing.publish_rule import PublishRule
from distflow_jax.flow.wire.door import Door
from distflow_jax.flow.workers.agreement import node_table, shared_tables
from distflow_jax.flow.workers.doors import Doors, announced, own_address, start_before
from distflow_jax.flow.workers.run_token import make_run_token
from distflow_jax.flow.workers.weight_shelf import WeightShelf
from distflow_jax.models import lora
from distflow_jax.parallel import processes
from distflow_jax.planning.plan_run import PreparedRun, config_table, flow_rule
from distflow_jax.rollout.requests import Response
from distflow_jax.runtime.host_offload import Offload
from distflow_jax.runtime.run_state import RunState

END_SECONDS = 3.0  # in which workers hear that the run is over


def make_home_sampler(
    prepared: PreparedRun,
    state: RunState,
    lock: threading.Condition,
    on_response: Callable[[Response], None],
) -> HomeSampler:
    """The sampler of a process whose groups workers answer; `lock` guards it."""
    config = prepared.config.flow
    home = Home(
        flow_rule(prepared.config, prepared.plan),
        exact=config.swap == "boundary",
        version=state.step,
        lease_seconds=config.lease_seconds,
        max_tries=config.max_tries,
        differs=differs,
    )
    ahead = {node.id for node in nodes_ahead(prepared.plan)}
    sampled = {task.node.id for task in sampling_tasks(prepared.plan)}
    tasks = NodeTasks(home.leases, (ahead - sampled) & set(config.worker_nodes))
    return HomeSampler(home, lock, on_response, tasks)


def deliver_to_workers(
    prepared: PreparedRun,
    state: RunState,
    producer: HomeProducer,
    offload: Offload,
    checkpoints: pathlib.Path,
    publish: Callable[[int], None],
) -> Delivery:
    """The delivery of a run with workers, who may join from now on. Collective.

    Its thread begins with the flow. WORKDIR/doors.json names the homes. `publish(version)` as of
    Publications.
    """
    config, workdir = prepared.config, pathlib.Path(checkpoints).parent
    said = [secrets.token_hex(8), start_before(workdir)]
    incarnation, before = processes.all_gather_json(said)[0]
    merged = functools.partial(lora.merged, scale=config.lora.scale)
    shelf = WeightShelf(incarnation, merged, prepared.sizes.engine.dtype)
    sync, kept = _Leaving(), config.flow.buffers

    def shelve(left: _Left, version: int) -> None:
        shelf.put(version, left.params)
        for older in [v for v in shelf.versions if v <= version - kept]:
            shelf.forget(older)

    (policy, *_) = prepared.sampled.values()
    with offload.staying(UPDATE_WEIGHTS, state.models):
        shelve(sync.leave(state.policy_params(policy)), state.step)
    producer.admit()  # before workers bring what they had for an earlier start
    whole = config_table(config)
    tables = shared_tables(whole, processes.code_table(), prepared.source.tokenizer)
    facts = {"incarnation": incarnation, "after": before, "began": state.step}
    facts["exact"] = config.flow.swap == "boundary"
    answers = HomeDoor(producer.sampler, producer.lock, tables, facts, node_table(whole))
    door = Door(
        own_address(config.flow.listen),
        make_run_token(workdir),
        answers.methods() | shelf.methods(),
        quick=QUICK,
        limit_bytes=FRAME_BYTES,
    )
    homes = processes.all_gather_json(announced(config.flow.listen, door.port))
    doors = Doors(incarnation, tuple(homes))
    answers.meet(homes)
    first = processes.process_index() == 0
    if first:
        doors.write(workdir)

    def leave() -> None:
        admission = producer.admission
        if not admission.has_step(admission.finished + 1):
            if first:
                Doors(incarnation, tuple(homes), ended=True).write(workdir)
            answers.end(END_SECONDS)
        door.close()

    tasks = producer.sampler.tasks
    thread = functools.partial(
        HomeThread,
        producer,
        shelve=shelve,
        starved_seconds=config.flow.starved_seconds,
        how=f"distflow worker --config=... --join={workdir}",
        leave=leave,
    )
    return Delivery(
        sync,
        True,
        Publications(PublishRule(0.0, config.flow.max_lag), producer, None, publish),
        thread,
        functools.partial(HomeNodes, tasks=tasks) if tasks.served else HostThread,
    )


@dataclasses.dataclass(frozen=True)
class _Left:
    """Weights that are about to be copied to the shelf."""

    params: Any

    @property
    def nbytes(self) -> int:
        """Bytes of this process's part of them."""
        arrays = jax.tree.leaves(self.params)
        blocks = [{str(s.index): s.data.nbytes for s in x.addressable_shards} for x in arrays]
        return sum(size for of_array in blocks for size in of_array.values())


class _Leaving:
    """Leaves weights to the shelf, in the place of a sync to a sampler of this process."""

    def leave(self, params: Any) -> _Left:
        """The weights, to be copied before they change."""
        return _Left(params)
