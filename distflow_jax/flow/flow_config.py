"""Settings of asynchronous steps: the section `flow` of a config."""

import dataclasses
import math

from distflow_jax.did_you_mean import hint
from distflow_jax.parsing.addresses import checked_address
from distflow_jax.parsing.setting_checks import check_least, check_one_of
from distflow_jax.rollout.scheduling.sampling_order import ORDERS

SWAPS = ("in_flight", "boundary")
CACHES = ("keep", "recompute")
WAVES = ("off", "counter", "ready")


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
    # with swap=in_flight: new weights go to samplers if those that they have differ by more than so
    # many nats per token (k3), or if a sampler has nothing to do; 0: after every step
    divergence: float = 0.0
    # whether a step trains on its groups as they become complete, wave by wave: off, all at once;
    # counter, the next wave_prompts groups by their counters, which is reproducible with
    # swap=boundary; or ready, the oldest complete groups that fill wave_rows
    waves: str = "off"
    wave_prompts: int = 0  # groups of a wave, with waves=counter
    wave_rows: int = 0  # rows of a wave over all data ranks, with waves=ready
    # which of the groups that may begin take slots first: longest expected response, counter, or
    # informative, those whose last scores differed most. Never changes what a step trains on
    order: str = "longest"
    # on the trainer's devices: a rollout ends once that many tokens were sampled in it, over all
    # processes, or prompts_per_step groups are complete, whichever these are, and those that the
    # step must train are among them; steps then differ in size. 0: it ends with its step's groups
    round_tokens: int = 0
    # keep the groups of each wave in the run's folder, with which train --replay=FOLDER repeats the
    # training without a sampler
    record: bool = False
    # whether workers sample, programs of their own that join the run (distflow worker): the
    # trainers have no sampler then
    workers: bool = False
    # nodes that workers run on each group beside those that sample, by their ids, such as reward:
    # host nodes of scope sample or group (distflow worker --nodes); (): the trainers run them
    worker_nodes: tuple[str, ...] = ()
    listen: str = "127.0.0.1:0"  # HOST:PORT where trainers answer workers; port 0: any free one
    save_seconds: float = 5.0  # between two times that a worker sends tokens under way
    # a group of which a worker sends nothing for so long is given to another one
    lease_seconds: float = 60.0
    # for which trainers wait for a worker; then they save a checkpoint and end with exit code 75
    starved_seconds: float = 600.0
    max_tries: int = 3  # failures of workers on a prompt, after which the next one takes its place

    def __post_init__(self):
        if self.max_lag < 0:
            raise ValueError(
                f"flow.max_lag must not be negative, got {self.max_lag}; 0: samplers do not run "
                "ahead"
            )
        for name, known in (("swap", SWAPS), ("cache", CACHES), ("waves", WAVES)):
            check_one_of(f"flow.{name}", getattr(self, name), known)
        if self.swap == "boundary" and self.cache == "recompute":
            raise ValueError(
                "flow.cache='recompute' has no effect with flow.swap='boundary': no response is "
                "under way when the weights change; use cache='keep'"
            )
        if self.order not in ORDERS:
            raise ValueError(f"flow.order={self.order!r} is unknown ({hint(self.order, ORDERS)})")
        self._check_publishing()
        defaults = {"swap": SWAPS[0], "cache": CACHES[0], "waves": WAVES[0], "order": "longest"}
        defaults["divergence"] = 0.0
        for name, default in defaults.items():
            if not self.max_lag and getattr(self, name) != default:
                raise ValueError(
                    f"flow.{name}={getattr(self, name)!r} has no effect with flow.max_lag=0; raise "
                    "that, or take it out"
                )
        if self.round_tokens < 0 or (self.round_tokens and not self.max_lag):
            raise ValueError(
                f"flow.round_tokens={self.round_tokens} "
                + (
                    "must not be negative; 0: rollouts have no budget"
                    if self.round_tokens < 0
                    else "lets max_lag x prompts_per_step groups begin, none with flow.max_lag=0: "
                    "raise that, or use round_tokens=0"
                )
            )
        self._check_waves()
        self._check_workers()

    def _check_publishing(self) -> None:
        """Raises ValueError for numbers that cannot be, and for what boundaries have no use of."""
        if not 0 <= self.divergence < math.inf:
            raise ValueError(
                f"flow.divergence must be finite and not negative, got {self.divergence}; 0: "
                "weights go to the samplers after every step"
            )
        if self.divergence and self.round_tokens:
            raise ValueError(
                f"flow.divergence={self.divergence:g} keeps older weights in the samplers, and "
                f"flow.round_tokens={self.round_tokens} gives groups a deadline by the newest; use "
                "divergence=0 or round_tokens=0"
            )
        if self.divergence and self.swap == "boundary":
            raise ValueError(
                f"flow.divergence={self.divergence!r} says when samplers take new weights, and "
                "with flow.swap='boundary' each step's version is fixed; use swap='in_flight', "
                "or take it out"
            )

    def _check_waves(self) -> None:
        """Raises ValueError unless a wave has the one size that its kind takes."""
        for name, kind in (("wave_prompts", "counter"), ("wave_rows", "ready")):
            value = getattr(self, name)
            if self.waves == kind and value < 1:
                raise ValueError(
                    f"flow.waves={kind!r} needs flow.{name} of at least 1, got {value}"
                )
            if self.waves != kind and value:
                raise ValueError(
                    f"flow.{name}={value} has no effect with flow.waves={self.waves!r}; use "
                    f"waves={kind!r}, or take it out"
                )
        if self.record and not self.in_waves:
            raise ValueError(
                "flow.record=True keeps the groups of waves, and flow.waves='off' makes none; use "
                "another one, or take it out"
            )

    def _check_workers(self) -> None:
        """Raises ValueError for numbers that workers cannot have."""
        for name in ("save_seconds", "lease_seconds", "starved_seconds"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"flow.{name} must be finite and above 0, got {value}")
        if self.lease_seconds < 2 * self.save_seconds:
            raise ValueError(
                f"flow.lease_seconds={self.lease_seconds:g} would end between two words of a "
                f"worker: use at least {2 * self.save_seconds:g}, twice flow.save_seconds"
            )
        check_least("flow", self, 1, "max_tries")
        checked_address("flow.listen", self.listen, least_port=0)
        if self.worker_nodes and not self.workers:
            raise ValueError(
                f"flow.worker_nodes={self.worker_nodes!r} has no effect with flow.workers=False; "
                "set workers=True, or take it out"
            )
        if not self.workers:
            return
        if not self.max_lag:
            raise ValueError(
                "flow.workers=True samples beside the training, and with flow.max_lag=0 neither "
                "could begin before the other ends: use at least 1, or workers=False"
            )
        taken = {"waves": self.in_waves, "round_tokens": self.round_tokens > 0}
        taken["divergence"] = self.divergence > 0
        for name, chosen in taken.items():
            if chosen:
                raise ValueError(
                    f"flow.{name}={getattr(self, name)!r} is for samplers of the trainers' own "
                    "processes; take it out, or use flow.workers=False"
                )

    @property
    def buffers(self) -> int:
        """Weights of the trainer that may lie in a host's memory on their way to its sampler.

        With `boundary` a sampler at step s still has to take versions s - max_lag .. s - 1. Workers
        that join, or answer a group of one that has ended, take the version before these too.
        """
        if self.workers and self.swap == "boundary":
            return self.max_lag + 1
        return max(2, self.max_lag) if self.swap == "boundary" else 2

    @property
    def ahead(self) -> bool:
        """Whether samplers run ahead of the training."""
        return self.max_lag > 0

    @property
    def in_waves(self) -> bool:
        """Whether a step trains on its groups wave by wave."""
        return self.waves != "off"
