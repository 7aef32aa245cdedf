"""No token is forgotten, and none is counted twice, over restarts with any number of processes."""

import json
import random

from distflow_jax.layout import Parts
from distflow_jax.stream.resume import ACCOUNT, FOLDER, GroupRecords, TokenAccount


def test_restarts_lose_what_was_sampled_after_the_checkpoint():
    saved = [TokenAccount(60, 10, 0, 30), TokenAccount(20, 0, 5, 25)]
    assert [account.sampled for account in saved] == [100, 50]
    found = TokenAccount.restored([account.to_dict() for account in saved], known=190)
    # 40 more were sampled by the last records, and 55 of the checkpoint go on
    assert found == TokenAccount(80, 10, 5 + 40, 55) and found.sampled == 190


def test_a_run_without_a_checkpoint():
    assert TokenAccount.restored([], known=70) == TokenAccount(lost=70)


def test_any_number_of_restarts():
    """A checkpoint may have fewer tokens than are under way, as of responses in turns, which are
    lost then, or more, which were sampled after it began."""
    draw = random.Random(0)
    for _ in range(1000):
        account = TokenAccount()
        for _ in range(5):
            trained, filtered, begun = (draw.randrange(100) for _ in range(3))
            account = TokenAccount(
                account.trained + trained, account.filtered + filtered, account.lost, begun
            )
            under_way = draw.randint(0, account.under_way + 20)
            saved = account.saved(under_way)
            assert saved.sampled == account.sampled + max(0, under_way - account.under_way)
            known = account.sampled + draw.randrange(50)
            goes_on = TokenAccount.restored([saved.to_dict()], known)
            assert (goes_on.trained, goes_on.filtered) == (account.trained, account.filtered)
            assert goes_on.sampled == max(known, saved.sampled)
            account = goes_on


def test_metrics_add_up_over_processes():
    accounts = [TokenAccount(4, 3, 2, 1), TokenAccount(5, 0, 0, 0)]
    parts = [account.metrics()[ACCOUNT] for account in accounts]
    whole = sum(parts[1:], start=parts[0])
    assert isinstance(whole, Parts)
    assert whole.merge(whole.values) == {
        "perf/tokens/sampled": 15,
        "perf/tokens/trained": 9,
        "perf/tokens/filtered": 3,
        "perf/tokens/lost": 2,
        "perf/tokens/under_way": 1,
    }


# -- what all processes had sampled by their last records ------------------------------------------


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
