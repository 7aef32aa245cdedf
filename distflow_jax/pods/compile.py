"""Compilation of all programs of a run for a planned pod, from shapes alone."""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from distflow_jax.dag.residency import UPDATE_WEIGHTS
from distflow_jax.parallel import mesh as mesh_lib
from distflow_jax.parallel.rules import device_bytes
from distflow_jax.planning.plan_run import RunPlan
from distflow_jax.planning.unit_programs import Program
from distflow_jax.pods.topology import Pod
from distflow_jax.programs.costs import Costs, costs_of, in_turn
from distflow_jax.rollout.cache_sizing import weight_bytes
from distflow_jax.rollout.engine.engine import weight_layout
from distflow_jax.runtime.make_engine import make_engine, make_sync
from distflow_jax.training.state import TrainState

# "Used 17.5G of 15.75G hbm", or "(16.29G) exceeds available HBM (15.75G)"
_SIZES = re.compile(r"([\d.]+[KMGT])\)? (?:of|exceeds available HBM) \(?([\d.]+[KMGT])")


class TooLarge(ValueError):
    """A program by itself needs more memory than a chip has; the message gives XLA's numbers."""


def compile_program(program: Program, pod: Pod) -> Costs:
    """Costs of a unit's program on the pod. Raises TooLarge."""
    mesh = program.mesh
    with reporting_size(program.unit.name):
        compiled = program.compile()
    return costs_of(program.traced, compiled, dict(mesh.shape), pod.numbers(mesh))


def compile_sync(planned: RunPlan, programs: Mapping[str, Program], pod: Pod) -> Costs:
    """Costs of the weight sync of the first sampled policy. Raises TooLarge."""
    params = sampled_params(planned, programs)
    local = _sampler_mesh(planned, planned.devices)
    mesh = jax.tree.leaves(params)[0].sharding.mesh
    runs = []
    sync = make_sync(planned.source, planned.config, planned.sizes, planned.devices)
    for traced, times in sync.programs(params):
        with reporting_size(UPDATE_WEIGHTS):
            compiled = traced.lower().compile()
        costs = costs_of(traced, compiled, dict(mesh.shape), pod.numbers(mesh))
        runs.append((costs, times))
    weights = weight_bytes(planned.source.config, planned.sizes.engine, local.shape["tensor"])
    return in_turn(runs, argument_bytes=device_bytes(params), output_bytes=weights)


def sampled_params(planned: RunPlan, programs: Mapping[str, Program]) -> Any:
    """Specs of the parameters of the first sampled policy."""
    (key, *_) = planned.own_samplers.values()
    state = next(p.given_states[key] for p in programs.values() if key in p.given_states)
    return state.params if isinstance(state, TrainState) else state


def compile_sampler(planned: RunPlan, pod: Pod, name: str) -> Costs:
    """Costs of one of a sampler's largest programs, see EnginePrograms.traced.

    A sampler is independent of the others, and compiled as a slice of its own. Raises TooLarge.
    """
    hosts = _sampler_mesh(planned, pod.devices)
    pod = pod.slice_of(pod.numbers(hosts))
    engine = make_engine(planned.source, planned.config, planned.sizes, pod.devices)
    weights = weight_layout(engine.model, engine.config, engine.mesh)
    traced = engine.programs.traced(weights.specs(engine.mesh, engine.config.dtype))[name]
    with reporting_size(name):
        compiled = traced.lower().compile()
    return costs_of(traced, compiled, dict(engine.mesh.shape), pod.numbers(engine.mesh))


@contextlib.contextmanager
def reporting_size(program: str) -> Iterator[None]:
    """Turns XLA's out-of-memory error into TooLarge, which names the program and the sizes."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        sizes = _SIZES.search(str(error))
        if "RESOURCE_EXHAUSTED" not in str(error) or not sizes:
            raise
        raise TooLarge(f"{program} alone needs {sizes[1]}iB of {sizes[2]}iB of HBM") from error


def _sampler_mesh(planned: RunPlan, devices: Sequence[jax.Device] | None) -> jax.sharding.Mesh:
    sizes = planned.sizes
    return mesh_lib.sampler_mesh(sizes.rollout_tensor, devices, sizes.sampler_submesh)
