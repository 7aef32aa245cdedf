"""Plan of a run on a pod: memory, FLOPs, traffic and estimated seconds of every segment."""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax

from distflow_jax.dag.residency import UPDATE_WEIGHTS
from distflow_jax.parallel.rules import device_bytes
from distflow_jax.planning.field_specs import num_bytes
from distflow_jax.planning.memory_advice import shortage
from distflow_jax.planning.memory_plan import MemoryPlan, offload_bytes, plan_memory
from distflow_jax.planning.plan_run import RunPlan
from distflow_jax.planning.unit_programs import Program
from distflow_jax.pods import formulas
from distflow_jax.pods.compile import (
    TooLarge,
    compile_program,
    compile_sampler,
    compile_sync,
    sampled_params,
)
from distflow_jax.pods.efficiency import Range, training_of
from distflow_jax.pods.generation import GenerationEstimate, Load, estimate_generation
from distflow_jax.pods.response_lengths import share_of_rows
from distflow_jax.pods.roofline import Estimate, estimate, traffic_tree
from distflow_jax.pods.temporaries import sampler_bytes
from distflow_jax.pods.topology import Pod
from distflow_jax.programs.costs import Costs
from distflow_jax.rollout.engine.engine_programs import sampler_programs
from distflow_jax.runtime.build import trace

# share of HBM left for other releases of XLA or libtpu, and for arrays of a run outside the plan
SPARE = 0.1


@dataclasses.dataclass(frozen=True)
class Reshard:
    """A field that is resharded between two segments with different training layouts."""

    field: str
    source: str
    target: str
    layouts: str
    bytes: int  # over all chips, copies not counted
    chip_bytes: int  # of the result on one chip


@dataclasses.dataclass(frozen=True)
class PodPlan:
    """A plan compiled, or priced by formulas, for a pod. Mappings are by the segment's name."""

    pod: Pod
    planned: RunPlan
    programs: Mapping[str, Program]
    costs: Mapping[str, Costs]
    chips: Mapping[str, int]  # number of chips that it runs on
    generation: GenerationEstimate | None  # None: the run samples nothing
    reshards: tuple[Reshard, ...]
    memory: MemoryPlan
    refused: Mapping[str, str]  # programs too large by themselves, which have no costs: reasons
    missing: str  # settings to change if memory does not suffice; "" if it does
    left_out: tuple[str, ...] = ()  # programs not compiled on request, which have no costs
    # share of its rows that responses of the mean length fill, of each program over rows; 1: all
    filled: Mapping[str, float] = dataclasses.field(default_factory=dict)
    offload: Estimate | None = (
        None  # of transfers between a chip and its host; None: there are none
    )

    @property
    def estimates(self) -> dict[str, Estimate]:
        """Estimate of each segment from its program's costs; see `generation` for sampling.

        Costs are those of all rows; empty rows cost nothing.
        """
        kind = training_of(self.planned.source.config)
        found = {}
        for name, cost in self.costs.items():
            flops = cost.flops / self.chips[name]
            accessed = cost.bytes_accessed or 0.0
            traffic = cost.traffic
            whole = estimate(self.pod, flops=flops, accessed=accessed, traffic=traffic, kind=kind)
            found[name] = whole * self.filled.get(name, 1.0)
        return found

    @property
    def expected(self) -> Range:
        """Expected seconds of a whole step; its parts run one after the other."""
        found = (e.expected(self.pod.efficiency) for e in self.parts.values())
        return sum(found, Range(0.0, 0.0))

    @property
    def problem(self) -> str:
        """The reason why a run would not start on the pod; "" if it would."""
        if self.refused:
            return "; ".join(f"{why}, which does not fit" for why in self.refused.values())
        return self.missing

    @property
    def spare(self) -> float:
        """The share of HBM that the fullest segment leaves; negative if it does not fit."""
        return 1 - self.memory.fullest.total / self.pod.chip.memory

    @property
    def parts(self) -> dict[str, Estimate]:
        """Estimates of all parts of a step: its segments, and the phases of sampling."""
        # programs of samplers are compiled for their memory: how often they run depends on the data
        of_sampler = _of_sampler(self.planned)
        found = {name: e for name, e in self.estimates.items() if name not in of_sampler}
        found |= {"offload": self.offload} if self.offload else {}
        if self.generation:
            g = self.generation
            phases = {"prefill": g.prefill, "decode, all slots": g.full, "stragglers": g.stragglers}
            found |= {f"rollout: {phase}": e for phase, e in phases.items()}
        return found

    @property
    def seconds(self) -> float:
        """The bound on the seconds of a whole step; its parts run one after the other."""
        return sum(e.total for e in self.parts.values())

    def to_tree(self) -> dict[str, Any]:
        """The plan as plain JSON values."""
        chip = {k: v for k, v in dataclasses.asdict(self.pod.chip).items() if v not in ((), 0, 0.0)}
        estimates = self.estimates
        return {
            "pod": {
                "name": self.pod.name,
                "chips": self.pod.size,
                "hosts": self.pod.hosts,
                "chip": chip,
            },
            "segments": {
                name: cost.to_tree()
                | {"chips": self.chips[name], "estimated_seconds": self._tree_of(estimates[name])}
                | {"traffic": [traffic_tree(self.pod, t) for t in cost.traffic]}
                for name, cost in self.costs.items()
            },
            "reshards": [dataclasses.asdict(reshard) for reshard in self.reshards],
            "memory": self.memory.to_tree() | {"spare": self.spare},
            "estimated_generation": self.generation and self._tree_of(self.generation),
            "estimated_step_seconds": self.seconds,
            "expected_step_seconds": self.expected.to_tree(),
            "not_compiled": list(self.left_out),
            "problem": self.problem,
        }

    def _tree_of(self, found: Estimate | GenerationEstimate) -> dict[str, Any]:
        return found.to_tree() | {"expected": found.expected(self.pod.efficiency).to_tree()}


