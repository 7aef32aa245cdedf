"""Delivery of new weights to the sampler of one process."""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

from distflow_jax.config.stream_config import StreamConfig
from distflow_jax.environments.episode_sampler import EpisodeSampler
from distflow_jax.resharding.weight_sync import WeightSync
from distflow_jax.stream.exact_order import ExactOrder
from distflow_jax.stream.host_nodes import HostThread, NodesAhead, Span
from distflow_jax.stream.links.local_link import InlineLink, OrderedLink, ThreadLink
from distflow_jax.stream.producer import Producer
from distflow_jax.stream.publish_rule import PublishRule
from distflow_jax.stream.sampling_side import Hooks, SamplingSide
from distflow_jax.stream.schedule import weight_buffers


@dataclasses.dataclass(frozen=True)
class Delivery:
    """The parts that bring weights from the trainer to an asynchronous sampler.

    Nothing runs until Driver, which makes the hooks, calls `start` once; threads begin there.
    """

    sync: WeightSync
    rule: PublishRule
    start: Callable[[Hooks], SamplingSide]  # starts what samples
    # makes what runs nodes on groups of a process whose workers run some of them
    nodes: Callable[[NodesAhead, Span, threading.Condition], HostThread] = HostThread


def make_delivery(
    config: StreamConfig,
    sampler: EpisodeSampler,
    producer: Producer,
    sync: WeightSync,
    *,
    own_devices: bool,
) -> Delivery:
    """The delivery of a run whose own processes sample."""

    def start(hooks: Hooks) -> SamplingSide:
        hand_on, evaluations = hooks.hand_on, hooks.evaluations
        options: dict[str, Any] = {"cache": config.cache, "span": hooks.span}
        if not own_devices:
            return InlineLink(sampler, producer, hand_on, idle=hooks.idle, **options)
        options |= {"arrive": hooks.arrive, "buffers": weight_buffers(config)}
        if config.weight_update == "in_flight":
            return ThreadLink(sampler, producer, hand_on, idle=hooks.idle, **options)
        order = ExactOrder(
            producer.admission, held=producer.version, known=hooks.known, due=evaluations.due
        )
        return OrderedLink(
            sampler, producer, hand_on, order=order, evaluations=evaluations, **options
        )

    return Delivery(sync, PublishRule(config.divergence, config.max_staleness), start)
