"""The instruments of a run: times, compilations and profiles, which change nothing of it."""

import contextlib
import dataclasses
import logging
import pathlib
from collections.abc import Callable

from distflow_jax.cluster import processes
from distflow_jax.config.upkeep_config import ObserveConfig
from distflow_jax.observe.compilations import Compilations
from distflow_jax.observe.phases import Phases
from distflow_jax.observe.profile import Profile
from distflow_jax.observe.spans import Spans
from distflow_jax.report.trackers.sender import Trackers
from distflow_jax.watchdog.controller import Watchdog

# JAX raises these for arrays that are deleted, or go while they are read, and for what a platform
# does not count; the last one is of the system's own files
_FAILURES = (RuntimeError, TypeError, OSError)

log = logging.getLogger("distflow_jax")


@dataclasses.dataclass(frozen=True)
class Instruments:
    """Open from before the programs are compiled to the end of the run."""

    compilations: Compilations
    spans: Spans  # the events of trace.json
    phases: Phases  # spans that the watchdog and the table of stragglers see too
    profile: Profile
    failed: set[str] = dataclasses.field(default_factory=set)  # measurements, at least once

    def measured(self, name: str, measure: Callable[[], float | None]) -> dict[str, float]:
        """{name: what `measure()` gives}; {} for None, and where it fails.

        The first failure is logged. `measure` must not communicate: it may fail on one process.
        """
        try:
            return {} if (value := measure()) is None else {name: value}
        except _FAILURES as error:
            if name not in self.failed:
                log.warning("%s is not measured: %s: %s", name, type(error).__name__, error)
            self.failed.add(name)
            return {}

    def close(self) -> None:
        """Ends the profile and the trace, and stops counting compilations."""
        self.profile.close()
        self.compilations.close()
        self.spans.close()


def open_instruments(
    config: ObserveConfig,
    folder: pathlib.Path,
    watchdog: Watchdog,
    shown: Callable[[str], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> Instruments:
    """Instruments that write below the run's folder: the trace of process 0, profiles of all.

    `shown(name)`: a block in which a terminal shows that a phase runs.
    """
    index = processes.process_index()
    compilations = Compilations()
    trace = folder / "trace.json" if index == 0 and config.trace else None
    spans = Spans(trace, process_index=index)
    phases = Phases(spans, watchdog, processes.communication_seconds, shown)
    profile = Profile(folder / "profile" / f"process_{index}", config.profiled)
    return Instruments(compilations, spans, phases, profile)


def open_trackers(config: ObserveConfig, folder: pathlib.Path) -> Trackers | None:
    """The trackers of process 0, None elsewhere."""
    if processes.process_index():
        return None
    return Trackers(config.trackers, folder, seconds=config.tracker_seconds)
