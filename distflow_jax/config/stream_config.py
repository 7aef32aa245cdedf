"""Settings of asynchronous steps: the section `stream` of a config."""

import dataclasses

from distflow_jax.parsing.addresses import checked_address
from distflow_jax.parsing.checked_fields import above, at_least, one_of
from distflow_jax.parsing.setting_checks import Section, refuse, setting

_AHEAD: dict[str, tuple[str, ...]] = {"max_staleness": ()}
_COMBINATIONS = {  # {what holds, see StreamConfig: the message}; the first one that holds is told
    "divergence budget": "stream.divergence={stream.divergence:g} keeps older weights in the "
    "samplers, and stream.round_tokens={stream.round_tokens} gives groups a deadline by the "
    "newest; use divergence=0 or round_tokens=0",
    "divergence boundary": "stream.divergence={stream.divergence!r} says when samplers take new "
    "weights, and with stream.weight_update='boundary' each step's version is fixed; use "
    "weight_update='in_flight', or take it out",
    "budget boundary": "stream.round_tokens={stream.round_tokens} says at its end which groups a "
    "step has, and stream.weight_update='boundary' fixes their version before they begin; use "
    "weight_update='in_flight', or round_tokens=0",
    "budget partial": "stream.round_tokens={stream.round_tokens} says at its end which groups a "
    "step has, and stream.partial_batches={stream.partial_batches!r} trains on them before; use "
    "partial_batches='off', or round_tokens=0",
    "hasty": "stream.lease_seconds={stream.lease_seconds:g} would end between two words of a "
    "worker: use at least {least:g}, twice stream.save_seconds",
    "workers !ahead": "stream.workers=True samples beside the training, and with "
    "stream.max_staleness=0 neither could begin before the other ends: use at least 1, or "
    "workers=False",
}


@dataclasses.dataclass(frozen=True)
class StreamConfig(Section, name="stream"):
    """How far samplers run ahead of the training, and how they take new weights."""

    # steps that a token may be old when it is trained on: samplers begin with the prompts of that
    # many steps more; 0: each step samples, then trains
    max_staleness: int = setting(0, at_least(0))
    # when samplers take new weights: in_flight, at once, between two tokens of a response; or
    # boundary, when all responses of a step are done, which is reproducible
    weight_update: str = setting("in_flight", one_of(("in_flight", "boundary")), needs=_AHEAD)
    # keys and values of tokens that older weights read: keep them, or recompute them after a weight
    # update
    cache: str = setting(
        "keep",
        one_of(("keep", "recompute")),
        needs=_AHEAD | {"weight_update": ("in_flight",)},
    )
    # with weight_update=in_flight: new weights go to samplers if those that they have differ by
    # more than so many nats per token (k3), or if a sampler has nothing to do; 0: after every step
    divergence: float = setting(0.0, at_least(0), needs=_AHEAD)
    # whether a step trains on its groups as they become complete, partial batch by partial batch:
    # off, all at once; counter, the next partial_batch_prompts groups by their counters, which is
    # reproducible with weight_update=boundary; or ready, the oldest complete groups that fill
    # partial_batch_rows
    partial_batches: str = setting("off", one_of(("off", "counter", "ready")), needs=_AHEAD)
    # groups of a partial batch
    partial_batch_prompts: int = setting(0, at_least(0), needs={"partial_batches": ("counter",)})
    # rows of a partial batch over all data ranks
    partial_batch_rows: int = setting(0, at_least(0), needs={"partial_batches": ("ready",)})
    # which of the groups that may begin take slots first: longest expected response, counter, or
    # informative, those whose last scores differed most. Never changes what a step trains on
    order: str = setting("longest", one_of(("longest", "counter", "informative")), needs=_AHEAD)
    # a rollout ends once that many tokens were sampled in it, over all processes, or
    # prompts_per_step groups are complete, whichever these are, and those that the step must train
    # are among them; steps then differ in size. Samplers with devices of their own, and workers, go
    # on meanwhile. 0: it ends with its step's groups
    round_tokens: int = setting(0, at_least(0), needs=_AHEAD)
    # keep the groups of each partial batch in the run's folder, with which train --replay=FOLDER
    # repeats the training without a sampler
    record: bool = setting(False, needs={"partial_batches": ("counter", "ready")})
    # whether workers sample, programs of their own that join the run (distflow worker): the
    # trainers have no sampler then
    workers: bool = False
    # nodes that workers run on each group beside those that sample, by their ids, such as reward:
    # host nodes of scope sample or group (distflow worker --nodes); (): the trainers run them.
    # With environment, rollout.environment runs on hosts of its own (--nodes=environment)
    worker_nodes: tuple[str, ...] = setting((), needs={"workers": ()})
    listen: str = "127.0.0.1:0"  # HOST:PORT where trainers answer workers; port 0: any free one
    # between two times that a worker sends tokens under way
    save_seconds: float = setting(5.0, above(0))
    # a group of which a worker sends nothing for so long is given to another one
    lease_seconds: float = setting(60.0, above(0))
    # for which trainers wait for a worker; then they save a checkpoint and end with exit code 75
    no_workers_seconds: float = setting(600.0, above(0))
    # failures of workers on a prompt, after which the next one takes its place
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
            "budget": self.round_tokens,
            "partial": self.in_partial_batches,
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
