"""Search for the fastest layout of a run on a pod.

All layouts that the pod and the model allow are priced by formulas, and the fastest of them are
compiled until one fits.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from distflow_jax.config.mesh_config import MeshConfig
from distflow_jax.config.run_config import Config
from distflow_jax.models.weights.source import ModelSource, open_options, open_shapes
from distflow_jax.planning.mesh_sizes import check_width, mesh_sizes
from distflow_jax.planning.plan_run import RunPlan, plan_run
from distflow_jax.pods.pod_plan import SPARE, PodPlan, plan_on
from distflow_jax.pods.topology import Pod
from distflow_jax.programs.text_table import WIDTH, broken_command, fill_lines, text_table
from distflow_jax.programs.units import format_bytes, in_unit_of
from distflow_jax.runtime.build import trace

# Axes of mesh.* that are searched. The others stay as configured: formulas do not cover pipelines,
# nor temporaries, which expert and context reduce
AXES = ("data", "fsdp", "tensor", "rollout_tensor")
_SHOWN = 12  # rows of the table


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layout, priced by formulas, and compiled if it was among the fastest."""

    guess: PodPlan
    compiled: PodPlan | None = None

    @property
    def mesh(self) -> dict[str, int]:
        """Sizes by axis, of AXES."""
        sizes = self.guess.planned.sizes
        return {a: getattr(sizes.mesh, a) for a in AXES[:-1]} | {AXES[-1]: sizes.rollout_tensor}

    @property
    def flags(self) -> str:
        """Command-line flags that choose this layout."""
        return " ".join(f"--config.mesh.{axis}={size}" for axis, size in self.mesh.items())

    @property
    def is_small(self) -> bool:
        """Whether live arrays, without temporaries, leave SPARE of a chip's memory."""
        return not self.guess.problem and self.guess.spare >= SPARE

    @property
    def fits(self) -> bool:
        """Whether it was compiled, and leaves SPARE of a chip's memory."""
        found = self.compiled
        return found is not None and not found.problem and found.spare >= SPARE

    def verdict(self) -> str:
        """Text on the memory that it needs."""
        if self.compiled is None:
            return "not compiled" if self.is_small else "too large without temporaries"
        if self.compiled.refused:
            return "; ".join(self.compiled.refused.values())
        return f"compiled: {self.compiled.spare:.1%} to spare"

    def to_tree(self) -> dict[str, Any]:
        """The candidate as plain JSON values."""
        compiled = self.compiled and {
            "fullest": self.compiled.memory.fullest.total,
            "spare": self.compiled.spare,
            "estimated_step_seconds": self.compiled.seconds,
            "expected_step_seconds": self.compiled.expected.to_tree(),
            "problem": self.compiled.problem,
        }
        return {
            "mesh": self.mesh,
            "flags": self.flags,
            "living_bytes": self.guess.memory.fullest.total,
            "living_spare": self.guess.spare,
            "estimated_step_seconds": self.guess.seconds,
            "expected_step_seconds": self.guess.expected.to_tree(),
            "compiled": compiled,
            "fits": self.fits if self.compiled else None,
        }


