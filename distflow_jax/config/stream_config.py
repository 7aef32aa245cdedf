"""Settings of asynchronous steps: the section `stream` of a config."""

import dataclasses

from distflow_jax.parsing.addresses import checked_address
from distflow_jax.parsing.checked_fields import above, at_least, one_of
from distflow_jax.parsing.setting_checks import Section, refuse, setting

_AHEAD: dict[str, tuple[str, ...]] = {"max_staleness": ()}
_COMBINATIONS = {  # {conditions, see StreamConfig: message}; the first match is reported
    "divergence boundary": "stream.divergence={stream.divergence!r} decides when samplers receive "
    "weights, but stream.weight_update='boundary' fixes the version of each step; use "
    "weight_update='in_flight', or remove stream.divergence",
    "hasty": "stream.lease_seconds={stream.lease_seconds:g} would expire between two reports of a "
    "worker: use at least {least:g}, twice stream.save_seconds",
    "workers !ahead": "stream.workers=True needs samples made ahead of training, but "
    "stream.max_staleness=0 allows none: use at least 1, or workers=False",
}


@dataclasses.dataclass(frozen=True)
class StreamConfig(Section, name="stream"):
    """How far samplers run ahead of training, and how they receive new weights."""

    # maximum age of a token when it is trained on, in steps, and the number of steps that samplers
    # may run ahead. 0: each step samples, then trains
    max_staleness: int = setting(0, at_least(0))
    # when samplers load new weights: in_flight (immediately, between two tokens of a response) or
    # boundary (after all responses of a step, which is reproducible)
    weight_update: str = setting("in_flight", one_of(("in_flight", "boundary")), needs=_AHEAD)
    # keys and values that were computed with older weights: keep them, or recompute them after a
    # weight update
    cache: str = setting(
        "keep",
        one_of(("keep", "recompute")),
        needs=_AHEAD | {"weight_update": ("in_flight",)},
    )
    # with weight_update=in_flight: send weights only if the policy has changed by more than this
    # many nats per token (k3), or if a sampler is idle; 0: after every step
    divergence: float = setting(0.0, at_least(0), needs=_AHEAD)
    # train on groups as they complete, in partial batches. off: the whole step at once. counter:
    # the next partial_batch_prompts groups in prompt order, which is reproducible with
    # weight_update=boundary. ready: the oldest complete groups that fill partial_batch_rows
    partial_batches: str = setting("off", one_of(("off", "counter", "ready")), needs=_AHEAD)
    # groups per partial batch
    partial_batch_prompts: int = setting(0, at_least(0), needs={"partial_batches": ("counter",)})
    # rows per partial batch, over all data ranks
    partial_batch_rows: int = setting(0, at_least(0), needs={"partial_batches": ("ready",)})
    # which groups get slots first: longest (longest expected responses), counter (prompt order), or
    # informative (largest spread of the prompt's last scores). Does not change the groups of a step
    order: str = setting("longest", one_of(("longest", "counter", "informative")), needs=_AHEAD)
    # store the groups of each partial batch in the run's folder; train --replay=FOLDER repeats the
    # training from them without a sampler
    record: bool = setting(False, needs={"partial_batches": ("counter", "ready")})
    # sample in separate jobs that join the run (distflow worker); trainers then have no sampler
    workers: bool = False
    # ids of host nodes that workers run on each group, such as reward (distflow worker --nodes);
    # their scope must be sample or group. (): trainers run them. With environment,
    # rollout.environment runs on separate hosts (--nodes=environment)
    worker_nodes: tuple[str, ...] = setting((), needs={"workers": ()})
    listen: str = "127.0.0.1:0"  # HOST:PORT on which trainers accept workers; port 0: any free one
    # interval at which workers send the tokens of unfinished responses
    save_seconds: float = setting(5.0, above(0))
    # time without a heartbeat after which a worker's groups go to another worker
    lease_seconds: float = setting(60.0, above(0))
    # time that trainers wait for a worker before they save and exit with code 75
    no_workers_seconds: float = setting(600.0, above(0))
    # number of failures after which a prompt is replaced by the next one
    max_tries: int = setting(3, at_least(1))

    def __post_init__(self):
        super().__post_init__()
        checked_address("stream.listen", self.listen, least_port=0)
        for name, kind in (("partial_batch_prompts", "counter"), ("partial_batch_rows", "ready")):
            if self.partial_batches == kind and not getattr(self, name):
                raise ValueError(
                    f"stream.partial_batches={kind!r} needs stream.{name} of at least 1, got 0"
                )
        holds = {
            "ahead": self.ahead,
            "boundary": self.weight_update == "boundary",
            "divergence": self.divergence,
            "workers": self.workers,
            "hasty": self.lease_seconds < 2 * self.save_seconds,
        }
        refuse(_COMBINATIONS, holds, stream=self, least=2 * self.save_seconds)

    @property
    def ahead(self) -> bool:
        """Whether samplers run ahead of the training."""
        return self.max_staleness > 0

    @property
    def in_partial_batches(self) -> bool:
        """Whether a step trains on its groups partial batch by partial batch."""
        return self.partial_batches != "off"
