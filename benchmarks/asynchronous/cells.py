"""Cells of benchmarks/streaming.py: one run each, on this machine's cores or simulated devices."""

import dataclasses
import pathlib
from typing import Any

import streaming_model

from distflow_jax.pods.schedules import DeviceSplit

MODELS = {  # name -> (config, settings)
    "tiny": ("tiny", {"rollout.max_response_length": 64, "rollout.num_slots": 64}),
    "smollm2": ("grpo_smollm2", {}),
}
# of runs on simulated devices: JAX's devices lend their meshes, and hold a tiny model
SIMULATED = {
    "model.source": "random:llama?hidden=32&layers=1&heads=2&kv_heads=1&mlp=64&vocab=512"
    "&max_position=2048",
    "data.prompts_per_step": streaming_model.PROMPTS,
    "data.max_prompt_length": 64,
    "rollout.num_samples": streaming_model.SAMPLES,
    "rollout.num_slots": streaming_model.SLOTS,
    "rollout.tokens_per_call": streaming_model.CALL,
    "training.row_tokens": 2304,  # two of the longest responses with their prompts
    "algorithm.proximal": "rollout",
    "reward.kwargs": {"pattern": ".*[0-9]"},
    "checkpoint.every": 10,
    "observe.samples_every": 10,
}
PARTIAL_BATCHES = {
    "stream.partial_batches": "ready",
    "stream.partial_batch_rows": 4,
}  # as many as the longest group may take


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One run."""

    schedule: str  # synchronous, boundary, in_flight, partial_batches or shared
    staleness: int
    steps: int  # that are timed
    warmup: int  # before them

    @property
    def config(self) -> str:
        """The shipped config."""
        return "tiny"

    @property
    def own_devices(self) -> bool:
        """Whether samplers have devices that do not train."""
        return self.schedule in ("boundary", "in_flight", "partial_batches")

    @property
    def last(self) -> int:
        """The run's last step: samplers are at work until the last timed one ends."""
        return self.warmup + self.steps + self.staleness + 1

    def settings(self) -> dict[str, Any]:
        """Values of the config, by key."""
        sampling = "1:2" if self.own_devices else "0:1"
        common = {
            "mesh.devices": "0:1",
            "mesh.roles": {"ROLLOUT": {"devices": sampling}},
            "training.steps": self.last,
            "eval.dataset": "",
            "health.enabled": False,
            "observe.trackers": (),
        }
        return common | ({"stream.max_staleness": self.staleness} if self.staleness else {})


@dataclasses.dataclass(frozen=True, kw_only=True)
class RealCell(Cell):
    """A model that computes, each process on a core of its own.

    With a learning rate of 0 all schedules have the same responses, and so the same work.
    """

    model: str  # of MODELS
    round: int = 0  # number of the run, of several of a kind

    @property
    def config(self) -> str:
        return MODELS[self.model][0]

    @property
    def name(self) -> str:
        return f"{self.model}-{self.schedule}-{self.staleness}-{self.round}"

    def settings(self) -> dict[str, Any]:
        same = {"algorithm.correction": "token_tis", "training.optimizer.lr": 0.0}
        return super().settings() | MODELS[self.model][1] | same | {"checkpoint.every": 1000}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatedCell(Cell):
    """A workload on simulated devices."""

    workload: str
    samplers: int  # simulated devices that sample, of all processes
    width: int = 1  # devices that share a copy of the sampler's weights

    @property
    def lengths(self) -> streaming_model.Workload:
        """Its workload."""
        return streaming_model.workload_of(self.workload)

    @property
    def engines(self) -> int:
        """Samplers, each with a share of the devices that sample."""
        return streaming_model.ENGINES

    @property
    def trainers(self) -> int:
        """Simulated devices that train, of all processes."""
        return streaming_model.DEVICES - self.samplers if self.own_devices else self.samplers

    @property
    def layout(self) -> DeviceSplit:
        """Its devices."""
        return DeviceSplit(
            self.samplers, self.trainers, self.width, self.engines, streaming_model.SLOTS
        )

    @property
    def name(self) -> str:
        layout = f"{self.samplers}x{self.width}"
        return f"{self.workload}-{self.schedule}-{self.staleness}-{layout}"

    def settings(self) -> dict[str, Any]:
        changed = super().settings() | SIMULATED
        changed["rollout.max_response_length"] = self.lengths.longest
        if self.schedule == "boundary":
            changed["stream.weight_update"] = "boundary"
        if self.schedule == "partial_batches":
            changed |= PARTIAL_BATCHES
        if self.lengths.reward:
            changed |= slow_rewards(streaming_model.mean_reward(self.lengths))
        return changed


@dataclasses.dataclass(frozen=True, kw_only=True)
class FarCell(SimulatedCell):
    """A workload whose samplers are workers, programs outside the trainers' job."""

    schedule: str = "in_flight"
    speeds: tuple[float, ...] = (1.0, 1.0)  # of each worker; at 1 its devices are as all others
    training: int = 0  # devices that train; 0: those that do not sample

    @property
    def trainers(self) -> int:
        return self.training or super().trainers

    @property
    def engines(self) -> int:
        return len(self.speeds)

    @property
    def name(self) -> str:
        speeds = "+".join(f"{speed:g}" for speed in self.speeds)
        return f"{super().name}-far-{speeds}"

    def settings(self) -> dict[str, Any]:
        """Values of the config, by key, of trainers and workers."""
        changed = super().settings()
        del changed["mesh.roles"]
        changed["stream.workers"] = True
        changed["rollout.num_slots"] = streaming_model.SLOTS // 2  # of each worker
        changed["stream.no_workers_seconds"] = 60.0
        return changed


KINDS = {kind.__name__: kind for kind in (RealCell, SimulatedCell, FarCell)}


def slow_rewards(mean: float) -> dict[str, Any]:
    """Settings of rewards that take seconds, `mean` on average."""
    return {
        "reward.function": f"{pathlib.Path(__file__).with_name('slow_reward.py')}:score",
        "reward.kwargs": {"mean": mean, "sigma": streaming_model.REWARD_SIGMA},
        "reward.num_workers": streaming_model.REWARD_WORKERS // streaming_model.ENGINES,
        "reward.timeout_seconds": 1000 * mean,
        "reward.start_seconds": 600.0,  # all of them start at once
    }
