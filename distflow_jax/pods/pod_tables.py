"""Tables of a pod plan: memory, traffic, reshards, and the seconds of every part of a step."""

from distflow_jax.pods.pod_plan import SPARE, PodPlan
from distflow_jax.pods.roofline import collective_seconds, exposed_seconds
from distflow_jax.programs.text_table import fill_lines, text_table
from distflow_jax.programs.units import format_bytes, format_decimal


def describe_plan(plan: PodPlan) -> str:
    """The plan of a pod as tables of text."""
    how = (
        "for each compiled program"
        if _is_compiled(plan)
        else "for each program, by formulas (nothing was compiled)"
    )
    parts = [
        plan.pod.describe(),
        f"memory per chip, {how}\n\n{text_table(_memory_rows(plan))}\n",
        f"{plan.memory.describe()}\n{_spare(plan)}",
        f"traffic per chip, summed over loop iterations\n\n{text_table(_traffic_rows(plan))}\n",
    ]
    if plan.reshards:
        parts.append(f"reshards between layouts\n\n{text_table(_reshard_rows(plan))}\n")
    parts.append(
        f"ESTIMATED seconds{'' if plan.filled else ', all rows filled'} (docs/scaling.md): terms "
        "and bound at peak rates, and the range that is expected at "
        f"{plan.pod.efficiency.source} shares of these rates; nothing was "
        f"measured\n\n{text_table(_seconds_rows(plan))}\n\n"
        f"a step: expected {plan.expected} s, bound {plan.seconds:.3g} s, without rewards and "
        "other host work"
        f"{', without programs that are too large' if plan.refused else ''}"
        f"{', without programs that were not compiled' if plan.left_out else ''}\n"
    )
    return fill_lines("\n".join(parts))


def _spare(plan: PodPlan) -> str:
    fullest = plan.memory.fullest
    text = f"{plan.spare:.1%} of HBM free in {fullest.name!r}, the fullest segment"
    if plan.refused:
        return f"{text}, without programs that are too large\n"
    if plan.memory.unknown:
        return f"{text}, without temporaries of {', '.join(plan.memory.unknown)}\n"
    if not _is_compiled(plan):
        text += ", with temporaries estimated by formulas"
    if plan.spare < SPARE:
        return f"WARNING: {text}: below {SPARE:.0%}, a run may run out of memory\n"
    return f"{text}\n"


def _is_compiled(plan: PodPlan) -> bool:
    return any(cost.peak_bytes for cost in plan.costs.values())


def _memory_rows(plan: PodPlan) -> list[tuple[str, ...]]:
    rows = [
        ("program", "arguments", "outputs", "in place of", "temporaries", "sum", "of HBM",
         "FLOPs per chip"),
    ]  # fmt: skip
    for name, cost in plan.costs.items():
        sizes = cost.argument_bytes, cost.output_bytes, cost.alias_bytes, cost.temp_bytes
        cells = ["-" if size is None else format_bytes(size) for size in sizes]
        peak = cost.peak_bytes
        share = "-" if peak is None else f"{peak / plan.pod.chip.memory:.0%}"
        cells += ["-" if peak is None else format_bytes(peak), share]
        rows.append((name, *cells, format_decimal(cost.flops / plan.chips[name], "")))
    rows += [(name, *["-"] * 4, "too large", "-", "-") for name in plan.refused]
    rows += [(name, *["-"] * 4, "not compiled", "-", "-") for name in plan.left_out]
    return rows


def _traffic_rows(plan: PodPlan) -> list[tuple[str, ...]]:
    rows = [("program", "axes", "collective", "bytes", "times", "estimated s", "alone")]
    for name, cost in plan.costs.items():
        for t in cost.traffic:
            seconds = collective_seconds(plan.pod.interconnect, t)
            alone = exposed_seconds(plan.pod, t)
            sizes = format_bytes(t.bytes), f"{t.times:,.0f}", f"{seconds:.2g}", f"{alone:.2g}"
            rows.append((name, "*".join(t.axes), t.kind, *sizes))
    return rows


def _reshard_rows(plan: PodPlan) -> list[tuple[str, ...]]:
    rows = [("field", "from", "to", "layouts", "bytes", "per chip then")]
    for r in plan.reshards:
        sizes = format_bytes(r.bytes), format_bytes(r.chip_bytes)
        rows.append((r.field, r.source, r.target, r.layouts, *sizes))
    return rows


def _seconds_rows(plan: PodPlan) -> list[tuple[str, ...]]:
    rows = [("segment", "compute", "memory", "links", "bound", "expected", "bound by")]
    for name, e in plan.parts.items():
        links = ", ".join(f"{axes} {s:.2g}" for axes, s in e.links.items() if s >= 5e-7) or "-"
        seconds = f"{e.compute:.3g}", f"{e.memory:.3g}", links, f"{e.total:.3g}"
        rows.append((name, *seconds, str(e.expected(plan.pod.efficiency)), e.bound))
    return rows
