"""A worker's side of a run: an engine on this machine's devices, fed by the trainers' task
buffers."""

import contextlib
import dataclasses
import os
import pathlib
import secrets
import socket
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from distflow_jax.cluster import processes
from distflow_jax.cluster.own_code import environment_code
from distflow_jax.config.config_dict import config_table
from distflow_jax.config.run_config import Config
from distflow_jax.dag.graph import Graph
from distflow_jax.environments.episode_sampler import EpisodeSampler
from distflow_jax.environments.event_loop import EnvironmentsFailed
from distflow_jax.environments.registry import Environments
from distflow_jax.models.parameters import abstract_params, param_shardings
from distflow_jax.models.weights.source import ModelSource, open_model, open_options
from distflow_jax.parallel import mesh as mesh_lib
from distflow_jax.parsing.paths import checked_path, named_path
from distflow_jax.planning.plan_run import make_environments, settle
from distflow_jax.planning.run_data import prompt_encoder
from distflow_jax.planning.sizes import Sizes
from distflow_jax.programs.program_cache import kept_programs
from distflow_jax.report.terminal import Terminal
from distflow_jax.resharding.weight_sync import WeightSync
from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.rollout.foreign.engine_protocol import EngineError
from distflow_jax.rollout.requests import SamplingParams
from distflow_jax.rollout.sampler import SamplerState
from distflow_jax.runtime.make_engine import make_engine, make_sync
from distflow_jax.runtime.samplers.file_limit import raise_file_limit
from distflow_jax.runtime.samplers.foreign_engines import EngineChoice
from distflow_jax.runtime.samplers.worker_nodes import Hosting, own_sizes, read_nodes
from distflow_jax.stream.links.buffer_addresses import addresses
from distflow_jax.stream.links.buffer_client import BufferClient
from distflow_jax.stream.links.buffer_links import Joining, Links, NobodyAnswers, Patience
from distflow_jax.stream.links.buffer_service import NODE_TABLE
from distflow_jax.stream.links.environment_hosts import EnvironmentHosts
from distflow_jax.stream.links.remote_link import Pull, RemoteLink, WorkerState
from distflow_jax.stream.links.shared_tables import node_table, shared_tables
from distflow_jax.stream.node_runner import NodeRunner
from distflow_jax.stream.weight_client import pull_target, pull_weights
from distflow_jax.stream.wire.calls import Refused, Unreachable
from distflow_jax.stream.worker import Worker
from distflow_jax.watchdog.exit_codes import EXIT_DONE, EXIT_PREEMPTED
from distflow_jax.watchdog.supervision import StopSignal

PULL_SECONDS = 600.0  # for a version of the weights to come
# (model, config and sizes of the worker) -> its engine, and the sync that feeds it
MakeSampler = Callable[[ModelSource, Config, Sizes], tuple[RolloutEngine, WeightSync]]
ENDED = (
    "the run has ended; if you are extending it, start the worker after the trainer prints `run`"
)


def make_sampler(
    source: ModelSource, config: Config, sizes: Sizes
) -> tuple[RolloutEngine, WeightSync]:
    """The engine that a config describes, and its sync."""
    return make_engine(source, config, sizes), make_sync(source, config, sizes)


class WorkerFailed(RuntimeError):
    """The engine of a worker or its environments have failed; another start may mend it."""


class WorkerLeft(RuntimeError):
    """A worker that was told to leave could not submit what it had."""


def run_worker(
    config: Config,
    join: str,
    stop: StopSignal,
    patience: Patience,
    *,
    chosen: Collection[str] = (),
    foreign: EngineChoice | None = None,
    nodes: Sequence[str] = (),
    make: MakeSampler = make_sampler,
) -> int:
    """Samples for the trainers that `join` names until their run ends; returns the exit code.

    EXIT_PREEMPTED: it was stopped before; WorkerLeft: and had to leave groups unfinished.
    `chosen` are the config keys that the command line gives. `foreign`: an engine of another
    program that samples; None: one of ours, which `make` makes; benchmarks may substitute it.
    `nodes`: ids of those that it runs; (): those that sample.
    Raises ValueError for user errors, NobodyAnswers if trainers do not answer in time, and
    WorkerFailed where an engine or its environments fail.
    """
    if not addresses(join) and os.path.exists(join := str(named_path("--join", join))):
        checked_path("folder", "--join", join)
    config, graph = settle(config, chosen)
    if not config.stream.workers:
        raise ValueError(
            "a worker samples for trainers with stream.workers=True: give "
            "--config.stream.workers=True to both"
        )
    if jax.process_count() > 1:
        raise ValueError("a worker is one process: start one on each host")
    terminal = Terminal()
    with terminal.activity("open_model"):
        source = open_model(config.model.source, **open_options(config.model))
    if foreign is not None:
        _check_foreign(foreign, config, source)
    served = read_nodes(nodes, config, graph, source)
    if served.samples:
        own_sizes(config, graph, source)  # refuses what is too small for a prompt and a response
    if not served.samples and foreign is not None:
        raise ValueError(
            f"--nodes={','.join(nodes)} names no node that samples, and --engine is for a worker "
            "that does: take it out"
        )
    raise_file_limit()
    table, code = config_table(config), processes.code_table()
    code |= environment_code(config.rollout.environment, config.rollout.environment_kwargs)
    tables = shared_tables(table, code, source.tokenizer)
    name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    with contextlib.ExitStack() as files:
        files.callback(terminal.close)
        terminal.print(f"joining {join} as {name}")
        runner = served.open(files)
        environments = None
        if served.samples:
            encoder = prompt_encoder(source, config.data.image_tokens)
            environments = make_environments(config, encoder, files)
        hosting = served.open_host(files)
        what = (config, graph, source, foreign, make, patience, environments, hosting)
        asked = _Asked(*what, stop, terminal)
        if runner.nodes:
            tables[NODE_TABLE] = node_table(table)
        joining = Joining(join, name, tables, runner.nodes, everywhere=served.hosts)
        serve = _sample if served.samples else _run_nodes

        def stopped() -> bool:
            hosting.check()
            return stop.is_set()

        stop.leave_at_once()  # it joins, and compiles, for minutes
        try:
            return serve(asked, joining, stopped, runner)
        except (EngineError, EnvironmentsFailed) as error:
            kind = WorkerLeft if stop.is_set() else WorkerFailed
            raise kind(f"{error}; its groups are for other workers now") from error


