"""A worker's relay: it hands the weights that it has pulled on to other workers."""

import dataclasses
from collections.abc import Callable

from distflow_jax.flow.wire.caller import Caller
from distflow_jax.flow.wire.door import Door
from distflow_jax.flow.workers.doors import announced
from distflow_jax.flow.workers.run_token import find_run_token
from distflow_jax.flow.workers.weight_shelf import WeightShelf


@dataclasses.dataclass(frozen=True)
class Relay:
    """Where a worker serves what it pulls, and how it calls others that do.

    The weights of one version stay in the memory of its host.
    """

    shelf: WeightShelf
    door: Door
    address: str  # that others call
    connect: Callable[[str], Caller]

    @classmethod
    def open(cls, listen: str, folder: str | None, name: str) -> "Relay":
        """A relay that listens on HOST:PORT; `folder` of the run, None if it is not known.

        Raises ValueError for an address in use, or a token that is not known.
        """
        token = find_run_token(folder)
        shelf = WeightShelf("")
        door = Door(listen, token, shelf.methods())

        def connect(address: str) -> Caller:
            return Caller(address, token, name)

        return cls(shelf, door, announced(listen, door.port), connect)

    def close(self) -> None:
        """Ends the calls of others."""
        self.door.close()
