"""Offload: eviction of models to host memory, and their prefetch before the nodes that use them.

dag/residency.py decides from the plan when each item moves. Nothing waits for a transfer, except
that a model is prefetched only after the node before the running one has ended: at most two nodes'
models share the devices.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax

from distflow_jax.dag.plan_walker import Runner
from distflow_jax.dag.residency import Item, Residency
from distflow_jax.layout import Layout, overlaps
from distflow_jax.parallel import host_memory
from distflow_jax.rollout.sampler import SamplerState
from distflow_jax.training.state import TrainState


@dataclasses.dataclass
class _Copies:
    """One item's copies: on the host, on the devices, or both, which then are equal."""

    host: Any = None
    device: Any = None

    @property
    def any(self) -> Any:
        return self.host if self.device is None else self.device


class Offload:
    """The states of a run's models and samplers, on the host or on their devices.

    `layouts` are keyed by the models' state keys. `new_cache` allocates a sampler's cache, which
    holds nothing between two rollouts.
    """

    def __init__(
        self,
        residencies: Mapping[str, Residency],
        layouts: Mapping[str, Layout],
        new_cache: Callable[[], Any] | None,
    ):
        self._residencies, self._layouts, self._new_cache = residencies, layouts, new_cache
        self._keys = {key for s in residencies.values() for key, _ in s.uses | s.replaces}
        self._states: dict[str, Any] = {}  # as returned last
        self._copies: dict[Item, _Copies] = {}
        self._last: dict[Layout, Any] = {}  # outputs of the last node on these devices

    def wrap(self, name: str, key: str, runner: Runner) -> Runner:
        """The runner of a node that uses model `key`, with the node's items on its devices."""
        if name not in self._residencies:
            return runner

        def wrapped(states, values):
            self.enter(name)
            kept, written, metrics = runner({**states, key: self._compose(key)}, values)
            if key in kept:
                self._take(key, kept[key])
            self.leave(name, (written, metrics))
            return {key: self._hand_out(key)}, written, metrics

        return wrapped

    def adopt(self, key: str, state: Any) -> Any:
        """Takes over a state that was built elsewhere, and evicts it to the host."""
        if key not in self._keys:
            return state
        self._take(key, state)
        self._evict(item for item in list(self._copies) if item[0] == key)
        return self._hand_out(key)

    def update(self, states: dict[str, Any]) -> None:
        """Replaces the entries of `states` that are held here by their current copies."""
        states |= {key: self._hand_out(key) for key in states.keys() & self._states.keys()}

    def abstract(self, states: Mapping[str, TrainState]) -> dict[str, TrainState]:
        """Shapes and host layouts of evicted `states`, for reading them from a checkpoint."""
        return {key: _waiting(x) if key in self._keys else x for key, x in states.items()}

    @contextlib.contextmanager
    def staying(self, name: str, states: dict[str, Any]) -> Iterator[None]:
        """A block with a residency of its own; `states` may be replaced inside."""
        self.enter(name)
        self.update(states)
        yield
        for key in self._keys & states.keys():
            if states[key] is not self._states.get(key):
                self._take(key, states[key])
        self.leave(name)
        self.update(states)

    def enter(self, name: str) -> None:
        """Before a node or block: evicts other models from its devices and fetches its items."""
        residency = self._residencies.get(name)
        if residency is None:
            return
        there = residency.uses | residency.replaces
        self._evict(
            item
            for item, copies in self._copies.items()
            if item not in there and self._shares_devices(item, residency)
        )
        for item in residency.replaces & self._copies.keys():
            copies = self._copies[item]
            host_memory.delete((copies.host, copies.device))
        self._fetch(residency.uses)

    def leave(self, name: str, given: Any = None) -> None:
        """After it: evicts and prefetches. `given`: arrays that are ready when it has ended."""
        residency = self._residencies.get(name)
        if residency is None:
            return
        self._evict(residency.evict)
        jax.block_until_ready(self._last.get(residency.layout))
        self._last[residency.layout] = given
        self._fetch(residency.prefetch)

    def _shares_devices(self, item: Item, residency: Residency) -> bool:
        layout = self._layouts.get(item[0])
        return layout is None or overlaps(layout, residency.layout)

    def _fetch(self, items: frozenset[Item]) -> None:
        for item in sorted(items & self._copies.keys()):
            copies = self._copies[item]
            if copies.device is None:
                is_cache = item[1] == "cache"
                copies.device = (
                    self._new_cache() if is_cache else host_memory.to_device(copies.host)
                )

    def _evict(self, items: Iterable[Item]) -> None:
        for item in items:
            copies = self._copies.get(item)
            if copies is None or copies.device is None:
                continue
            if copies.host is None and item[1] != "cache":
                copies.host = host_memory.to_host(copies.device)
            host_memory.delete(copies.device)
            copies.device = None

    def _take(self, key: str, state: Any) -> None:
        """Splits a state into its items. A new value invalidates the item's copy on the host."""
        for what, tree in _split(state).items():
            copies = self._copies.setdefault((key, what), _Copies())
            if tree is copies.any:
                continue
            if copies.host is not None:
                host_memory.delete(copies.host)
            waits = tree is None or host_memory.on_host(tree)
            self._copies[key, what] = _Copies(tree, None) if waits else _Copies(None, tree)
        self._states[key] = state

    def _compose(self, key: str) -> Any:
        items = {item[1]: x.any for item, x in self._copies.items() if item[0] == key}
        return _join(self._states[key], items)

    def _hand_out(self, key: str) -> Any:
        self._states[key] = self._compose(key)
        return self._states[key]


def _split(state: Any) -> dict[str, Any]:
    if isinstance(state, TrainState):
        return {"params": state.params, "moments": state.opt_state}
    if isinstance(state, SamplerState):
        return {"params": state.params, "cache": state.decode}
    return {"params": state}


def _waiting(state: TrainState) -> TrainState:
    params, moments = map(host_memory.layouts_on_host, (state.params, state.opt_state))
    return TrainState(params, moments, state.count)


def _join(state: Any, items: Mapping[str, Any]) -> Any:
    if isinstance(state, TrainState):
        return TrainState(items["params"], items["moments"], state.count)
    if isinstance(state, SamplerState):
        return dataclasses.replace(state, params=items["params"], decode=items["cache"])
    return items["params"]
