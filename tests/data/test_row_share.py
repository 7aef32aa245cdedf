"""A row is parsed, rendered and counted by one process, once: the next start knows its length."""

import dataclasses
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.gathers import exchanges, together
from support.picture_rows import write_rows

from distflow_jax.data import encoded_rows, files
from distflow_jax.data.dataset import open_dataset
from distflow_jax.data.encoded_rows import EncodedRows, TokenLimits, rows_in_limit
from distflow_jax.data.row_share import RowShare
from distflow_jax.models.tokenizer import Tokenizer

LIMITS = TokenLimits(40, 16, "drop")


def written(path, rows):
    """A data file in the form of its ending, or a folder of two."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.mkdir()
        for name, part in (("a.jsonl", rows[:7]), ("b.parquet", rows[7:])):
            written(path / name, part)
    return str(path)


def rows(count=23, **changed):
    found = [{"prompt": "why? " * (i % 9) + "so", "answer": str(i)} for i in range(count)]
    for i, row in changed.items():
        found[int(i[1:])] = row
    return found


def checked(spec, share=None, tokenizer=None, limits=LIMITS):
    """(fingerprint, rows without truth, rows in the limits, reasons of others) of a data set."""
    dataset = open_dataset(spec, share=share)
    encoded = EncodedRows(dataset, tokenizer or Tokenizer.byte_level(512), 0)
    kept, dropped = rows_in_limit(encoded, limits)
    return dataset.fingerprint, dataset.without_truth, kept.tolist(), dropped


def shared(count, function):
    """The results, or errors, of function(share) in so many processes side by side."""
    ends = exchanges(count)

    def of_one(index):
        def gather(value):
            return [json.loads(text) for text in ends[index].all_gather(json.dumps(value).encode())]

        def gather_arrays(array):
            found = ends[index].all_gather(array.tobytes())
            return [np.frombuffer(b, array.dtype).reshape(-1, *array.shape[1:]) for b in found]

        try:
            return function(RowShare(index, count, gather, gather_arrays))
        except (ValueError, OSError) as error:
            return error

    try:
        return together(count, of_one)
    finally:
        for end in ends:
            end.close()


@pytest.mark.parametrize("name", ["data.jsonl", "data.json", "data.parquet", "folder"])
def test_any_number_of_processes_finds_what_one_finds(tmp_path, name):
    spec = written(tmp_path / name, rows(r3={"prompt": "no truth", "answer": None}))
    alone = checked(spec)
    assert 0 < len(alone[2]) < 23 and alone[1] == [3]
    for count in (2, 3, 31):
        assert shared(count, lambda share: checked(spec, share)) == [alone] * count


def test_each_row_is_read_by_one_process(tmp_path, monkeypatch):
    spec, seen = written(tmp_path / "data.jsonl", rows()), []
    original = files.example_from_row

    def counted(row, *place, **options):
        seen.append(row["answer"])
        return original(row, *place, **options)

    monkeypatch.setattr(files, "example_from_row", counted)
    shared(3, lambda share: checked(spec, share))
    assert sorted(seen, key=int) == [str(i) for i in range(23) for _ in range(2)]  # and counted


def test_the_first_bad_row_is_everybodys_error(tmp_path):
    bad = {"prompt": 7, "answer": "1"}
    spec = written(tmp_path / "data.jsonl", rows(r21=bad, r9=bad))
    with pytest.raises(ValueError) as alone:
        checked(spec)
    for count in (2, 3):
        found = shared(count, lambda share: checked(spec, share))
        assert {str(error) for error in found} == {str(alone.value)}


def test_a_host_with_other_files_is_named(tmp_path):
    one, two = (written(tmp_path / f"{n}.jsonl", rows(n)) for n in (20, 21))
    found = shared(2, lambda share: checked(two if share.index else one, share))
    assert ["process 1 reads other rows" in str(found[0]), "process 0" in str(found[1])] == [
        True
    ] * 2


@pytest.fixture
def unread(monkeypatch):
    """Has reading a row fail."""

    def stop(*_, **__):
        raise AssertionError("a row was read")

    def forbid():
        monkeypatch.setattr(files, "example_from_row", stop)
        monkeypatch.setattr(encoded_rows, "examples", stop)

    return forbid


def test_the_next_start_reads_no_row(tmp_path, unread):
    spec, share = written(tmp_path / "data.jsonl", rows()), RowShare(kept=tmp_path / "kept")
    first = checked(spec, share)
    assert first == checked(spec)
    unread()
    assert checked(spec, share) == first


@pytest.mark.parametrize(
    "change",
    [
        {"share": "code"},
        {"limits": TokenLimits(39, 16, "drop")},
        {"tokenizer": dataclasses.replace(Tokenizer.byte_level(512), chat_template="{{ 1 }}")},
        {"rows": rows(r5={"prompt": "other", "answer": "5"})},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_lengths_depend_on_has_them_counted_again(tmp_path, unread, change):
    spec, share = written(tmp_path / "data.jsonl", rows()), RowShare(kept=tmp_path / "kept")
    checked(spec, share)
    if "rows" in change:
        written(tmp_path / "data.jsonl", change.pop("rows"))
    if "share" in change:
        change = {"share": RowShare(kept=tmp_path / "kept", code="new")}
    unread()
    with pytest.raises(AssertionError, match="a row was read"):
        checked(spec, **{"share": share} | change)


def test_files_that_are_damaged_or_missing_cost_time_alone(tmp_path):
    spec, share = written(tmp_path / "data.jsonl", rows()), RowShare(kept=tmp_path / "kept")
    first = checked(spec, share)
    for path in (tmp_path / "kept").iterdir():
        path.write_bytes(path.read_bytes()[:30])
    assert checked(spec, share) == first
    (tmp_path / "file").touch()
    assert checked(spec, RowShare(kept=tmp_path / "file" / "below")) == first


def test_one_process_that_can_keep_nothing_costs_time_alone(tmp_path):
    spec = written(tmp_path / "data.jsonl", rows())

    def found(share):
        kept = None if share.index else tmp_path / "kept"
        return checked(spec, dataclasses.replace(share, kept=kept))

    for _ in range(2):
        assert shared(2, found) == [checked(spec)] * 2


def test_only_so_many_are_kept(tmp_path):
    share = RowShare(kept=tmp_path)
    for i in range(70):
        share.keep([i], lengths=np.zeros(1, np.int64))
    assert len(list(tmp_path.iterdir())) == 64 and share.known([69])


def test_rows_with_images_are_checked_at_each_start(tmp_path):
    share = RowShare(kept=tmp_path / "kept")
    dataset = open_dataset(write_rows(tmp_path, pictures=3), share=share)
    assert dataset.first_image_row is not None and not (tmp_path / "kept").exists()
