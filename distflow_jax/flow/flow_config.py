"""Settings of asynchronous steps: the section `flow` of a config."""

import dataclasses

SWAPS = ("in_flight", "boundary")
CACHES = ("keep", "recompute")


@dataclasses.dataclass(frozen=True)
class FlowConfig:
    """How far samplers run ahead of the training, and how they take new weights."""

    # steps that a token may be old when it is trained on: samplers begin with the prompts of that
    # many steps more; 0: each step samples, then trains
    max_lag: int = 0
    # when samplers take new weights: in_flight, at once, between two tokens of a response; or
    # boundary, when all responses of a step are done, which is reproducible
    swap: str = "in_flight"
    # keys and values of tokens that older weights read: keep them, or recompute them after a swap
    cache: str = "keep"

    def __post_init__(self):
        if self.max_lag < 0:
            raise ValueError(
                f"flow.max_lag must not be negative, got {self.max_lag}; 0: samplers do not run "
                "ahead"
            )
        for name, known in (("swap", SWAPS), ("cache", CACHES)):
            if getattr(self, name) not in known:
                raise ValueError(
                    f"flow.{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}"
                )
        if self.swap == "boundary" and self.cache == "recompute":
            raise ValueError(
                "flow.cache='recompute' has no effect with flow.swap='boundary': no response is "
                "under way when the weights change; use cache='keep'"
            )
        for name, default in (("swap", SWAPS[0]), ("cache", CACHES[0])):
            if not self.max_lag and getattr(self, name) != default:
                raise ValueError(
                    f"flow.{name}={getattr(self, name)!r} has no effect with flow.max_lag=0; raise "
                    "that, or take it out"
                )

    @property
    def buffers(self) -> int:
        """Weights of the trainer that may lie in a host's memory on their way to its sampler.

        With `boundary` a sampler at step s still has to take versions s - max_lag .. s - 1.
        """
        return max(2, self.max_lag) if self.swap == "boundary" else 2

    @property
    def ahead(self) -> bool:
        """Whether samplers run ahead of the training."""
        return self.max_lag > 0
