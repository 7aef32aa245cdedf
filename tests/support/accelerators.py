"""Lowering of programs for accelerators on a machine without any."""

import contextlib
import importlib.util

import jax
import pytest

TRITON_DEPRECATED = "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="pip install -r requirements-tpu-plan.txt"
)


@contextlib.contextmanager
def abstract_gpu():
    """Later versions of JAX ask which GPU a Triton kernel is lowered for; 0.10 takes any."""
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100", num_cores=132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield
