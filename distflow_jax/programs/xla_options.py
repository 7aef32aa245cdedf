"""XLA compiler options of all programs, by platform.

Options that the user sets in XLA_FLAGS or LIBTPU_INIT_ARGS are left unchanged.
"""

import functools
import logging
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import Mesh, SingleDeviceSharding

log = logging.getLogger("distflow_jax")

_PLATFORMS = {"cuda": "gpu", "rocm": "gpu"}
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_NONE: Mapping[str, Any] = MappingProxyType({})
# XLA:CPU gives sums to a library (YNNPACK) that uses one thread and some 6 ns per number: for the
# softmax of an update's logits, or for a norm, more time than everything else there. The library is
# fast for products only.
_CPU = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
OF_ALL: Mapping[str, Mapping[str, Any]] = {"cpu": _CPU}
# XLA:GPU would concatenate the weights of products with the same input in every decode step: a
# copy, which costs more than a product of a few rows can gain.
OF_SAMPLERS: Mapping[str, Mapping[str, Any]] = {
    "cpu": _CPU,
    "gpu": {"xla_gpu_dot_merger_threshold_mb": 0},
}
# Programs that are compiled for their costs and never run: LLVM's part is most of a compilation.
NEVER_RUN: Mapping[str, Mapping[str, Any]] = {
    "cpu": {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True},
}
_PIPELINED = "COLLECTIVE_PIPELINING_MODE_ON"
# Overlap of collectives with other work, for training programs on several devices. None of these is
# on by default.
# GPU: the options of XLA's optimization level O1 (openxla.org/xla/gpu_optimization_levels; NVIDIA's
# images for JAX set the first), except unrolled loops, which hold two layers' gathered weights at
# once. Pipelining has another name and kind of value from jax 0.12 on.
# TPU: the asynchronous collectives that openxla.org/xla/flags_guidance suggests where they differ
# from the default; all-gathers are asynchronous by default. The threshold keeps a gather of large
# weights and its product apart: XLA would make a loop over the shards of them, which reads and
# writes the whole result once for each, and permutes the shards in turn (docs/lab/pods.md).
OF_COLLECTIVES: Mapping[str, Mapping[str, Any]] = {
    "gpu": {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_enable_pipelined_all_gather": True,
        "xla_gpu_enable_pipelined_all_reduce": True,
        "xla_gpu_enable_pipelined_reduce_scatter": True,
        "xla_gpu_pipeline_all_gather": _PIPELINED,
        "xla_gpu_pipeline_all_reduce": _PIPELINED,
        "xla_gpu_pipeline_reduce_scatter": _PIPELINED,
    },
    "tpu": {
        "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
        "xla_tpu_enable_async_all_to_all": True,
        "xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000,
    },
}


def compiler_options(mesh: Mesh, *, sampler: bool = False, runs: bool = True) -> dict[str, Any]:
    """Options of a program on a mesh, for jax.jit's `compiler_options`.

    `runs` is false for a program that is compiled for its costs alone. Options unknown to this
    version of XLA are left out, and logged once at debug level.
    """
    device = _own_device(mesh)
    wanted = wanted_options(device.platform, mesh.size, sampler=sampler)
    if not runs:
        wanted |= NEVER_RUN.get(device.platform, _NONE)
    return {name: value for name, value in wanted.items() if _known(device, name, value)}


def wanted_options(platform: str, devices: int, *, sampler: bool = False) -> dict[str, Any]:
    """Options of a program on `devices` devices, including those unknown to this XLA."""
    platform = _PLATFORMS.get(platform, platform)
    wanted = dict((OF_SAMPLERS if sampler else OF_ALL).get(platform, _NONE))
    if devices > 1 and not sampler:
        wanted |= OF_COLLECTIVES.get(platform, _NONE)
    flags = {flag for name in _VARIABLES for flag in _names(os.environ.get(name, ""))}
    return {name: value for name, value in wanted.items() if name not in flags}


def describe(options: Mapping[str, Any]) -> str:
    """Formats options in one line."""
    return " ".join(f"{name}={value}" for name, value in options.items()) or "none"


def _names(flags: str) -> list[str]:
    """Names of flags: "--xla_a=true --xla_b" -> ["xla_a", "xla_b"]."""
    return [flag.lstrip("-").partition("=")[0] for flag in flags.split()]


def _own_device(mesh: Mesh) -> jax.Device:
    """A device of this process; the first device of a mesh that is only planned for."""
    devices = list(mesh.devices.flat)
    own = (device for device in devices if device.process_index == jax.process_index())
    return next(own, devices[0])


@functools.cache
def _known(device: jax.Device, name: str, value: Any) -> bool:
    there = SingleDeviceSharding(device)
    try:
        program = jax.jit(lambda: 0, out_shardings=there).lower()
        program.compile(compiler_options={name: value})
    except Exception as error:  # the type depends on the version
        log.debug("XLA does not take the option %s=%s: %s", name, value, error)
        return False
    return True
