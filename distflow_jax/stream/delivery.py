"""Delivery of new weights to the sampler of one process."""

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

from distflow_jax.cluster import processes
from distflow_jax.cluster.peers import Peers
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
    peers: Peers  # of publications that the rule may leave out
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
    """The delivery of a run whose own processes sample.

    Collective. Only publishing by divergence has connections.
    """

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

    return Delivery(sync, *publishing(config, producer), start)


def publishing(config: StreamConfig, producer: Producer) -> tuple[PublishRule, Peers]:
    """The rule of a run's publications, and the numbers of one that may leave some out.

    Collective.
    """
    rule = PublishRule(config.divergence, config.max_staleness)
    return rule, peers_of(producer, spreads=rule.skips)


def peers_of(producer: Producer, *, spreads: bool) -> Peers:
    """Numbers that wake a producer's threads where they rise; without `spreads` they have no
    connections. Collective."""
    exchange = processes.second_exchange() if spreads else None
    return Peers(exchange, processes.process_index(), processes.process_count(), producer.wake)
