"""Every accepted form of data gives the same examples, and every malformed one names its place."""

import importlib.util
import json
import re

import pyarrow as pa
import pyarrow.csv as pcsv
import pyarrow.parquet as pq
import pytest

from distflow_jax.data.dataset import open_dataset
from distflow_jax.data.generated_rows import is_held_out
from distflow_jax.data.generated_tasks import value_of
from distflow_jax.data.hub import choose

GSM8K = [  # the form of GSM8K's rows
    {
        "question": "Ada has 3 boxes of 400 nails and uses 12. How many are left?",
        "answer": "She starts with 3*400 = <<3*400=1200>>1200 nails.\n1200-12 = 1188.\n#### 1,188",
    },
    {
        "question": "A pen costs $2 and a pad $5. What do 4 pens and a pad cost?",
        "answer": "The pens cost 4*2 = <<4*2=8>>8 dollars.\nWith the pad 13.\n#### 13",
    },
]
VERL = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": row["question"]}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"index": i, "split": "train"},
    }
    for i, (row, truth) in enumerate(zip(GSM8K, ["1188", "13"], strict=True))
]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_arrow(path, rows, new_file):
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as sink, new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return str(path)


def write(path, rows, kind):
    if kind == "jsonl":
        return write_jsonl(path.with_suffix(".jsonl"), rows)
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path.with_suffix(".parquet"))
        return str(path.with_suffix(".parquet"))
    new_file = pa.ipc.new_file if kind == "arrow file" else pa.ipc.new_stream
    return write_arrow(path.with_suffix(".arrow"), rows, new_file)


def examples(dataset):
    return [dataset[row] for row in range(len(dataset))]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow file", "arrow stream"])
def test_every_file_format_holds_verl_rows(tmp_path, kind):
    got = examples(open_dataset(write(tmp_path / "data", VERL, kind)))
    assert [e.prompt for e in got] == [row["prompt"] for row in VERL]
    assert [e.ground_truth for e in got] == ["1188", "13"]
    assert [e.data_source for e in got] == ["openai/gsm8k"] * 2
    assert [e.extra_info for e in got] == [row["extra_info"] for row in VERL]
    assert got[0].ability == "math" and got[0].chosen is None


def test_question_answer_rows(tmp_path):
    path = write_jsonl(tmp_path / "school.jsonl", GSM8K)
    got = examples(open_dataset(path, system_prompt="Be brief.", prompt_suffix=" Think."))
    assert got[0].prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": GSM8K[0]["question"] + " Think."},
    ]
    assert [e.ground_truth for e in got] == ["1188", "13"]
    assert got[0].data_source == "school"
    assert got[0].extra_info["answer"] == GSM8K[0]["answer"]
    assert open_dataset(path)[1].prompt == [{"role": "user", "content": GSM8K[1]["question"]}]


