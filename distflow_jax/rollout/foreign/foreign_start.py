"""Schedulers over one foreign engine, one after the other: the engine keeps its weights."""

from distflow_jax.rollout.foreign.engine_protocol import ForeignEngine
from distflow_jax.rollout.foreign.foreign_scheduler import ForeignLimits, ForeignScheduler
from distflow_jax.rollout.requests import RolloutStats
from distflow_jax.rollout.sampler import SamplerState


class ForeignStart:
    """Starts an EpisodeSampler's schedulers over a foreign engine.

    `SamplerState.params` are in the form of training, and its decode state is None.
    """

    def __init__(self, engine: ForeignEngine, limits: ForeignLimits):
        self.engine, self._limits = engine, limits
        self._scheduler: ForeignScheduler | None = None

    def __call__(self, state: SamplerState) -> ForeignScheduler:
        """An empty scheduler, over the engine with the weights of `state`.

        EngineError if the engine does not take them.
        """
        if self._scheduler is None:
            self._scheduler = ForeignScheduler(
                self.engine, state.params, self._limits, version=state.version
            )
        elif (
            self._scheduler.version != state.version or self._scheduler.params is not state.params
        ):  # after a restart of the run a version may be that of other weights
            self._scheduler.load(state.params, state.version)
        self._scheduler.stats = RolloutStats()
        return self._scheduler

    def close(self) -> None:
        """Ends the engine's connections."""
        self.engine.close()
