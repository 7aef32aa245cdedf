"""How a piece of weights goes from a training mesh to the samplers' devices."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from distflow_jax.resharding.common_mesh import Refinement

# traceable: (parameters, number of the piece's first layer) -> the piece, as it arrives
Take = Callable[[Any, jax.Array], Any]
# traceable: (weights, piece, number of its first layer) -> the weights with the piece
Put = Callable[[Any, Any, jax.Array], Any]


class Step(Protocol):
    """Brings one piece: (weights or None, parameters, number of its first layer) -> the weights
    with it, or itself. The weights are donated."""

    def __call__(self, out: Any, params: Any, start: np.int32) -> Any:
        """Runs its programs."""

    def trace(self, out: Any, params: Any, start: np.int32) -> jax.stages.Traced:
        """The program on the trainer's devices."""


@dataclasses.dataclass(frozen=True)
class Layouts:
    """Of a piece: the trainer's before it goes, the samplers' as it arrives, and that of what `put`
    gives, on the samplers' (replica, tensor) mesh."""

    leaving: Any
    arriving: Any
    held: Any

    def of(self, choose: Callable[[Any], Any]) -> "Layouts":
        """Those of a part of it."""
        return Layouts(choose(self.leaving), choose(self.arriving), choose(self.held))


class Route(Protocol):
    """From the mesh of a trainer to where weights stay."""

    def view(self, x: Any) -> Any:
        """A parameter, or its ShapeDtypeStruct, as steps take it."""

    def place(self, layout: NamedSharding) -> NamedSharding:
        """Where weights stay that have this layout on the samplers' mesh."""

    def step(self, take: Take, put: Put, layouts: Layouts) -> Step:
        """A step whose pieces have these layouts."""


class WholeRoute:
    """From all devices to all devices: a step is one program."""

    def __init__(self, trainer: Mesh, replicas: Mesh, local: Mesh):
        self._common = Refinement(trainer, replicas)
        self.view, self.place = self._common.view, self._common.layout

    def step(self, take: Take, put: Put, layouts: Layouts) -> Step:
        """See Route."""

        def run(out, params, start):
            piece = take(params, start)
            came = jax.tree.map(self._common.travel, piece, layouts.leaving, layouts.arriving)
            return put(out, came, start)

        held = jax.tree.map(self.place, layouts.held)
        return jax.jit(run, donate_argnums=0, out_shardings=held)
