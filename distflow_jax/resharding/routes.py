"""Routes of weight chunks from a training mesh to the samplers' devices."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from distflow_jax.resharding.common_mesh import CommonMesh

# traceable: (parameters, the chunk's first layer) -> the chunk to be moved
Take = Callable[[Any, jax.Array], Any]
# traceable: (weights or None, chunk, its first layer) -> the weights with the chunk written in
Put = Callable[[Any, Any, jax.Array], Any]


class Step(Protocol):
    """The move of one chunk: (weights or None, parameters, the chunk's first layer) -> weights.

    Returns the weights with the chunk written in, or the chunk alone for None. The weights passed
    in are donated.
    """

    def __call__(self, out: Any, params: Any, start: np.int32) -> Any:
        """Runs the programs of the step."""

    def trace(self, out: Any, params: Any, start: np.int32) -> jax.stages.Traced:
        """The program on the trainer's devices."""


@dataclasses.dataclass(frozen=True)
class Layouts:
    """Pytrees of the NamedShardings of a chunk on its way."""

    leaving: Any  # on the trainer's mesh, before the move
    arriving: Any  # on the samplers' (replica, tensor) mesh, after the move
    held: Any  # of the output of `put`, on the samplers' mesh

    def of(self, choose: Callable[[Any], Any]) -> "Layouts":
        """The layouts of a subtree, picked by `choose`."""
        return Layouts(choose(self.leaving), choose(self.arriving), choose(self.held))


class Route(Protocol):
    """A way from a trainer's mesh to the devices on which samplers hold the weights."""

    def view(self, x: Any) -> Any:
        """A parameter, or its ShapeDtypeStruct, in the layout that steps take."""

    def place(self, layout: NamedSharding) -> NamedSharding:
        """The sharding in which weights of this layout on the samplers' mesh are stored."""

    def step(self, take: Take, put: Put, layouts: Layouts) -> Step:
        """A step for chunks of these layouts."""


class WholeRoute:
    """The route from all devices to all devices: a step is one program."""

    def __init__(self, trainer: Mesh, replicas: Mesh, local: Mesh):
        self._common = CommonMesh(trainer, replicas)
        self.view, self.place = self._common.view, self._common.layout

    def step(self, take: Take, put: Put, layouts: Layouts) -> Step:
        """See Route."""

        def run(out, params, start):
            chunk = take(params, start)
            arrived = jax.tree.map(self._common.reshard, chunk, layouts.leaving, layouts.arriving)
            return put(out, arrived, start)

        held = jax.tree.map(self.place, layouts.held)
        return jax.jit(run, donate_argnums=0, out_shardings=held)
