"""Runs that note, after each step, the time and what CPUs and simulated devices have done.

On simulated devices all is real but decoding, updating and moving weights.
"""

import dataclasses
import json
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from asynchronous.cells import FarCell, SimulatedCell
from asynchronous.engine import DrawnLengths, Lane, SimulatedEngine, wait_until
from streaming_model import SAMPLES, work_of

from distflow_jax.batch import Rows
from distflow_jax.cluster import processes
from distflow_jax.layout import Metrics
from distflow_jax.models.weights.source import ModelSource
from distflow_jax.observe.spans import Spans
from distflow_jax.parallel import mesh
from distflow_jax.planning.plan_run import PreparedRun
from distflow_jax.planning.sizes import Sizes
from distflow_jax.planning.unit_programs import Program
from distflow_jax.pods.schedules import Decode
from distflow_jax.run import one_step
from distflow_jax.runtime.build import Runtime, Span, build
from distflow_jax.runtime.step_actions import OpenRun
from distflow_jax.sandbox.descendants import descendants, usage
from distflow_jax.training.state import TrainState
from distflow_jax.training.update import HAS_SEQUENCES


def own_cpu_seconds() -> float:
    """CPU-seconds of this process and those that it has started, so far (Linux)."""
    return sum(usage(process)[1] for process in (os.getpid(), *descendants()))


def machine_cpu_seconds() -> float:
    """CPU-seconds of everything on the machine since it was booted (Linux)."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


class MarkedRun:
    """Notes of a run whose parts `build` makes, and whose steps `step`: see run.open_run, run.loop.
    `write_marks` leaves them in its folder."""

    def __init__(self):
        self.marks: list[dict[str, Any]] = []

    def build(self, prepared: PreparedRun, spans: Spans, phase: Span) -> Runtime:
        """The parts of the run, as of runtime/build.py."""
        return build(prepared, spans, phase)

    def step(self, run: OpenRun) -> Metrics:
        """One step."""
        metrics = one_step(run)
        now = {"time": time.perf_counter(), "own_cpu": own_cpu_seconds()}
        self.marks.append(now | {"machine_cpu": machine_cpu_seconds()} | self.work())
        return metrics

    def work(self) -> dict[str, Any]:
        """Seconds of simulated devices by kind of work, so far: none here."""
        return {}

    def write_marks(self, folder: pathlib.Path) -> None:
        """Writes the notes of this process."""
        path = folder / f"marks-{processes.process_index()}.json"
        path.write_text(json.dumps(self.marks))


class SimulatedRun(MarkedRun):
    """A run on simulated devices, which notes their work too."""

    def __init__(self, cell: SimulatedCell):
        super().__init__()
        self._cell, here = cell, processes.process_count()
        self._sampler = self._trainer = Lane(cell.samplers // here)
        if cell.own_devices:
            self._trainer = Lane(cell.trainers // here)

    def build(self, prepared: PreparedRun, spans: Spans, phase: Span) -> Runtime:
        """The parts of a real run, with stand-ins where devices would work."""
        sampler, work = None, work_of(self._cell.lengths)
        if not isinstance(self._cell, FarCell):
            sampler = simulated_sampler(prepared.source, prepared.sizes, self._cell, self._sampler)
        runtime = build(prepared, spans, phase, sampler=sampler)
        partial = runtime.partial_batches
        simulated = {
            name: SimulatedProgram(
                program,
                self._trainer,
                work.token,
                of_partial_batches=partial is not None and name in partial.units,
            )
            for name, program in runtime.programs.items()
            if any(task.node.type != "COMPUTE" for task in program.unit.tasks)
        }
        if partial is not None:
            updates = dict.fromkeys(partial.updates, SimulatedUpdate(self._trainer))
            partial = dataclasses.replace(partial, updates=updates)
        return dataclasses.replace(
            runtime, runners=runtime.runners | simulated, partial_batches=partial
        )

    def work(self) -> dict[str, Any]:
        """Seconds of simulated devices by kind of work, so far."""
        return {"sampler": dict(self._sampler.busy), "trainer": dict(self._trainer.busy)}


def simulated_sampler(
    source: ModelSource, sizes: Sizes, cell: SimulatedCell, lane: Lane, *, speed: float = 1.0
) -> tuple[SimulatedEngine, "SimulatedSync"]:
    """An engine of a cell and its weight updates, in the place of a run's own.

    At `speed` 2 it decodes twice as fast.
    """
    work = work_of(cell.lengths)
    costs = cell.layout.decode(work)
    engine = SimulatedEngine(
        source.config,
        sizes.engine,
        mesh.sampler_mesh(1, submesh=sizes.sampler_submesh),
        stop_ids=source.tokenizer.stop_ids,
        token=source.tokenizer.encode("7")[0],
        lane=lane,
        costs=Decode(costs.step / speed, costs.slot / speed, costs.prompt / speed),
        lengths=DrawnLengths(cell.lengths.lengths, 0, SAMPLES),
    )
    return engine, SimulatedSync(work.weight_update, lane)


class SimulatedSync:
    """In place of a WeightSync: a weight update takes seconds, and the weights are a number."""

    def __init__(self, weight_update: float, sampler: Lane):
        """`weight_update`: seconds of a whole one."""
        self._swap, self._sampler = weight_update, sampler

    def __call__(self, params: Any) -> Any:
        """A whole weight update, for which the devices do nothing else."""
        wait_until(self._sampler.begin("weight_update", self._swap))
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
    one on an accelerator does: the next partial batch is made ready meanwhile."""

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
        wait_until(self._lane.free)
        return _counted(state), {HAS_SEQUENCES: jnp.bool_(True)}


def _counted(state: TrainState) -> TrainState:
    return dataclasses.replace(state, count=state.count + 1)
