"""Search of the settings of a run on a pod: the fastest for each training mesh, by formulas.

A step's training depends on the mesh, training.remat and training.micro_batch_rows, its sampling on
mesh.rollout_tensor and rollout.cache_fraction, and only memory on all of them. So both are priced
apart, each without and with training.offload, and pairs are tried from the fastest on until one
fits.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from distflow_jax.parallel.mesh import check_hosts
from distflow_jax.planning.mesh_sizes import check_width, mesh_sizes
from distflow_jax.planning.unit_programs import Program
from distflow_jax.pods.efficiency import Range
from distflow_jax.pods.pod_plan import SPARE, PodPlan
from distflow_jax.pods.pricing import CACHE, MESH, OFFLOAD, REMAT, ROWS, WIDTH, Pricing, Values

_REMATS = ("none", "dots", "attention", "full")
_ROWS = (1, 2, 4, 8)  # of a micro-batch, per data rank
_MICRO_TOKENS = 32_768  # of a device's micro-batch at most
_FRACTIONS = (0.1, 0.15, 0.25, 0.4, 0.6)


@dataclasses.dataclass(frozen=True)
class TrainingMesh:
    """Sizes by key of MESH, and the number of its data ranks."""

    values: Values
    ranks: int


@dataclasses.dataclass(frozen=True)
class _Priced:
    """Values of some of the searched keys, the plan with them, and its expected seconds."""

    values: Values
    plan: PodPlan
    sampling: Range
    rest: Range  # of the step

    @classmethod
    def of(cls, values: Values, plan: PodPlan) -> "_Priced":
        """A plan with the values that it has of those that are searched."""
        generation, whole = plan.generation, plan.expected
        sampling = generation.expected(plan.pod.efficiency) if generation else Range(0.0, 0.0)
        rest = Range(whole.low - sampling.low, whole.high - sampling.high)
        return cls(values, plan, sampling, rest)


class Search:
    """The best settings of one run on one pod. Keys that the command line sets stay."""

    def __init__(self, pricing: Pricing):
        self.pricing = pricing
        self._samplers: dict[str, list[_Priced]] = {}  # by training.offload
        self._unlike: list[str] = []  # reasons why sizes do not suit this model
        self._reasons: list[str] = []  # why values are no run

    @property
    def reason(self) -> str:
        """The first reason why something that was tried is no run."""
        return (self._reasons or self._unlike)[0]

    def meshes(self) -> list[TrainingMesh]:
        """Training meshes that the pod holds, the model's sizes allow and the command line leaves.

        Raises ValueError if no mesh has a size that the command line sets.
        """
        return _left(self.pricing, list(_meshes(self.pricing, self._unlike)))

    def best_of(self, mesh: TrainingMesh, spare: float = SPARE) -> PodPlan | None:
        """The fastest plan on a training mesh that leaves `spare` of a chip's memory, else the
        smallest one; None if no run is possible on the mesh."""
        programs: dict[str, Program] = {}
        pairs = [
            (training, sampling)
            for offload in self._of(OFFLOAD, ("none", "idle"))
            for training in self._trainings(mesh, offload, programs)
            for sampling in self._samplers.get(offload, ())
        ]
        pairs.sort(key=lambda pair: (pair[0].rest + pair[1].sampling).middle)
        for training, sampling in pairs:
            if _held(training, sampling) > (1 - spare) * self.pricing.pod.chip.memory:
                continue
            plan = self._joined(training, sampling)
            if plan is not None and not plan.problem and plan.spare >= spare:
                return plan
        return self._joined(*min(pairs, key=lambda pair: _held(*pair))) if pairs else None

    def _trainings(
        self, mesh: TrainingMesh, offload: str, programs: dict[str, Program]
    ) -> list[_Priced]:
        """The training of each remat and micro-batch on a mesh, beside the first samplers.

        `programs`: of the mesh, empty before the first call for it.
        """
        found: list[_Priced] = []
        samplers = self._samplers.get(offload)
        beside = samplers[0].values if samplers else {}
        for remat, rows in itertools.product(self._of(REMAT, _REMATS), self._rows(mesh)):
            values = {**mesh.values, REMAT: remat, ROWS: rows, OFFLOAD: offload}
            try:
                planned = self.pricing.planned({**values, **beside})
                programs |= {} if programs else self.pricing.programs(planned)
                found.append(_Priced.of(values, self.pricing.price(planned, programs)))
            except ValueError as error:
                self._reasons.append(str(error))
                continue
            if samplers is None:
                self._samplers[offload] = samplers = self._samplings(values, programs)
        return found

    def _samplings(self, training: Values, programs: Mapping[str, Program]) -> list[_Priced]:
        """Samplers of each width and size of the cache, beside one training."""
        found: list[_Priced] = []
        for width in _widths(
            self.pricing, self._of(WIDTH, _divisors(self.pricing.pod.size)), self._unlike
        ):
            known = set()
            for fraction in self._fractions():
                values = {WIDTH: width, CACHE: fraction}
                try:
                    planned = self.pricing.planned({**training, **values})
                    engine = planned.sizes.engine
                    if (engine.slots, engine.decode_slots) in known:  # larger is of no use
                        break
                    known.add((engine.slots, engine.decode_slots))
                    found.append(_Priced.of(values, self.pricing.price(planned, programs)))
                except ValueError as error:
                    self._reasons.append(str(error))
            if found and not found[-1].plan.planned.own_samplers:
                break
        return found

    def _joined(self, training: _Priced, sampling: _Priced) -> PodPlan | None:
        try:
            planned = self.pricing.planned({**training.values, **sampling.values})
            return self.pricing.price(planned, training.plan.programs)
        except ValueError as error:
            self._reasons.append(str(error))
            return None

    def _of(self, key: str, values: Iterable[Any]) -> list[Any]:
        return [self.pricing.fixed[key]] if key in self.pricing.fixed else list(values)

    def _rows(self, mesh: TrainingMesh) -> list[int]:
        training, context = self.pricing.config.training, self.pricing.config.mesh.context
        fitting = (n for n in _ROWS if n * training.row_tokens <= _MICRO_TOKENS * context)
        return self._of(ROWS, [mesh.ranks * n for n in sorted({1, *fitting})])

    def _fractions(self) -> list[float]:
        rollout = self.pricing.config.rollout
        if rollout.num_slots or rollout.cache_tokens:  # the cache is a number of its own
            return [rollout.cache_fraction]
        return self._of(CACHE, _FRACTIONS)


def _held(training: _Priced, sampling: _Priced) -> int:
    """Bytes of the fullest segment of such a step: what is of samplers is as in `sampling`."""
    programs = training.plan.programs
    return max(
        t.total
        - (t.sampler_weights + t.cache + (0 if t.name in programs else t.temporaries or 0))
        + (s.sampler_weights + s.cache + (0 if t.name in programs else s.temporaries or 0))
        for t, s in zip(training.plan.memory.segments, sampling.plan.memory.segments, strict=True)
    )


def _meshes(pricing: Pricing, unlike: list[str]) -> Iterator[TrainingMesh]:
    """All meshes of Search.meshes, whatever is set; `unlike` gets the reasons against others."""
    pod = pricing.pod
    for data, tensor in itertools.product(_divisors(pod.size), repeat=2):
        mesh = dataclasses.replace(
            pricing.config.mesh, data=data, fsdp=0, tensor=tensor, rollout_tensor=1
        )
        try:
            sizes, *_ = mesh_sizes(mesh, pricing.source.config, pod.machine)
        except ValueError as error:
            unlike.append(str(error))
            continue
        if pod.holds(sizes):
            values = dict(zip(MESH, (data, sizes.fsdp, tensor), strict=True))
            yield TrainingMesh(values, sizes.ranks)


def _left(pricing: Pricing, found: list[TrainingMesh]) -> list[TrainingMesh]:
    """The meshes with the sizes that the command line sets; see Search.meshes."""
    for key in MESH:
        size = pricing.fixed.get(key, 0)
        sizes = sorted({mesh.values[key] for mesh in found})
        if size and sizes and size not in sizes:
            raise ValueError(
                f"{key}={size}: no training mesh of {pricing.pod.name} can have this size; use "
                f"one of {sizes}, or let the sweep choose"
            )
        found = [mesh for mesh in found if size in (0, mesh.values[key])]
    return found


def _widths(pricing: Pricing, widths: Iterable[int], unlike: list[str]) -> Iterator[int]:
    """The widths, devices of a sampler's data rank, that the pod and the model's sizes allow."""
    machine = pricing.pod.machine
    for width in widths:
        try:
            check_width(WIDTH, width, pricing.source.config, machine.devices)
            check_hosts(width, WIDTH, machine.processes, machine.local_devices)
        except ValueError as error:
            unlike.append(str(error))
            continue
        if pricing.pod.interconnect.span(range(width)):
            yield width


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
