"""Colours and lines of a plan's picture, and the page around it: title and legend."""

from collections.abc import Collection, Sequence

from distflow_jax.dag.plan import Plan
from distflow_jax.report.drawing import Drawing, Line, Rect, Shape, Text, move, text_width
from distflow_jax.report.plan_picture.captions import AFTER, LOADER

# role -> (strong, faint)
ROLE_COLORS = {
    LOADER: ("#64748b", "#f1f5f9"),
    "ROLLOUT": ("#15803d", "#e9f7ee"),
    "REWARD": ("#b45309", "#fdf3e1"),
    "ACTOR": ("#1d4ed8", "#e8f0fe"),
    "CRITIC": ("#7e22ce", "#f5ebfe"),
    "REFERENCE": ("#0f766e", "#e3f5f3"),
}
# move -> (colour, dashes, thickness, meaning)
MOVE_STYLES = {
    "stay": ("#64748b", (), 1.2, "stay where they are"),
    "share": ("#0891b2", (7.0, 3.0), 1.5, "share among hosts"),
    "pack": ("#ea7a0c", (), 1.7, "pack, host to mesh"),
    "unpack": ("#9333ea", (9.0, 3.0, 2.0, 3.0), 1.5, "unpack, mesh to host"),
    "reshard": ("#dc2626", (5.0, 3.0), 1.7, "reshard, mesh to mesh"),
    AFTER: ("#94a3b8", (1.5, 3.0), 1.2, "after, nothing is read"),
}
INK, FAINT, PAPER = "#1f2937", "#526072", "#ffffff"

_MARGIN = 22.0
_TITLE, _SMALL = 15.0, 10.0  # sizes of text


def page(
    plan: Plan,
    shapes: Sequence[Shape],
    legend: Sequence[tuple[list[Shape], float]],
) -> Drawing:
    """Adds the title above, the legend below and margins around."""
    edges = [_extent(shape) for shape in shapes]
    left, top = min(e[0] for e in edges), min(e[1] for e in edges)
    right, bottom = max(e[2] for e in edges), max(e[3] for e in edges)
    title = f"plan {plan.name}"
    digest = f"digest {plan.digest[:12]}"
    title_width = text_width(title, _TITLE, bold=True)
    widest = max([width for _, width in legend], default=0.0)
    wanted = max(right - left, widest, title_width + 14.0 + text_width(digest, _SMALL))
    width = wanted + 2 * _MARGIN
    head = _MARGIN + 32.0
    placed: list[Shape] = [
        Text(_MARGIN, _MARGIN + 12.0, title, _TITLE, INK, bold=True),
        Text(_MARGIN + title_width + 14.0, _MARGIN + 12.0, digest, _SMALL, FAINT),
        *(move(shape, _MARGIN - left, head - top) for shape in shapes),
    ]
    x, y = _MARGIN, head + bottom - top + 34.0
    for entry, size in legend:
        if x > _MARGIN and x + size > width - _MARGIN:
            x, y = _MARGIN, y + 20.0
        placed += [move(shape, x, y) for shape in entry]
        x += size + 20.0
    return Drawing(width, y + _MARGIN, placed, PAPER)


def legend_entries(
    roles: Collection[str], kinds: Collection[str], has_segments: bool, has_loops: bool
) -> list[tuple[list[Shape], float]]:
    """(shapes, width) of the legend's entries, on a base line at 0."""
    entries: list[tuple[list[Shape], str, float]] = []
    for role, (strong, faint) in ROLE_COLORS.items():
        if role in roles:
            mark = [Rect(0, -10.0, 16.0, 12.0, faint, strong, 1.2, radius=3.0)]
            entries.append((mark, "loader" if role == LOADER else role, 16.0))
    for kind, (color, dash, thickness, meaning) in MOVE_STYLES.items():
        if kind in kinds:
            line = Line([(0, -4.0), (30.0, -4.0)], color, thickness, dash)
            entries.append(([line], meaning, 30.0))
    for shown, is_loop, meaning in (
        (has_segments, False, "one device program where fused"),
        (has_loops, True, "repeated until done"),
    ):
        if shown:
            stroke, fill, dash = outline_style(is_loop)
            mark = [Rect(0, -10.0, 16.0, 12.0, fill, stroke, 1.2, dash=dash)]
            entries.append((mark, meaning, 16.0))
    return [
        ([*mark, Text(size + 6.0, 0, word, _SMALL, FAINT)], size + 6.0 + text_width(word, _SMALL))
        for mark, word, size in entries
    ]


def outline_style(is_loop: bool) -> tuple[str, str, tuple[float, ...]]:
    """(stroke, fill, dashes)."""
    return ("#be185d", "#fdf2f8", (6.0, 4.0)) if is_loop else ("#94a3b8", "#f8fafc", (2.0, 2.0))


def _extent(shape: Shape) -> tuple[float, float, float, float]:
    if isinstance(shape, Text):
        return shape.box()
    if isinstance(shape, Rect):
        return shape.x, shape.y, shape.x + shape.width, shape.y + shape.height
    across, down = [x for x, _ in shape.points], [y for _, y in shape.points]
    return min(across), min(down), max(across), max(down)
