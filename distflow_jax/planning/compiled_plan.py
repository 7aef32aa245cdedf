"""A plan's programs with their costs and the memory of a step: all that compiling tells."""

import dataclasses
from collections.abc import Mapping

from distflow_jax.planning.memory_advice import shortage
from distflow_jax.planning.memory_plan import MemoryPlan, plan_memory
from distflow_jax.planning.plan_run import RunPlan
from distflow_jax.planning.unit_programs import Program
from distflow_jax.programs.costs import Costs, costs_of


@dataclasses.dataclass(frozen=True)
class CompiledPlan:
    """Programs of a plan's units on meshes, by the unit's name, with what is known of them."""

    run: RunPlan
    programs: Mapping[str, Program]
    costs: Mapping[str, Costs]  # without temporaries where nothing was compiled
    memory: MemoryPlan

    def with_sampler(self, temporaries: int | None, sync: int | None) -> "CompiledPlan":
        """A copy with the temporaries of the sampler's programs and of the weight sync, in bytes.

        They are compiled last, and None where the platform does not report them.
        """
        return dataclasses.replace(self, memory=self.memory.with_sampler(temporaries, sync))

    @property
    def shortage(self) -> str:
        """One line on a device that has less memory than the plan needs, with ways out, or ""."""
        return shortage(self.run, self.memory, self.programs, self.costs)

    def check(self) -> None:
        """Raises ValueError if a device has less memory than the plan needs."""
        if missing := self.shortage:
            raise ValueError(missing)


def compile_plan(
    run: RunPlan,
    programs: Mapping[str, Program],
    *,
    only_trace: bool = False,
    only_costs: bool = False,
) -> CompiledPlan:
    """Compiles the programs and works out costs and memory; allocates no array.

    With `only_trace` nothing is compiled, and the memory is without the programs' temporaries. With
    `only_costs` compiling takes half of the time, and the programs must not run. The programs of
    the moves between units are not among them: they compile in step 1.
    """
    costs = {
        name: costs_of(
            program.traced, None if only_trace else program.compile(for_costs=only_costs)
        )
        for name, program in programs.items()
    }
    return CompiledPlan(run, programs, costs, plan_memory(run, programs, costs))
