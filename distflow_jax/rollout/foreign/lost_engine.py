"""Engines that go away: whether one is still the one that was given the weights, and its return."""

import logging
import time
from typing import Any

from distflow_jax.rollout.foreign.engine_protocol import EngineError, ForeignEngine

log = logging.getLogger("distflow_jax")

FIRST_PAUSE, LAST_PAUSE = 0.2, 5.0  # seconds between two looks at an engine that is away


class LostEngine:
    """Loads of one engine, and what to do when it was away."""

    def __init__(self, engine: ForeignEngine, lost_seconds: float):
        """`lost_seconds`: that it may be away."""
        self._engine, self._seconds = engine, lost_seconds
        self._started: float | None = None  # of the process that has the weights

    def start(self, params: Any, version: int) -> None:
        """The first load: an engine that does not answer, or does not load, is an error at once."""
        self._started = self._engine.status().started
        self._engine.load(params, version)

    def load(self, params: Any, version: int, cache: str) -> None:
        """Brings new weights, to an engine that was away in between too."""
        try:
            self._engine.load(params, version, cache=cache)
        except EngineError as error:
            log.warning("%s", error)
            self.bring_back(params, version)

    def is_same(self, *, fault: bool = False) -> bool:
        """Whether the engine is there, and its process is the one that has the weights.

        `fault`: a connection to it has failed. Then an engine that does not say when it began may
        be another one.
        """
        try:
            started = self._engine.status().started
        except EngineError as error:
            log.warning("%s", error)
            return False
        return started == self._started and not (fault and started is None)

    def bring_back(self, params: Any, version: int) -> None:
        """Waits until the engine is there and has these weights.

        EngineError where that takes too long.
        """
        end, pause = time.monotonic() + self._seconds, FIRST_PAUSE
        log.warning("%s: waiting up to %g s for it", self._engine.name, self._seconds)
        while True:
            try:
                self._started = self._engine.status().started
                self._engine.load(params, version)
                log.warning("%s is back, with version %d", self._engine.name, version)
                return
            except EngineError as error:
                if time.monotonic() + pause > end:
                    raise EngineError(
                        f"{self._engine.name} was away for {self._seconds:g} s: {error}"
                    ) from error
                log.warning("%s", error)
            time.sleep(pause)
            pause = min(LAST_PAUSE, 2 * pause)
