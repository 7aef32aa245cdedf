"""Runs on simulated devices: all is real but decoding, updating and moving weights."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from asynchronous.engine import DrawnLengths, SimulatedEngine
from asynchronous.lanes import Lane, wait_until
from asynchronous.marked_run import MarkedRun
from streaming_model import (
    CALL,
    DEVICES,
    ENGINES,
    PROMPTS,
    REWARD_SIGMA,
    REWARD_WORKERS,
    SAMPLES,
    SLOTS,
    Workload,
    mean_reward,
    work_of,
    workload_of,
)

from distflow_jax.batch import Rows
from distflow_jax.cluster import processes
from distflow_jax.models.weights.source import ModelSource
from distflow_jax.observe.spans import Spans
from distflow_jax.parallel import mesh
from distflow_jax.planning.plan_run import PreparedRun
from distflow_jax.planning.sizes import Sizes
from distflow_jax.planning.unit_programs import Program
from distflow_jax.pods.schedules import Decode, DeviceSplit
from distflow_jax.runtime.build import Runtime, Span, build
from distflow_jax.runtime.open_run import OpenRun
from distflow_jax.training.state import TrainState
from distflow_jax.training.update import HAS_SEQUENCES

SETTINGS = {
    "model.source": "random:llama?hidden=32&layers=1&heads=2&kv_heads=1&mlp=64&vocab=512"
    "&max_position=2048",
    "data.prompts_per_step": PROMPTS,
    "data.max_prompt_length": 64,
    "rollout.num_samples": SAMPLES,
    "rollout.num_slots": SLOTS,
    "rollout.tokens_per_call": CALL,
    "training.row_tokens": 2304,  # two of the longest responses with their prompts
    "algorithm.proximal": "rollout",
    "reward.kwargs": {"pattern": ".*[0-9]"},
    "eval.dataset": "",
    "checkpoint.every": 10,
    "health.enabled": False,
    "observe.trackers": (),
    "observe.samples_every": 10,
    "mesh.devices": "0:1",
}
# JAX's devices lend their meshes, and hold a tiny model; simulated ones have its work
SHARED = {"mesh.roles": {"ROLLOUT": {"devices": "0:1"}}}
OWN = {"mesh.roles": {"ROLLOUT": {"devices": "1:2"}}}
PARTIAL_BATCHES = {
    "stream.partial_batches": "ready",
    "stream.partial_batch_rows": 4,
}  # as many as the longest group may take


@dataclasses.dataclass(frozen=True)
class SimulatedCell:
    """One run of a cell."""

    workload: str
    schedule: str  # synchronous, boundary, in_flight, partial batches or shared
    staleness: int
    samplers: int  # simulated devices that sample, of all processes
    steps: int  # that are timed
    warmup: int  # before them
    width: int = 1  # devices that share a copy of the sampler's weights
    seed: int = 0
    round_tokens: int = 0  # of a rollout on shared devices; 0: it ends with B groups of its step

    @property
    def lengths(self) -> Workload:
        """Its workload."""
        return workload_of(self.workload)

    @property
    def engines(self) -> int:
        """Samplers, each with a share of the devices that sample."""
        return ENGINES

    @property
    def layout(self) -> DeviceSplit:
        """Its devices."""
        return DeviceSplit(self.samplers, self.trainers, self.width, self.engines, SLOTS)

    @property
    def config(self) -> str:
        """The shipped config."""
        return "tiny"

    @property
    def own_devices(self) -> bool:
        """Whether samplers have devices that do not train."""
        return self.schedule in ("boundary", "in_flight", "partial_batches")

    @property
    def trainers(self) -> int:
        """Simulated devices that train, of all processes."""
        return DEVICES - self.samplers if self.own_devices else self.samplers

    @property
    def name(self) -> str:
        """Of its folder."""
        budget = f"-{self.round_tokens}" if self.round_tokens else ""
        layout = f"{self.samplers}x{self.width}"
        return f"{self.workload}-{self.schedule}-{self.staleness}-{layout}{budget}"

    def settings(self) -> dict[str, Any]:
        """Values of the config, by key. Samplers are at work until the last timed step ends."""
        changed = SETTINGS | (OWN if self.own_devices else SHARED)
        changed |= {
            "training.steps": self.warmup + self.steps + self.staleness + 1,
            "seed": self.seed,
        }
        changed["rollout.max_response_length"] = self.lengths.longest
        if self.schedule == "boundary":
            changed["stream.weight_update"] = "boundary"
        changed |= {"stream.round_tokens": self.round_tokens} if self.round_tokens else {}
        if self.schedule == "partial_batches":
            changed |= PARTIAL_BATCHES
        if self.lengths.reward:
            changed |= slow_rewards(mean_reward(self.lengths))
        return changed | ({"stream.max_staleness": self.staleness} if self.staleness else {})

    def make_run(self) -> MarkedRun:
        """How it is made and noted."""
        return SimulatedRun(self)


def slow_rewards(mean: float) -> dict[str, Any]:
    """Settings of rewards that take seconds, `mean` on average."""
    return {
        "reward.function": f"{pathlib.Path(__file__).with_name('slow_reward.py')}:score",
        "reward.kwargs": {"mean": mean, "sigma": REWARD_SIGMA},
        "reward.num_workers": REWARD_WORKERS // ENGINES,
        "reward.timeout_seconds": 1000 * mean,
        "reward.start_seconds": 600.0,  # all of them start at once
    }


class SimulatedSync:
    """In place of a WeightSync: a weight update takes seconds, and the weights are a number."""

    def __init__(self, weight_update: float, sampler: Lane):
        """`weight_update`: seconds of a whole one."""
        self._swap, self._sampler = weight_update, sampler

    def __call__(self, params: Any) -> Any:
        """A whole weight update, for which the devices do nothing else."""
        self._sampler.run("weight_update", self._swap)
        return {"weights": jnp.zeros(())}

    def leave(self, params: Any) -> "SimulatedWeights":
        """Begins to send the weights."""
        return SimulatedWeights()

    def arrive(self, left: "SimulatedWeights") -> Any:
        """The weights on the sampler's devices, after a whole weight update."""
        return self(left)

    def temporaries(self, params: Any) -> int | None:
        """None: there is no program."""


