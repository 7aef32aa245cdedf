"""Every form of a row with images gives the same example, and every bad one names its image."""

import base64
import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image as Pillow

from distflow_jax.data.dataset import open_dataset

PIXELS = [np.full((4 + i, 6, 3), 40 * i, np.uint8) for i in range(3)]
ASKED = "<image>Is <image> larger?"
PARTS = [
    {"type": "image"},
    {"type": "text", "text": "Is "},
    {"type": "image"},
    {"type": "text", "text": " larger?"},
]


def png(pixels):
    file = io.BytesIO()
    Pillow.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def uri(pixels):
    return "data:image/png;base64," + base64.b64encode(png(pixels)).decode()


def user(content):
    return [{"role": "user", "content": content}]


@pytest.fixture
def folder(tmp_path):
    """A folder of a data set, with pictures/0.png to 2.png beside the data file."""
    pictures = tmp_path / "set" / "pictures"
    pictures.mkdir(parents=True)
    for i, pixels in enumerate(PIXELS):
        (pictures / f"{i}.png").write_bytes(png(pixels))
    return tmp_path / "set"


def opened(folder, *rows, **options):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_dataset(str(path), **options)


def check(example, numbers=(0, 1), content=PARTS):
    assert example.prompt[-1] == {"role": "user", "content": content}
    assert [image.size() for image in example.images] == [PIXELS[i].shape[:2] for i in numbers]
    for image, i in zip(example.images, numbers, strict=True):
        np.testing.assert_array_equal(image.pixels(), PIXELS[i])


PATHS = ["pictures/0.png", "pictures/1.png"]


def image_part(value):
    return {"type": "image", "image": value}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": user(ASKED), "images": PATHS},
        {"prompt": user(ASKED), "images": [{"path": path} for path in PATHS]},
        {"prompt": user(ASKED), "images": [{"image": PATHS[0]}, uri(PIXELS[1])]},
        {"prompt": user(PARTS), "images": PATHS},
        {"prompt": user([image_part(PATHS[0]), PARTS[1], PARTS[0], PARTS[3]]), "images": PATHS[1:]},
        {
            "messages": [
                *user([image_part(PATHS[0]), PARTS[1], image_part(uri(PIXELS[1])), PARTS[3]]),
                {"role": "assistant", "content": [{"type": "text", "text": "No"}]},
            ],
        },
        {
            "prompt": user(
                [
                    {"type": "image_url", "image_url": {"url": uri(PIXELS[0])}},
                    PARTS[1],
                    {"type": "image_url", "image_url": uri(PIXELS[1])},
                    PARTS[3],
                ]
            )
        },
        {"question": ASKED, "answer": "no", "images": PATHS},
        {"conversations": user(ASKED), "image_urls": PATHS, "answer": "no"},
        {"conversations": json.dumps(user(ASKED)), "image_urls": PATHS, "answer": "no"},
    ],
)
def test_all_forms_of_a_row_are_one_example(folder, row):
    dataset = opened(folder, row)
    check(dataset[0])
    assert dataset.first_image_row == 0
    assert not {"images", "image", "image_urls", "conversations"} & set(dataset[0].extra_info)


def test_absolute_paths_and_file_addresses(folder):
    paths = [str(folder / PATHS[0]), f"file://{folder / PATHS[1]}"]
    check(opened(folder, {"prompt": user(ASKED), "images": paths})[0])


def test_verl_and_trl_tables(folder):
    """Hugging Face's Image columns hold bytes, a path, or both; the bytes count."""
    both = [{"bytes": png(PIXELS[0]), "path": "lost.png"}, {"bytes": None, "path": PATHS[1]}]
    parts = [{**{"text": None}, **part} for part in PARTS]
    rows = [
        {"prompt": [{"role": "user", "content": parts}], "images": both},
        {"prompt": [{"role": "user", "content": parts}], "images": both[::-1]},
    ]
    path = folder / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    dataset = open_dataset(str(path))
    check(dataset[0])
    check(dataset[1], (1, 0))


@pytest.mark.parametrize("column", ["image", "image_urls"])
def test_images_without_a_place_come_first(folder, column):
    value = PATHS[0] if column == "image" else PATHS[:1]
    system = {"role": "system", "content": "Look."}
    example = opened(folder, {"prompt": [system, *user("What?")], column: value})[0]
    check(example, (0,), [{"type": "image"}, {"type": "text", "text": "What?"}])
    assert example.prompt[0] == system
    assert opened(folder, {"prompt": "What?", column: value})[0].prompt == "<image>What?"


@pytest.mark.parametrize("column", ["image", "images"])
def test_a_call_of_tools_beside_an_image_may_have_no_content(folder, column):
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    asked, result = user("<image>What?"), {"role": "tool", "content": "3"}
    value = PATHS[0] if column == "image" else PATHS[:1]
    example = opened(folder, {"prompt": [*asked, called, result], column: value})[0]
    assert example.prompt[1].get("content") is None and len(example.images) == 1
    assert example.prompt[0]["content"] == [{"type": "image"}, {"type": "text", "text": "What?"}]


