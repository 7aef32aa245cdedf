"""Records of steps in partial batches: what was trained on comes back, bit for bit, or a file is
named."""

import functools
import json
import shutil

import numpy as np
import pytest
from support.tiny_model import prompt_of

from distflow_jax.coordinator.field_store import FieldStore
from distflow_jax.coordinator.rounds import Ended
from distflow_jax.layout import Layout
from distflow_jax.stream.batches.group_facts import facts_of
from distflow_jax.stream.batches.partial_batches import PartialBatch
from distflow_jax.stream.batches.recordings import (
    FILE,
    FOLDER,
    PartialBatchReplay,
    Recording,
    RecordWriter,
    StepRecord,
)
from distflow_jax.stream.host_nodes import Group
from distflow_jax.stream.step_groups import StepGroups

HOST = Layout("host")
NODES = ("rollout", "reward", "choose")
WRITERS = dict.fromkeys((None, *NODES), HOST)
GROUPS = 4  # of a step


def prompt(counter):
    return prompt_of(counter, [counter, 7, 8])


def group_of(counter, *, chosen=None, samples=3):
    """A group as samplers and nodes on the host leave it: columns of all forms."""
    rng = np.random.default_rng(counter)
    uid = np.array([[counter, i] for i in range(samples)], np.int64)
    store = FieldStore.of_step(WRITERS, {"uid": uid, "prompt": [prompt(counter)] * samples})
    lengths = rng.integers(0, 6, samples)
    store.put("rollout", "response", [rng.integers(0, 9, n).astype(np.int32) for n in lengths])
    store.put("rollout", "response_mask", [rng.random(n) < 0.5 for n in lengths])
    store.put("rollout", "rollout_logp", [rng.normal(size=n).astype(np.float32) for n in lengths])
    store.put("rollout", "version", [np.full(n, counter % 2, np.int32) for n in lengths])
    store.put("rollout", "finished", rng.random(samples) < 0.5)
    store.put("reward", "score", rng.normal(size=samples).astype(np.float32))
    store.put("choose", "score", np.arange(samples) / 3)  # anew: the last one is the column
    store.put("choose", "image", [rng.integers(0, 9, (i, 2)).astype(np.int16) for i in range(3)])
    store.put("choose", "odd", [1.5, True, np.float32(2)])
    if chosen is not None:
        store.put("choose", "keep", chosen)
    return Group(counter, store, set(), done=True)


def record_of(step, *, mine=lambda counter: True):
    """A step in two partial batches; its groups of one process."""
    counters = range(GROUPS * (step - 1), GROUPS * step)
    groups = {c: group_of(c, chosen=[2, 0, 1] if c % 2 else None) for c in counters}
    facts = [facts_of(groups[c], 0 if mine(c) else 1) for c in counters]
    partial_batches = (
        PartialBatch(step, 1, 0, (facts[0], facts[3]), False, False),
        PartialBatch(step, 2, 0, (facts[1], facts[2]), True, True),
    )
    metrics = {"reward/mean": 0.1 + step, "reward/calls": 3, "odd": float("nan"), "perf/x": 1}
    own = tuple(groups[c] for c in counters if mine(c))
    return StepRecord(step, partial_batches, own, GROUPS * step, metrics)


def write(writer, record):
    """Trains a step, of whose groups a writer is told."""
    for batch in record.partial_batches:
        groups = [group for group in record.groups if group.counter in batch.counters]
        writer.write(batch, groups, rows=1, room=2)
    writer.finish(record.step, record.end, record.metrics)


def written(folder, steps, **start):
    writer = RecordWriter(folder, min(steps) - 1, start)
    for step in steps:
        write(writer, record_of(step))
    writer.close()
    return folder


def same(ours, theirs):
    if isinstance(theirs, np.ndarray):
        return ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
    if np.ndim(theirs):
        return same(np.asarray(ours), np.asarray(theirs))
    return ours == theirs


