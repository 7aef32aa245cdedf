"""Metrics of what a step has trained on, over all processes."""

import functools
from collections.abc import Mapping

from distflow_jax.batch import Samples
from distflow_jax.coordinator.batch_metrics import (
    batch_metrics,
    gather_images,
    gather_table,
    image_metrics,
)
from distflow_jax.coordinator.coordinator import Coordinator
from distflow_jax.dag.plan_walker import Runner
from distflow_jax.layout import Metrics
from distflow_jax.planning.plan_run import PreparedRun
from distflow_jax.runtime.build import Runtime
from distflow_jax.runtime.instruments import Instruments
from distflow_jax.runtime.mfu import Utilization
from distflow_jax.runtime.place import Place
from distflow_jax.runtime.steps import PartialBatchSteps


class Statistics:
    """Measures the samples of steps, and shows their lengths and scores to the loader."""

    def __init__(self, prepared: PreparedRun, runtime: Runtime, instruments: Instruments):
        self._loader, self._instruments = prepared.loader, instruments
        self._utilization = Utilization(prepared, runtime.programs)
        self.close = self._utilization.close

    def following(self, runners: Mapping[str, Runner]) -> dict[str, Runner]:
        """The same runners; those of programs are timed where the devices' peak is known."""
        return self._utilization.following(runners)

    def of_step(
        self, step: int, samples: Samples, held: Coordinator | PartialBatchSteps, place: Place
    ) -> Metrics:
        """Metrics of a step's samples, whose rows `held` has. Collective."""
        loader = self._loader
        table = gather_table(samples, images=loader.sees)
        metrics = batch_metrics(table, held.tokens_per_rank())
        images = gather_images(held.image_counts()) if loader.sees else None
        metrics |= image_metrics(images)
        mfu = functools.partial(self._utilization.mfu, step, held, images)
        metrics |= self._instruments.measured("perf/mfu/actor", mfu)
        loader.observe(place.batches, table.counter, table.response)
        loader.observe_scores(place.batches, table.counter, table.score)
        return metrics | {
            "training/global_step": step,
            "training/epoch": loader.epoch(place.loader_position),
        }
