"""A plan as a Mermaid flowchart, which GitHub and many editors render."""

from collections.abc import Iterable, Mapping, Sequence

from distflow_jax.dag.plan import Plan
from distflow_jax.report.plan_picture.captions import (
    AFTER,
    LOADER,
    Bytes,
    is_region_title,
    loader_lines,
    node_lines,
    outlines,
    role_of,
    wire_captions,
)
from distflow_jax.report.plan_picture.legend import MOVE_STYLES, ROLE_COLORS

_ARROWS = {"stay": "-->", "pack": "==>", "reshard": "==>", AFTER: "-.->"}  # others: -.->


def to_mermaid(
    plan: Plan, *, sizes: Bytes | None = None, regions: Mapping[str, Iterable[str]] | None = None
) -> str:
    """The plan as a flowchart; `sizes` and `regions` are those of picture.draw."""
    if regions is None:
        regions = {f"until {plan.region.until}": plan.region.nodes} if plan.region else {}
    regions = {name: sorted(members) for name, members in regions.items()}
    outlined = outlines(plan, regions)
    # generated ids: a node named "end" or "default" would be a key word
    ids = {LOADER: "loader"} | {t.node.id: f"n{i}" for i, t in enumerate(plan.tasks, 1)}
    lines = [f"%% plan {_comment(plan.name)}, digest {plan.digest[:12]}", "flowchart LR"]
    if plan.loader_fields:
        lines.append("  " + _node("loader", ["loader", *loader_lines(plan)]))
    boxes = {
        task.node.id: _node(ids[task.node.id], [title, *rest])
        for place, task in enumerate(plan.tasks, 1)
        for title, rest in [node_lines(task, place)]
    }
    lines += _grouped(list(boxes), boxes, outlined, level=0)
    captions = wire_captions(plan, sizes)
    for caption in captions:
        arrow = _ARROWS.get(caption.kind, "-.->")
        label = f'|"{_escape(", ".join(caption.fields))}"|' if caption.fields else ""
        lines.append(f"  {ids[caption.source]} {arrow}{label} {ids[caption.target]}")
    for kind, (color, *_) in MOVE_STYLES.items():
        numbers = [str(i) for i, caption in enumerate(captions) if caption.kind == kind]
        if numbers:
            lines.append(f"  linkStyle {','.join(numbers)} stroke:{color}")
    roles = role_of(plan)
    for role, (strong, faint) in ROLE_COLORS.items():
        members = [ids[name] for name in roles if roles[name] == role]
        if members:
            name = "loaded" if role == LOADER else role.lower()
            lines.append(f"  classDef {name} fill:{faint},stroke:{strong},color:#1f2937")
            lines.append(f"  class {','.join(members)} {name}")
    return "\n".join(lines) + "\n"


def _grouped(
    names: Sequence[str],
    boxes: Mapping[str, str],
    outlined: Mapping[str, Sequence[str]],
    level: int,
    path: str = "g",
) -> list[str]:
    """Lines of nodes, and of subgraphs for the outlines at this level."""
    lines: list[str] = []
    indent = "  " * (level + 1)
    groups: dict[str, list[str]] = {}
    for name in names:
        if len(outlined[name]) > level:
            groups.setdefault(outlined[name][level], []).append(name)
        else:
            lines.append(indent + boxes[name])
    for number, (title, members) in enumerate(groups.items(), 1):
        place = f"{path}{number}"
        lines.append(f'{indent}subgraph {place}["{_escape(title)}"]')
        lines += _grouped(members, boxes, outlined, level + 1, f"{place}_")
        lines.append(f"{indent}end")
        if is_region_title(title):
            lines.append(f"{indent}style {place} stroke:#be185d,stroke-dasharray:6 4")
    return lines


def _node(name: str, words: Sequence[str]) -> str:
    title, *rest = map(_escape, words)
    return f'{name}["{"<br/>".join([f"<b>{title}</b>", *rest])}"]'


def _escape(text: str) -> str:
    """Replaces characters that would end a label or be markup by Mermaid's entity codes."""
    return "".join(c if c.isalnum() or c in " _-.,:/()" else f"#{ord(c)};" for c in text)


def _comment(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)