def test_a_mark_is_text_where_no_image_is(folder):
    prose = "HTML has <image> and <img>."
    dataset = opened(folder, {"prompt": user(prose)}, {"prompt": prose, "images": []})
    assert [example.prompt for example in dataset] == [user(prose), prose]
    assert dataset[0].images == () and dataset.first_image_row is None
    # and beside parts too
    content = [{"type": "image"}, {"type": "text", "text": prose}]
    check(opened(folder, {"prompt": user(content), "images": PATHS[:1]})[0], (0,), content)


def test_parts_of_text_are_text(folder):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert opened(folder, {"prompt": user(parts)})[0].prompt == user("ab")


def test_other_columns_and_folders(folder, tmp_path):
    row = {"prompt": user(ASKED), "figures": ["0.png", "1.png"]}
    options = {"columns": {"images": "figures"}, "image_root": str(folder / "pictures")}
    check(opened(folder, row, **options)[0])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    check(opened(elsewhere, row, **options)[0])
    with pytest.raises(FileNotFoundError, match="data.image_root=lost does not exist"):
        opened(folder, row, image_root="lost")


def test_the_fingerprint_sees_the_files(folder):
    row = {"prompt": user(ASKED), "images": PATHS}
    before = opened(folder, row).fingerprint
    assert opened(folder, row).fingerprint == before
    (folder / PATHS[0]).write_bytes(png(np.zeros((50, 50, 3), np.uint8)))
    assert opened(folder, row).fingerprint != before


def asked(*images, prompt="<image>?"):
    return {"prompt": user(prompt), "images": list(images)}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (asked("pictures/7.png"), r"image 1: 'pictures/7.png' does not exist; did you mean"),
        (asked("images/0.png"), r"image 1: .* nor does its folder"),
        (asked("pictures"), r"image 1: 'pictures' is no file, but a folder"),
        (asked("../other.png"), r"image 1: '../other.png' leads out of .*: move .*data.image_root"),
        (asked("link.png"), r"image 1: 'link.png' leads out of"),
        (asked("/etc/passwd"), r"image 1: '/etc/passwd' leads out of"),
        (asked("a\0b"), r"image 1: 'a\\x00b' is not a path"),
        (asked("https://a.b/c.png"), r"image 1: 'https://a.b/c.png' is an address, .* download"),
        (asked("s3://a/c.png"), r"image 1: 's3://a/c.png' is an address, and nothing is fetched"),
        (asked("iVBORw0K" * 500), r"image 1: 'iVBOR.* is not a path \(.*\): base64 needs 'data:"),
        (asked("a/" * 2000), r"image 1: .{,300}$"),
        (asked("data:image/png;base64,@@"), r"image 1: the data URI is not valid base64"),
        (asked("data:image/png,abc"), r"image 1: a data URI must be like data:image/png;base64"),
        (asked(5), r"image 1: expected a path, bytes, a data URI, or an object .* got 5"),
        (asked({"url": None}), r"image 1: expected a path"),
        (asked("rows.jsonl"), r"image 1 \(rows.jsonl\): not a picture in a known format"),
        (asked(*PATHS), r"column 'images': 2 images and 1 <image> in its prompt: write one"),
        (asked(PATHS[0], prompt=ASKED), r"column 'images': 1 image and 2 <image> in its prompt"),
        (asked(PATHS[0], prompt="?"), r"1 image and 0 <image> .* data.columns=\{'image': 'images'"),
        (asked(PATHS[0], prompt=PARTS), r"1 image and 2 parts of type image without an image"),
        ({"prompt": user(PARTS)}, r"2 parts of type image without an image and no column 'images'"),
        ({"prompt": user("?"), "images": PATHS, "image": PATHS[0]}, r"holds images, and so does"),
        ({"prompt": user("?"), "videos": ["a.mp4"]}, r"column 'videos': videos are not read"),
        ({"prompt": user("?"), "video": "a.mp4"}, r"column 'video': videos are not read"),
        ({"prompt": user([{"type": "video"}])}, r"column 'prompt': a part of type 'video': videos"),
        ({"prompt": user([{"type": "audio"}])}, r"column 'prompt': a part of a message is .* got"),
        (
            {"prompt": user("?"), "chosen": user([image_part(PATHS[0])]), "rejected": "b"},
            r"column 'chosen': has an image, and a policy writes text alone",
        ),
        (
            {"messages": [*user("?"), {"role": "assistant", "content": [image_part(PATHS[0])]}]},
            r"column 'messages': ends with an assistant's turn that has an image",
        ),
        (
            {
                "prompt": [
                    *user("?"),
                    {"role": "assistant", "content": [image_part(PATHS[0])]},
                    *user("!"),
                ]
            },
            r"message 1 of the assistant has an image",
        ),
        ({"conversations": "[", "image_urls": PATHS}, r"column 'conversations': expected a list"),
        ({"prompt": [{"role": "system", "content": "?"}], "image": PATHS[0]}, r"no message of the"),
    ],
)
def test_a_bad_row_names_file_row_image_and_fix(folder, row, message):
    (folder / "../other.png").write_bytes(png(PIXELS[0]))
    (folder / "link.png").symlink_to(folder / "../other.png")
    with pytest.raises(ValueError, match=rf"rows.jsonl, row 2[,:] .*{message}") as error:
        opened(folder, {"prompt": "fine"}, row)
    assert "\n" not in str(error.value)
