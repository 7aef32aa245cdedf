"""A measurement that fails is left out, and ends nothing."""

import jax
import jax.numpy as jnp
import pytest

from distflow_jax.config.upkeep_config import ObserveConfig
from distflow_jax.parallel.host_memory import buffers
from distflow_jax.runtime.instruments import open_instruments


@pytest.fixture
def measured(tmp_path):
    instruments = open_instruments(ObserveConfig(trace=False), tmp_path, None)
    yield instruments.measured
    instruments.close()


def deleted():
    x = jnp.arange(4)
    x.delete()
    return x


class Gone:
    """An array that another thread deletes between two looks at it."""

    def __init__(self):
        self._x = jnp.arange(4)
        self.dtype = self._x.dtype

    def is_deleted(self):
        return False

    @property
    def addressable_shards(self):
        shards = self._x.addressable_shards
        self._x.delete()
        return shards


FAILURES = {
    "a value": lambda: float(deleted()[0]),
    "shards": lambda: float(len(deleted().addressable_shards)),
    "buffers": lambda: float(sum(buffers([jnp.arange(2), Gone()]).values())),
    "jax's own loop over shards that are gone": lambda: float(len(iter(None))),
    "a file": lambda: float(open("/proc/none").read()),
}


@pytest.mark.parametrize("fails", FAILURES.values(), ids=FAILURES)
def test_what_fails_is_logged_once(measured, caplog, fails):
    for _ in range(3):
        assert measured("perf/one", fails) == {}
        assert measured("perf/two", lambda: 2.0) == {"perf/two": 2.0}
    (told,) = caplog.messages
    assert told.startswith("perf/one is not measured: ")
    assert measured("perf/two", fails) == {} and len(caplog.messages) == 2
    assert measured("perf/one", lambda: 1.0) == {"perf/one": 1.0}


def test_nothing_to_measure_is_no_failure(measured, caplog):
    assert measured("perf/one", lambda: None) == {} and not caplog.messages


@pytest.mark.parametrize("error", [ValueError, AssertionError, KeyError, KeyboardInterrupt])
def test_other_errors_are_faults(measured, error):
    def fails():
        raise error

    with pytest.raises(error):
        measured("perf/one", fails)


def test_arrays_that_were_deleted_before_do_not_count():
    there, gone = jnp.arange(8), deleted()
    assert sum(buffers([there, gone]).values()) == 8 * there.itemsize
    assert list(buffers([there])) == list(buffers([there, there]))
    assert sum(buffers(jax.live_arrays()).values()) >= 8 * there.itemsize
