"""The task buffers of a run whose groups workers sample: one in each process, with its server."""

import functools
import pathlib
import secrets
from collections.abc import Collection
from typing import Any

import jax

from distflow_jax.cluster import processes
from distflow_jax.cluster.own_code import environment_code
from distflow_jax.config.config_dict import config_table
from distflow_jax.dag.residency import UPDATE_WEIGHTS
from distflow_jax.models import lora
from distflow_jax.planning.plan_run import PreparedRun
from distflow_jax.report.run_writer import RunEvents
from distflow_jax.rollout.response_checks import ResponseLimits
from distflow_jax.runtime.host_offload import Offload
from distflow_jax.runtime.run_state import RunState
from distflow_jax.runtime.samplers.file_limit import most_workers, raise_file_limit
from distflow_jax.runtime.samplers.worker_log import WorkerLog
from distflow_jax.stream.frames.frames import FRAME_BYTES
from distflow_jax.stream.links.buffer_addresses import (
    BufferAddresses,
    announced,
    own_address,
    start_before,
)
from distflow_jax.stream.links.buffer_service import QUICK, BufferService
from distflow_jax.stream.links.run_token import make_run_token
from distflow_jax.stream.links.shared_tables import node_table, shared_tables
from distflow_jax.stream.producer import Producer
from distflow_jax.stream.schedule import weight_buffers
from distflow_jax.stream.weight_store import WeightStore
from distflow_jax.stream.weight_wire import weight_methods
from distflow_jax.stream.wire.wire_server import WireServer
from distflow_jax.stream.workers_side import WorkerServer, WorkersSide

END_SECONDS = 3.0  # in which workers hear that the run is over


def serve_workers(
    prepared: PreparedRun,
    state: RunState,
    producer: Producer,
    offload: Offload,
    checkpoints: pathlib.Path,
) -> WorkersSide:
    """The task buffer of a run with workers, who may join from now on. Collective.
    WORKDIR/task_buffers.json names the task buffers.
    """
    config, workdir = prepared.config, pathlib.Path(checkpoints).parent
    first, limits = processes.process_index() == 0, _limits(prepared)
    events = [RunEvents(workdir / "events.jsonl").add] if first else []
    workers = WorkerLog(prepared.worker_command, *events)
    said = [secrets.token_hex(8), start_before(workdir)]
    attempt, before = processes.all_gather_json(said)[0]
    merged = functools.partial(lora.merged, scale=config.lora.scale)
    weights = WeightStore(attempt, merged, prepared.sizes.engine.dtype)
    kept = weight_buffers(config.stream)

    def store(params: Any, version: int, evaluated: Collection[int]) -> int:
        weights.put(version, params)
        weights.keep(version - kept + 1, evaluated)
        return _own_bytes(params)

    (policy, *_) = prepared.sampled.values()
    with offload.staying(UPDATE_WEIGHTS, state.models):
        store(state.policy_params(policy), state.step, ())
    producer.admit()  # before workers bring what they had for an earlier start
    whole = config_table(config)
    code = processes.code_table()
    code |= environment_code(config.rollout.environment, config.rollout.environment_kwargs)
    tables = shared_tables(whole, code, prepared.source.tokenizer)
    facts = {"attempt": attempt, "after": before, "began": state.step}
    facts["exact"] = config.stream.weight_update == "boundary"
    answers = BufferService(
        producer.requests,
        producer.lock,
        tables,
        facts,
        node_table(whole),
        limits=limits,
        most_workers=most_workers(raise_file_limit()),
    )
    server = WireServer(
        own_address(config.stream.listen),
        make_run_token(workdir),
        answers.methods() | weight_methods(weights),
        quick=QUICK,
        limit_bytes=FRAME_BYTES,
        know=answers.know,
    )
    buffers = processes.all_gather_json(announced(config.stream.listen, server.port))
    addresses = BufferAddresses(attempt, tuple(buffers))
    answers.meet(buffers)
    if first:
        addresses.write(workdir)

    def leave() -> None:
        if state.over:  # not by the rule: the last step's groups are taken before it trains
            if first:
                BufferAddresses(attempt, tuple(buffers), ended=True).write(workdir)
            answers.end(END_SECONDS)
        server.close()

    return WorkersSide(
        producer,
        store,
        open_evaluations=kept,
        no_workers_seconds=config.stream.no_workers_seconds,
        server=WorkerServer(workers.moved, workers.missing, answers.answer_waiting, leave),
    )


def _limits(prepared: PreparedRun) -> ResponseLimits:
    """Limits of the responses of workers."""
    network, tokenizer = prepared.source.config, prepared.source.tokenizer
    experts = None
    if prepared.sizes.engine.record_experts:
        experts = (network.num_layers, network.experts_per_token, network.num_experts)
    environments = prepared.environments
    return ResponseLimits(
        network.vocab_size,
        tokenizer.stop_ids,
        experts,
        max_turns=0 if environments is None else environments.max_turns,
        turn_length=prepared.config.rollout.turn_length,
        images=prepared.sizes.packing.images,
    )


def _own_bytes(params: Any) -> int:
    """Bytes of this process's part of the weights."""
    arrays = jax.tree.leaves(params)
    blocks = [{str(s.index): s.data.nbytes for s in x.addressable_shards} for x in arrays]
    return sum(size for of_array in blocks for size in of_array.values())
