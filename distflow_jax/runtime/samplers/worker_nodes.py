"""A worker's side of nodes that it runs in place of the trainers: functions and their processes."""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Collection, Sequence

from distflow_jax.config.mesh_config import MeshConfig
from distflow_jax.config.run_config import Config
from distflow_jax.dag.graph import Graph
from distflow_jax.dag.plan import Unit
from distflow_jax.dag.plan_walker import make_runner
from distflow_jax.environments.handle import check_environments
from distflow_jax.models.weights.source import ModelSource
from distflow_jax.planning.machine import Machine
from distflow_jax.planning.plan_run import RunPlan, make_environments, make_plan, run_loader
from distflow_jax.planning.run_data import prompt_encoder
from distflow_jax.planning.run_models import models_of
from distflow_jax.planning.sizes import Sizes, derive_sizes
from distflow_jax.rewards.pool import RewardPool
from distflow_jax.runtime.contexts import ContextFactory
from distflow_jax.stream.checks import check_nodes, sampling_tasks
from distflow_jax.stream.host_nodes import NodesAhead
from distflow_jax.stream.links.environment_host import EnvironmentHost
from distflow_jax.stream.node_runner import NodeRunner
from distflow_jax.stream.tasks import ENVIRONMENT

log = logging.getLogger("distflow_jax")


@dataclasses.dataclass(frozen=True)
class Hosting:
    """Calls to what runs environments of workers, see EnvironmentHost; by default there is none."""

    listen: Callable[[str, bytes], str] = lambda address, token: ""
    check: Callable[[], None] = lambda: None


@dataclasses.dataclass(frozen=True)
class WorkerNodes:
    """The nodes that a worker serves.

    Attributes:
      samples: whether it serves those that sample.
      hosts: whether it runs environments of workers that sample.
      units: host nodes.
    """

    samples: bool
    hosts: bool
    units: Sequence[Unit]
    run: RunPlan

    def open_host(self, files: contextlib.ExitStack) -> Hosting:
        """Opens what runs environments of workers, and tries one on a row if the data is here;
        `files` closes it.

        Raises ValueError or FileNotFoundError for an environment that is not there, or fails.
        """
        if not self.hosts:
            return Hosting()
        host = _environment_host(self.run, files)
        return Hosting(host.listen, host.check)

    def open(self, files: contextlib.ExitStack) -> NodeRunner:
        """Opens the functions of the host nodes; `files` ends their processes.

        Raises ValueError or FileNotFoundError for functions that are not there.
        """
        beside = [ENVIRONMENT] if self.hosts else []
        if not self.units:
            return NodeRunner(beside=beside)
        tasks = [task for unit in self.units for task in unit.tasks]
        config = self.run.config
        rewards = files.enter_context(RewardPool(config.reward, config.sandbox))
        rewards.one_by_one  # noqa: B018 - its processes have found the function then
        stages, _ = ContextFactory(self.run, {}, rewards=rewards).stages(tasks)
        runners = {unit.name: make_runner(unit, stages) for unit in self.units}
        ahead = NodesAhead(frozenset(), tuple(self.units), runners)
        return NodeRunner(ahead, beside)


def _environment_host(run: RunPlan, files: contextlib.ExitStack) -> EnvironmentHost:
    config = run.config
    encoder = prompt_encoder(run.source, config.data.image_tokens)
    environments = make_environments(config, encoder, files)
    try:
        row = run_loader(run, encoder).prompt(0)
    except (ValueError, FileNotFoundError) as error:  # calls bring their rows
        log.warning("the environment is not tried, as no row is here: %s", error)
    else:
        check_environments(environments, row)
    host = EnvironmentHost(environments, config.stream.lease_seconds)
    files.callback(host.close)
    return host


def read_nodes(
    names: Collection[str], config: Config, graph: Graph, source: ModelSource
) -> WorkerNodes:
    """The nodes that --nodes names; () for those that sample.

    Raises ValueError for nodes that a worker cannot run.
    """
    machine = dataclasses.replace(Machine.current(), memory=0, host_memory=0)
    own, sizes = own_sizes(config, graph, source, machine)
    plan = make_plan(own, graph, sizes)
    sampling = [task.node.id for task in sampling_tasks(plan)]
    names = tuple(names) or tuple(sampling)
    where = f"--nodes={','.join(names)}"
    units = check_nodes(names, plan, where, config.rollout.environment)
    missing = [node for node in sampling if node not in names]
    if missing and len(missing) < len(sampling):
        raise ValueError(
            f"{where} leaves out {missing[0]!r}: the nodes that sample share one sampler, so name "
            "all of them or none"
        )
    run = RunPlan(own, graph, machine, source, sizes, plan, models_of(plan), None)
    return WorkerNodes(not missing and bool(sampling), ENVIRONMENT in names, units, run)


def own_sizes(
    config: Config, graph: Graph, source: ModelSource, machine: Machine | None = None
) -> tuple[Config, Sizes]:
    """Config and sizes of a worker that has all of this machine's devices, whatever the trainers'
    mesh; `machine`: in its place."""
    own = dataclasses.replace(
        config,
        mesh=MeshConfig(rollout_tensor=config.mesh.rollout_tensor),
        training=dataclasses.replace(config.training, micro_batch_rows=0),
    )
    return own, derive_sizes(own, source.config, machine or Machine.current(), graph)
