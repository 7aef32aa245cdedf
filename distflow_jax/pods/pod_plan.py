"""Plan of a run on a pod: memory, FLOPs, traffic and estimated seconds of every segment."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax

from distflow_jax.dag.residency import UPDATE_WEIGHTS
from distflow_jax.planning.field_specs import num_bytes
from distflow_jax.planning.memory_advice import shortage
from distflow_jax.planning.memory_plan import MemoryPlan, device_bytes, plan_memory
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
from distflow_jax.pods.generation import GenerationEstimate, Load, estimate_generation
from distflow_jax.pods.roofline import Estimate, collective_seconds, estimate
from distflow_jax.pods.topology import Pod
from distflow_jax.programs.costs import Costs
from distflow_jax.programs.text_table import fill_lines, text_table
from distflow_jax.programs.traffic import CollectiveTraffic
from distflow_jax.programs.units import format_bytes, format_decimal
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

    @property
    def estimates(self) -> dict[str, Estimate]:
        """Estimate of each segment from its program's costs; see `generation` for sampling."""
        found = {}
        for name, cost in self.costs.items():
            flops = cost.flops / self.chips[name]
            accessed = cost.bytes_accessed or 0.0
            found[name] = estimate(self.pod, flops=flops, accessed=accessed, traffic=cost.traffic)
        return found

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

    def _describe_spare(self) -> str:
        fullest = self.memory.fullest
        text = f"{self.spare:.1%} of HBM to spare, in {fullest.name!r}"
        if self.refused:
            return f"{text}, without what is too large\n"
        if self.memory.unknown:
            return f"{text}, without temporaries of {', '.join(self.memory.unknown)}\n"
        if self.spare < SPARE:
            return f"WARNING: {text}: below {SPARE:.0%}, a run may exceed memory\n"
        return f"{text}\n"

    @property
    def parts(self) -> dict[str, Estimate]:
        """Estimates of all parts of a step: its segments, and the phases of sampling."""
        # programs of samplers are compiled for their memory: how often they run depends on the data
        of_sampler = _of_sampler(self.planned)
        found = {name: e for name, e in self.estimates.items() if name not in of_sampler}
        if self.generation:
            g = self.generation
            phases = {"prefill": g.prefill, "decode, all slots": g.full, "stragglers": g.stragglers}
            found |= {f"rollout: {phase}": e for phase, e in phases.items()}
        return found

    @property
    def seconds(self) -> float:
        """Estimated seconds of a whole step; its parts run one after the other."""
        return sum(e.total for e in self.parts.values())

    def describe(self) -> str:
        """The plan as tables of text."""
        how = (
            "of each program"
            if any(cost.peak_bytes for cost in self.costs.values())
            else "of each program, FLOPs only: nothing was compiled"
        )
        parts = [
            self.pod.describe(),
            f"memory of a chip, {how}\n\n{text_table(self._memory_rows())}\n",
            f"{self.memory.describe()}\n{self._describe_spare()}",
            f"traffic of a chip, over all trips of loops\n\n{text_table(self._traffic_rows())}\n",
        ]
        if self.reshards:
            parts.append(f"reshards between layouts\n\n{text_table(self._reshard_rows())}\n")
        parts.append(
            "ESTIMATED seconds, all rows filled, every rate at its peak (docs/scaling.md): bounds, "
            f"nothing of this was measured\n\n{text_table(self._seconds_rows())}\n\n"
            f"a step: {self.seconds:.3g} s, without rewards and other work of the hosts"
            f"{', without programs that are too large' if self.refused else ''}"
            f"{', without programs that were not compiled' if self.left_out else ''}\n"
        )
        return fill_lines("\n".join(parts))

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
                | {"chips": self.chips[name], "estimated_seconds": estimates[name].to_tree()}
                | {"traffic": [self._traffic_tree(t) for t in cost.traffic]}
                for name, cost in self.costs.items()
            },
            "reshards": [dataclasses.asdict(reshard) for reshard in self.reshards],
            "memory": self.memory.to_tree() | {"spare": self.spare},
            "estimated_generation": self.generation.to_tree() if self.generation else None,
            "estimated_step_seconds": self.seconds,
            "not_compiled": list(self.left_out),
            "problem": self.problem,
        }

    def _traffic_tree(self, traffic: CollectiveTraffic) -> dict[str, Any]:
        return {
            "kind": traffic.kind,
            "axes": list(traffic.axes),
            "bytes": traffic.bytes,
            "times": traffic.times,
            "overlapped": traffic.overlapped,
            "estimated_seconds": collective_seconds(self.pod.interconnect, traffic),
        }

    def _memory_rows(self) -> list[tuple[str, ...]]:
        rows = [
            ("program", "arguments", "outputs", "in place of", "temporaries", "sum", "of HBM",
             "FLOPs of a chip"),
        ]  # fmt: skip
        for name, cost in self.costs.items():
            sizes = cost.argument_bytes, cost.output_bytes, cost.alias_bytes, cost.temp_bytes
            cells = ["-" if size is None else format_bytes(size) for size in sizes]
            peak = cost.peak_bytes
            share = "-" if peak is None else f"{peak / self.pod.chip.memory:.0%}"
            cells += ["-" if peak is None else format_bytes(peak), share]
            rows.append((name, *cells, format_decimal(cost.flops / self.chips[name], "")))
        rows += [(name, *["-"] * 4, "too large", "-", "-") for name in self.refused]
        rows += [(name, *["-"] * 4, "not compiled", "-", "-") for name in self.left_out]
        return rows

    def _traffic_rows(self) -> list[tuple[str, ...]]:
        rows = [("program", "axes", "collective", "bytes", "times", "", "estimated s")]
        for name, cost in self.costs.items():
            for t in cost.traffic:
                seconds = collective_seconds(self.pod.interconnect, t)
                overlapped = "overlapped" if t.overlapped else ""
                sizes = format_bytes(t.bytes), f"{t.times:,.0f}", overlapped, f"{seconds:.2g}"
                rows.append((name, "*".join(t.axes), t.kind, *sizes))
        return rows

    def _reshard_rows(self) -> list[tuple[str, ...]]:
        rows = [("field", "from", "to", "layouts", "bytes", "on a chip then")]
        for r in self.reshards:
            sizes = format_bytes(r.bytes), format_bytes(r.chip_bytes)
            rows.append((r.field, r.source, r.target, r.layouts, *sizes))
        return rows

    def _seconds_rows(self) -> list[tuple[str, ...]]:
        rows = [("segment", "compute", "memory", "links", "exposed", "in all", "bound by")]
        rows += [(name, *_cells(e)) for name, e in self.parts.items()]
        return rows


