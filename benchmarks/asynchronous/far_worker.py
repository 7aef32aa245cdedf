"""A worker outside the job, which joins one run after the other."""

import collections
import dataclasses
import json
import os
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from asynchronous.far_cells import FarCell
from asynchronous.lanes import Lane
from asynchronous.marked_run import own_cpu_seconds
from asynchronous.simulated_run import simulated_engine
from streaming_model import work_of

from distflow_jax.cluster import processes
from distflow_jax.config.mesh_config import MeshConfig
from distflow_jax.environments.episode_sampler import EpisodeSampler
from distflow_jax.models.parameters import abstract_params, param_shardings
from distflow_jax.models.weights.source import ModelSource, open_model, open_options
from distflow_jax.notebook import load_config
from distflow_jax.parallel import mesh as mesh_lib
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.plan_run import config_table, settle
from distflow_jax.planning.sizes import Sizes, derive_sizes
from distflow_jax.rollout.requests import Response
from distflow_jax.rollout.sampler import SamplerState
from distflow_jax.stream.links.buffer_addresses import read_addresses
from distflow_jax.stream.links.buffer_client import BufferClient
from distflow_jax.stream.links.buffer_links import Joining, Links
from distflow_jax.stream.links.remote_link import RemoteLink, WorkerState
from distflow_jax.stream.links.shared_tables import shared_tables
from distflow_jax.stream.node_runner import NodeRunner
from distflow_jax.stream.weight_client import pull_target, pull_weights
from distflow_jax.stream.worker import Worker

START_SECONDS = 300.0  # for trainers to open their servers


class SimulatedSampler(EpisodeSampler):
    """An EpisodeSampler whose weight updates take seconds of its devices."""

    def __init__(self, *given: Any, lane: Lane, weight_update: float, **options: Any):
        """`weight_update`: seconds for which it does not decode; the rest as EpisodeSampler."""
        super().__init__(*given, **options)
        self._lane, self._swap = lane, weight_update

    def load(self, params: Any, version: int, *, cache: str = "keep") -> None:
        """Weight updates the weights."""
        self._lane.run("weight_update", self._swap)
        super().load(params, version, cache=cache)


def join_runs(cells: Sequence[FarCell], folder: pathlib.Path, number: int) -> None:
    """Samples for the runs of all cells that have a worker of this number, one after the other."""
    for cell in cells:
        place = folder / cell.name
        if not isinstance(cell, FarCell) or number >= len(cell.speeds):
            continue
        end = time.monotonic() + START_SECONDS * (1 + len(cells))
        while read_addresses(place) is None and time.monotonic() < end:
            time.sleep(0.2)
        _sample(cell, place, number)


def _sample(cell: FarCell, place: pathlib.Path, number: int) -> None:
    config = load_config(cell.config, cell.settings()).config
    config, graph = settle(config)
    source = open_model(config.model.source, **open_options(config.model))
    tables = shared_tables(config_table(config), processes.code_table(), source.tokenizer)
    joining = Joining(str(place), f"worker-{number}-{os.getpid()}", tables)
    links = joining.first()
    if links is None:
        return
    own = dataclasses.replace(config, mesh=MeshConfig())
    sizes = derive_sizes(own, source.config, Machine.current(), graph)
    lane = Lane(cell.samplers // cell.engines)
    engine = simulated_engine(source, sizes, cell, lane, speed=cell.speeds[number])
    ended = collections.deque[Response]()
    state = SamplerState(_weights(), links.first_version, engine.init_decode_state())
    sampler = SimulatedSampler(
        *(engine, state),
        on_response=ended.append,
        lane=lane,
        weight_update=work_of(cell.lengths).weight_update,
    )
    began, cpu = time.perf_counter(), own_cpu_seconds()
    slots, save_seconds = sizes.engine.slots, config.stream.save_seconds
    state = WorkerState(
        links=links,
        capacity=slots,
        version=links.first_version,
        newest=links.newest,
        slots=slots,
    )
    pull = _Pull(source, sizes)
    link = RemoteLink(state, pull, ended, save_seconds=save_seconds)
    client = BufferClient(
        state, joining, NodeRunner({}), save_seconds=save_seconds, orphan_seconds=60.0
    )
    client.sample(Worker(sampler, link, cache=config.stream.cache), link, lambda: False)
    seconds = time.perf_counter() - began
    found = {
        "seconds": seconds,
        "cpu": (own_cpu_seconds() - cpu) / seconds,
        "busy": dict(lane.busy),
    }
    (place / f"far-{number}.json").write_text(json.dumps(found))


class _Pull:
    """Pulls the real weights, which are few."""

    def __init__(self, source: ModelSource, sizes: Sizes):
        shardings = param_shardings(source.config, mesh_lib.replica_mesh(1, jax.devices()[:1]))
        self._target = pull_target(abstract_params(source.config), shardings, sizes.engine.dtype)

    def __call__(self, links: Links, version: int) -> Any:
        pull_weights(links.weights, version, self._target, 60.0, links.attempt)
        return _weights()


def _weights() -> Any:
    return {"weights": jnp.zeros(())}
