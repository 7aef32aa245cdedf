"""A plan as a Mermaid flowchart, which GitHub and many editors render."""

from collections.abc import Mapping, Sequence

from distflow_jax.dag.plan import Plan
from distflow_jax.report.plan_picture.captions import (
    AFTER,
    LOADER,
    is_region_title,
    loader_lines,
    node_lines,
    outlines,
    role_of,
    wire_captions,
)
from distflow_jax.report.plan_picture.legend import MOVE_STYLES, ROLE_COLORS

_ARROWS = {"stay": "-->", "pack": "==>", "reshard": "==>", AFTER: "-.->"}  # others: -.->


def to_mermaid(plan: Plan) -> str:
    """The plan as a flowchart."""
    # generated ids: a node named "end" or "default" would be a key word
    ids = {LOADER: "loader"} | {t.node.id: f"n{i}" for i, t in enumerate(plan.tasks, 1)}
    name = "".join(c if c.isprintable() else " " for c in plan.name)
    lines = [f"%% plan {name}, digest {plan.digest[:12]}", "flowchart LR"]
    if plan.loader_fields:
        lines.append("  " + _node("loader", ["loader", *loader_lines(plan)]))
    boxes = {
        task.node.id: _node(ids[task.node.id], [title, *rest])
        for place, task in enumerate(plan.tasks, 1)
        for title, rest in [node_lines(task, place)]
    }
    lines += _grouped(boxes, outlines(plan))
    captions = wire_captions(plan)
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


def _grouped(boxes: Mapping[str, str], outlined: Mapping[str, str]) -> list[str]:
    """Lines of nodes, and of a subgraph for each outline."""
    lines = [f"  {box}" for name, box in boxes.items() if name not in outlined]
    groups: dict[str, list[str]] = {}
    for name, box in boxes.items():
        if name in outlined:
            groups.setdefault(outlined[name], []).append(f"    {box}")
    for number, (title, members) in enumerate(groups.items(), 1):
        lines += [f'  subgraph g{number}["{_escape(title)}"]', *members, "  end"]
        if is_region_title(title):
            lines.append(f"  style g{number} stroke:#be185d,stroke-dasharray:6 4")
    return lines


def _node(name: str, words: Sequence[str]) -> str:
    title, *rest = map(_escape, words)
    return f'{name}["{"<br/>".join([f"<b>{title}</b>", *rest])}"]'


def _escape(text: str) -> str:
    """Replaces characters that would end a label or be markup by Mermaid's entity codes."""
    return "".join(c if c.isalnum() or c in " _-.,:/()" else f"#{ord(c)};" for c in text)
