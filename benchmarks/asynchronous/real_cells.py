"""Runs on this machine's cores, each process on one: a step takes CPU-seconds / cores at least."""

import dataclasses
from typing import Any

from asynchronous.marked_run import MarkedRun

BESIDE = {"mesh.devices": "0:1", "mesh.roles": {"ROLLOUT": {"devices": "1:2"}}}
ON_ALL = {"mesh.devices": "0:1", "mesh.roles": {"ROLLOUT": {"devices": "0:1"}}}
MODELS = {  # name -> (config, settings)
    "tiny": ("tiny", {"rollout.max_response_length": 64, "rollout.num_slots": 64}),
    "smollm2": ("grpo_smollm2", {}),
}


@dataclasses.dataclass(frozen=True)
class RealCell:
    """One run of a model, synchronous or with samplers that run ahead."""

    model: str  # of MODELS
    schedule: str  # synchronous, shared or in_flight (on a device of their own)
    staleness: int
    steps: int  # that are timed
    warmup: int  # before them
    round: int = 0  # number of the run, of several of a kind

    @property
    def config(self) -> str:
        """The shipped config."""
        return MODELS[self.model][0]

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.model}-{self.schedule}-{self.staleness}-{self.round}"

    def settings(self) -> dict[str, Any]:
        """Values of the config, by key. Samplers are at work until the last timed step ends.

        With a learning rate of 0 all schedules have the same responses, and so the same work.
        """
        where = BESIDE if self.schedule == "in_flight" else ON_ALL
        common = {
            "training.steps": self.warmup + self.steps + self.staleness + 1,
            "algorithm.correction": "token_tis",
            "training.optimizer.lr": 0.0,
            "eval.dataset": "",
            "checkpoint.every": 1000,
            "health.enabled": False,
            "observe.trackers": (),
        }
        ahead = {"stream.max_staleness": self.staleness} if self.staleness else {}
        return MODELS[self.model][1] | where | common | ahead

    def make_run(self) -> MarkedRun:
        """How it is made and noted."""
        return MarkedRun()