@dataclasses.dataclass(frozen=True)
class Sweep:
    """All layouts that the run allows, the fastest first."""

    pod: Pod
    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate | None:
        """The first compiled candidate that fits; if none was compiled, the first small one."""
        if any(c.compiled for c in self.candidates):
            return next((c for c in self.candidates if c.fits), None)
        return next((c for c in self.candidates if c.is_small), None)

    @property
    def problem(self) -> str:
        """The reason why no layout is suggested, in one line; "" if one is."""
        if self.best is not None:
            return ""
        tried = [c for c in self.candidates if c.compiled]
        if tried:
            why = "; ".join(f"{_text(c)}: {c.verdict()}" for c in tried)
            return (
                f"none of the {len(tried)} fastest layouts leaves {SPARE:.0%} of HBM ({why}): "
                "compile more of them (--sweep_compile)"
            )
        least = min(self.candidates, key=lambda c: c.guess.memory.fullest.total)
        fullest = least.guess.memory.fullest
        on_chips = least.guess.planned.config.training.offload == "none"
        return (
            f"no layout of {self.pod.name} leaves {SPARE:.0%} of a chip's "
            f"{format_bytes(self.pod.chip.memory)}: the smallest is {_text(least)}, which holds "
            f"{format_bytes(fullest.total)} in {fullest.name!r}, without temporaries; use more "
            f"chips{', or training.offload=idle' if on_chips else ''}"
        )

    def describe(self) -> str:
        """The candidates as a table of text, and the flags of the suggested layout."""
        small = [c for c in self.candidates if c.is_small]
        large = len(self.candidates) - len(small)
        shown = small[:_SHOWN] or self.candidates[:_SHOWN]
        parts = [
            self.pod.describe(),
            f"layouts by ESTIMATED seconds of a step, by formulas; nothing of this was measured\n\n"
            f"{text_table(self._rows(shown))}\n",
            f"{len(self.candidates)} layouts in all, of which {large} hold more than "
            f"{1 - SPARE:.0%} of a chip's memory without temporaries\n",
        ]
        if self.best is None:
            return fill_lines("\n".join(parts))
        known = "" if self.best.compiled else ", whose temporaries are unknown"
        parts.append(f"suggested: {_text(self.best)}{known}\n\n")
        flags = broken_command(self.best.flags, WIDTH - 2)
        return fill_lines("\n".join(parts)) + "".join(f"  {line}\n" for line in flags)

    def to_tree(self) -> dict[str, Any]:
        """All candidates as plain JSON values."""
        return {
            "pod": self.pod.name,
            "spare": SPARE,
            "suggested": self.best and self.best.mesh,
            "flags": self.best.flags if self.best else "",
            "problem": self.problem,
            "layouts": [c.to_tree() for c in self.candidates],
        }

    def _rows(self, shown: Sequence[Candidate]) -> list[tuple[str, ...]]:
        living = [c.guess.memory.fullest.total for c in shown]
        unit, write = in_unit_of(max(living))
        titles = "step, s", "rollout, s", "compiled, s", f"lives on a chip, {unit}", "memory"
        rows = [("data", "fsdp", "tensor", "sampler", *titles)]
        for c, held in zip(shown, living, strict=True):
            generation, compiled = c.guess.generation, c.compiled
            seconds = (
                f"{c.guess.seconds:.3g}",
                f"{generation.total:.3g}" if generation else "-",
                f"{compiled.seconds:.3g}" if compiled and not compiled.refused else "-",
            )
            verdict = "-" if compiled is None and c.is_small else c.verdict()
            rows.append((*map(str, c.mesh.values()), *seconds, write(held), verdict))
        return rows


def sweep(
    pod: Pod,
    config: Config,
    chosen: Collection[str] = (),
    *,
    mean_response: int = 0,
    compiles: int = 3,
    say: Callable[[str], None] = lambda line: None,
) -> Sweep:
    """Prices all layouts of a run, and compiles the fastest of them until one fits.

    Args:
      pod: the pod.
      config: of the run.
      chosen: config keys set on the command line.
      mean_response: see `plan_on`.
      compiles: the most layouts to compile.
      say: called with lines on the progress.

    Raises ValueError if no layout is possible, and the errors of `open_shapes`.
    """
    candidates = price(pod, config, chosen, mean_response=mean_response, say=say)
    if pod.compiles:
        candidates = compile_fastest(
            pod, candidates, mean_response=mean_response, compiles=compiles, say=say
        )
    return Sweep(pod, tuple(candidates))


