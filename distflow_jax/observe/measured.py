"""Measurements of a run: one that fails is left out of the metrics, and ends nothing."""

import logging
from collections.abc import Callable, Mapping

# JAX raises RuntimeError for an array that is deleted and for what a platform does not count,
# TypeError for an array that goes while it is read. OSError is of the system's own files.
_FAILURES = (RuntimeError, TypeError, OSError)

log = logging.getLogger("distflow_jax")


class Measured:
    """Takes measurements. What fails is logged once, and counted.

    measured = Measured()
    measured("memory", lambda: {"perf/memory_gb": read_memory()})  # {} where that fails
    measured.take()  # {"perf/measurements_failed": 1.0}; {} if none has failed since the last call
    """

    def __init__(self):
        self._logged: set[str] = set()
        self._failed = 0

    def __call__(
        self, name: str, measure: Callable[[], Mapping[str, float]]
    ) -> Mapping[str, float]:
        """The metrics of `measure()`, which must not communicate: it may fail on one process."""
        try:
            return measure()
        except _FAILURES as error:
            if name not in self._logged:
                log.warning("%s is left out: %s: %s", name, type(error).__name__, error)
            self._logged.add(name)
            self._failed += 1
            return {}

    def take(self) -> dict[str, float]:
        """The number of failures since the last call, as a metric."""
        failed, self._failed = self._failed, 0
        return {"perf/measurements_failed": float(failed)} if failed else {}