def plan_on(
    pod: Pod,
    planned: RunPlan,
    *,
    mean_response: int = 0,
    compiled: bool = True,
    programs: Mapping[str, Program] | None = None,
    only: Collection[str] = (),
    flops: Mapping[str, float] | None = None,
) -> PodPlan:
    """Compiles a run for a pod, or prices it by formulas. Allocates no array.

    Args:
      pod: the pod.
      planned: a plan on the pod's devices.
      mean_response: tokens, for the time of sampling and the rows that responses fill; 0: the
        longest allowed.
      compiled: compile the programs, which needs a pod that compiles; else formulas give the costs.
      programs: those of runtime.build.trace; None: they are traced here.
      only: names of the programs to compile; (): all.
      flops: of the programs, for formulas; None: counted in their jaxprs.

    Raises ValueError if a mesh does not fit the pod, or the formulas do not cover it, and for an
    unknown name in `only`.
    """
    pod.check_mesh("mesh", planned.sizes.mesh)
    for role, mesh in planned.sizes.role_meshes.items():
        pod.check_mesh(f"mesh.roles.{role}", mesh)
    load = _load(pod, planned, mean_response)
    programs = trace(planned) if programs is None else programs
    of_sampler = _of_sampler(planned)
    names = (*of_sampler, UPDATE_WEIGHTS) if planned.own_samplers else ()
    left_out = _left_out((*names, *programs), only)
    if compiled:
        costs, refused = _compiled(pod, planned, programs, left_out)
    else:
        costs, refused = _by_formulas(pod, planned, programs, flops or {}), {}
    chips = {name: programs[name].mesh.size if name in programs else pod.size for name in costs}
    chips |= {n: pod.per_host * planned.sizes.sampler_hosts for n in of_sampler if n in costs}
    known = {name: costs.get(name, Costs(0.0)) for name in programs}
    taken = [costs[n].temp_bytes for n in of_sampler if n in costs]
    sync = costs[UPDATE_WEIGHTS].temp_bytes if UPDATE_WEIGHTS in costs else None
    needed = max(taken) if taken and len(taken) == len(of_sampler) else None
    if not compiled and planned.own_samplers:
        needed = sampler_bytes(planned)
    memory = plan_memory(planned, programs, known).with_sampler(needed, sync, left_out)
    return PodPlan(
        pod,
        planned,
        programs,
        costs,
        chips,
        _generation(pod, planned, load) if planned.own_samplers else None,
        tuple(_reshards(planned, programs)),
        memory,
        refused,
        "" if refused else shortage(planned, memory, programs, known),
        left_out,
        _filled(planned, programs, load) if mean_response else {},
        _offload(pod, planned, programs),
    )


def _offload(pod: Pod, planned: RunPlan, programs: Mapping[str, Program]) -> Estimate | None:
    """Seconds of a step's transfers, as if each were waited for."""
    moved = sum(offload_bytes(planned, programs))
    seconds = moved / pod.chip.host_bandwidth
    return Estimate(0.0, 0.0, {"host": seconds}, seconds) if moved else None