def check_store(ours, theirs):
    assert same(ours.uid, theirs.uid) and same(ours.own, theirs.own)
    assert ours.sources == theirs.sources and ours.values.keys() == theirs.values.keys()
    found = [(ours.values[v], theirs.values[v]) for v in theirs.values]
    found += [(ours.columns[field], theirs.columns[field]) for field in theirs.columns]
    for mine, wanted in found:
        assert len(mine) == len(wanted) and isinstance(mine, np.ndarray) == isinstance(
            wanted, np.ndarray
        )
        if len(wanted) and hasattr(wanted[0], "counter"):
            assert [p.counter for p in mine] == [p.counter for p in wanted]
        else:
            assert all(same(a, b) for a, b in zip(mine, wanted, strict=True))


def test_versions_of_a_group_are_those_of_its_sampled_tokens():
    """A token that an environment wrote has no version: 0 stands there."""
    group = group_of(1, samples=3)
    none = np.zeros(0, np.int32)
    responses = [np.arange(4, dtype=np.int32), np.zeros(1, np.int32), none]
    masks = [np.array([1, 1, 0, 1], bool), np.zeros(1, bool), none.astype(bool)]
    group.store.put("rollout", "response", responses)
    group.store.put("rollout", "response_mask", masks)
    group.store.put("rollout", "version", [np.array([8, 9, 0, 9]), np.zeros(1, np.int32), none])
    facts = facts_of(group, 0)
    assert (facts.first, facts.last, facts.responses) == (8, 9, (4, 1, 0))


def test_a_record_comes_back_as_it_was(tmp_path):
    written(tmp_path, (1, 2))
    recording = Recording(tmp_path, 0, 0, 1)
    assert recording.last == 2
    for step in (1, 2):
        found, wanted = recording.read(step, WRITERS, prompt), record_of(step)
        assert found.partial_batches == wanted.partial_batches and found.end == wanted.end
        assert [g.counter for g in found.groups] == [g.counter for g in wanted.groups]
        for ours, theirs in zip(found.groups, wanted.groups, strict=True):
            check_store(ours.store, theirs.store)
        assert np.isnan(found.metrics.pop("odd"))
        assert found.metrics == {"reward/mean": 0.1 + step, "reward/calls": 3}


