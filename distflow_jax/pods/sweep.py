"""The fastest settings of a run on a pod: found by formulas, and the best of them compiled.

search.py prices all settings; here the best for each training mesh are listed, and the fastest
three or so are compiled, which decides between them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from distflow_jax.config.graph_settings import value_at
from distflow_jax.pods.pod_plan import SPARE, PodPlan
from distflow_jax.pods.pricing import SEARCHED, Values
from distflow_jax.pods.search import Search, TrainingMesh
from distflow_jax.pods.topology import Pod
from distflow_jax.programs.text_table import WIDTH, broken_command, fill_lines, text_table
from distflow_jax.programs.units import format_bytes

_SHOWN = 12  # rows of the table


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Settings of a run, priced by formulas, and compiled if they were among the fastest."""

    mesh: TrainingMesh
    guess: PodPlan
    compiled: PodPlan | None = None

    @property
    def values(self) -> Values:
        """Values by the keys of SEARCHED."""
        config = self.guess.planned.config
        return {key: value_at(config, key) for key in SEARCHED}

    @property
    def flags(self) -> tuple[str, ...]:
        """Command-line flags that choose these settings."""
        return tuple(f"--config.{key}={value}" for key, value in self.values.items())

    @property
    def is_small(self) -> bool:
        """Whether it leaves SPARE of a chip's memory by formulas."""
        return not self.guess.problem and self.guess.spare >= SPARE

    @property
    def fits(self) -> bool:
        """Whether it was compiled, and leaves SPARE of a chip's memory."""
        found = self.compiled
        return found is not None and not found.problem and found.spare >= SPARE

    def verdict(self) -> str:
        """Text on the memory that it needs."""
        if self.compiled is None:
            return f"{self.guess.spare:.0%}" if self.is_small else "too large"
        if self.compiled.refused:
            return "; ".join(self.compiled.refused.values())
        return f"{self.compiled.spare:.1%}"

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
            "values": dict(self.values),
            "flags": " ".join(self.flags),
            "fullest": self.guess.memory.fullest.total,
            "spare": self.guess.spare,
            "estimated_step_seconds": self.guess.seconds,
            "expected_step_seconds": self.guess.expected.to_tree(),
            "compiled": compiled,
            "fits": self.fits if self.compiled else None,
        }


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The best settings for each training mesh that the run allows, the fastest first."""

    pod: Pod
    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate | None:
        """Of the compiled candidates that fit the one with the fewest expected seconds; if none was
        compiled, the first small one."""
        if any(c.compiled for c in self.candidates):
            fitting = [c for c in self.candidates if c.fits]
            return min(fitting, key=_compiled_seconds, default=None)
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
                f"none of the {len(tried)} fastest layouts leaves {SPARE:.0%} of HBM free ({why}): "
                "compile more layouts with --sweep_compile"
            )
        least = min(self.candidates, key=lambda c: c.guess.memory.fullest.total)
        fullest = least.guess.memory.fullest
        on_chips = least.guess.planned.config.training.offload == "none"
        return (
            f"no layout of {self.pod.name} leaves {SPARE:.0%} of a chip's "
            f"{format_bytes(self.pod.chip.memory)} free: the smallest is {_text(least)}, which "
            f"needs about {format_bytes(fullest.total)} in {fullest.name!r}; use more "
            f"chips{', or training.offload=idle' if on_chips else ''}"
        )

    def describe(self) -> str:
        """The candidates as a table of text, and the flags of the suggested settings."""
        small = [c for c in self.candidates if c.is_small or c.compiled]
        shown = small[:_SHOWN] or self.candidates[:_SHOWN]
        large = sum(not c.is_small for c in self.candidates)
        parts = [
            self.pod.describe(),
            "the best settings for each training mesh, by EXPECTED seconds per step; nothing "
            f"was measured\n\n{text_table([_TITLES, *map(_row, shown)])}\n",
            f"{len(self.candidates)} layouts, {large} of which need more than {1 - SPARE:.0%} of "
            "a chip's memory\n",
        ]
        if self.best is None:
            return fill_lines("\n".join(parts))
        known = "" if self.best.compiled else ", whose temporaries are estimated"
        parts.append(f"suggested: {_text(self.best)}{known}\n\n")
        flags = broken_command(" ".join(self.best.flags), WIDTH - 2)
        return fill_lines("\n".join(parts)) + "".join(f"  {line}\n" for line in flags)

    def flag_file(self) -> str:
        """The flags of the suggested settings, for --flagfile. There must be some."""
        assert self.best is not None
        expected = (self.best.compiled or self.best.guess).expected
        lines = [f"# plan.py --sweep for {self.pod.name}: expected {expected} s a step"]
        return "\n".join([*lines, *self.best.flags, ""])

    def to_tree(self) -> dict[str, Any]:
        """All candidates as plain JSON values."""
        return {
            "pod": self.pod.name,
            "spare": SPARE,
            "suggested": self.best and dict(self.best.values),
            "flags": " ".join(self.best.flags) if self.best else "",
            "problem": self.problem,
            "layouts": [c.to_tree() for c in self.candidates],
        }


_TITLES = (
    *("data", "fsdp", "tensor", "sampler", "remat", "rows", "cache", "offload"),
    *("step, s", "compiled", "free"),
)


def _row(c: Candidate) -> tuple[str, ...]:
    compiled = c.compiled and not c.compiled.refused
    data, fsdp, tensor, width, remat, rows, cache, offload = c.values.values()
    return (
        *(str(size) for size in (data, fsdp, tensor, width)),
        remat,
        str(rows // c.mesh.ranks),
        f"{cache:g}",
        offload,
        str(c.guess.expected),
        str(c.compiled.expected) if c.compiled and compiled else "-",
        c.verdict(),
    )


def sweep(
    search: Search,
    *,
    compiles: int = 3,
    say: Callable[[str], None] = lambda line: None,
) -> Sweep:
    """Finds the best settings for each training mesh, and compiles the fastest.

    Args:
      search: of a run on a pod.
      compiles: the most settings to compile, on a pod that compiles.
      say: called with lines on the progress.

    Raises ValueError if no settings are possible.
    """
    candidates = price(search, say)
    if search.pricing.pod.compiles:
        candidates = compile_fastest(search, candidates, compiles=compiles, say=say)
    return Sweep(search.pricing.pod, tuple(candidates))


def price(search: Search, say: Callable[[str], None] = lambda line: None) -> list[Candidate]:
    """The best settings for each mesh, sorted by expected seconds of a step, by formulas; those
    that fit come first. Arguments and errors: see `sweep`.
    """
    meshes = list(search.meshes())
    say(f"{len(meshes)} training meshes")
    plans = [(mesh, search.best_of(mesh)) for mesh in meshes]
    candidates = [Candidate(mesh, plan) for mesh, plan in plans if plan]
    if not candidates:
        raise ValueError(f"this run fits no layout of {search.pricing.pod.name}: {search.reason}")
    return _sorted(candidates)


def compile_fastest(
    search: Search,
    candidates: Sequence[Candidate],
    *,
    compiles: int = 3,
    say: Callable[[str], None] = lambda line: None,
) -> list[Candidate]:
    """Compiles the fastest candidates, at most `compiles`; returns all candidates.

    If one takes more memory than the formulas say, the next settings of its mesh that leave so much
    more become another candidate. Arguments: see `sweep`.
    """
    found = list(candidates)
    for count in range(1, compiles + 1):
        number = next((i for i, c in enumerate(found) if c.is_small and not c.compiled), None)
        if number is None:
            break
        candidate = found[number]
        say(f"compiling {count} of at most {compiles}: {_text(candidate)}")
        planned = candidate.guess.planned
        compiled = search.pricing.compiled(planned)
        found[number] = tried = dataclasses.replace(candidate, compiled=compiled)
        if tried.fits:
            continue
        missing = max(
            candidate.guess.spare - compiled.spare, 0.0 if not compiled.refused else SPARE
        )
        plan = search.best_of(candidate.mesh, SPARE + missing)
        if plan is not None and plan.spare >= SPARE + missing:
            found = _sorted([*found, Candidate(candidate.mesh, plan)])
    return found


def _sorted(candidates: Sequence[Candidate]) -> list[Candidate]:
    return sorted(
        candidates,
        key=lambda c: (not c.is_small, c.guess.expected.middle, c.guess.memory.fullest.total),
    )


def _compiled_seconds(c: Candidate) -> float:
    assert c.compiled is not None
    return c.compiled.expected.middle


def _text(c: Candidate) -> str:
    data, fsdp, tensor, width, remat, rows, cache, offload = c.values.values()
    return (
        f"data {data} x fsdp {fsdp} x tensor {tensor}, samplers of {width}, remat {remat}, "
        f"{rows // c.mesh.ranks} rows at a time, cache {cache:g}, offload {offload}"
    )
