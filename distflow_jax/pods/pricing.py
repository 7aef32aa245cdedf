"""The price of settings of a run on a pod, by formulas: its plan, with expected seconds and memory.

Programs are traced on one training mesh, once for each training.remat: FLOPs of a row are the same
on all meshes, and so are the shapes of its fields.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from distflow_jax.config.graph_settings import value_at, with_values
from distflow_jax.config.run_config import Config
from distflow_jax.models.weights.source import ModelSource, open_options, open_shapes
from distflow_jax.parallel.rules import data_ranks
from distflow_jax.planning.plan_run import RunPlan, plan_run
from distflow_jax.planning.unit_programs import Program
from distflow_jax.pods.formulas import flops_of
from distflow_jax.pods.pod_plan import PodPlan, plan_on
from distflow_jax.pods.topology import Pod
from distflow_jax.runtime.build import trace

Values = Mapping[str, Any]  # by config key

# The other axes stay as configured: formulas do not cover pipelines
MESH = ("mesh.data", "mesh.fsdp", "mesh.tensor")
REMAT, ROWS = "training.remat", "training.micro_batch_rows"
WIDTH, CACHE = "mesh.rollout_tensor", "rollout.cache_fraction"
OFFLOAD = "training.offload"
SEARCHED = (*MESH, WIDTH, REMAT, ROWS, CACHE, OFFLOAD)


class Pricing:
    """Prices settings of one run on one pod."""

    def __init__(
        self,
        pod: Pod,
        config: Config,
        chosen: Collection[str] = (),
        *,
        mean_response: int = 0,
    ):
        """Opens the shapes of the run's model.

        Args:
          pod: the pod.
          config: of the run.
          chosen: config keys set on the command line; these are not searched.
          mean_response: see `plan_on`.

        Raises the errors of `open_shapes`.
        """
        self.pod, self.config = pod, config
        self.source = _shapes_of(config)
        # values that stay, by key of SEARCHED
        self.fixed = {key: value_at(config, key) for key in SEARCHED if key in chosen}
        self._chosen = set(chosen).difference(SEARCHED)
        self._mean_response = mean_response
        self._programs: dict[str, Program] = {}  # as first traced
        # FLOPs for each row, by the program's name
        self._flops: dict[tuple[str, bool], dict[str, float]] = {}

    def planned(self, values: Values) -> RunPlan:
        """The run's plan with these values. Raises ValueError if it is no run."""
        planned = plan_run(
            with_values(self.config, values),
            self.pod.machine,
            self._chosen,
            searched=SEARCHED,
            open_source=lambda *_, **__: self.source,
        )
        return dataclasses.replace(planned, devices=self.pod.devices)

    def traced(self, planned: RunPlan) -> dict[str, Program]:
        """The programs of a plan. Raises ValueError if they are none."""
        programs = trace(planned)
        if (kind := _kind_of(planned)) not in self._flops:
            self._flops[kind] = {
                name: flops_of(program).flops / _rows_of(planned, program)
                for name, program in programs.items()
            }
        return programs

    def programs(self, planned: RunPlan) -> dict[str, Program]:
        """The programs on the plan's mesh, for `price`. Those of the first plan are traced, later
        ones have specs alone. Raises ValueError if they are none."""
        self._programs = self._programs or self.traced(planned)
        return trace(planned, self._programs)

    def price(self, planned: RunPlan, programs: Mapping[str, Program]) -> PodPlan:
        """The plan by formulas; `programs` may have been traced with other settings, on the same
        mesh. Raises the errors of `plan_on`."""
        if (kind := _kind_of(planned)) not in self._flops:
            self.traced(planned)
        flops = {
            name: self._flops[kind][name] * _rows_of(planned, program)
            for name, program in programs.items()
        }
        return plan_on(
            self.pod,
            planned,
            compiled=False,
            programs=programs,
            flops=flops,
            mean_response=self._mean_response,
        )

    def compiled(self, planned: RunPlan) -> PodPlan:
        """The plan with its programs compiled. Raises the errors of `plan_on`."""
        return plan_on(
            self.pod, planned, programs=self.traced(planned), mean_response=self._mean_response
        )


def _shapes_of(config: Config) -> ModelSource:
    return open_shapes(config.model.source, **open_options(config.model))


def _kind_of(planned: RunPlan) -> tuple[str, bool]:
    """The settings on which FLOPs for each row depend."""
    forward = planned.sizes.forward
    return forward.remat, forward.keep_logits


def _rows_of(planned: RunPlan, program: Program) -> int:
    """Rows of a step that a program computes, on all devices together."""
    layout = program.unit.layout
    return planned.sizes.packing.rows[layout] * data_ranks(program.mesh.shape)