@dataclasses.dataclass(frozen=True)
class SimulatedWeights:
    """Weights on their way."""

    nbytes: int = 0
    ready: bool = True  # whether they are in the memory of the host


class SimulatedProgram:
    """In place of a unit's program: it takes seconds for each token of a batch or of a partial
    batch, and counts its updates. The program of a partial batch returns once it is under way, as
    one on an accelerator
    does: the next partial batch is made ready meanwhile."""

    def __init__(self, program: Program, lane: Lane, token: float, *, of_partial_batches: bool):
        """`token`: seconds of one device. `of_partial_batches`: a call is no update of its own."""
        if program.outputs:
            raise ValueError(f"unit {program.unit.name!r} writes fields, and simulated ones do not")
        self._keys, self._lane, self._token = program.unit.state_keys, lane, token
        self._of_partial_batches = of_partial_batches

    def __call__(
        self, states: Mapping[str, Any], values: Sequence[Any]
    ) -> tuple[dict[str, Any], Sequence[Any], dict[str, Any]]:
        """See dag.plan_walker.Runner."""
        rows = next(value for value in values if isinstance(value, Rows))
        tokens = sum(int(np.sum(shard.data)) for shard in rows.length.addressable_shards)
        end = self._lane.begin("train", tokens * self._token / self._lane.devices)
        trained = {k: states[k] for k in self._keys if isinstance(states[k], TrainState)}
        if self._of_partial_batches:
            return trained, (), {}
        wait_until(end)
        return {k: _counted(s) for k, s in trained.items()}, (), {}


class SimulatedUpdate:
    """In place of a PartialBatchUpdate: it adds nothing up, waits for its partial batches, and
    counts its updates."""

    def __init__(self, lane: Lane):
        """`lane`: the devices that train."""
        self._lane = lane

    def begin(self, state: TrainState) -> TrainState:
        """The state as it is."""
        return state

    def finish(self, state: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """The state after an update, and that it trained something."""
        self._lane.wait()
        return _counted(state), {HAS_SEQUENCES: jnp.bool_(True)}


def _counted(state: TrainState) -> TrainState:
    return dataclasses.replace(state, count=state.count + 1)


def simulated_engine(
    source: ModelSource, sizes: Sizes, cell: SimulatedCell, lane: Lane, *, speed: float = 1.0
) -> SimulatedEngine:
    """An engine of a cell, in the place of a run's own; at `speed` 2 it decodes twice as fast."""
    costs = cell.layout.decode(work_of(cell.lengths))
    return SimulatedEngine(
        source.config,
        sizes.engine,
        mesh.sampler_mesh(1, submesh=sizes.sampler_submesh),
        stop_ids=source.tokenizer.stop_ids,
        token=source.tokenizer.encode("7")[0],
        lane=lane,
        costs=Decode(costs.step / speed, costs.slot / speed, costs.prompt / speed),
        lengths=DrawnLengths(cell.lengths.lengths, cell.seed, SAMPLES),
    )


class SimulatedRun(MarkedRun):
    """A run on simulated devices, which notes their work too."""

    def __init__(self, cell: SimulatedCell):
        super().__init__()
        self.cell, here = cell, processes.process_count()
        self.sampler = self.trainer = Lane(cell.samplers // here)
        if cell.own_devices:
            self.trainer = Lane(cell.trainers // here)

    def make_sampler(
        self, prepared: PreparedRun, weight_update: float
    ) -> tuple[SimulatedEngine, SimulatedSync] | None:
        """The sampler of this process and its weight updates; None: workers sample."""
        engine = simulated_engine(prepared.source, prepared.sizes, self.cell, self.sampler)
        return engine, SimulatedSync(weight_update, self.sampler)

    def build(self, prepared: PreparedRun, spans: Spans, phase: Span) -> Runtime:
        """The parts of a real run, with stand-ins where devices would work."""
        work = work_of(self.cell.lengths)
        sampler = self.make_sampler(prepared, work.weight_update)
        runtime = build(prepared, spans, phase, sampler=sampler)
        partial_batches = runtime.partial_batches
        simulated = {
            name: SimulatedProgram(
                *(program, self.trainer, work.token),
                of_partial_batches=partial_batches is not None and name in partial_batches.units,
            )
            for name, program in runtime.programs.items()
            if any(task.node.type != "COMPUTE" for task in program.unit.tasks)
        }
        if partial_batches is not None:
            partial_batches = dataclasses.replace(
                partial_batches,
                updates=dict.fromkeys(partial_batches.updates, SimulatedUpdate(self.trainer)),
            )
        return dataclasses.replace(
            runtime, runners=runtime.runners | simulated, partial_batches=partial_batches
        )

    def work(self, run: OpenRun) -> dict[str, Any]:
        """Seconds of simulated devices by kind of work, so far."""
        return {"sampler": dict(self.sampler.busy), "trainer": dict(self.trainer.busy)}
