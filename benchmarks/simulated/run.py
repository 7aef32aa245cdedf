"""Runs of one process on simulated devices: all is real but decoding, updating and moving weights.

`run_cells` is what every process of the job does: one run after the other.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from simulated.engine import DecodeCosts, DrawnLengths, SimulatedEngine
from simulated.lanes import Lane, wait_until
from streaming_model import DEVICES, EXPOSED, SLOT_STEP, STEP, WORKLOADS, Costs

from distflow_jax.batch import Rows
from distflow_jax.checkpoint.checkpointer import Checkpointer
from distflow_jax.notebook import load_config
from distflow_jax.parallel import job, mesh, processes
from distflow_jax.planning.plan_run import PreparedRun, prepare
from distflow_jax.planning.unit_programs import Program
from distflow_jax.report.terminal import Terminal
from distflow_jax.run import Run
from distflow_jax.runtime.build import Runtime, build
from distflow_jax.training.state import TrainState
from distflow_jax.watchdog.controller import Watchdog
from distflow_jax.watchdog.supervision import stop_on_sigterm

SETTINGS = {
    "model.source": "random:llama?hidden=32&layers=1&heads=2&kv_heads=1&mlp=64&vocab=512"
    "&max_position=2048",
    "data.prompts_per_step": 32,
    "data.max_prompt_length": 64,
    "rollout.num_samples": 8,
    "rollout.max_response_length": 1024,
    "rollout.num_slots": 256,
    "rollout.tokens_per_call": 16,
    "training.row_tokens": 2048,
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


@dataclasses.dataclass(frozen=True)
class CellRun:
    """One run of a cell."""

    workload: str
    schedule: str  # synchronous, boundary, in_flight or shared
    lag: int
    samplers: int  # simulated devices that sample, of all processes
    steps: int  # that are timed
    warmup: int  # before them
    seed: int = 0

    @property
    def own_devices(self) -> bool:
        """Whether samplers have devices that do not train."""
        return self.schedule in ("boundary", "in_flight")

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.workload}-{self.schedule}-{self.lag}-{self.samplers}"

    def settings(self) -> dict[str, Any]:
        """Values of the config, by key. Samplers are at work until the last timed step ends."""
        changed = SETTINGS | (OWN if self.own_devices else SHARED)
        changed |= {"training.steps": self.warmup + self.steps + self.lag + 1, "seed": self.seed}
        if self.schedule == "boundary":
            changed["flow.swap"] = "boundary"
        return changed | ({"flow.max_lag": self.lag} if self.lag else {})


class SimulatedSync:
    """In place of a WeightSync: a swap takes seconds, and the weights are a number."""

    def __init__(self, swap: float, sampler: Lane, wire: Lane):
        """`swap`: seconds of a whole one; `wire`: between trainers and samplers."""
        self._swap, self._sampler, self._wire = swap, sampler, wire

    def __call__(self, params: Any) -> Any:
        self._sampler.run("swap", self._swap)
        return {"weights": jnp.zeros(())}

    def leave(self, params: Any) -> float:
        """Begins to send the weights; returns when they are in the memory of the host."""
        return self._wire.begin("swap", (1 - EXPOSED) * self._swap)

    def has_left(self, left: float) -> bool:
        """Whether weights are there."""
        return time.perf_counter() >= left

    def arrive(self, left: float) -> Any:
        """The weights on the sampler's devices."""
        wait_until(left)
        self._sampler.run("swap", EXPOSED * self._swap)
        return {"weights": jnp.zeros(())}

    def temporaries(self, params: Any) -> int | None:
        """None: there is no program."""


class SimulatedProgram:
    """In place of a unit's program: it takes seconds for each token, and counts its updates."""

    def __init__(self, program: Program, lane: Lane, token: float):
        """`token`: seconds of one device."""
        if program.outputs:
            raise ValueError(f"unit {program.unit.name!r} writes fields, and simulated ones do not")
        self._keys, self._lane, self._token = program.unit.state_keys, lane, token

    def __call__(
        self, states: Mapping[str, Any], values: Sequence[Any]
    ) -> tuple[dict[str, Any], Sequence[Any], dict[str, Any]]:
        """See dag.plan_walker.Runner."""
        rows = next(value for value in values if isinstance(value, Rows))
        tokens = sum(int(np.sum(shard.data)) for shard in rows.length.addressable_shards)
        self._lane.run("train", tokens * self._token / self._lane.devices)
        trained = {k: states[k] for k in self._keys if isinstance(states[k], TrainState)}
        kept = {k: dataclasses.replace(s, count=s.count + 1) for k, s in trained.items()}
        return kept, (), {}