def price(
    pod: Pod,
    config: Config,
    chosen: Collection[str] = (),
    *,
    mean_response: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> list[Candidate]:
    """All layouts, sorted by estimated seconds of a step, from formulas.

    The formulas cover FLOPs, links and HBM, but not the transfers of offload. Arguments and errors:
    see `sweep`.
    """
    source = open_shapes(config.model.source, **open_options(config.model))
    kept = {*chosen, *(f"mesh.{axis}" for axis in AXES)}
    unlike: list[str] = []  # reasons why sizes are no mesh of this model
    meshes = list(_training_meshes(pod, config, source, unlike))
    widths = list(_sampler_widths(pod, source))
    candidates, reasons = [], []
    say(f"{len(meshes)} training meshes x {len(widths)} widths of a sampler")
    for mesh in meshes:
        programs = None
        for width in widths:
            tried = dataclasses.replace(
                config, mesh=dataclasses.replace(mesh, rollout_tensor=width)
            )
            try:
                planned = _planned(pod, tried, kept, source)
                # the programs of a training mesh do not depend on the samplers
                programs = programs or trace(planned)
                guess = plan_on(
                    pod, planned, mean_response=mean_response, compiled=False, programs=programs
                )
            except ValueError as error:
                reasons.append(str(error))
                continue
            candidates.append(Candidate(guess))
            if not planned.own_samplers:
                break
    if not candidates:
        raise ValueError(f"no layout of {pod.name} suits this run: {(reasons or unlike)[0]}")
    candidates.sort(key=lambda c: (c.guess.seconds, c.guess.memory.fullest.total))
    return candidates


def compile_fastest(
    pod: Pod,
    candidates: Sequence[Candidate],
    *,
    mean_response: int = 0,
    compiles: int = 3,
    say: Callable[[str], None] = lambda line: None,
) -> list[Candidate]:
    """Compiles the first candidates, at most `compiles`, until one fits; returns all candidates.

    Arguments: see `sweep`.
    """
    found = list(candidates)
    count, too_large = 0, []  # training programs that are too large whatever the sampler's width
    for number, candidate in enumerate(candidates):
        guess = candidate.guess
        if not candidate.is_small or any(guess.programs is programs for programs in too_large):
            continue
        if count == compiles:
            break
        count += 1
        say(f"compiling {count} of at most {compiles}: {_text(candidate)}")
        compiled = plan_on(pod, guess.planned, mean_response=mean_response, programs=guess.programs)
        found[number] = Candidate(guess, compiled)
        if found[number].fits:
            break
        if compiled.refused.keys() & guess.programs.keys():
            too_large.append(guess.programs)
    return found


def _training_meshes(
    pod: Pod, config: Config, source: ModelSource, unlike: list[str]
) -> Iterator[MeshConfig]:
    """Training meshes that the pod holds and the model's sizes allow."""
    for data, tensor in itertools.product(_divisors(pod.size), repeat=2):
        mesh = dataclasses.replace(config.mesh, data=data, fsdp=0, tensor=tensor, rollout_tensor=1)
        try:
            sizes, _ = mesh_sizes(mesh, source.config, pod.machine)
        except ValueError as error:
            unlike.append(str(error))
            continue
        if pod.holds(sizes):
            yield dataclasses.replace(mesh, fsdp=sizes.fsdp)


def _sampler_widths(pod: Pod, source: ModelSource) -> Iterator[int]:
    for width in _divisors(pod.size):
        try:
            check_width("mesh.rollout_tensor", width, source.config, pod.machine)
        except ValueError:
            continue
        if pod.interconnect.span(range(width)):
            yield width


def _planned(pod: Pod, config: Config, chosen: Collection[str], source: ModelSource) -> RunPlan:
    planned = plan_run(config, pod.machine, chosen, open_source=lambda *_, **__: source)
    return dataclasses.replace(planned, devices=pod.devices)


def _text(candidate: Candidate) -> str:
    *mesh, (_, width) = candidate.mesh.items()
    return f"{' x '.join(f'{axis} {size}' for axis, size in mesh)}, samplers of {width}"


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