def _of_sampler(planned: RunPlan) -> tuple[str, ...]:
    """The programs of a sampler that are compiled."""
    if not planned.own_samplers:
        return ()
    return sampler_programs(planned.source.config, planned.sizes.engine)


def _left_out(names: Collection[str], only: Collection[str]) -> tuple[str, ...]:
    """The names of programs not in `only`. Raises ValueError for an unknown name in `only`."""
    unknown = [name for name in only if name not in names]
    if unknown:
        raise ValueError(
            f"--only={','.join(only)}: unknown programs {', '.join(map(repr, unknown))}; this run "
            f"has {', '.join(names)}"
        )
    return tuple(name for name in names if only and name not in only)


def _compiled(
    pod: Pod, planned: RunPlan, programs: Mapping[str, Program], left_out: Collection[str]
) -> tuple[dict[str, Costs], dict[str, str]]:
    """(costs by the segment's name, reasons of programs that are too large)."""
    work: dict[str, Callable[[], Costs]] = {}
    if planned.own_samplers:
        for name in _of_sampler(planned):
            work[name] = functools.partial(compile_sampler, planned, pod, name)
        work[UPDATE_WEIGHTS] = lambda: compile_sync(planned, programs, pod)
    for name, program in programs.items():
        work[name] = functools.partial(compile_program, program, pod)
    costs: dict[str, Costs] = {}
    refused = {}
    for name, compile_it in work.items():
        if name in left_out:
            continue
        try:
            costs[name] = compile_it()
        except TooLarge as error:
            refused[name] = str(error)
    return costs, refused


def _by_formulas(
    pod: Pod, planned: RunPlan, programs: Mapping[str, Program], flops: Mapping[str, float]
) -> dict[str, Costs]:
    costs = {}
    if planned.own_samplers:
        mesh = jax.tree.leaves(sampled_params(planned, programs))[0].sharding.mesh
        costs[UPDATE_WEIGHTS] = formulas.sync_costs(planned, mesh, pod.numbers(mesh))
    for name, program in programs.items():
        costs[name] = formulas.program_costs(
            planned, program, pod.interconnect, pod.numbers(program.mesh), flops.get(name)
        )
    return costs


def _generation(pod: Pod, planned: RunPlan, load: Load) -> GenerationEstimate:
    sizes = planned.sizes
    return estimate_generation(pod, planned.source.config, sizes.engine, sizes.rollout_tensor, load)


def _load(pod: Pod, planned: RunPlan, mean_response: int) -> Load:
    """The work of one data rank of the samplers in a step."""
    config, sizes = planned.config, planned.sizes
    longest = config.rollout.max_response_length
    if mean_response > longest:
        raise ValueError(
            f"--mean_response={mean_response} is above rollout.max_response_length={longest}; use "
            f"at most {longest}"
        )
    responses = config.data.prompts_per_step * config.rollout.num_samples
    hosts = pod.hosts // sizes.sampler_hosts  # samplers
    ranks = sizes.sampler_ranks * hosts
    return Load(
        responses=-(-responses // ranks),
        slots=sizes.engine.decode_slots * hosts // ranks,
        prompt=config.data.max_prompt_length,
        mean=mean_response or longest,
        longest=longest,
        group=config.rollout.num_samples,
    )


def _filled(planned: RunPlan, programs: Mapping[str, Program], load: Load) -> dict[str, float]:
    """The share of its rows that responses fill, of each program; in whole micro-batches."""
    packing, filled = planned.sizes.packing, {}
    prompts = packing.prompts_per_step // packing.mini_batches
    lengths = load.prompt, load.mean, load.longest
    share = share_of_rows(prompts, load.group, *lengths, packing.limits)
    for name, program in programs.items():
        layout = program.unit.layout
        at_once = planned.sizes.rows_at_a_time(layout)
        whole = packing.rows[layout] // at_once
        filled[name] = math.ceil(share * whole) / whole
    return filled


def _reshards(planned: RunPlan, programs: Mapping[str, Program]) -> Iterator[Reshard]:
    for unit in planned.plan.units:
        if unit.name not in programs:
            continue
        for edge, spec in zip(unit.inputs, programs[unit.name].inputs, strict=True):
            layouts = edge.source_layout, edge.target_layout
            if edge.move == "stay" or {layout.kind for layout in layouts} != {"mesh"}:
                continue
            yield Reshard(
                edge.field,
                edge.source or "",
                unit.name,
                f"{layouts[0]} -> {layouts[1]}",
                num_bytes(spec),
                device_bytes(spec),
            )