def test_trl_rows(tmp_path):
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    path = write_jsonl(
        tmp_path / "trl.jsonl",
        [
            {"prompt": "1 + 1 =", "solution": "2", "level": 3},
            {"prompt": chat[:1], "chosen": chat[1:], "rejected": [chat[1] | {"content": "No"}]},
            {"messages": chat},
            {"prompt": "Sky is", "completion": " blue"},
        ],
    )
    plain, pair, demonstration, completion = examples(open_dataset(path))
    assert (plain.prompt, plain.ground_truth) == ("1 + 1 =", "2")
    assert plain.extra_info == {"solution": "2", "level": 3}
    assert (pair.prompt, pair.chosen, pair.rejected) == (chat[:1], "Hello", "No")
    assert (demonstration.prompt, demonstration.chosen) == (chat[:1], "Hello")
    assert (completion.prompt, completion.chosen) == ("Sky is", " blue")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"question": "a?" "answer": 1}', r"row 3: not valid JSON at character 19"),
        ("[1, 2]", r"row 3: expected an object with columns, got \[1, 2\]"),
        ('{"text": "a"}', r"row 3: none of the columns .* found 'text'"),
        ('{"question": "a?"}', "row 3, column 'answer': missing"),
        ('{"question": "a?", "answer": "so #### "}', "row 3, column 'answer': nothing follows"),
        ('{"question": 5, "answer": "5"}', "row 3, column 'question': expected text, got 5"),
        ('{"prompt": ""}', "row 3, column 'prompt': expected text, got ''"),
        ('{"prompt": []}', "row 3, column 'prompt': an empty list"),
        ('{"prompt": [{"role": "user"}]}', "row 3, column 'prompt': message 0 needs text in 'con"),
        ('{"prompt": "a", "extra_info": 3}', "row 3, column 'extra_info': expected an object"),
        ('{"prompt": "a", "reward_model": {}}', "row 3, column 'reward_model': has no 'ground_t"),
        ('{"prompt": "a", "rejected": "b"}', "row 3, column 'chosen': missing"),
        ('{"prompt": "a", "data_source": 3}', "row 3, column 'data_source': expected text, got 3"),
        ('{"prompt": "a", "images": ["x"]}', "row 3, column 'images': 1 image and 0 <im"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "row 3, column 'messages'"),
        ('{"prompt": "a", "a": {"b": 1, "b": 2}}', "row 3: key 'b' occurs twice in an object"),
        (b'{"prompt": "\xff\xfe"}'.decode("latin-1"), "row 3: not UTF-8"),
    ],
)
def test_a_malformed_row_names_file_row_and_column(tmp_path, row, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(f'{{"prompt": "fine"}}\n\n{row}\n'.encode("latin-1"))
    with pytest.raises(ValueError, match=f"bad.jsonl, {message}"):
        open_dataset(str(path))


def test_a_null_in_a_table_is_found(tmp_path):
    path = write(tmp_path / "bad", [*VERL, VERL[0] | {"prompt": None}], "parquet")
    with pytest.raises(ValueError, match="bad.parquet, row 3: none of the columns 'prompt'"):
        open_dataset(path)


def test_files_that_are_not_there_or_not_data(tmp_path):
    path = write_jsonl(tmp_path / "train.jsonl", VERL)
    with pytest.raises(FileNotFoundError, match="tran.jsonl does not exist; did you mean .*train"):
        open_dataset(path.replace("train", "tran"))
    with pytest.raises(FileNotFoundError, match="nor does its folder"):
        open_dataset(str(tmp_path / "nowhere" / "train.jsonl"))
    with pytest.raises(FileNotFoundError, match="no file matches"):
        open_dataset(str(tmp_path / "*.parquet"))
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match="notes.txt has an unknown ending; known: .jsonl"):
        open_dataset(str(tmp_path / "notes.txt"))
    for name in ("broken.parquet", "broken.arrow"):
        (tmp_path / name).write_text("this is no table")
        with pytest.raises(ValueError, match=f"{name}: not a readable"):
            open_dataset(str(tmp_path / name))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ValueError, match="empty.jsonl has no rows"):
        open_dataset(str(tmp_path / "empty.jsonl"))
    with pytest.raises(ValueError, match="prompts are complete"):
        open_dataset(path, system_prompt="Be brief.")


def test_several_files_are_one_data_set(tmp_path):
    rows = [{"prompt": f"{i}"} for i in range(7)]
    write_jsonl(tmp_path / "b.jsonl", rows[3:])
    write(tmp_path / "a", rows[:3], "parquet")
    for spec in (str(tmp_path), str(tmp_path / "*")):
        dataset = open_dataset(spec)
        assert [e.prompt for e in examples(dataset)] == [row["prompt"] for row in rows]
        assert [e.data_source for e in examples(dataset)] == ["a"] * 3 + ["b"] * 4
    with pytest.raises(IndexError):
        dataset[7]


