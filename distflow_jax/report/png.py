"""A drawing as PNG, by Pillow, with the font that Pillow brings: the same pixels everywhere."""

import io
import math
import re
from collections.abc import Iterator, Sequence

from PIL import Image, ImageDraw, ImageFont

from distflow_jax.report.drawing import Drawing, Line, Point, Rect, Shape, Text, rounded

_FINE = 2  # pixels drawn per pixel written, in each direction: smooth edges
_BAND = 128  # rows of the picture drawn at a time, which bounds the memory
_MOST_PIXELS = 40_000_000

_INVISIBLE = (0, 0, 0, 0)


def to_png(drawing: Drawing, scale: float = 2.0) -> bytes:
    """The drawing with `scale` pixels per unit, fewer where that would be above 40 megapixels."""
    scale = min(scale, math.sqrt(_MOST_PIXELS / (drawing.width * drawing.height)))
    width, height = math.ceil(drawing.width * scale), math.ceil(drawing.height * scale)
    zoom = scale * _FINE
    background = _color(drawing.background)
    mode = "RGBA" if background == _INVISIBLE else "RGB"
    canvas = Image.new(mode, (width, height), background)
    reach = [(shape, *_rows(shape, zoom)) for shape in drawing.shapes]
    for top in range(0, height, _BAND):
        rows = min(_BAND, height - top)
        band = Image.new(mode, (width * _FINE, rows * _FINE), background)
        pen = ImageDraw.Draw(band)
        first, last = top * _FINE, (top + rows) * _FINE
        for shape, above, below in reach:
            if below >= first and above <= last:
                _draw(pen, shape, zoom, -first)
        canvas.paste(band.resize((width, rows), Image.Resampling.BOX), (0, top))
    file = io.BytesIO()
    canvas.save(file, "PNG")
    return file.getvalue()


def _rows(shape: Shape, zoom: float) -> tuple[float, float]:
    """First and last row of pixels that the shape may touch."""
    if isinstance(shape, Rect):
        top, bottom, margin = shape.y, shape.y + shape.height, shape.thickness
    elif isinstance(shape, Line):
        rows = [y for _, y in shape.points]
        top, bottom, margin = min(rows), max(rows), shape.thickness
    else:
        top, bottom, margin = shape.y - shape.size, shape.y + shape.size, 0
    return (top - margin) * zoom, (bottom + margin) * zoom


def _draw(pen: ImageDraw.ImageDraw, shape: Shape, zoom: float, shift: float) -> None:
    if isinstance(shape, Text):
        font = ImageFont.load_default(shape.size * zoom)
        anchor = {"start": "ls", "middle": "ms", "end": "rs"}[shape.anchor]
        place = (shape.x * zoom, shape.y * zoom + shift)
        heavy = round(0.02 * shape.size * zoom) if shape.bold else 0  # the font has no bold face
        pen.text(place, shape.text, _color(shape.color), font, anchor, stroke_width=heavy)
        return
    closed = isinstance(shape, Rect) or shape.closed
    outline = rounded(shape) if isinstance(shape, Rect) else shape.points
    points = [(x * zoom, y * zoom + shift) for x, y in outline]
    if shape.fill != "none":
        pen.polygon(points, _color(shape.fill))
    if shape.stroke != "none":
        again = 1 if shape.dash else 2  # one more joins the last corner
        path = [*points, *points[:again]] if closed else points
        thickness = max(1, round(shape.thickness * zoom))
        for part in _dashes(path, [n * zoom for n in shape.dash]):
            pen.line(part, _color(shape.stroke), thickness, joint="curve")


def _dashes(points: Sequence[Point], pattern: Sequence[float]) -> Iterator[list[Point]]:
    """The parts of a line that a pattern of lengths, drawn and left out by turns, leaves."""
    if not pattern:
        yield list(points)
        return
    turn, left, part = 0, pattern[0], [points[0]]
    for start, end in zip(points, points[1:], strict=False):
        length, done = math.dist(start, end), 0.0
        while length - done > left:
            done += left
            t = done / length
            here = (start[0] + t * (end[0] - start[0]), start[1] + t * (end[1] - start[1]))
            if turn % 2 == 0:
                yield [*part, here]
            turn, part = turn + 1, [here]
            left = pattern[turn % len(pattern)]
        left -= length - done
        if turn % 2 == 0:
            part.append(end)
    if turn % 2 == 0 and len(part) > 1:
        yield part


def _color(color: str) -> tuple[int, ...]:
    if color == "none":
        return _INVISIBLE
    digits = re.findall("#([0-9a-f]{6})", color)[-1]  # of var(--name, #rrggbb), what it falls to
    red, green, blue = bytes.fromhex(digits)
    return red, green, blue, 255
