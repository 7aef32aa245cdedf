"""What XLA is told about programs beside their code: per platform, in this one place."""

import functools
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax

log = logging.getLogger("distflow_jax")

_PLATFORMS = {"cuda": "gpu", "rocm": "gpu"}
_NONE: Mapping[str, Any] = MappingProxyType({})
# XLA:CPU hands sums to a library (YNNPACK) that takes one thread and some 6 ns a number: of the
# softmax of an update's logits, or of a norm, more time than all else there. Products alone are
# what it is good at.
_CPU = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
OF_ALL: Mapping[str, Mapping[str, Any]] = {"cpu": _CPU}
# XLA:GPU would put weights of products with one input side by side, in every decode step: a copy of
# them, which costs more than the few rows of a product can gain.
OF_SAMPLERS: Mapping[str, Mapping[str, Any]] = {
    "cpu": _CPU,
    "gpu": {"xla_gpu_dot_merger_threshold_mb": 0},
}


def compiler_options(platform: str, *, sampler: bool = False) -> dict[str, Any]:
    """Options of a program on a platform: jax.jit's `compiler_options`.

    Those that this version of XLA does not know are left out, which the log says once.
    """
    table = OF_SAMPLERS if sampler else OF_ALL
    wanted = table.get(_PLATFORMS.get(platform, platform), _NONE)
    return {name: value for name, value in wanted.items() if _known(platform, name, value)}


@functools.cache
def _known(platform: str, name: str, value: Any) -> bool:
    try:
        with jax.default_device(jax.local_devices(backend=platform)[0]):
            jax.jit(lambda: 0).lower().compile(compiler_options={name: value})
    except Exception as error:  # which one depends on the version
        log.info("XLA does not take the option %s=%s: %s", name, value, error)
        return False
    return True
