"""Rows of programs that are faulty are found before step 1, on a sample, and counted."""

import json

import pytest
from support.tiny_config import SMALL_AHEAD, tiny_config

from distflow_jax.planning.plan_run import prepare

GOOD = {
    "prompt": "Write f(n), n squared.",
    "ground_truth": {"fn_name": "f", "inputs": [[2], [3]], "outputs": [4, 9]},
    "reference": "def f(n):\n    return n * n",
}


def prepared(tmp_path, rows, *settings):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = (f"data.train={path}", "data.shuffle=False", "eval.dataset=", "reward.function=code")
    kwargs = () if any(s.startswith("reward.kwargs") for s in settings) else ("reward.kwargs={}",)
    prepare(tiny_config(*SMALL_AHEAD[:2], *data, *kwargs, *settings)).close()


@pytest.mark.parametrize(
    ("column", "value", "problem"),
    [
        ("reference", "def f(n):\n    return 2 * n", "'reference' fails the row's own cases"),
        ("reference", "while True:\n    pass", "'reference' fails the row's own cases"),
        ("ground_truth", {"inputs": [], "outputs": []}, "the row has no test cases"),
        ("ground_truth", "{", "not valid JSON"),
        (
            "ground_truth",
            {"fn_name": "f", "inputs": [[2], [3]], "outputs": [4]},
            "2 inputs but 1 outputs: give one output for each input",
        ),
    ],
)
def test_faulty_rows_are_named_and_counted(tmp_path, column, value, problem):
    rows = [GOOD | ({column: value} if row in (4, 9, 11) else {}) for row in range(16)]
    with pytest.raises(ValueError) as error:
        prepared(tmp_path, rows, "sandbox.cpu_seconds=0.5")
    message = str(error.value)
    assert "rows.jsonl, row 5: " in message
    assert problem in message and "\n" not in message
    assert "3 of 16 rows checked; also rows 10, 12" in message


def test_rows_without_programs_of_their_own_are_fine(tmp_path):
    row = {key: value for key, value in GOOD.items() if key != "reference"}
    prepared(tmp_path, [row] * 8)
    begun = [{"role": "user", "content": "f(n)"}, {"role": "assistant", "content": "```python\nd"}]
    prepared(tmp_path, [GOOD | {"prompt": begun}] * 8)
    wrong = GOOD | {"code": "def f(n):\n    return 0"}
    prepared(tmp_path, [wrong] * 8)
    with pytest.raises(ValueError, match=r"the program in column 'code' fails .*\(8 of 8 rows"):
        prepared(tmp_path, [wrong] * 8, "reward.kwargs={'reference': 'code'}")


def test_a_first_row_without_cases_ends_the_start(tmp_path):
    with pytest.raises(ValueError, match="row 1: the ground truth is missing or empty"):
        prepared(tmp_path, [GOOD | {"ground_truth": ""}] + [GOOD] * 7)
