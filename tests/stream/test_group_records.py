"""Tokens that were sampled before a start count once, with any number of processes each time."""

import json

from distflow_jax.stream.group_records import FOLDER, GroupRecords


def record(folder, process, step, sampled):
    """A process's line of a step."""
    with (folder / FOLDER / f"{process}.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "tokens": {"sampled": sampled}}) + "\n")


def test_lines_of_processes_that_are_gone_count_once(tmp_path):
    """Two processes, then one that counts what both had sampled, then another start."""
    assert GroupRecords(tmp_path, 0).known == 0
    for step in (1, 2, 3):
        record(tmp_path, 0, step, 50 * step)
        record(tmp_path, 1, step, 40 * step)
    known = GroupRecords(tmp_path, 2).known
    assert known == 270
    record(tmp_path, 0, 3, known + 60)  # process 1 has its lines of steps 1 and 2
    assert GroupRecords(tmp_path, 3).known == known + 60
    record(tmp_path, 0, 4, known + 80)
    record(tmp_path, 1, 4, 10)  # two processes again
    assert GroupRecords(tmp_path, 3).known == known + 90


def test_a_process_that_was_killed_a_step_behind_counts(tmp_path):
    GroupRecords(tmp_path, 0)
    record(tmp_path, 0, 1, 50)
    record(tmp_path, 1, 1, 40)
    record(tmp_path, 0, 2, 90)
    assert GroupRecords(tmp_path, 0).known == 130


def test_starts_that_record_no_step_forget_nothing(tmp_path):
    GroupRecords(tmp_path, 0)
    record(tmp_path, 0, 1, 50)
    assert GroupRecords(tmp_path, 0).known == 50  # nothing was saved: all of it is lost
    assert GroupRecords(tmp_path, 0).known == 50
    record(tmp_path, 1, 1, 7)  # process 0, which counts them, was killed before its line
    assert GroupRecords(tmp_path, 0).known == 57
