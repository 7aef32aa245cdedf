"""Delivery: how new weights reach the sampler of one process."""

import dataclasses
import threading
from collections.abc import Callable

from distflow_jax.parallel import processes
from distflow_jax.parallel.peers import Peers
from distflow_jax.resharding.weight_sync import WeightSync
from distflow_jax.stream.host_nodes import HostThread, NodesAhead, Span
from distflow_jax.stream.lease_monitor import LeaseMonitor
from distflow_jax.stream.producer import Producer
from distflow_jax.stream.publish_rule import PublishRule
from distflow_jax.stream.stream_config import StreamConfig


@dataclasses.dataclass(frozen=True)
class Delivery:
    """The parts that bring weights from the trainer to a sampler that runs ahead."""

    sync: WeightSync
    own_devices: bool  # whether the sampler has devices that no trainer uses
    rule: PublishRule
    peers: Peers | None = None  # of publications that the rule may leave out
    # makes the thread of a process whose groups workers sample, of a call that hands groups on
    thread: Callable[[Callable[[], None]], LeaseMonitor] | None = None
    # makes what runs nodes on groups of a process whose workers run some of them
    nodes: Callable[[NodesAhead, Span, threading.Condition], HostThread] = HostThread


def make_delivery(
    config: StreamConfig,
    producer: Producer,
    sync: WeightSync,
    *,
    own_devices: bool,
) -> Delivery:
    """The delivery of a run whose samplers run ahead.

    Collective. Only publishing by divergence has connections.
    """
    rule = PublishRule(config.divergence, config.max_staleness)
    peers = None
    if rule.skips:

        def heard() -> None:
            with producer.lock:
                producer.lock.notify_all()

        index, count = processes.process_index(), processes.process_count()
        peers = Peers(processes.second_exchange(), index, count, heard)
    return Delivery(sync, own_devices, rule, peers)
