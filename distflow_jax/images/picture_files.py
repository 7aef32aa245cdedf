"""Files of pictures -> uint8 [H, W, 3]; refusals name the image and the fix.

The header alone gives the size, so that a data set is checked, and a file of 200 megapixels
refused, before any pixel is decoded. 16 bits, palettes, CMYK and EXIF rotation are converted;
transparent pictures are put on white. Pillow itself turns a TIFF while it decodes it.
"""

import dataclasses
import io
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from distflow_jax.images import pillow
from distflow_jax.parsing.one_line import one_line
from distflow_jax.parsing.paths import reading

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
STILL = {"MPO"}  # a camera's JPEG with a preview behind it: its first picture is read
MOST_PIXELS = 64 << 20  # of one image; a decoded one takes three bytes each
MOST_BYTES = 256 << 20  # of one file
MOST_RATIO = 200  # of the longer side to the shorter one
LEAST_SIDE = 2
PREVIEW = 256  # pixels of a side of an image whose patches are cut, where it is alone in its prompt
_ORIENTATION = 0x0112  # of EXIF
_TURNED = (5, 6, 7, 8)  # orientations that swap height and width
_TIFF_SIDES = (0x0100, 0x0101)  # tags of the width and height before it is turned
_END_OF_JPEG = b"\xff\xd9"
_TAIL = 65536  # bytes at a file's end in which a whole JPEG has its end mark

# of Pillow and its codecs, for what a file holds
_ERRORS = (
    *(OSError, SyntaxError, ValueError, EOFError, struct.error, KeyError, IndexError, TypeError),
    *(AttributeError, OverflowError, ZeroDivisionError, MemoryError, RuntimeError),
)


class ImageSource(Protocol):
    """An image that is not read yet."""

    @property
    def place(self) -> str:
        """Where the image is: the start of an error message."""

    def size(self) -> tuple[int, int]:
        """(height, width), without decoding the pixels. Raises ValueError."""

    def pixels(self) -> np.ndarray:
        """uint8 [H, W, 3]. Raises ValueError."""


@dataclasses.dataclass(frozen=True)
class PictureFile:
    """A file of a picture, or its bytes."""

    place: str
    content: Path | bytes = dataclasses.field(repr=False)

    def bytes_on_disk(self) -> int:
        """Size of the file, or of the bytes."""
        if isinstance(self.content, bytes):
            return len(self.content)
        return self.content.stat().st_size

    def size(self) -> tuple[int, int]:
        """(height, width) as the header and its EXIF rotation say."""
        return self._opened(_size)

    def check(self) -> tuple[int, int]:
        """(height, width) of a file that is whole, as far as can be seen without decoding.

        Formats without an end mark are decoded.
        """
        return self._opened(self._checked)

    def pixels(self) -> np.ndarray:
        """The picture as RGB on white, turned as EXIF says, uint8 [H, W, 3]."""
        return self._opened(_rgb)

    def _opened(self, use: Callable[[Any], Any]) -> Any:
        content = self.content
        in_memory = io.BytesIO(content) if isinstance(content, bytes) else None
        with in_memory or reading(content, f"{self.place}: file") as source:
            try:
                _check_bytes(source)
                return use(self._header(source))
            except _Refused as refusal:
                raise self._refused(str(refusal)) from None
            except _ERRORS as error:
                raise self._refused(
                    "truncated or damaged: fetch or write it again "
                    f"({one_line(str(error)) or type(error).__name__})"
                ) from None

    def _header(self, source: Any) -> Any:
        image = pillow.load()
        try:
            opened = image.open(source, formats=FORMATS)
        except (image.DecompressionBombError, image.DecompressionBombWarning) as error:
            raise _Refused(_too_large(f"too many ({one_line(str(error))})")) from None
        except image.UnidentifiedImageError:
            raise _Refused(
                f"not a picture in a known format: convert it to one of {', '.join(FORMATS)}"
            ) from None
        _check_header(opened)
        return opened

    def _checked(self, opened: Any) -> tuple[int, int]:
        size = _size(opened)
        if opened.format == "PNG":
            opened.verify()  # reads all chunks and their checksums
        elif not _has_its_end(opened):
            opened.load()
        return size

    def _refused(self, problem: str) -> ValueError:
        return ValueError(f"{self.place}: {problem}")


class _Refused(Exception):
    """A picture that is not taken; the text is the problem and its fix."""


def preview(pixels: np.ndarray, side: int = PREVIEW) -> np.ndarray:
    """A picture, uint8 [H, W, 3], with sides of at most so many pixels."""
    height, width = pixels.shape[:2]
    if max(height, width) <= side:
        return pixels
    image = pillow.load()
    picture = image.fromarray(pixels)
    picture.thumbnail((side, side), image.Resampling.BOX)
    return np.array(picture)


