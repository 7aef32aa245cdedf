"""Checksums of files of more than one segment."""

import json
import zlib

import pytest
from etils import epath

from distflow_jax.checkpoint import checksums


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    """Three files of whole segments, of parts of some, and of nothing; a segment has 512 KiB."""
    monkeypatch.setattr(checksums, "_SEGMENT", 1 << 19)
    (tmp_path / "arrays").mkdir()
    for name, size in {"whole": 1 << 20, "parts": (5 << 18) + 77, "empty": 0}.items():
        (tmp_path / "arrays" / name).write_bytes(bytes(i % 251 for i in range(size)))
    checksums.write(epath.Path(tmp_path), ["arrays"], {})
    return epath.Path(tmp_path)


def test_each_segment_has_the_crc_of_zlib(checkpoint):
    table = json.loads((checkpoint / checksums.FILE).read_text())
    assert {name: len(entry) - 1 for name, entry in table.items()} == {
        "arrays/whole": 2,
        "arrays/parts": 3,
        "arrays/empty": 0,
    }
    for name, (size, *values) in table.items():
        content = (checkpoint / name).read_bytes()
        parts = [content[start : start + (1 << 19)] for start in range(0, size, 1 << 19)]
        assert (size, values) == (len(content), [zlib.crc32(part) for part in parts])


@pytest.mark.parametrize("at", [0, (1 << 19) - 1, 1 << 19, 5 << 18, -1])
def test_a_change_in_any_segment_is_seen(checkpoint, at):
    assert checksums.damage(checkpoint) == ""
    path = checkpoint / "arrays" / "parts"
    content = bytearray(path.read_bytes())
    content[at] ^= 128
    path.write_bytes(content)
    shares = [checksums.damage(checkpoint, index, 2) for index in range(2)]
    assert sum("arrays/parts has another content" in share for share in shares) == 1
    assert shares.count("") == 1
    assert "arrays/parts has another" in checksums.quick_damage(checkpoint, "arrays")
    assert checksums.quick_damage(checkpoint, "record") == ""


@pytest.mark.parametrize(
    "text",
    ["[]", '{"arrays/whole": []}', '{"arrays/whole": [1048576, 1]}', '{"a": 3}', "{", "[" * 99999],
    ids=len,
)
def test_a_damaged_table_is_damage(checkpoint, text):
    (checkpoint / checksums.FILE).write_text(text)
    assert checksums.FILE in checksums.damage(checkpoint)
