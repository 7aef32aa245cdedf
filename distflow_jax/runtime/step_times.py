"""The cost of a step: times by node, throughput, memory, compilations, waiting processes."""

import logging
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from distflow_jax.cluster import processes
from distflow_jax.dag.plan import Plan, Unit
from distflow_jax.observe import memory
from distflow_jax.observe.phases import straggler_report
from distflow_jax.runtime.instruments import Instruments

# node (role, type) -> verl's name of its time
VERL_TIMINGS = {
    ("ROLLOUT", "MODEL_INFERENCE"): "gen",
    ("REWARD", "COMPUTE"): "reward",
    ("ACTOR", "MODEL_INFERENCE"): "old_log_prob",
    ("REFERENCE", "MODEL_INFERENCE"): "ref",
    ("CRITIC", "MODEL_INFERENCE"): "values",
    ("ACTOR", "COMPUTE"): "adv",
    ("CRITIC", "MODEL_TRAIN"): "update_critic",
    ("ACTOR", "MODEL_TRAIN"): "update_actor",
}
_PEAK = "perf/max_memory_allocated_gb"

log = logging.getLogger("distflow_jax")


class StepTimes:
    """Counts from its creation, and from step to step. `warm`: whether a step has run; nothing may
    compile after it."""

    def __init__(self, plan: Plan, instruments: Instruments):
        self._spans, self._phases = instruments.spans, instruments.phases
        self._compilations, self._instruments = instruments.compilations, instruments
        self._names = {unit.name: _timing(unit) for unit in plan.units}
        self._communicated = processes.communication_seconds()
        self._spent = np.array([time.process_time(), processes.coordination_cpu_seconds()])
        self._started = time.perf_counter()
        self.warm = False

    def begin(self) -> None:
        """Starts the clock of a step."""
        self._started = time.perf_counter()

    def so_far(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Seconds and throughput of the step up to now. `metrics` are the batch's."""
        seconds = time.perf_counter() - self._started
        return _speed(metrics, seconds)

    def take(
        self, step: int, metrics: Mapping[str, float], received: int
    ) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
        """(metrics of the step that just ended, its straggler report). Collective.

        `metrics` are the batch's, `received` are bytes from other processes.
        """
        seconds = time.perf_counter() - self._started
        spent = self._spans.take()
        compiled = self._compilations.names()
        if compiled and self.warm:
            log.warning("compiled in step %d, after the first: %s", step, ", ".join(compiled))
        self.warm = True
        timings: dict[str, float] = {}
        for key, value in spent.items():  # two nodes that share a name add up
            name = f"timing_s/{self._names.get(key, key)}"
            timings[name] = timings.get(name, 0.0) + value
        timings["timing_s/step"] = seconds
        work = seconds - spent.get("testing", 0.0)
        tokens = metrics["perf/total_num_tokens"]
        counts = {}  # of no tokens, where a region found nothing to train on
        if tokens:
            share = metrics["response_length/mean"] / metrics["global_seqlen/mean"]
            counts = {"gen": tokens * share, "update_actor": tokens}
        for name, count in counts.items():
            if f"timing_s/{name}" in timings:
                timings[f"timing_per_token_ms/{name}"] = 1000 * timings[f"timing_s/{name}"] / count
        per_process, stragglers = self._per_process(received)
        measured = timings | {
            **per_process,
            "timing_s/host_communication": self._communication(),
            **_speed(metrics, work),
            **self._instruments.measured(_PEAK, memory.peak_memory_gb),
            "perf/compilations": self._compilations.take(),
            "perf/compilations_fetched": self._compilations.take_fetched(),
        }
        return measured, stragglers

    def _per_process(self, received: int) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
        """Work and waiting of each process. Collective.

        Metrics are means over the processes, of bytes the maximum.
        """
        work, nodes = self._phases.take_work(), list(self._names)
        now = np.array([time.process_time(), processes.coordination_cpu_seconds()])
        spent, self._spent = now - self._spent, now
        mine = np.array([*spent, received, *(work.get(node, 0.0) for node in nodes)])
        table = processes.all_gather_ints(mine)
        report = straggler_report(nodes, table[:, 3:])
        idle = {f"perf/idle/{node}": float(np.mean(report[node]["idle"])) for node in nodes}
        measured = idle | {
            "perf/cpu_seconds": float(table[:, 0].mean()),
            "perf/coordination_cpu_seconds": float(table[:, 1].mean()),
            "perf/bytes_received": float(table[:, 2].max()),
        }
        return measured, report

    def _communication(self) -> float:
        """Seconds in collectives among hosts since the last call."""
        before, self._communicated = self._communicated, processes.communication_seconds()
        return self._communicated - before


def _speed(metrics: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Throughput and seconds of a step without its evaluation."""
    tokens = metrics["perf/total_num_tokens"]
    return {
        "perf/throughput": tokens / seconds / jax.device_count(),
        "perf/time_per_step": seconds,
    }


def _timing(unit: Unit) -> str:
    """The name of a unit's time: verl's, where there is one; of nodes in one program all names."""
    words = []
    for node in (task.node for task in unit.tasks):
        # a function of the user's own has no name of verl's
        known = VERL_TIMINGS.get((node.role, node.type)) if node.fn is None else None
        words.append(known or node.id)
    return ".".join(words)