def _cells(e: Estimate) -> tuple[str, ...]:
    links = ", ".join(f"{axes} {s:.2g}" for axes, s in e.links.items() if s >= 5e-7) or "-"
    return (
        f"{e.compute:.3g}",
        f"{e.memory:.3g}",
        links,
        f"{e.exposed:.3g}",
        f"{e.total:.3g}",
        e.bound,
    )


def plan_on(
    pod: Pod,
    planned: RunPlan,
    *,
    mean_response: int = 0,
    compiled: bool = True,
    programs: Mapping[str, Program] | None = None,
    only: Collection[str] = (),
) -> PodPlan:
    """Compiles a run for a pod, or prices it by formulas. Allocates no array.

    Args:
      pod: the pod.
      planned: a plan on the pod's devices.
      mean_response: tokens, for the time of sampling; 0: the longest allowed.
      compiled: compile the programs, which needs a pod that compiles; else formulas give the costs.
      programs: those of runtime.build.trace; None: they are traced here.
      only: names of the programs to compile; (): all.

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
        costs, refused = _by_formulas(pod, planned, programs), {}
    chips = {name: programs[name].mesh.size if name in programs else pod.size for name in costs}
    chips |= {n: pod.per_host * planned.sizes.sampler_hosts for n in of_sampler if n in costs}
    known = {name: costs.get(name, Costs(0.0)) for name in programs}
    taken = [costs[n].temp_bytes for n in of_sampler if n in costs]
    sync = costs[UPDATE_WEIGHTS].temp_bytes if UPDATE_WEIGHTS in costs else None
    needed = max(taken) if taken and len(taken) == len(of_sampler) else None
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
    )


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


def _by_formulas(pod: Pod, planned: RunPlan, programs: Mapping[str, Program]) -> dict[str, Costs]:
    costs = {}
    if planned.own_samplers:
        mesh = jax.tree.leaves(sampled_params(planned, programs))[0].sharding.mesh
        costs[UPDATE_WEIGHTS] = formulas.sync_costs(planned, mesh, pod.numbers(mesh))
    for name, program in programs.items():
        costs[name] = formulas.program_costs(planned, program, pod.numbers(program.mesh))
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
            "at most that"
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