@dataclasses.dataclass(frozen=True)
class _Asked:
    """The settings of a worker that samples, see run_worker."""

    config: Config
    graph: Graph
    source: ModelSource
    foreign: EngineChoice | None
    make: MakeSampler
    patience: Patience
    environments: Environments | None  # None: a response is one turn
    hosting: Hosting  # of environments of workers
    stop: StopSignal
    terminal: Terminal

    def ready(self, name: str, does: str, links: Links) -> None:
        """Says that the worker of a name is ready, and that from now on SIGTERM lets it submit."""
        trainers = "1 trainer" if len(links.clients) == 1 else f"{len(links.clients)} trainers"
        self.terminal.print(f"ready as {name}: {does} for {trainers}")
        self.stop.step_finished()


def _check_foreign(foreign: EngineChoice, config: Config, source: ModelSource) -> None:
    """Raises ValueError for a run that an engine of another program cannot sample for."""
    name = config.rollout.environment
    beyond = {
        f"gets token ids alone, and {config.model.source!r} sees images": source.config.vision,
        f"answers in one turn, and rollout.environment={name!r} in several": name,
    }
    for why in [why for why, there in beyond.items() if there]:
        raise ValueError(f"{foreign.address} {why}: sample with --engine=own")


def _run_nodes(
    asked: _Asked, joining: Joining, stopped: Callable[[], bool], nodes: NodeRunner
) -> int:
    """Runs host nodes alone until the run has ended, or `stopped()`; returns the exit code."""
    links = _join(asked, joining, stopped, nodes)
    if links is None:
        return EXIT_DONE
    client = BufferClient(
        WorkerState(links=links),
        joining,
        nodes,
        save_seconds=0.0,
        orphan_seconds=asked.patience.orphan,
    )
    asked.ready(joining.name, f"runs {', '.join(nodes.nodes)}", links)
    finished = client.serve(stopped)
    asked.terminal.print(f"ended after {nodes.served} nodes of groups")
    return EXIT_DONE if finished else EXIT_PREEMPTED


def _join(
    asked: _Asked, joining: Joining, stopped: Callable[[], bool], nodes: NodeRunner
) -> Links | None:
    """Links to the task buffers, which a host of environments answers from now on at the address
    that `nodes` gets; None if the run has ended."""
    with asked.terminal.activity("waiting for the trainers"):
        links = joining.first(asked.patience.join, stopped)
    if links is None:
        asked.terminal.print(ENDED)
        return None
    nodes.address = asked.hosting.listen(asked.config.stream.listen, joining.token)
    return links


def _sample(asked: _Asked, joining: Joining, ended: Callable[[], bool], nodes: NodeRunner) -> int:
    """Samples, and runs `nodes`, until the run has ended, or `ended()`; returns the exit code."""
    links = _join(asked, joining, ended, nodes)
    if links is None:
        return EXIT_DONE
    config, graph, source = asked.config, asked.graph, asked.source
    with contextlib.ExitStack() as files:
        files.enter_context(kept_programs(config.compilation_cache))
        if asked.foreign is None:
            opened = _own_engine(asked)
        else:
            opened = _foreign_engine(asked.foreign, config, graph, source, files, asked.stop)
        with asked.terminal.activity("loading weights of the trainers"):
            first = _first_weights(joining, links, opened.pull, asked.patience.join)
        if first is None:
            return EXIT_DONE
        links, weights = first
        state = WorkerState(
            links=links,
            capacity=opened.slots,
            version=links.first_version,
            slots=opened.slots,
        )
        if links.hosts is not None:
            state.meet = _run_elsewhere(asked, joining, files)
            state.meet(links.hosts)
        save_seconds = config.stream.save_seconds
        link = RemoteLink(state, opened.pull, save_seconds=save_seconds)
        with asked.terminal.activity("compile_sampler"):
            sampler = opened.sampler(weights, links.first_version)
        worker = Worker(sampler, link, cache=config.stream.cache)
        orphan_seconds = asked.patience.orphan
        client = BufferClient(
            state, joining, nodes, save_seconds=save_seconds, orphan_seconds=orphan_seconds
        )
        does = f"{opened.slots} slots of {opened.name}, version {links.first_version},"
        asked.ready(joining.name, does, links)  # from here on there is something to submit
        finished = client.sample(worker, link, ended)
    asked.terminal.print(
        f"ended after {worker.groups} groups; {worker.loads} loads of weights stopped it for "
        f"{worker.load_seconds:.3g} s"
    )
    return EXIT_DONE if finished else EXIT_PREEMPTED


