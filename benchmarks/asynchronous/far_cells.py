"""Runs whose samplers are workers: programs outside the trainers' job, on simulated devices.

Task buffers, wire, leases and the pull of the (tiny) weights are real.
"""

import dataclasses
from typing import Any

from asynchronous.engine import SimulatedEngine
from asynchronous.marked_run import MarkedRun
from asynchronous.simulated_run import SimulatedCell, SimulatedRun, SimulatedSync
from streaming_model import SLOTS

from distflow_jax.planning.plan_run import PreparedRun


@dataclasses.dataclass(frozen=True)
class FarCell(SimulatedCell):
    """One run of a cell with workers."""

    speeds: tuple[float, ...] = (1.0, 1.0)  # of each worker; at 1 its devices are as all others
    slots: int = SLOTS // 2  # of each worker
    training: int = 0  # devices that train; 0: those that do not sample

    @property
    def own_devices(self) -> bool:
        """Whether samplers have devices that do not train: all of them."""
        return True

    @property
    def trainers(self) -> int:
        """Simulated devices that train, of all processes."""
        return self.training or super().trainers

    @property
    def engines(self) -> int:
        """Samplers, each with a share of the devices that sample."""
        return len(self.speeds)

    @property
    def name(self) -> str:
        """Of its folder."""
        speeds = "+".join(f"{speed:g}" for speed in self.speeds)
        return f"{super().name}-far-{speeds}-{self.seed}"

    def settings(self) -> dict[str, Any]:
        """Values of the config, by key, of trainers and workers."""
        changed = super().settings()
        del changed["mesh.roles"]
        changed["stream.workers"] = True
        changed["rollout.num_slots"] = self.slots
        changed["stream.no_workers_seconds"] = 60.0
        return changed

    def make_run(self) -> MarkedRun:
        """How the run of the trainers is made and noted."""
        return FarRun(self)


class FarRun(SimulatedRun):
    """The trainers of a run with workers."""

    def make_sampler(
        self, prepared: PreparedRun, weight_update: float
    ) -> tuple[SimulatedEngine, SimulatedSync] | None:
        """None: workers sample."""
        return None
