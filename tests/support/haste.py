"""Programs compiled in a hurry: most of those in tests run a few times, and LLVM is most of that.

Only code generation is hurried; XLA's own passes are those of any run. What trains for many steps
(nightly tests of tests/runs/test_learning.py, the notebooks) is compiled as a user's run is.
"""

import importlib.metadata
import os

FLAGS = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
if importlib.metadata.version("jaxlib").startswith("0.10."):
    # half of LLVM's work; later ones do not know the flag, and refuse to start with it
    FLAGS.append("--xla_cpu_use_fusion_emitters=false")
    # a tenth of a test's CPU-seconds: programs are small, and workers share the cores
    FLAGS.append("--xla_cpu_parallel_codegen_split_count=1")
DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"


def environment(devices: int | None = None) -> dict[str, str]:
    """The environment of a process that compiles in a hurry, with this many CPU devices."""
    count = [] if devices is None else [f"{DEVICE_COUNT_FLAG}={devices}"]
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join([*FLAGS, *count])}