class SimulatedRun(Run):
    """A run that notes, after each step, the time and what its devices and CPUs have done."""

    def __init__(self, cell: CellRun, prepared: PreparedRun, folder: pathlib.Path, *rest: Any):
        self.cell, self.marks = cell, []
        here, devices = processes.process_count(), DEVICES
        self.sampler = Lane(cell.samplers // here)
        self.trainer = Lane((devices - cell.samplers) // here) if cell.own_devices else self.sampler
        super().__init__(prepared, folder, *rest)

    def make_runtime(self) -> Runtime:
        """The parts of a real run, with stand-ins where devices would work."""
        prepared, sizes = self.prepared, self.prepared.sizes
        source, n = prepared.source, prepared.config.rollout.num_samples
        (workload,) = (w for w in WORKLOADS if w.name == self.cell.workload)
        costs = Costs.of(workload)
        engine = SimulatedEngine(
            source.config,
            sizes.engine,
            mesh.sampler_mesh(1, submesh=sizes.sampler_submesh),
            stop_ids=source.tokenizer.stop_ids,
            token=source.tokenizer.encode("7")[0],
            lane=self.sampler,
            costs=DecodeCosts(STEP, SLOT_STEP),
            lengths=DrawnLengths(workload.lengths, prepared.config.seed, n),
        )
        sync = SimulatedSync(costs.swap, self.sampler, Lane(1))
        spans, phase = self.instruments.spans, self.phases.span
        runtime = build(prepared, spans, phase, sampler=(engine, sync))
        simulated = {
            name: SimulatedProgram(program, self.trainer, costs.token)
            for name, program in runtime.programs.items()
            if any(task.node.type != "COMPUTE" for task in program.unit.tasks)
        }
        return dataclasses.replace(runtime, runners=runtime.runners | simulated)

    def run_step(self, prompts: Any) -> dict[str, Any]:
        """One step."""
        metrics = super().run_step(prompts)
        self.marks.append(
            {
                "time": time.perf_counter(),
                "sampler": dict(self.sampler.busy),
                "trainer": dict(self.trainer.busy),
                "own_cpu": own_cpu_seconds(),
                "machine_cpu": machine_cpu_seconds(),
            }
        )
        return metrics


def own_cpu_seconds() -> float:
    """CPU-seconds of this process and those that it has started, so far (Linux)."""
    return sum(map(_cpu_seconds, [os.getpid(), *_descendants(os.getpid())]))


def machine_cpu_seconds() -> float:
    """CPU-seconds of everything on the machine since it was booted (Linux)."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _descendants(pid: int) -> list[int]:
    found = []
    for path in pathlib.Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            found += [child, *_descendants(child)]
    return found


def _cpu_seconds(pid: int) -> float:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        after_name = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def run_cells(cells: Sequence[CellRun], folder: pathlib.Path) -> None:
    """Makes all runs, each in a folder of its name; writes what it has noted there."""
    processes.initialize(job.find(os.environ))
    jax.config.update("jax_compilation_cache_dir", str(folder / "programs"))
    with stop_on_sigterm() as stop:
        for cell in cells:
            config = load_config("tiny", cell.settings()).config
            place = folder / cell.name
            place.mkdir(parents=True, exist_ok=True)
            with (
                contextlib.closing(Checkpointer(place / "checkpoints", config.checkpoint)) as saved,
                contextlib.closing((prepared := prepare(config)).rewards),
            ):
                quiet = Terminal(enabled=False)
                run = SimulatedRun(cell, prepared, place, saved, Watchdog(config.health, 1), quiet)
                run.loop(stop)
            text = json.dumps(run.marks)
            (place / f"marks-{processes.process_index()}.json").write_text(text)
            processes.barrier(f"end of {cell.name}")
    processes.shutdown()
