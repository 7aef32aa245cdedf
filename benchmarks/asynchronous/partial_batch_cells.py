"""Runs that note what a partial batch costs: the sampler takes no time, and all else is real.

All groups that may begin are complete before a step is measured, so that nothing waits for samples
and no sampler is at work beside the training.
"""

import collections
import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from asynchronous.engine import DecodeCosts
from asynchronous.lanes import Lane
from asynchronous.marked_run import MarkedRun
from asynchronous.simulated_run import SimulatedSync, simulated_engine

from distflow_jax.coordinator.assignment import Shares
from distflow_jax.coordinator.coordinator import Coordinator
from distflow_jax.layout import Metrics
from distflow_jax.observe.spans import Spans
from distflow_jax.parallel import processes
from distflow_jax.planning.plan_run import PreparedRun
from distflow_jax.planning.unit_programs import Program
from distflow_jax.runtime.build import Runtime, Span, build
from distflow_jax.runtime.open_run import OpenRun
from distflow_jax.runtime.steps import PartialBatchSteps
from distflow_jax.stream.batches.agreement import Agreement
from distflow_jax.stream.batches.partial_batches import PartialBatchPlanner

COMMON = {
    "algorithm.correction": "token_tis",
    "stream.max_staleness": 1,
    "mesh.devices": "0:1",
    "mesh.roles": {"ROLLOUT": {"devices": "1:2"}},
    "eval.dataset": "",
    "checkpoint.every": 1000,
    "health.enabled": False,
    "observe.trackers": (),
    "observe.samples_every": 0,
    "observe.trace": False,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # name -> (config, settings)
    # computes next to nothing
    "smallest": (
        "tiny",
        {
            "model.source": "random:llama?hidden=32&layers=1&heads=2&kv_heads=1&mlp=64&vocab=512"
            "&max_position=512",
            "data.max_prompt_length": 64,
            "rollout.num_samples": 8,
            "rollout.max_response_length": 64,
            "rollout.num_slots": 512,
            "training.row_tokens": 512,
        },
    ),
    # rows of about a group each
    "tiny": ("tiny", {"data.max_prompt_length": 64, "training.row_tokens": 128}),
    "smollm2": ("grpo_smollm2", {"rollout.num_slots": 64, "training.row_tokens": 160}),
}
# calls within a step in partial batches -> the part of a partial batch that they are; the time of a
# call within another one is its own alone
PARTS: list[tuple[Any, str, str]] = [
    (PartialBatchSteps, "run", "rest"),
    (Agreement, "next", "gather"),
    (processes, "all_gather_ragged", "gather"),
    (PartialBatchPlanner, "learn", "plan"),
    (PartialBatchPlanner, "next", "plan"),
    (Shares, "make", "plan"),
    (Coordinator, "get", "pack"),
    (Program, "__call__", "launch"),
    (PartialBatchSteps, "_size_of", "launch"),
    (jax, "block_until_ready", "compute"),
]


@dataclasses.dataclass(frozen=True)
class PartialBatchCell:
    """One run of a model whose steps are trained in partial batches, or at once."""

    model: str  # of MODELS
    prompts: int  # groups of a step
    partial_batches: int  # of a step, all of them equal; 0: at once
    # of a partial batch that is filled with what is complete; 0: partial batches have prompts /
    # partial batches groups
    rows: int
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
        return f"{self.model}-{self.prompts}-{self.partial_batches}-{self.round}"

    def settings(self) -> dict[str, Any]:
        """Values of the config, by key. Samplers are at work until the last timed step ends."""
        changed = COMMON | MODELS[self.model][1] | {"data.prompts_per_step": self.prompts}
        changed["training.steps"] = self.warmup + self.steps + 2
        if self.rows:
            return changed | {
                "stream.partial_batches": "ready",
                "stream.partial_batch_rows": self.rows,
            }
        if self.partial_batches:
            partial_batch = {
                "stream.partial_batches": "counter",
                "stream.partial_batch_prompts": self.prompts // self.partial_batches,
            }
            return changed | partial_batch
        return changed

    def make_run(self) -> MarkedRun:
        """How it is made and noted."""
        return CostedRun()


class Stopwatch:
    """Seconds of the main thread by part, within a call of the part "rest"; a part within another
    one is not counted there."""

    def __init__(self):
        self.seconds: collections.Counter[str] = collections.Counter()
        self._inner = [0.0]  # seconds of the parts within each open part

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Times its body."""
        self._inner.append(0.0)
        begun = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - begun
            self.seconds[name] += spent - self._inner.pop()
            self._inner[-1] += spent

    def following(self, call: Callable, name: str) -> Callable:
        """The same call, timed."""

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            within = name == "rest" or len(self._inner) > 1
            if not within or threading.current_thread() is not threading.main_thread():
                return call(*args, **kwargs)
            with self.part(name):
                return call(*args, **kwargs)

        return timed


class CostedRun(MarkedRun):
    """A run that notes, for each step, the seconds of its parts, CPU-seconds and rows.

    CPU-seconds are those of all threads from the first look at the step's groups until its weights
    leave for the sampler.
    """

    def __init__(self):
        super().__init__()
        self._watch = Stopwatch()
        self._cpu = {"begun": 0.0, "spent": 0.0}
        self._publishes = False  # whether weights on their way end a measurement already

    def build(self, prepared: PreparedRun, spans: Spans, phase: Span) -> Runtime:
        """The parts of a real run, but for a sampler that takes no time."""
        limit = prepared.config.rollout.max_response_length
        engine = simulated_engine(
            prepared,
            Lane(1),
            DecodeCosts(0.0, 0.0),
            lambda rng, count: rng.integers(1, limit + 1, count),
        )
        sampler = engine, SimulatedSync(0.0, Lane(1))
        return build(prepared, spans, phase, sampler=sampler)

    def step(self, run: OpenRun) -> Metrics:
        """One step, once all groups that may begin are complete on all processes."""
        if not self._publishes:
            self._end_with_weights(run)
        run.source.drive.wait_until(functools.partial(_settled, run))
        processes.barrier(f"step {run.state.step}")
        with contextlib.ExitStack() as parts:
            for owner, name, part in PARTS:
                call = getattr(owner, name)
                parts.callback(setattr, owner, name, call)
                setattr(owner, name, self._watch.following(call, part))
            self._cpu["begun"] = time.process_time()
            return super().step(run)

    def _end_with_weights(self, run: OpenRun) -> None:
        """Has the weights of the step that has ended end its measurement."""
        self._publishes, publish = True, run.source.publish

        def measured(params: Any, version: int) -> None:
            if version == run.state.step:
                self._cpu["spent"] += time.process_time() - self._cpu["begun"]
            publish(params, version)

        run.source.publish = measured

    def work(self, run: OpenRun) -> dict[str, Any]:
        """Seconds by part and CPU-seconds so far, and rows of the last step."""
        shares = run.runtime.coordinator.shares if run.runtime.partial_batches is None else None
        rows = sum(len(mini.rows) for mini in shares.minis) if shares is not None else 0
        return {"parts": dict(self._watch.seconds), "cpu": self._cpu["spent"], "rows": rows}


def _settled(run: OpenRun) -> bool:
    """Whether all groups that may begin before a step are complete."""
    producer = run.source.producer
    with producer.lock:
        end = producer.admission.end(producer.version)
        newest = producer.version >= run.state.step - 1
        done = all(group.done for group in producer.groups.values())
        return newest and producer.begun_up_to(end) and done