def test_the_fingerprint_is_of_the_content(tmp_path):
    rows = [{"question": f"{i}?", "answer": "1"} for i in range(5)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    fingerprint = open_dataset(path).fingerprint
    moved = write_jsonl(tmp_path / "moved.jsonl", rows)
    assert open_dataset(moved).fingerprint == fingerprint
    assert open_dataset(path, prompt_suffix=" ").fingerprint != fingerprint
    rows[2]["answer"] = "2"  # same size, in the middle
    assert open_dataset(write_jsonl(tmp_path / "a.jsonl", rows)).fingerprint != fingerprint


def test_arithmetic_is_right_and_a_function_of_seed_and_row():
    spec = "task:arithmetic?operands=3&operators=+-*&digits=1-2&size={size}&seed={seed}"
    few, many = (
        open_dataset(spec.format(size=50, seed=3)),
        open_dataset(spec.format(size=500, seed=3)),
    )
    assert examples(few) == examples(many)[:50]
    assert examples(few) != examples(open_dataset(spec.format(size=50, seed=4)))
    assert few.fingerprint != many.fingerprint
    operators = set()
    for example in examples(many):
        problem = example.extra_info["problem"]
        assert example.prompt[0]["content"] == f"What is {problem}? Answer with just the number."
        assert example.ground_truth == str(eval(problem))
        operators |= set(problem) & set("+-*")
    assert operators == set("+-*")


def test_arithmetic_never_changes():
    # Recorded runs and checkpoints count on these rows.
    dataset = open_dataset("task:arithmetic")
    assert [dataset[row].extra_info["problem"] for row in range(3)] == [
        "62 + 12",
        "28 + 48",
        "98 + 58",
    ]
    assert value_of("2 + 3 * 4 - 5 * 6") == -16


def test_held_out_problems_are_never_trained_on():
    def problems(**options):
        query = "&".join(f"{k}={v}" for k, v in options.items())
        dataset = open_dataset(f"task:arithmetic?digits=1&{query}")
        return {example.extra_info["problem"] for example in examples(dataset)}

    train = set().union(*(problems(seed=seed, size=1000) for seed in range(3)))
    held_out = problems(seed=0, size=1000, held_out=1)
    assert train and held_out and not train & held_out
    assert len(train | held_out) == 100  # every sum of two digits belongs to one of them
    assert all(map(is_held_out, held_out))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("task:arithmetik", "unknown task 'arithmetik'"),
        ("task:arithmetic?digit=2", "unknown option 'digit'; did you mean 'digits'"),
        ("task:arithmetic?digits=two", "digits must be like 2 or 1-3"),
        ("task:arithmetic?operators=/", r"operators must be some of \+ - \*, got '/'"),
        ("task:arithmetic?size=many", "'size' must be a whole number, got 'many'"),
        ("task:arithmetic?held_out=maybe", "'held_out' must be 0 or 1"),
        ("task:arithmetic?size", "option 'size' has no value"),
        ("task:arithmetic?size=1&size=2", "'size' is given twice"),
        ("task:arithmetic?template=What?", "template must contain {problem}"),
        ("task:", "no name after the colon"),
        ("hf:", "not of the form hf:ORG/NAME"),
        ("", "no data set is named"),
    ],
)
def test_bad_specs(spec, message):
    with pytest.raises(ValueError, match=message):
        open_dataset(spec)


@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is not None, reason="installed")
def test_a_missing_optional_package_is_named():
    with pytest.raises(ValueError, match="pip install reasoning_gym"):
        open_dataset("reasoning_gym:leg_counting")


@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="not installed")
def test_reasoning_gym_rows_are_repeatable():
    dataset = open_dataset("reasoning_gym:leg_counting?size=5&seed=3", prompt_suffix=" Go.")
    assert len(dataset) == 5
    assert dataset[2] == dataset[2] != dataset[3]
    assert dataset[2].prompt[0]["content"].endswith(" Go.")
    with pytest.raises(ValueError, match="no data set 'leg_countin'; did you mean 'leg_counting'"):
        open_dataset("reasoning_gym:leg_countin")


def test_options_of_a_task_are_decoded_but_keep_their_plus():
    dataset = open_dataset(
        "task:arithmetic?operators=+&template={problem}%20%3D%20%26", prompt_suffix="!"
    )
    assert dataset[0].prompt[0]["content"] == dataset[0].extra_info["problem"] + " = &!"


# files of a repository -> what is asked for, and those that are read; the rest belongs to others
REPOSITORIES = {
    "shards": (
        ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
        ["data/test-00000-of-00001.parquet", "README.md"],
        "train",
    ),
    "splits of other names": (
        ["data/train_prefs-00000-of-00001.parquet"],
        ["data/train_sft-00000-of-00001.parquet"],
        "train_prefs",
    ),
    "folders": (["default/test/0000.parquet"], ["default/train/0000.parquet"], "test"),
    "saved to disk": (
        ["train/data-00000-of-00001.arrow"],
        ["train/state.json", "train/dataset_info.json", "test/data-00000-of-00001.arrow"],
        "train",
    ),
    "a subset": (["main/train.jsonl"], ["socratic/train.jsonl"], "main/train"),
    "words in names": (["gsm_train_v2.csv"], ["gsm_test_v2.csv", "trainers.csv"], "train"),
    "no split": (["alpaca_cleaned.json"], ["dataset_infos.json", "alpaca.py"], "train"),
    "two formats": (["train.parquet"], ["train.csv", "train.json", "test.json"], "train"),
}


