"""Settings of asynchronous steps: the section `stream` of a config."""

import dataclasses
import math

from distflow_jax.did_you_mean import hint
from distflow_jax.parsing.addresses import checked_address
from distflow_jax.parsing.setting_checks import check_least, check_one_of, refuse
from distflow_jax.rollout.scheduling.sampling_order import ORDERS

WEIGHT_UPDATES = ("in_flight", "boundary")
CACHES = ("keep", "recompute")
PARTIAL_BATCHES = ("off", "counter", "ready")
_NEED_STALENESS = ("weight_update", "cache", "partial_batches", "order", "divergence")
_COMBINATIONS = {  # {conditions, see StreamConfig: message}; the first match is reported
    "boundary recompute": "stream.cache='recompute' has no effect with "
    "stream.weight_update='boundary', because no response is unfinished when weights change; use "
    "cache='keep'",
    "impossible": "stream.divergence must be finite and not negative, got {stream.divergence}; "
    "with 0, samplers receive weights after every step",
    "divergence budget": "stream.divergence={stream.divergence:g} leaves older weights in the "
    "samplers, but with stream.round_tokens={stream.round_tokens} deadlines follow from the "
    "newest; use divergence=0 or round_tokens=0",
    "divergence boundary": "stream.divergence={stream.divergence!r} decides when samplers receive "
    "weights, but stream.weight_update='boundary' fixes the version of each step; use "
    "weight_update='in_flight', or remove stream.divergence",
    "budget !ahead": "stream.round_tokens={stream.round_tokens} allows max_staleness x "
    "prompts_per_step groups, which is none with stream.max_staleness=0: raise that, or use "
    "round_tokens=0",
    "budget boundary": "stream.round_tokens={stream.round_tokens} decides a step's groups at its "
    "end, but stream.weight_update='boundary' fixes their version before they begin; use "
    "weight_update='in_flight', or round_tokens=0",
    "budget partial": "stream.round_tokens={stream.round_tokens} decides a step's groups at its "
    "end, but stream.partial_batches={stream.partial_batches!r} trains some earlier; use "
    "partial_batches='off', or round_tokens=0",
    "record !partial": "stream.record=True records partial batches, but "
    "stream.partial_batches='off' makes none; use counter or ready, or remove stream.record",
    "hasty": "stream.lease_seconds={stream.lease_seconds:g} would expire between two reports of a "
    "worker: use at least {least:g}, twice stream.save_seconds",
    "nodes !workers": "stream.worker_nodes={stream.worker_nodes!r} has no effect with "
    "stream.workers=False; set workers=True, or remove stream.worker_nodes",
    "workers !ahead": "stream.workers=True needs samples made ahead of training, but "
    "stream.max_staleness=0 allows none: use at least 1, or workers=False",
}


