"""Rows as verl, TRL, Tunix, MaxText and verifiers have them are read without a change."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from distflow_jax.data.dataset import open_dataset


def rows_of(path, rows, **options):
    """The examples of a table, or of JSON lines if the name ends so."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = open_dataset(str(path), **options)
    return [dataset[row] for row in range(len(dataset))]


def user(text):
    return [{"role": "user", "content": text}]


def test_the_parquet_of_verl_s_gsm8k_script(tmp_path):
    """examples/data_preprocess/gsm8k.py writes these columns."""
    extra = {"split": "train", "index": 0, "answer": "6 * 7 #### 42", "question": "6 * 7?"}
    row = {
        "data_source": "openai/gsm8k",
        "prompt": user('6 * 7? Let\'s think step by step and output the answer after "####".'),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "42"},
        "extra_info": extra,
    }
    (example,) = rows_of(tmp_path / "train.parquet", [row])
    assert (example.prompt, example.data_source) == (row["prompt"], "openai/gsm8k")
    assert (example.ground_truth, example.extra_info, example.ability) == ("42", extra, "math")


def test_a_style_of_verl_without_a_rule_needs_no_truth(tmp_path):
    row = {"prompt": user("?"), "reward_model": {"style": "model"}, "data_source": "chat"}
    (example,) = rows_of(tmp_path / "a.jsonl", [row])
    assert example.ground_truth is None


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_trl_s_prompt_only_rows_and_their_columns(tmp_path, ending):
    rows = [
        {"prompt": user("6 * 7?"), "solution": "$42$", "level": "easy"},
        {"prompt": user("1 / 0?"), "solution": None, "level": "hard"},
    ]
    first, second = rows_of(tmp_path / f"a.{ending}", rows)
    assert first.prompt == user("6 * 7?") and first.ground_truth == "$42$"
    assert first.extra_info == {"solution": "$42$", "level": "easy"}
    assert second.ground_truth is None
    assert second.extra_info == {"solution": None, "level": "hard"}  # TRL passes None, too
    (plain,) = rows_of(tmp_path / f"b.{ending}", [{"prompt": "6 * 7 =", "ground_truth": "42"}])
    assert (plain.prompt, plain.ground_truth) == ("6 * 7 =", "42")


def test_gsm8k_as_tunix_and_maxtext_load_it(tmp_path):
    """The question becomes a chat; the number after #### is the ground truth."""
    row = {"question": "6 * 7?", "answer": "6 * 7 = <<6*7=42>>42\n#### 1,042"}
    (example,) = rows_of(tmp_path / "a.parquet", [row], system_prompt="Be brief.")
    assert example.prompt == [{"role": "system", "content": "Be brief."}, *user("6 * 7?")]
    assert example.ground_truth == "1042"
    assert example.extra_info == row  # a function that names `answer` gets the column


def test_rows_that_tunix_has_templated_are_text(tmp_path):
    text = "<start_of_turn>user\n6 * 7?<end_of_turn>\n<start_of_turn>model\n"
    row = {"prompts": text, "question": "6 * 7?", "answer": "42"}
    (example,) = rows_of(tmp_path / "a.parquet", [row], columns={"prompt": "prompts"})
    assert (example.prompt, example.ground_truth) == (text, "42")
    assert example.extra_info == {"answer": "42"}


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_the_columns_of_verifiers(tmp_path, ending):
    info = {"tests": ["a", "b"]}
    asked = {"question": "6 * 7?", "answer": "42", "info": info, "task": "maths", "example_id": 3}
    (example,) = rows_of(tmp_path / f"a.{ending}", [asked])
    assert (example.prompt, example.ground_truth) == (user("6 * 7?"), "42")
    assert example.extra_info == asked
    prompted = {"prompt": user("6 * 7?"), "answer": "42", "info": json.dumps(info), "task": "maths"}
    (example,) = rows_of(tmp_path / f"b.{ending}", [prompted])
    assert (example.prompt, example.ground_truth) == (user("6 * 7?"), "42")
    assert example.extra_info == {k: v for k, v in prompted.items() if k != "prompt"}
