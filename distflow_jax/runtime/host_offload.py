"""Models that wait in host memory while others have the devices.

What comes and goes when is decided from the plan (dag/residency.py); here it is done. Nothing waits
for a transfer, except that a model is fetched ahead only when the node before the one that is at
work has ended: more than two do not share the devices.
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
    """Of one item: a copy on the host, one on the devices, or both, which then are equal."""

    host: Any = None
    device: Any = None

    @property
    def any(self) -> Any:
        return self.host if self.device is None else self.device


class Offload:
    """Holds the states of a run's models and samplers, on the host or on their devices.

    `layouts` are those of the models, by the key of their state; a sampler has all devices.
    `new_cache` makes a sampler's cache anew: it holds nothing between two rollouts.
    """

    def __init__(
        self,
        stays: Mapping[str, Residency],
        layouts: Mapping[str, Layout],
        new_cache: Callable[[], Any] | None,
    ):
        self._stays, self._layouts, self._new_cache = stays, layouts, new_cache
        self._keys = {key for s in stays.values() for key, _ in s.uses | s.replaces}
        self._states: dict[str, Any] = {}  # as handed out last
        self._copies: dict[Item, _Copies] = {}
        self._last: dict[Layout, Any] = {}  # what the last node on these devices gave

    def wrap(self, name: str, key: str, runner: Runner) -> Runner:
        """The runner of a node that uses model `key`, which finds on its devices what it uses."""
        if name not in self._stays:
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
        """Takes over a state that was made elsewhere, and lets it wait on the host."""
        if key not in self._keys:
            return state
        self._take(key, state)
        self._put_away(item for item in list(self._copies) if item[0] == key)
        return self._hand_out(key)

    def update(self, states: dict[str, Any]) -> None:
        """Brings those of `states` that are held here up to where they lie now."""
        states |= {key: self._hand_out(key) for key in states.keys() & self._states.keys()}

    def abstract(self, states: Mapping[str, TrainState]) -> dict[str, TrainState]:
        """The shapes and layouts of `states` as they wait: to be read from a checkpoint."""
        return {key: _waiting(x) if key in self._keys else x for key, x in states.items()}

    @contextlib.contextmanager
    def staying(self, name: str, states: dict[str, Any]) -> Iterator[None]:
        """A block with a stay of its own, within which `states` may be given new ones."""
        self.enter(name)
        self.update(states)
        yield
        for key in self._keys & states.keys():
            if states[key] is not self._states.get(key):
                self._take(key, states[key])
        self.leave(name)
        self.update(states)

    def enter(self, name: str) -> None:
        """Before a node, or what else has a stay: its devices have what it uses, and no other
        model."""
        stay = self._stays.get(name)
        if stay is None:
            return
        there = stay.uses | stay.replaces
        self._put_away(
            item
            for item, copies in self._copies.items()
            if item not in there and self._shares_devices(item, stay)
        )
        for item in stay.replaces & self._copies.keys():
            copies = self._copies[item]
            host_memory.delete((copies.host, copies.device))
        self._fetch(stay.uses)

    def leave(self, name: str, given: Any = None) -> None:
        """After it; `given` are arrays that are there when its devices are done."""
        stay = self._stays.get(name)
        if stay is None:
            return
        self._put_away(stay.put_away)
        jax.block_until_ready(self._last.get(stay.layout))
        self._last[stay.layout] = given
        self._fetch(stay.fetch_ahead)

    def _shares_devices(self, item: Item, stay: Residency) -> bool:
        layout = self._layouts.get(item[0])
        return layout is None or overlaps(layout, stay.layout)

    def _fetch(self, items: frozenset[Item]) -> None:
        for item in sorted(items & self._copies.keys()):
            copies = self._copies[item]
            if copies.device is None:
                is_cache = item[1] == "cache"
                copies.device = (
                    self._new_cache() if is_cache else host_memory.to_device(copies.host)
                )

    def _put_away(self, items: Iterable[Item]) -> None:
        for item in items:
            copies = self._copies.get(item)
            if copies is None or copies.device is None:
                continue
            if copies.host is None and item[1] != "cache":
                copies.host = host_memory.to_host(copies.device)
            host_memory.delete(copies.device)
            copies.device = None

    def _take(self, key: str, state: Any) -> None:
        """Splits a state into its items. What is new makes a copy on the host worthless."""
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
