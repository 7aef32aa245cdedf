"""A worker's side of a run: an engine on this machine's devices, fed by the trainers' homes."""

import collections
import contextlib
import dataclasses
import logging
import os
import secrets
import socket
from collections.abc import Collection
from typing import Any

import jax

from distflow_jax.config.run_config import Config
from distflow_jax.environments.episode_sampler import EpisodeSampler
from distflow_jax.flow.workers.agreement import shared_tables
from distflow_jax.flow.workers.home_links import Joining, Links
from distflow_jax.flow.workers.weight_pull import WeightPull, pull_target
from distflow_jax.flow.workers.worker import Pace, Worker
from distflow_jax.models.parameters import abstract_params, param_shardings
from distflow_jax.models.weights.source import open_model
from distflow_jax.parallel import mesh as mesh_lib
from distflow_jax.parallel import processes
from distflow_jax.parallel.mesh import MeshConfig
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.plan_run import config_table, settle
from distflow_jax.planning.sizes import derive_sizes
from distflow_jax.programs.compilation_cache import kept_programs
from distflow_jax.rollout.requests import Response
from distflow_jax.rollout.sampler import SamplerState
from distflow_jax.runtime.samplers.make_sampler import make_engine, make_sync
from distflow_jax.watchdog.exit_codes import EXIT_DONE
from distflow_jax.watchdog.supervision import StopSignal

PULL_SECONDS = 600.0  # for a version of the weights to come

log = logging.getLogger("distflow_jax")


def run_worker(
    config: Config,
    join: str,
    stop: StopSignal,
    *,
    chosen: Collection[str] = (),
    orphan_seconds: float,
) -> int:
    """Samples for the trainers that `join` names until their run ends; returns the exit code.

    `chosen` are the config keys that the command line gives. Raises ValueError for user errors,
    and if trainers do not answer for `orphan_seconds`.
    """
    config, graph = settle(config, chosen)
    if not config.flow.workers:
        raise ValueError(
            "a worker samples for trainers with flow.workers=True: give --config.flow.workers=True "
            "to both"
        )
    if jax.process_count() > 1:
        raise ValueError("a worker is one process: start one on each host")
    source = open_model(config.model.source, **config.model.options())
    table = config_table(config)
    name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    joining = Joining(join, name, shared_tables(table, processes.code_table(), source.tokenizer))
    links = joining.first()
    if links is None:
        log.info("the run has ended")
        return EXIT_DONE
    with contextlib.ExitStack() as files:
        files.enter_context(kept_programs(config.compilation_cache))
        # this machine's devices are all the sampler's, whatever the trainers' mesh
        own = dataclasses.replace(
            config,
            mesh=MeshConfig(rollout_tensor=config.mesh.rollout_tensor),
            training=dataclasses.replace(config.training, micro_batch_rows=0),
        )
        sizes = derive_sizes(own, source.config, Machine.current(), graph)
        engine, sync = make_engine(source, own, sizes), make_sync(source, own, sizes)
        mesh = mesh_lib.replica_mesh(sizes.rollout_tensor)
        target = pull_target(
            abstract_params(source.config), param_shardings(source.config, mesh), sizes.engine.dtype
        )

        def pull(links: Links, version: int) -> Any:
            pulled = WeightPull(links.callers).pull(
                version, target, PULL_SECONDS, links.incarnation
            )
            return jax.block_until_ready(sync(pulled))

        weights = pull(links, links.first_version)
        engine.compile(weights)
        state = SamplerState(weights, links.first_version, engine.init_decode_state())
        ended: collections.deque[Response] = collections.deque()
        worker = Worker(
            EpisodeSampler(engine, state, on_response=ended.append),
            links,
            joining,
            pull,
            Pace(config.flow.save_seconds, orphan_seconds),
            slots=sizes.engine.slots,
            cache=config.flow.cache,
            ended=ended,
        )
        print(
            f"ready: {sizes.engine.slots} slots, version {links.first_version}, for "
            f"{len(links.callers)} trainers",
            flush=True,
        )
        worker.serve(stop.is_set)
    print(f"ended after {worker.groups} groups", flush=True)
    return EXIT_DONE