def _run_elsewhere(
    asked: _Asked, joining: Joining, files: contextlib.ExitStack
) -> Callable[[Mapping[str, str]], None]:
    """Has environments run on the hosts of the run, which the returned function takes."""
    loop, seconds = asked.environments.loop, asked.config.stream.lease_seconds
    hosts = EnvironmentHosts(loop, joining.name, joining.token, seconds)
    files.callback(hosts.close)
    files.callback(asked.environments.close)  # before that: the hosts hear of it
    asked.environments.run_elsewhere(hosts.make)
    return hosts.meet


def _first_weights(
    joining: Joining, links: Links, pull: Pull, seconds: float
) -> tuple[Links, Any] | None:
    """(links, weights of their first version); None if the run has ended.

    Trainers that go on meanwhile have newer ones. ValueError for weights that do not come.
    """
    while True:
        try:
            return links, pull(links, links.first_version)
        except (Refused, Unreachable) as error:
            links.close()
            again = joining.first(seconds)
            if again is None:
                return None
            before = (links.attempt, links.first_version)
            if (again.attempt, again.first_version) == before:
                again.close()
                kind = NobodyAnswers if isinstance(error, Unreachable) else ValueError
                raise kind(f"the weights did not come: {error}") from error
            links = again


@dataclasses.dataclass(frozen=True)
class _Opened:
    """An engine that waits for weights, and how these come."""

    name: str
    slots: int
    pull: Pull
    sampler: Callable[[Any, int], EpisodeSampler]  # of weights, and their version


def _own_engine(asked: _Asked) -> _Opened:
    """An engine on this machine's devices."""
    source = asked.source
    own, sizes = own_sizes(asked.config, asked.graph, source)
    engine, sync = asked.make(source, own, sizes)
    pull_trained = _trained_pull(source, sizes, mesh_lib.replica_mesh(sizes.rollout_tensor))

    def pull(links: Links, version: int) -> Any:
        return jax.block_until_ready(sync(pull_trained(links, version)))

    def sampler(weights: Any, version: int) -> EpisodeSampler:
        engine.compile(weights)
        state = SamplerState(weights, version, engine.init_decode_state())
        return EpisodeSampler(engine, state, asked.environments)

    return _Opened("its own engine", sizes.engine.slots, pull, sampler)


def _foreign_engine(
    choice: EngineChoice,
    config: Config,
    graph: Graph,
    source: ModelSource,
    files: contextlib.ExitStack,
    stop: StopSignal,
) -> _Opened:
    """An engine of another program; `files` closes it. Once `stop` is set, an engine that is away
    is an error at once.

    Weights pass through the memory of this machine's first device.
    """
    if config.training.router_replay:
        raise ValueError(
            f"{choice.address} does not say which experts its tokens went to: set "
            "training.router_replay=False, or sample with --engine=own"
        )
    choice.check(SamplingParams.of_training(config.rollout))
    place = pathlib.Path(files.enter_context(tempfile.TemporaryDirectory(prefix="distflow-")))
    try:
        engine = choice.open(source, place, config.seed)
    except EngineError as error:
        raise ValueError(f"{error}; start it, or name another --engine") from error
    files.enter_context(contextlib.closing(engine))
    _, sizes = own_sizes(config, graph, source)
    pull = _trained_pull(source, sizes, mesh_lib.replica_mesh(1, jax.local_devices()[:1]))

    def sampler(weights: Any, version: int) -> EpisodeSampler:
        state = SamplerState(weights, version, None)
        start = choice.start(engine, source, SamplingParams.of_training(config.rollout), stop)
        try:
            start(state)
        except EngineError as error:
            raise ValueError(f"{error}; see docs/foreign_engines.md") from error
        return EpisodeSampler(None, state, start=start)

    return _Opened(choice.address, engine.slots, pull, sampler)


def _trained_pull(source: ModelSource, sizes: Sizes, mesh: Mesh) -> Pull:
    """Pulls weights in the form of training, in the samplers' dtype, to `mesh`."""
    shardings = param_shardings(source.config, mesh)
    target = pull_target(abstract_params(source.config), shardings, sizes.engine.dtype)

    def pull(links: Links, version: int) -> Any:
        return pull_weights(links.weights, version, target, PULL_SECONDS, links.attempt)

    return pull
