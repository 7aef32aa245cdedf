"""Which layout a run should have on a pod: all that the pod and the model allow, priced by
formulas, and the fastest of them compiled until one fits."""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from distflow_jax.config.run_config import Config
from distflow_jax.dag.plan import aligned
from distflow_jax.models.weights.source import ModelSource, open_shapes
from distflow_jax.parallel.mesh import MeshConfig
from distflow_jax.planning.mesh_sizes import check_width, mesh_sizes
from distflow_jax.planning.plan_run import RunPlan, plan_run
from distflow_jax.pods.pod_plan import SPARE, PodPlan, plan_on
from distflow_jax.pods.topology import Pod
from distflow_jax.programs.units import format_bytes
from distflow_jax.runtime.build import trace

# Of mesh.*. The others stay as configured: stages are not known to the formulas, and what experts
# and rows in parts are for, temporaries, is not either
AXES = ("data", "fsdp", "tensor", "rollout_tensor")
_SHOWN = 12  # rows of the table


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A layout, planned by formulas, and compiled where it was among the best."""

    guess: PodPlan
    compiled: PodPlan | None = None

    @property
    def mesh(self) -> dict[str, int]:
        """Sizes of AXES."""
        sizes = self.guess.planned.sizes
        return {a: getattr(sizes.mesh, a) for a in AXES[:-1]} | {AXES[-1]: sizes.rollout_tensor}

    @property
    def flags(self) -> str:
        """What the command line needs for it."""
        return " ".join(f"--config.mesh.{axis}={size}" for axis, size in self.mesh.items())

    @property
    def is_small(self) -> bool:
        """Whether what lives on a chip leaves SPARE of its memory, temporaries not counted."""
        return not self.guess.problem and self.guess.spare >= SPARE

    @property
    def fits(self) -> bool:
        """Whether it was compiled, and leaves SPARE of a chip's memory."""
        found = self.compiled
        return found is not None and not found.problem and found.spare >= SPARE

    def verdict(self) -> str:
        """What is known of its memory, for people."""
        if self.compiled is None:
            return "not compiled" if self.is_small else "too large without temporaries"
        if self.compiled.refused:
            return "; ".join(self.compiled.refused.values())
        return f"compiled: {self.compiled.spare:.1%} to spare"

    def to_tree(self) -> dict[str, Any]:
        """Plain JSON values."""
        compiled = self.compiled and {
            "fullest": self.compiled.memory.fullest.total,
            "spare": self.compiled.spare,
            "estimated_step_seconds": self.compiled.seconds,
            "problem": self.compiled.problem,
        }
        return {
            "mesh": self.mesh,
            "flags": self.flags,
            "living_bytes": self.guess.memory.fullest.total,
            "living_spare": self.guess.spare,
            "estimated_step_seconds": self.guess.seconds,
            "compiled": compiled,
            "fits": self.fits if self.compiled else None,
        }


@dataclasses.dataclass(frozen=True)
class Sweep:
    """All layouts that are a run, the fastest first."""

    pod: Pod
    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate | None:
        """The first that fits, as compiled; where none was compiled, the first that is small."""
        if any(c.compiled for c in self.candidates):
            return next((c for c in self.candidates if c.fits), None)
        return next((c for c in self.candidates if c.is_small), None)

    @property
    def problem(self) -> str:
        """Why no layout is suggested, in one line; "" where one is."""
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
        """The table for people, and the flags of the layout that it suggests."""
        small = [c for c in self.candidates if c.is_small]
        large = len(self.candidates) - len(small)
        shown = small[:_SHOWN] or self.candidates[:_SHOWN]
        parts = [
            self.pod.describe(),
            f"layouts by ESTIMATED seconds of a step, by formulas; nothing of this was measured\n\n"
            f"{aligned(self._rows(shown))}\n",
            f"{len(self.candidates)} layouts in all, of which {large} hold more than "
            f"{1 - SPARE:.0%} of a chip's memory without temporaries\n",
        ]
        if self.best is not None:
            known = "" if self.best.compiled else ", whose temporaries are not known"
            parts.append(f"suggested: {_text(self.best)}{known}\n\n  {self.best.flags}\n")
        return "\n".join(parts)

    def to_tree(self) -> dict[str, Any]:
        """The same as plain JSON values, with every layout."""
        return {
            "pod": self.pod.name,
            "spare": SPARE,
            "suggested": self.best and self.best.mesh,
            "flags": self.best.flags if self.best else "",
            "problem": self.problem,
            "layouts": [c.to_tree() for c in self.candidates],
        }

    def _rows(self, shown: Sequence[Candidate]) -> list[tuple[str, ...]]:
        titles = "a step, s", "rollout", "if compiled", "lives on a chip", "to spare", "memory"
        rows = [(*AXES, *titles)]
        for c in shown:
            generation, compiled = c.guess.generation, c.compiled
            seconds = (
                f"{c.guess.seconds:.4g}",
                f"{generation.total:.4g}" if generation else "-",
                f"{compiled.seconds:.4g}" if compiled and not compiled.refused else "-",
            )
            lives = format_bytes(c.guess.memory.fullest.total), f"{c.guess.spare:.1%}"
            rows.append((*map(str, c.mesh.values()), *seconds, *lives, c.verdict()))
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
    """Prices all layouts of a run, and compiles the fastest, at most `compiles`, until one fits.

    `chosen` are the config keys that the command line gives; `mean_response` as of `plan_on`. `say`
    is told what is at work. Raises ValueError where there is no layout, and what `open_shapes`
    does.
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
    """All layouts by estimated seconds, by formulas. FLOPs, links and HBM decide; what offload
    takes to move is not known. Arguments and errors: see `sweep`."""
    source = open_shapes(config.model.source, **config.model.options())
    kept = {*chosen, *(f"mesh.{axis}" for axis in AXES)}
    unlike: list[str] = []  # why sizes are no mesh of this model
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
                # what a training mesh runs does not depend on the samplers
                programs = programs or trace(planned)
                guess = plan_on(
                    pod, planned, mean_response=mean_response, compiled=False, programs=programs
                )
            except ValueError as error:
                reasons.append(str(error))
                continue
            candidates.append(Candidate(guess))
            if not planned.samplers:
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
    """The candidates, of which the first are compiled, at most `compiles`, until one fits."""
    found = list(candidates)
    count, too_large = 0, []  # training programs that no width of a sampler can help
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
    """Those that the pod's torus holds and the model's sizes divide."""
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