def check_sides(height: int, width: int) -> None:
    """Raises ValueError, without a place, for sides that no family can take."""
    if min(height, width) < LEAST_SIDE:
        raise ValueError(
            f"has {width} x {height} pixels: a side needs at least {LEAST_SIDE}; replace the image"
        )
    if max(height, width) > MOST_RATIO * min(height, width):
        raise ValueError(
            f"has {width} x {height} pixels: a side may be at most {MOST_RATIO} times the other; "
            "cut or pad it"
        )


def _check_bytes(source: Any) -> None:
    size = source.seek(0, io.SEEK_END)
    source.seek(0)
    if not size:
        raise _Refused("has no bytes: fetch or write it again")
    if size > MOST_BYTES:
        raise _Refused(f"has {size >> 20} MiB, more than {MOST_BYTES >> 20}: save a smaller one")


def _check_header(opened: Any) -> None:
    width, height = opened.size
    if width * height > MOST_PIXELS:
        raise _Refused(_too_large(f"{width} x {height}, {width * height / 1e6:.0f}"))
    if getattr(opened, "is_animated", False) and opened.format not in STILL:
        raise _Refused("an animation, or a document of several pages: save the one that is meant")
    if opened.mode == "F":
        raise _Refused("has floating-point pixels: save it with 8 or 16 bits")
    if opened.mode == "I" and opened.format == "TIFF":
        raise _Refused("has pixels of 32 bits: save it with 8 or 16 bits")
    try:
        check_sides(*_size(opened))
    except ValueError as error:
        raise _Refused(str(error)) from None


def _too_large(found: str) -> str:
    return f"has {found} megapixels, more than {MOST_PIXELS / 1e6:.0f}: save a smaller one"


def _orientation(opened: Any) -> int:
    # not the subclass's method, which decodes a PNG in search of EXIF after its pixels
    return pillow.load().Image.getexif(opened).get(_ORIENTATION, 1)


def _size(opened: Any) -> tuple[int, int]:
    width, height = opened.size
    if opened.format == "TIFF":  # versions of Pillow differ in whether its size is turned
        width, height = (opened.tag_v2[tag] for tag in _TIFF_SIDES)
    return (width, height) if _orientation(opened) in _TURNED else (height, width)


def _has_its_end(opened: Any) -> bool:
    """Whether a JPEG's end mark is near the end of its file, behind the start of its pixels."""
    if opened.format not in ("JPEG", "MPO"):
        return False
    source = opened.fp
    # Pillow has read the header; a preview in it has an end mark of its own
    at, end = source.tell(), source.seek(0, io.SEEK_END)
    source.seek(max(at, end - _TAIL))
    found = _END_OF_JPEG in source.read()
    source.seek(at)
    return found


def on_white(picture: Any) -> np.ndarray:
    """A picture of Pillow as RGB, on white where it is transparent, uint8 [H, W, 3]."""
    image = pillow.load()
    clear = None
    if picture.mode.startswith("I"):  # one channel of 16 bits, some in a word of 32
        value = picture.info.get("transparency")
        words = np.clip(np.asarray(picture).astype(np.int64), 0, 65535)
        clear = None if value is None else words == value
        picture = image.fromarray((words >> 8).astype(np.uint8))
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        white = image.new("RGBA", picture.size, (255, 255, 255, 255))
        picture = image.alpha_composite(white, picture)
    pixels = np.array(picture.convert("RGB"))
    if clear is not None:
        pixels[clear] = 255
    return pixels


def _rgb(opened: Any) -> np.ndarray:
    image = pillow.load()
    method = {
        2: image.Transpose.FLIP_LEFT_RIGHT,
        3: image.Transpose.ROTATE_180,
        4: image.Transpose.FLIP_TOP_BOTTOM,
        5: image.Transpose.TRANSPOSE,
        6: image.Transpose.ROTATE_270,
        7: image.Transpose.TRANSVERSE,
        8: image.Transpose.ROTATE_90,
    }.get(_orientation(opened))
    opened.load()
    pixels = on_white(opened)
    if method is None or opened.format == "TIFF":
        return pixels
    return np.array(image.fromarray(pixels).transpose(method))


@dataclasses.dataclass(frozen=True, eq=False)
class DrawnPicture:
    """A picture that a task draws when it is needed."""

    place: str
    height: int
    width: int
    draw: Callable[[], np.ndarray] = dataclasses.field(repr=False)

    def size(self) -> tuple[int, int]:
        """(height, width)."""
        return self.height, self.width

    def pixels(self) -> np.ndarray:
        """Draws it, uint8 [H, W, 3]."""
        return self.draw()
