"""Drawings of rectangles, lines and text in pixels, the widths of texts, and SVG output.

Plans and charts are `Drawing`s, which `to_svg` writes. x goes right, y down. A colour is "#rrggbb",
or "var(--name, #rrggbb)" if a page may define `name`; other viewers use the hexadecimal colour.
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape, quoteattr

Point = tuple[float, float]

# A viewer uses the first of these that is installed; `text_width` is an upper bound for all.
FONTS = "Inter, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"

# Advance of the characters 32..126 in hundredths of the size: at least that of DejaVu Sans, the
# widest font that browsers use for sans-serif.
_ADVANCE = [
    int(number)
    for number in (
        "32 41 46 84 64 96 78 28 40 40 56 84 32 37 32 34 64 64 64 64 64 64 64 64 64 64 34 34 84 "
        "84 84 54 100 69 69 70 78 64 58 78 76 30 55 66 58 87 75 79 61 79 70 64 62 74 69 99 69 62 "
        "69 40 34 40 84 50 50 62 64 55 64 62 36 64 64 28 28 58 28 98 64 62 64 64 42 53 40 64 60 "
        "82 60 60 53 64 34 64 84 "
    ).split()
]
_BOLD = 1.2  # upper bound of a bold word's width against a regular one's
_OTHER = 1.25  # ems of characters beyond ASCII: 1 for Chinese, a quarter more for pictograms

# characters that XML cannot contain, not even escaped
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclasses.dataclass(frozen=True)
class Rect:
    """A rectangle with rounded corners; `title` is its tooltip."""

    x: float
    y: float
    width: float
    height: float
    fill: str = "none"
    stroke: str = "none"
    thickness: float = 1.0
    radius: float = 0.0
    dash: tuple[float, ...] = ()
    title: str = ""


@dataclasses.dataclass(frozen=True)
class Line:
    """A line through points; a polygon if it has a fill or is `closed`."""

    points: Sequence[Point]
    stroke: str = "none"
    thickness: float = 1.0
    dash: tuple[float, ...] = ()
    fill: str = "none"
    closed: bool = False
    title: str = ""


@dataclasses.dataclass(frozen=True)
class Text:
    """One line of text; (x, y) is the start, middle or end of its base line."""

    x: float
    y: float
    text: str
    size: float = 11.0
    color: str = "#1f2937"
    bold: bool = False
    anchor: str = "start"

    def box(self) -> tuple[float, float, float, float]:
        """(left, top, right, bottom) of a box that contains the text."""
        width = text_width(self.text, self.size, self.bold)
        left = self.x - width * {"start": 0.0, "middle": 0.5, "end": 1.0}[self.anchor]
        return left, self.y - 0.8 * self.size, left + width, self.y + 0.25 * self.size


Shape = Rect | Line | Text


@dataclasses.dataclass(frozen=True)
class Drawing:
    """Shapes on a canvas; later shapes cover earlier ones."""

    width: float
    height: float
    shapes: Sequence[Shape]
    background: str = "none"


def text_width(text: str, size: float, bold: bool = False) -> float:
    """Upper bound of the text's width in any of FONTS, in pixels."""
    ems = sum(
        _ADVANCE[ord(c) - 32] / 100 if " " <= c <= "~" else _OTHER if c.isprintable() else 0.0
        for c in text
    )
    return ems * size * (_BOLD if bold else 1.0)


def shorten(text: str, size: float, width: float, bold: bool = False) -> str:
    """The text, cut to fit into `width` with an ellipsis."""
    if text_width(text, size, bold) <= width:
        return text
    while text and text_width(text + "…", size, bold) > width:
        text = text[:-1]
    return text.rstrip() + "…"


def wrap(words: Iterable[str], size: float, width: float) -> list[str]:
    """Lines of whole words, no wider than `width` unless a word alone is."""
    lines: list[str] = []
    for word in words:
        longer = f"{lines[-1]} {word}" if lines else word
        if lines and text_width(longer, size) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def move(shape: Shape, dx: float, dy: float) -> Shape:
    """The shape, moved by (dx, dy)."""
    if isinstance(shape, Line):
        return dataclasses.replace(shape, points=[(x + dx, y + dy) for x, y in shape.points])
    return dataclasses.replace(shape, x=shape.x + dx, y=shape.y + dy)


def curve(start: Point, end: Point) -> list[Point]:
    """A smooth line that leaves `start` and arrives at `end` horizontally (a cubic Bézier)."""
    (x0, y0), (x1, y1) = start, end
    if abs(y1 - y0) < 0.5:
        return [start, end]
    middle, points = (x0 + x1) / 2, []
    for i in range(17):
        t = i / 16
        a, b, c, d = (1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3
        points.append(((a * x0 + (b + c) * middle + d * x1), ((a + b) * y0 + (c + d) * y1)))
    return points


# -- SVG --------------------------------------------------------------------------------------


def to_svg(drawing: Drawing, label: str = "") -> str:
    """A self-contained SVG document; `label` describes it for screen readers."""
    width, height = _number(drawing.width), _number(drawing.height)
    name = f" role='img' aria-label={_quote(label)}" if label else ""
    lines = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' "
        f"width='{width}' height='{height}' font-family={_quote(FONTS)}{name}>"
    ]
    if drawing.background != "none":
        lines.append(f"<rect width='{width}' height='{height}' fill='{drawing.background}'/>")
    lines += [_element(shape) for shape in drawing.shapes]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _element(shape: Shape) -> str:
    if isinstance(shape, Text):
        place = f"x='{_number(shape.x)}' y='{_number(shape.y)}' font-size='{_number(shape.size)}'"
        place += " font-weight='600'" if shape.bold else ""
        place += "" if shape.anchor == "start" else f" text-anchor='{shape.anchor}'"
        return f"<text {place}{_paint(fill=shape.color)}>{_xml(shape.text)}</text>"
    paint = _paint(fill=shape.fill, stroke=shape.stroke)
    if shape.stroke != "none":
        paint += f" stroke-width='{_number(shape.thickness)}'"
        if shape.dash:
            paint += f" stroke-dasharray='{' '.join(_number(n) for n in shape.dash)}'"
    if isinstance(shape, Rect):
        kind, radius = "rect", f" rx='{_number(shape.radius)}'" if shape.radius else ""
        sides = f"width='{_number(shape.width)}' height='{_number(shape.height)}'"
        place = f"x='{_number(shape.x)}' y='{_number(shape.y)}' {sides}{radius}"
    else:
        kind = "polygon" if shape.closed or shape.fill != "none" else "polyline"
        points = " ".join(f"{_number(x)},{_number(y)}" for x, y in shape.points)
        place = f"points='{points}' stroke-linejoin='round'"
    if shape.title:
        return f"<{kind} {place}{paint}><title>{_xml(shape.title)}</title></{kind}>"
    return f"<{kind} {place}{paint}/>"


def _paint(**colors: str) -> str:
    """Colours as attributes; var() goes into `style`, the only place where all viewers take it."""
    style = "".join(f"{what}:{color};" for what, color in colors.items() if "var(" in color)
    plain = "".join(f" {what}='{color}'" for what, color in colors.items() if "var(" not in color)
    plain = plain.replace(" stroke='none'", "")
    return f"{plain} style='{style}'" if style else plain


def _number(value: float) -> str:
    text = f"{value:.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def _xml(text: str) -> str:
    return escape(_FORBIDDEN.sub("\ufffd", text))


def _quote(text: str) -> str:
    return quoteattr(_FORBIDDEN.sub("\ufffd", text))