def test_a_replay_hands_out_what_was_trained(tmp_path):
    """Partial batch by partial batch, also to a process that has no group of a partial batch, of a
    step, or of the first."""
    writer = RecordWriter(tmp_path, 0, {})
    for step, mine in ((1, ()), (2, (4, 7)), (3, ())):
        write(writer, record_of(step, mine=lambda counter, mine=mine: counter in mine))
    writer.close()
    folder = tmp_path / "replay"
    folder.mkdir()
    records = RecordWriter(folder, 0, None)
    recording, steps = Recording(tmp_path, 0, 0, 1), StepGroups(NODES)
    read = functools.partial(recording.read, writers=WRITERS, prompt=prompt)
    replay = PartialBatchReplay(recording, records, steps=steps, read=read)
    for step, sizes in ((1, (0, 0)), (2, (5, 0)), (3, (0, 0))):
        for size, wanted in zip(sizes, record_of(step).partial_batches, strict=True):
            partial_batch, store = replay.take(step)
            replay.record(partial_batch, rows=1, room=2)
            assert (partial_batch.number, partial_batch.counters) == (
                wanted.number,
                wanted.counters,
            )
            assert len(store.own) == size and store.done == frozenset(NODES)
            assert store.columns["score"].dtype == np.float64
        store, metrics = replay.end()
        assert len(store.own) == sum(sizes)
        assert metrics["reward/mean"] == 0.1 + step and replay.finish(step) == GROUPS * step
    with pytest.raises(Ended, match="no whole record of a later one"):
        replay.take(4)
    records.close()
    assert (folder / FILE).read_text() == (tmp_path / FILE).read_text()
    assert not (folder / FOLDER).exists()


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ValueError, match="has no records of partial batches.*stream.record=True"):
        Recording(tmp_path, 0, 0, 1)
    written(tmp_path, (1, 2, 3))
    first, second, third = (tmp_path / FOLDER / str(step) / "0.npz" for step in (1, 2, 3))
    whole = second.read_bytes()
    for part in (0, 10, len(whole) // 2, len(whole) - 1):
        second.write_bytes(whole[:part])
        with pytest.raises(ValueError, match=f"{second} cannot be read"):
            Recording(tmp_path, 0, 0, 1)
    place = whole.index(b"0.0.npy") + 200
    second.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    recording = Recording(tmp_path, 0, 0, 1)
    with pytest.raises(ValueError, match=f"{second} cannot be read.*CRC"):
        recording.read(2, WRITERS, prompt)
    for facts in ({"start": {}}, {"start": {"processes": 1}}, [1], {"start": None}):
        np.savez(second, **{"facts.json": np.frombuffer(json.dumps(facts).encode(), np.uint8)})
        with pytest.raises(ValueError, match=f"{second} cannot be read"):
            Recording(tmp_path, 0, 0, 1).read(2, WRITERS, prompt)
    second.unlink()
    with pytest.raises(ValueError, match=f"lacks {second}: it has records of steps 1 to 3"):
        Recording(tmp_path, 0, 0, 1)
    assert Recording(tmp_path, 2, 0, 1).last == 3  # a replay that goes on needs the others alone
    second.write_bytes(whole)
    third.rename(third.with_suffix(".part"))  # of a run that was killed
    assert Recording(tmp_path, 0, 0, 1).last == 2
    first.unlink()
    with pytest.raises(ValueError, match=f"lacks {first}"):
        Recording(tmp_path, 0, 0, 1)


@pytest.mark.parametrize("behind", [1, 2, 3])
def test_a_killed_recording_ends_where_its_slowest_process_did(tmp_path, behind):
    """Each process writes in the background: the others may be some steps further."""
    written(tmp_path, range(1, 7), processes=2)
    for step in range(1, 7 - behind):
        place = tmp_path / FOLDER / str(step)
        shutil.copy(place / "0.npz", place / "1.npz")
    for process in (0, 1):
        assert Recording(tmp_path, 0, process, 2).last == 6 - behind
    lacking = tmp_path / FOLDER / "2" / "1.npz"
    lacking.unlink()
    with pytest.raises(ValueError, match=f"lacks {lacking}: it has records of steps 1 to 6"):
        Recording(tmp_path, 0, 0, 2)
    with pytest.raises(ValueError, match="lacks .*6/1.npz"):
        Recording(tmp_path, 5, 0, 2)  # nothing is left to go on with


def test_another_number_of_processes_is_refused(tmp_path):
    written(tmp_path, (1,))
    with pytest.raises(ValueError, match="by 1 processes, and this job has 2: start it with as"):
        Recording(tmp_path, 0, 1, 2)


def test_other_data_are_refused(tmp_path):
    recording = Recording(written(tmp_path, (1,)), 0, 0, 1)
    with pytest.raises(ValueError, match="prompt 0 has other tokens than in the recorded run"):
        recording.read(1, WRITERS, lambda counter: prompt_of(counter, [1, 2]))


def test_steps_that_are_trained_again_have_the_last_record(tmp_path):
    written(tmp_path, (1, 2, 3, 4), start="first")
    written(tmp_path, (3,), start="second")
    lines = (tmp_path / FILE).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 1, 2, 2, 3, 3]
    recording = Recording(tmp_path, 0, 0, 1)
    assert recording.last == 3
    assert [(step, start["start"]) for step, start in recording.starts] == [
        (1, "first"),
        (3, "second"),
    ]


def test_columns_that_no_file_holds_are_named(tmp_path):
    record = record_of(1)
    record.groups[0].store.put("choose", "odd", [{"a": 1}, 2, 3])
    writer = RecordWriter(tmp_path, 0, {})
    write(writer, record)
    with pytest.raises(ValueError, match="field 'odd' holds a dict"):
        writer.wait()
    writer.close()


def test_a_full_disk_is_told_with_the_file(tmp_path):
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = RecordWriter(tmp_path, 0, {})
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        write(writer, record_of(1))
        with pytest.raises(OSError) as found:
            writer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    writer.close()
    assert found.value.filename == str(tmp_path / FOLDER / "1" / "0.npz")
    assert not list((tmp_path / FOLDER / "1").iterdir())
