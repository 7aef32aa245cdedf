"""Model FLOPs utilisation of the actor's update: `perf/mfu/actor`.

MFU = model FLOPs / (seconds x devices x peak FLOP/s of one), Chowdhery et al. 2022 (PaLM,
arxiv.org/abs/2204.02311), appendix B. The FLOPs are those of models/model_flops.py for the tokens
and images that the rows hold, once for each of `training.epochs`; seconds are those that the
update's program has its devices; the peak is the maker's for dense products of bfloat16, whatever
the run computes in. Where other nodes share the program, the passes of their models count too.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from distflow_jax.coordinator.coordinator import Coordinator
from distflow_jax.dag.plan import Unit
from distflow_jax.dag.plan_walker import Runner
from distflow_jax.models.decoder_config import adapted, scalar_model
from distflow_jax.models.model_flops import BatchWork, forward_flops, training_flops
from distflow_jax.observe.device_times import DeviceTimes
from distflow_jax.planning.chips import peak_flops
from distflow_jax.planning.plan_run import RunPlan
from distflow_jax.planning.unit_programs import Program


class Utilization:
    """Follows the programs of a run on devices whose peak is known; elsewhere it does nothing."""

    def __init__(self, run: RunPlan, programs: Mapping[str, Program]):
        self._run = run
        self._meshes = {name: program.mesh for name, program in programs.items()}
        self._updates = [u for u in run.plan.units if u.name in programs and _trains_actor(u)]
        kinds = {self._meshes[u.name].devices.flat[0].device_kind for u in self._updates}
        self._peak = min((peak_flops(kind) or 0.0 for kind in kinds), default=0.0)
        self._times = DeviceTimes() if self._peak else None

    def following(self, runners: Mapping[str, Runner]) -> dict[str, Runner]:
        """The same runners; those of programs are timed where the devices' peak is known."""
        if self._times is None:
            return dict(runners)
        return {n: self._followed(n, r) if n in self._meshes else r for n, r in runners.items()}

    def mfu(
        self, step: int, coordinator: Coordinator, images: np.ndarray | None = None
    ) -> float | None:
        """perf/mfu/actor of the step that has ended; None where its actor was not trained.

        `images`: Coordinator.image_counts of all processes, int64 [5]; None without a tower.
        """
        if self._times is None:
            return None
        seconds = self._times.take()
        updates = [u for u in self._updates if u.condition.active(step) and u.name in seconds]
        capacity = sum(seconds[u.name] * self._meshes[u.name].size for u in updates) * self._peak
        if not capacity:
            return None
        work = coordinator.work(self._run.source.config.sliding_window)
        if images is not None:
            work = with_images(work, images)
        return sum(self._flops(unit, work) for unit in updates) / capacity

    def close(self) -> None:
        """Ends the timing of programs."""
        if self._times is not None:
            self._times.close()

    def _followed(self, name: str, runner: Runner) -> Runner:
        devices, times = self._meshes[name].local_devices, self._times

        def followed(states, values):
            # states are donated to the next program that takes them
            return times.follow(name, devices, lambda: runner(states, values), _fields_and_metrics)

        return followed

    def _flops(self, unit: Unit, work: BatchWork) -> float:
        """Of all models in the unit's program."""
        config, decoder = self._run.config, self._run.source.config
        total = 0.0
        for node in (task.node for task in unit.tasks):
            scores = node.role in ("CRITIC", "REWARD")
            network = scalar_model(decoder) if scores else decoder
            if node.type == "MODEL_TRAIN":
                trained = training_flops(adapted(network, config.lora), work)
                total += config.training.epochs * trained
            elif node.type == "MODEL_INFERENCE":
                total += forward_flops(network, work)
        return total


def with_images(work: BatchWork, counts: np.ndarray) -> BatchWork:
    """The work with that of the tower; `counts` int64 [5] as Coordinator.image_counts has them."""
    patches, pairs, near = counts[2:].tolist()
    return dataclasses.replace(work, patches=patches, patch_pairs=pairs, window_pairs=near)


def _trains_actor(unit: Unit) -> bool:
    return any((t.node.role, t.node.type) == ("ACTOR", "MODEL_TRAIN") for t in unit.tasks)


def _fields_and_metrics(found: tuple[Any, ...]) -> tuple[Any, ...]:
    return found[1:]