@dataclasses.dataclass(frozen=True)
class StreamConfig:
    """How far samplers run ahead of training, and how they receive new weights."""

    # maximum age of a token in steps when it is trained on; samplers may be that many steps ahead.
    # 0: each step samples, then trains
    max_staleness: int = 0
    # when samplers load new weights: in_flight, at once, between two tokens of a response; or
    # boundary, after all responses of a step, which is reproducible
    weight_update: str = "in_flight"
    # keys and values computed by older weights: keep them, or recompute them after a weight update
    cache: str = "keep"
    # with weight_update=in_flight: send weights only if the policy has changed by more than this
    # many nats per token (k3), or if a sampler is idle; 0: after every step
    divergence: float = 0.0
    # train on groups as they complete, in partial batches: off, the whole step at once; counter,
    # the next partial_batch_prompts groups by counter, which is reproducible with
    # weight_update=boundary; or ready, the oldest complete groups that fill partial_batch_rows
    partial_batches: str = "off"
    partial_batch_prompts: int = 0  # groups of a partial batch, with partial_batches=counter
    # rows of a partial batch over all data ranks, with partial_batches=ready
    partial_batch_rows: int = 0
    # which groups get slots first: longest expected response, counter, or informative (largest
    # spread of last scores). Does not change the groups of a step
    order: str = "longest"
    # token budget of a rollout over all processes. The rollout also ends once prompts_per_step
    # groups are complete, but never before the groups that its step must train; step sizes vary.
    # Workers and samplers with devices of their own keep sampling. 0: no budget
    round_tokens: int = 0
    # store the groups of each partial batch in the run's folder, from which train --replay=FOLDER
    # repeats the training without a sampler
    record: bool = False
    # sample in separate jobs that join the run (distflow worker); the trainers have no sampler
    workers: bool = False
    # ids of host nodes that workers run on each group, such as reward (distflow worker --nodes);
    # their scope must be sample or group. (): the trainers run them. With environment,
    # rollout.environment runs on separate hosts (--nodes=environment)
    worker_nodes: tuple[str, ...] = ()
    listen: str = "127.0.0.1:0"  # HOST:PORT on which trainers accept workers; port 0: any free one
    save_seconds: float = 5.0  # interval at which workers send the tokens of unfinished responses
    lease_seconds: float = 60.0  # silence after which a worker's groups go to another worker
    # time that trainers wait for a worker before they save and end with exit code 75
    no_workers_seconds: float = 600.0
    max_tries: int = 3  # failures after which a prompt is replaced by the next one

    def __post_init__(self):
        check_one_of("stream.weight_update", self.weight_update, WEIGHT_UPDATES)
        check_one_of("stream.cache", self.cache, CACHES)
        check_one_of("stream.partial_batches", self.partial_batches, PARTIAL_BATCHES)
        if self.order not in ORDERS:
            raise ValueError(f"stream.order={self.order!r} is unknown ({hint(self.order, ORDERS)})")
        for name in ("save_seconds", "lease_seconds", "no_workers_seconds"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise ValueError(f"stream.{name} must be finite and above 0, got {value}")
        check_least("stream", self, 0, "max_staleness", "round_tokens")
        check_least("stream", self, 1, "max_tries")
        checked_address("stream.listen", self.listen, least_port=0)
        holds = {
            "ahead": self.ahead,
            "boundary": self.weight_update == "boundary",
            "recompute": self.cache == "recompute",
            "divergence": self.divergence,
            "impossible": not 0 <= self.divergence < math.inf,
            "budget": self.round_tokens,
            "partial": self.in_partial_batches,
            "record": self.record,
            "workers": self.workers,
            "nodes": self.worker_nodes,
            "hasty": self.lease_seconds < 2 * self.save_seconds,
        }
        refuse(_COMBINATIONS, holds, stream=self, least=2 * self.save_seconds)
        self._check_needs()

    def _check_needs(self) -> None:
        """Raises ValueError for a setting without the one that it needs, or the other way round."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name in _NEED_STALENESS:
            if not self.ahead and (value := getattr(self, name)) != defaults[name]:
                raise ValueError(
                    f"stream.{name}={value!r} has no effect with stream.max_staleness=0; raise "
                    f"that, or remove stream.{name}"
                )
        for name, kind in (("partial_batch_prompts", "counter"), ("partial_batch_rows", "ready")):
            value, chosen = getattr(self, name), self.partial_batches
            if chosen == kind and value < 1:
                raise ValueError(
                    f"stream.partial_batches={kind!r} needs stream.{name} of at least 1, got "
                    f"{value}"
                )
            if chosen != kind and value:
                raise ValueError(
                    f"stream.{name}={value} has no effect with stream.partial_batches={chosen!r}; "
                    f"use partial_batches={kind!r}, or remove stream.{name}"
                )

    @property
    def buffers(self) -> int:
        """Weights of the trainer that may lie in a host's memory on their way to its sampler.

        With `boundary` a sampler at step s still has to take versions s - max_staleness .. s - 1.
        Workers that join, or answer a group of one that has ended, take the version before these
        too.
        """
        if self.workers and self.weight_update == "boundary":
            return self.max_staleness + 1
        return max(2, self.max_staleness) if self.weight_update == "boundary" else 2

    @property
    def evaluates_beside(self) -> bool:
        """Whether versions are evaluated while later steps train."""
        return self.workers or self.weight_update == "boundary"

    @property
    def open_evaluations(self) -> int:
        """Evaluations of workers that may be under way at a time: each keeps its version of the
        weights in a host's memory, beside the newest ones."""
        return self.buffers if self.workers else 0

    @property
    def ahead(self) -> bool:
        """Whether samplers run ahead of the training."""
        return self.max_staleness > 0

    @property
    def names_workers(self) -> bool:
        """Whether the gaps of a step's groups are told apart, to judge the workers by them: a step
        in partial batches counts its groups anew in each."""
        return self.workers and not self.in_partial_batches

    @property
    def in_partial_batches(self) -> bool:
        """Whether a step trains on its groups partial batch by partial batch."""
        return self.partial_batches != "off"
