"""Every picture becomes RGB as a viewer shows it, or is refused in one line with a fix."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image as Pillow

from distflow_jax.images.picture_files import PREVIEW, PictureFile, preview
from distflow_jax.images.record import digest_of, image_of

RED, WHITE = (255, 0, 0), (255, 255, 255)


def noise(height, width, channels=3):
    pixels = np.random.default_rng(height).integers(0, 256, (height, width, channels), np.uint8)
    return pixels.squeeze()


def written(picture, kind="PNG", **options):
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return PictureFile("rows.jsonl, row 3, image 2", file.getvalue())


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP", "TIFF", "PPM", "GIF"])
def test_lossless_formats_give_their_pixels(kind):
    pixels = noise(6, 9)
    if kind == "GIF":
        pixels[:] = pixels[0, 0]  # 256 colours at most
    file = written(Pillow.fromarray(pixels), kind, **({"lossless": True} if kind == "WEBP" else {}))
    assert file.check() == file.size() == (6, 9)
    np.testing.assert_array_equal(file.pixels(), pixels)


def test_other_modes_are_converted():
    gray = noise(5, 4, 1)
    same = np.repeat(gray[..., None], 3, axis=2)
    np.testing.assert_array_equal(written(Pillow.fromarray(gray)).pixels(), same)
    deep = Pillow.fromarray(gray.astype(np.uint16) * 256 + 77)
    assert deep.mode == "I;16"
    np.testing.assert_array_equal(written(deep).pixels(), same)
    np.testing.assert_array_equal(written(deep, "TIFF").pixels(), same)
    palette = Pillow.fromarray(same).quantize(200)
    np.testing.assert_array_equal(written(palette).pixels(), np.array(palette.convert("RGB")))
    cmyk = Pillow.new("CMYK", (4, 4), (0, 255, 255, 0))
    np.testing.assert_allclose(written(cmyk, "JPEG").pixels(), np.full((4, 4, 3), RED), atol=3)
    assert written(Pillow.new("1", (3, 3), 1)).pixels().tolist() == [[list(WHITE)] * 3] * 3


def test_what_is_transparent_is_white():
    clear = Pillow.new("RGBA", (4, 2), (0, 0, 0, 0))
    clear.putpixel((0, 0), (255, 0, 0, 255))
    for picture in (clear, clear.convert("LA")):
        pixels = written(picture).pixels()
        assert tuple(pixels[1, 3]) == WHITE
    assert tuple(written(clear).pixels()[0, 0]) == RED
    palette = Pillow.new("P", (3, 3), 0)
    palette.putpalette([9, 9, 9, 255, 0, 0])
    assert tuple(written(palette, transparency=0).pixels()[1, 1]) == WHITE
    deep = Pillow.fromarray(np.array([[0, 20_000], [77, 65_535]], np.uint16))
    pixels = written(deep, transparency=77).pixels()
    assert pixels[..., 0].tolist() == [[0, 78], [255, 255]]


@pytest.mark.parametrize("turned", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
def test_exif_turns_the_picture_and_its_size(turned, kind):
    picture = Pillow.fromarray(np.repeat(np.repeat(noise(3, 5), 16, 0), 16, 1))
    exif = Pillow.Exif()
    exif[0x0112] = turned
    file = written(picture, kind, exif=exif, **({"quality": 100} if kind == "JPEG" else {}))
    expected = {
        1: np.array(picture),
        2: np.array(picture)[:, ::-1],
        3: np.array(picture)[::-1, ::-1],
        4: np.array(picture)[::-1],
        5: np.array(picture).transpose(1, 0, 2),
        6: np.rot90(np.array(picture), -1),
        7: np.array(picture)[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(np.array(picture)),
    }[turned]
    assert file.check() == file.size() == file.pixels().shape[:2] == expected.shape[:2]
    away = np.abs(file.pixels().astype(int) - expected)
    assert away.mean() < (12 if kind == "JPEG" else 1e-9)


def bomb(width, height):
    """A PNG of a hundred bytes that would have so many pixels."""

    def chunk(kind, body):
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = chunk(b"IHDR", struct.pack(">II5B", width, height, 8, 2, 0, 0, 0))
    return of(
        b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"0")) + chunk(b"IEND", b"")
    )


def animation(kind):
    frames = [Pillow.new("RGB", (8, 8), colour) for colour in (RED, WHITE)]
    return written(frames[0], kind, save_all=True, append_images=frames[1:])


def of(content):
    return PictureFile("rows.jsonl, row 3, image 2", content)


def cut_with_preview():
    """Two thirds of a JPEG whose header has a whole one, as cameras write it."""
    picture = Pillow.fromarray(noise(64, 64))
    small = written(picture.resize((16, 16)), "JPEG").content
    whole = written(picture, "JPEG").content
    # a segment of an application, APP1, behind the first two bytes
    whole = whole[:2] + b"\xff\xe1" + struct.pack(">H", len(small) + 2) + small + whole[2:]
    assert of(whole).check() == (64, 64)
    return of(whole[: len(whole) * 2 // 3])


def cut(kind):
    content = written(Pillow.fromarray(noise(64, 64)), kind).content
    return of(content[: len(content) * 2 // 3])


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (lambda: of(b""), "has no bytes: fetch"),
        (lambda: of(b"<html>not found</html>"), "not a picture in a known format: convert"),
        (lambda: of(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), "not a picture in"),
        (lambda: cut("PNG"), "truncated or damaged: fetch"),
        (lambda: cut("JPEG"), "truncated or damaged: fetch"),
        (cut_with_preview, "truncated or damaged: fetch"),
        (lambda: cut("WEBP"), "truncated or damaged: fetch|not a picture"),
        (lambda: cut("BMP"), "truncated or damaged: fetch"),
        (lambda: cut("TIFF"), "truncated or damaged: fetch|not a picture"),
        *(
            (lambda kind=kind: animation(kind), "an animation, or a document of several pages")
            for kind in ("GIF", "WEBP", "PNG", "TIFF")
        ),
        (lambda: bomb(20_000, 10_000), "megapixels, more than 67: save a smaller"),
        (lambda: bomb(9_000, 9_000), "9000 x 9000, 81 megapixels, more than 67"),
        (lambda: bomb(10_000, 10_000), "megapixels, more than 67: save a smaller"),
        (lambda: written(Pillow.new("RGB", (1, 1))), "1 x 1 pixels: a side needs at least 2"),
        (lambda: written(Pillow.new("RGB", (600, 2))), "600 x 2 pixels: a side may be at most 200"),
        (lambda: written(Pillow.new("F", (9, 9)), "TIFF"), "floating-point pixels: save it with"),
        (lambda: written(Pillow.new("I", (9, 9)), "TIFF"), "pixels of 32 bits: save it with 8"),
    ],
)
def test_a_bad_picture_is_refused_by_name_before_it_is_used(file, message):
    with pytest.raises(ValueError, match=rf"^rows.jsonl, row 3, image 2: .*({message})") as error:
        file().check()
    assert "\n" not in str(error.value)


def test_a_picture_damaged_inside_is_named_when_it_is_decoded():
    file = bomb(40, 40)  # its header and checksums are right
    assert file.check() == (40, 40)
    with pytest.raises(ValueError, match=r"row 3, image 2: truncated or damaged"):
        file.pixels()


def test_equal_pixels_are_one_image_in_any_format():
    pixels = noise(6, 9)
    png, bmp = (written(Pillow.fromarray(pixels), kind).pixels() for kind in ("PNG", "BMP"))
    assert image_of(png).digest == image_of(bmp).digest
    assert digest_of(pixels) != digest_of(pixels.reshape(9, 6, 3))
    other = pixels.copy()
    other[0, 0, 0] ^= 1
    assert digest_of(other) != digest_of(pixels)
    with pytest.raises(ValueError, match=r"uint8 \[height, width, 3\], got uint8 \[6, 9\]"):
        image_of(pixels[..., 0])


def test_a_preview_is_small():
    assert preview(noise(400, 900)).shape == (114, PREVIEW, 3)
    assert preview(noise(400, 900), 90).shape == (40, 90, 3)
    small = noise(20, 30)
    assert preview(small) is small