@pytest.mark.parametrize("name", REPOSITORIES)
def test_files_of_a_split_of_the_hub_are_found_by_their_names(name):
    wanted, others, split = REPOSITORIES[name]
    *subset, split = split.rsplit("/", 1)
    chosen = choose([*others, *wanted], [], subset[0] if subset else None, split, "hf:a/b")
    assert chosen == wanted


CARD = [
    {"config_name": "main", "data_files": [{"split": "train", "path": "a/one-*"}]},
    {"config_name": "more", "data_files": {"train": ["b/*.csv"], "held": "**/held.jsonl"}},
    {"config_name": "whole", "data_dir": "c"},
    {"config_name": "plain", "data_files": "d/x.json"},
    {"config_name": "features alone"},
    "no map",
]


def test_a_card_names_the_files_of_a_split():
    files = ["a/one-1.json", "a/two-1.json", "b/1.csv", "b/in/2.csv", "b/in/held.jsonl"]
    files += ["c/test.json", "c/train.json", "d/x.json"]

    def chosen(subset, split):
        return choose(files, CARD, subset, split, "hf:a/b")

    assert chosen("main", "train") == ["a/one-1.json"]
    assert chosen("more", "train") == ["b/1.csv"]
    assert chosen("more", "held") == chosen(None, "held") == ["b/in/held.jsonl"]
    assert chosen("whole", "test") == ["c/test.json"]
    assert chosen("plain", "train") == ["d/x.json"]
    with pytest.raises(ValueError, match="several subsets .*: main, more, plain, whole; name one"):
        chosen(None, "train")
    with pytest.raises(FileNotFoundError, match=r"no split 'test' in subset 'mian'; it has 'main/"):
        chosen("mian", "test")
    with pytest.raises(FileNotFoundError, match="did you mean :more/held at the end"):
        chosen("more", "hold")


def test_a_split_of_the_hub_that_is_not_there():
    two = ["main/train-0.parquet", "socratic/train-0.parquet"]
    with pytest.raises(ValueError, match="several subsets .*: main, socratic; name one"):
        choose(two, [], None, "train", "hf:a/b")
    with pytest.raises(FileNotFoundError, match="no split 'dev'; it has 'main/train', 'socratic/t"):
        choose(two, [], None, "dev", "hf:a/b")
    with pytest.raises(FileNotFoundError, match="nor any other that is read .* found '.gz', '.py'"):
        choose(["train.jsonl.gz", "load.py", "README.md"], [], None, "train", "hf:a/b")


def test_a_name_of_the_hub_without_its_scheme(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for spec in ("openai/gsm8k", "openai/gsm8k:main/train", "a-b/c_d.v1@refs/pr/1"):
        with pytest.raises(FileNotFoundError, match=re.escape(f"did you mean hf:{spec}?")):
            open_dataset(spec)
    for spec in ("data/gsm8k", "rows/train.jsonl", "gsm8k", "/openai/gsm8k"):
        with pytest.raises(FileNotFoundError) as caught:
            open_dataset(spec)
        assert "hf:" not in str(caught.value)


@pytest.mark.parametrize("ending", ["csv", "arrow", "feather"])
def test_columns_of_one_name_are_refused(tmp_path, ending):
    """A row would have the last of them."""
    path, names = tmp_path / f"a.{ending}", ["question", "answer", "answer"]
    table = pa.Table.from_arrays([pa.array([text]) for text in ("1 + 1?", "2", "3")], names)
    if ending == "csv":
        pcsv.write_csv(table, path)
    else:
        with pa.ipc.new_file(str(path), table.schema) as file:
            file.write_table(table)
    with pytest.raises(ValueError, match=rf"a.{ending}: several columns are named 'answer'"):
        open_dataset(str(path))


def test_csv_is_text_as_it_stands(tmp_path):
    """Whatever other rows hold, and however long they are; an empty cell is null."""
    path, long = tmp_path / "rows.csv", "x" * (3 << 20)
    rows = [
        "question,answer,level",
        '"What is ""1"",\nand 2?",007,',
        "What?,1.50,3",
        f"Is it?,true,{long}",
    ]
    path.write_text("\n".join(rows) + "\n")
    one, two, three = open_dataset(str(path))
    assert one.prompt[0]["content"] == 'What is "1",\nand 2?'
    assert [x.ground_truth for x in (one, two, three)] == ["007", "1.50", "true"]
    assert [x.extra_info.get("level") for x in (one, two, three)] == [None, "3", long]
    path.write_text("question,answer\nWhat?,1,2\n")
    with pytest.raises(ValueError, match="rows.csv: not a readable .csv file"):
        open_dataset(str(path))
