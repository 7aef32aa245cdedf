"""Rows as people have them: JSON arrays, pairs without a prompt, columns of any name, the hub."""

import itertools
import json
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants
from support.fake_hub import COMMIT, hub_of

from distflow_jax.config.data_config import COLUMNS, check_columns
from distflow_jax.data.column_choice import EVALUATION, INHERITED, TRAINING
from distflow_jax.data.dataset import open_dataset
from distflow_jax.data.example import Example
from distflow_jax.data.message_forms import split_pair

ROWS = [{"question": f"{i} + {i}?", "answer": str(2 * i)} for i in range(4)]


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def opened(path, rows, **options) -> list[Example]:
    dataset = open_dataset(write(path, json.dumps(rows)), **options)
    return [dataset[row] for row in range(len(dataset))]


def turn(role, content):
    return {"role": role, "content": content}


def said(*texts):
    """A conversation that a user begins."""
    roles = itertools.cycle(["user", "assistant"])
    return [turn(role, text) for role, text in zip(roles, texts, strict=False)]


def hh(*texts):
    """A conversation in HH-RLHF's form."""
    names = itertools.cycle(["Human", "Assistant"])
    return "".join(f"\n\n{name}: {text}" for name, text in zip(names, texts, strict=False))


# -- .json ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(ROWS),
        json.dumps(ROWS, indent=2),
        "\ufeff \r\n\t" + json.dumps(ROWS) + "\n\n",
        "\n".join(map(json.dumps, ROWS)),
        "\ufeff\n" + "\n\n".join(map(json.dumps, ROWS)),
    ],
)
def test_a_json_file_holds_an_array_or_lines(tmp_path, text):
    dataset = open_dataset(write(tmp_path / "a.json", text))
    assert [dataset[i].ground_truth for i in (2, 0, 3, 1)] == ["4", "0", "6", "2"]
    assert len(dataset) == len(ROWS)


def test_text_of_any_language_keeps_its_place_in_an_array(tmp_path):
    rows = [{"prompt": text} for text in ("né 𝄞", 'quote " [,] {', "\\", "日本\u2028", "plain")]
    for ascii_only in (True, False):
        text = json.dumps(rows, ensure_ascii=ascii_only)
        dataset = open_dataset(write(tmp_path / "a.json", text))
        assert [dataset[i].prompt for i in range(5)] == [row["prompt"] for row in rows]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", r"a\.json has no rows"),
        (" [ \n ]", r"a\.json has no rows"),
        ("", r"a\.json has no rows"),
        ('[{"prompt": "a"}, 3]', "row 2: expected an object with columns, got 3"),
        ('[[{"prompt": "a"}]]', "row 1: expected an object with columns, got "),
        ('[{"prompt": "a"}, {"prompt": ]', "row 2: not valid JSON at line 1, character 30"),
        ('[{"prompt": "a"},\n]', "row 2: not valid JSON at line 2, character 1: Expecting value"),
        ('[{"prompt": "a"} {"prompt": "b"}]', "row 2: not valid JSON .* Expecting ',' or ']'"),
        ('[{"prompt": "a"}', "row 2: not valid JSON .* Expecting ',' or ']'"),
        ('[{"prompt": "a"}]\n[{"prompt": "b"}]', "text after the end of the array in line 2"),
        ('{\n"data": [{"prompt": "a"}]\n}', "one object over several lines.* 'data' is an array"),
        ('{\n"prompt": "a"\n}', "one object over several lines; expected an array of rows"),
        ("[" * 100_000, "row 1: objects nested too deeply"),
        (b'[{"prompt": "\xff"}]', r"a\.json: not UTF-8 text"),
        ('[{"prompt": "a"}]'.encode("utf-16"), "not UTF-8 text"),
        ('[{"prompt": "a", "prompt": "b"}]', "row 1: key 'prompt' occurs twice in an object"),
        ("null", "row 1: expected an object with columns, got None"),
    ],
)
def test_a_json_file_that_is_no_data_set_names_its_row(tmp_path, text, message):
    with pytest.raises(ValueError, match=message) as caught:
        open_dataset(write(tmp_path / "a.json", text))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_integers_above_64_bits_are_kept(tmp_path):
    (example,) = opened(
        tmp_path / "a.json", [{"question": "2^99?", "answer": 2**99, "n": -(2**70)}]
    )
    assert example.ground_truth == str(2**99) and example.extra_info["n"] == -(2**70)


# -- pairs without a prompt -----------------------------------------------------------------------


def test_the_common_beginning_of_a_pair_is_its_prompt(tmp_path):
    start = [turn("system", "Be kind."), *said("Hi", "Hello", "How are you?")]
    rows = [
        {"chosen": [*start, turn("assistant", "Well")], "rejected": [*start, turn("assistant", "")]}
    ]
    (pair,) = opened(tmp_path / "a.json", rows)
    assert (pair.prompt, pair.chosen, pair.rejected) == (start, "Well", "")
    # a table gives every message the keys of all, null where it has none
    rows[0]["rejected"][0] = rows[0]["rejected"][0] | {"name": "s"}
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    table = open_dataset(str(tmp_path / "a.parquet"))
    assert [m["content"] for m in table[0].prompt] == [m["content"] for m in start]
    assert (table[0].chosen, table[0].rejected) == ("Well", "")


def test_a_prompt_beside_whole_conversations_is_the_conversations_beginning(tmp_path):
    """The columns of ultrafeedback_binarized: `prompt` is the first message's text."""
    row = {"prompt": "Hi", "chosen": said("Hi", "Hello"), "rejected": said("Hi", "No")}
    (pair,) = opened(tmp_path / "a.json", [row | {"messages": said("Hi", "Hello")}])
    assert (pair.prompt, pair.chosen, pair.rejected) == (said("Hi"), "Hello", "No")
    # answers without the prompt leave it as it is
    row = {"prompt": "Hi", "chosen": said("Hi", "Hello")[1:], "rejected": said("Hi", "No")[1:]}
    (pair,) = opened(tmp_path / "a.json", [row])
    assert (pair.prompt, pair.chosen) == ("Hi", "Hello")


def test_hh_rlhf_rows(tmp_path):
    row = {"chosen": hh("Hi", "Hello", "Who?", " Me\n\nand you "), "rejected": hh("Hi", "Hello")}
    row["rejected"] += "\n\nHuman: Who?\n\nAssistant:"
    (pair,) = opened(tmp_path / "hh.json", [row])
    assert pair.prompt == said("Hi", "Hello", "Who?")
    assert (pair.chosen, pair.rejected) == ("Me\n\nand you", "")
    assert pair.data_source == "hh" and pair.extra_info == {}


def test_turns_after_the_answers_are_left_out(tmp_path):
    """Some of HH-RLHF's pairs differ before their last turn."""
    prompt, chosen, rejected = split_pair(hh("a", "b", "c", "d"), hh("a", "x", "y", "z"), "row")
    assert (prompt, chosen, rejected) == (said("a"), "b", "x")
    # one that goes on where the other ends: both have the same answer, and so no gradient
    prompt, chosen, rejected = split_pair(hh("a", "b", "c", "d"), hh("a", "b"), "row")
    assert (prompt, chosen, rejected) == (said("a"), "b", "b")


def test_every_cut_of_a_conversation_is_found():
    """For all pairs over a small alphabet the parts are the conversations' own."""
    for length in (1, 3):
        for texts in itertools.product("ab", repeat=length):
            for answers in itertools.product("ab", repeat=2):
                first, second = (said(*texts, answer) for answer in answers)
                for form in (list, lambda turns: hh(*(t["content"] for t in turns))):
                    prompt, *found = split_pair(form(first), form(second), "row")
                    assert (prompt, tuple(found)) == (said(*texts), answers)


@pytest.mark.parametrize(
    ("chosen", "rejected", "message"),
    [
        ("Blue", "Green", "column 'chosen': text without a prompt"),
        (hh("a", "b"), "c", "column 'rejected': text without a prompt"),
        ("See:\n\nHuman: a\n\nAssistant: b", hh("a", "b"), "column 'chosen': text without a pr"),
        (hh("a", "b"), hh("c", "d"), "have no common beginning"),
        (said("a"), said("a"), "have no common beginning"),
        ([turn("assistant", "a")], [turn("assistant", "b")], "have no common beginning"),
        (said("a", "b", "c"), said("a", "b", "d"), "differs from the other in message 2 of 'user'"),
        (said("a", "b"), [], "column 'rejected': an empty list"),
        (said("a", "b"), 3, "column 'rejected': expected text or a list"),
        (said("a", "b"), [{"role": "user"}], "column 'rejected': message 0 needs text in"),
        (said("a", "b"), None, "none of the columns"),
        (None, said("a", "b"), "column 'chosen': missing, although there is a 'rejected'"),
    ],
)
def test_a_pair_without_a_prompt_names_what_is_wrong(tmp_path, chosen, rejected, message):
    good = {"chosen": said("a", "b"), "rejected": said("a", "c")}
    with pytest.raises(ValueError, match="a.json, row 2.*" + message):
        opened(tmp_path / "a.json", [good, {"chosen": chosen, "rejected": rejected}])


# -- data.columns ---------------------------------------------------------------------------------


def test_columns_by_any_name(tmp_path):
    rows = [{"instruction": "1 + 1?", "output": "so #### 2", "level": 3, "answer": "hidden"}]
    columns = {"question": "instruction", "answer": "output"}
    for example in (
        opened(tmp_path / "a.json", rows, columns=columns)[0],
        opened(tmp_path / "a.json", rows, columns=dict(reversed(columns.items())))[0],
    ):
        assert example.prompt == [turn("user", "1 + 1?")]
        assert example.ground_truth == "2"
        assert example.extra_info == {"question": "1 + 1?", "answer": "so #### 2", "level": 3}
    (plain,) = opened(tmp_path / "a.json", rows, columns={"prompt": "instruction"})
    assert (plain.prompt, plain.ground_truth) == ("1 + 1?", "hidden")


def test_columns_can_be_exchanged_and_shared(tmp_path):
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    (worse,) = opened(
        tmp_path / "a.json", rows, columns={"chosen": "rejected", "rejected": "chosen"}
    )
    assert (worse.chosen, worse.rejected) == ("c", "b")
    del rows[0]["rejected"]
    columns = {"completion": "chosen", "answer": "chosen"}
    (both,) = opened(tmp_path / "a.json", rows, columns=columns)
    assert (both.chosen, both.ground_truth) == ("b", "b")


def test_a_question_may_have_a_pair_of_answers(tmp_path):
    (pair,) = opened(tmp_path / "a.json", [{"question": "a?", "chosen": "b", "rejected": "c"}])
    assert (pair.prompt, pair.chosen, pair.rejected) == (said("a?"), "b", "c")
    (pair,) = opened(tmp_path / "a.json", [{"question": "a?", "chosen": "b"}], system_prompt="S")
    assert pair.prompt[0] == turn("system", "S")


PROMPTS = [
    ({"instruction": "a", "prompt": "b"}, {"question": "instruction"}),
    ({"instruction": "a", "prompt": "b"}, {"messages": "instruction"}),
    ({"instruction": "a", "messages": "b"}, {"prompt": "instruction"}),
    ({"instruction": "a", "messages": "b"}, {"question": "instruction"}),
    ({"instruction": "a", "question": "b"}, {"prompt": "instruction"}),
    ({"instruction": "a", "question": "b"}, {"messages": "instruction"}),
]


@pytest.mark.parametrize(("row", "columns"), PROMPTS)
def test_a_chosen_prompt_wins_over_every_other_of_the_file(tmp_path, row, columns):
    own = dict.fromkeys(row, said("b")) if "messages" in row else dict.fromkeys(row, "b")
    own["instruction"] = said("a") if "messages" in columns else "a"
    columns = columns | {"answer": "output"}
    (example,) = opened(tmp_path / "a.json", [own | {"output": "c"}], columns=columns)
    assert example.prompt in ("a", said("a")) and example.ground_truth == "c"


TRUTHS = ("answer", "solution", "ground_truth", "reward_model")


@pytest.mark.parametrize("prompt", ["prompt", "question"])
@pytest.mark.parametrize(("name", "other"), [*itertools.permutations(TRUTHS, 2)])
def test_a_chosen_ground_truth_wins_over_every_other_of_the_file(tmp_path, prompt, name, other):
    own, others = (
        {"ground_truth": text} if column == "reward_model" else text
        for column, text in ((name, "own"), (other, "other"))
    )
    row = {"q": "a", "final": own, other: others}
    (example,) = opened(tmp_path / "a.json", [row], columns={prompt: "q", name: "final"})
    assert example.ground_truth == "own"


def test_a_chosen_answer_wins_over_the_answers_of_the_file(tmp_path):
    pair = {"prompt": "p", "chosen": "b", "rejected": "c"}
    (one,) = opened(tmp_path / "a.json", [pair | {"r": "a"}], columns={"completion": "r"})
    assert (one.chosen, one.rejected) == ("a", None)
    row = pair | {"completion": "d", "r": "a"}
    (two,) = opened(tmp_path / "a.json", [row], columns={"chosen": "r"})
    assert (two.chosen, two.rejected) == ("a", "c")
    (one,) = opened(tmp_path / "a.json", [row], columns={"completion": "completion"})
    assert (one.chosen, one.rejected) == ("d", None)


def test_no_answer_of_a_row_is_left_unread(tmp_path):
    """`chosen` and `completion` are answers to messages and to questions as to prompts."""
    for start, prompt in (
        ({"messages": said("u")}, said("u")),
        ({"question": "u"}, said("u")),
        ({"question": "u", "answer": "1"}, said("u")),
        ({"prompt": "u"}, "u"),
    ):
        (pair,) = opened(tmp_path / "a.json", [start | {"chosen": "b", "rejected": "c"}])
        assert (pair.prompt, pair.chosen, pair.rejected) == (prompt, "b", "c")
        for row, columns in (({"completion": "b"}, {}), ({"r": "b"}, {"completion": "r"})):
            (one,) = opened(tmp_path / "a.json", [start | row], columns=columns)
            assert (one.prompt, one.chosen, one.rejected) == (prompt, "b", None)
            assert one.ground_truth == start.get("answer")
    (same,) = opened(tmp_path / "a.json", [{"messages": said("u", "b"), "completion": "b"}])
    assert same.chosen == "b"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": said("u", "a"), "chosen": "b", "rejected": "c"}, "'chosen' is another"),
        ({"messages": said("u", "a"), "completion": "b"}, "'completion' is another: leave one out"),
        ({"prompt": "u", "completion": "b", "chosen": "c"}, "'completion': is an answer"),
        ({"question": "u", "completion": "b", "chosen": "c"}, "data.columns={'chosen': 'chosen'}"),
        (
            {"prompt": "SYSTEM: be terse", "chosen": said("u", "a"), "rejected": said("u", "b")},
            "column 'prompt': 'SYSTEM: be terse' is in no message with which",
        ),
        (
            {"prompt": "half \ud83d"},
            r"'prompt': half of a character \(.*'\\ud83d'\) at character 6",
        ),
        ({"prompt": said("a", "b \udc00")}, "column 'prompt': half of a character"),
        ({"prompt": [turn("us\ud83der", "a")]}, "column 'prompt': half of a character"),
        ({"messages": said("a", "b \udc00")}, "column 'messages': half of a character"),
        ({"question": "\ud83d", "answer": "1"}, "column 'question': half of a character"),
        ({"question": "a", "answer": "\ud83d"}, "column 'answer': half of a character"),
        ({"prompt": "a", "completion": "\ud83d"}, "column 'completion': half of a character"),
        ({"prompt": "a", "chosen": "b", "rejected": "\ud83d"}, "column 'rejected': half of a ch"),
        ({"chosen": said("a", "b"), "rejected": said("a", "\ud83d")}, "'rejected': half of a char"),
        ({"prompt": "a", "data_source": "\ud83d"}, "column 'data_source': half of a character"),
        ({"question": "a", "answer": math.nan}, "column 'answer': expected text, got nan"),
        ({"question": "a", "answer": math.inf}, "column 'answer': expected text, got inf"),
        ({"prompt": [turn("", "a")]}, "column 'prompt': message 0 needs text in 'role'"),
        ({"prompt": "a", "messages": said("b")}, "'messages': is a prompt, and so is 'prompt'; "),
        (
            {"prompt": "a", "conversations": said("b")},
            "data.columns={'prompt': 'prompt'} or data.columns={'conversations': 'conversations'}",
        ),
        ({"messages": said("a"), "conversations": said("b")}, "'conversations': is a prompt"),
        ({"system": "Be brief.", "conversations": said("a")}, "'system': a part of the prompt"),
        ({"system_prompt": "a", "question": "b", "answer": "c"}, "'system_prompt': a part of the"),
    ],
)
def test_a_row_that_could_not_be_read_whole_is_an_error(tmp_path, row, message):
    with pytest.raises(ValueError, match="a.json, row 2.*" + message) as caught:
        opened(tmp_path / "a.json", [{"prompt": "\ud83d\ude00"}, row])
    assert str(caught.value).isprintable()


def test_parts_of_alpacas_prompts_are_not_left_out(tmp_path):
    columns = {"question": "instruction", "answer": "output"}
    row = {"instruction": "Add.", "input": "", "output": "5"}
    assert opened(tmp_path / "a.json", [row], columns=columns)[0].prompt == said("Add.")
    with pytest.raises(ValueError, match="row 2, column 'input': a part of the prompt that would"):
        opened(tmp_path / "a.json", [row, row | {"input": "2, 3"}], columns=columns)
    others = {"question": "Add.", "answer": "5", "input": "2, 3"}  # of a reward function
    assert opened(tmp_path / "a.json", [others])[0].extra_info["input"] == "2, 3"


def test_errors_name_the_key_that_changes_the_choice(tmp_path):
    rows = [{"qestion": "a"}]
    with pytest.raises(ValueError, match=r"found 'qestion'; eval.columns={'question': 'qestion'}"):
        opened(tmp_path / "a.json", rows, columns_key=EVALUATION)
    for key, message in (
        (TRAINING, "which data.columns gives for 'prompt'; found 'qestion'$"),
        (EVALUATION, "which eval.columns gives for 'prompt'; found 'qestion'$"),
        (INHERITED, "which data.columns gives for 'prompt'; found 'qestion'; or set eval.columns$"),
    ):
        with pytest.raises(ValueError, match=message):
            opened(tmp_path / "a.json", rows, columns={"prompt": "xyz"}, columns_key=key)


def test_a_null_in_a_chosen_column_counts_as_absent(tmp_path):
    rows = [{"q": "a", "truth": None}, {"q": None, "truth": "b"}]
    with pytest.raises(ValueError, match="row 2: none of the columns .* has a value"):
        opened(tmp_path / "a.json", rows, columns={"prompt": "q", "answer": "truth"})


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        ({"instrution": "a"}, {"prompt": "instruction"}, "no column 'instruction', which"),
        ({"x": "a", "y": 1}, {"prompt": "text"}, "for 'prompt'; found 'x', 'y'"),
        ({}, {"prompt": "text"}, "for 'prompt'; found no columns"),
        ({"text": 3}, {"prompt": "text"}, "column 'prompt': expected text or a list .* got 3"),
        ({"qestion": "a"}, {}, r"found 'qestion'; data.columns={'question': 'qestion'} reads"),
        ({"Prompt": "a"}, {}, r"data.columns={'prompt': 'Prompt'} reads 'Prompt' as 'prompt'"),
        ({"text": "a"}, {}, r"found 'text'; name a column, as in data.columns={'prompt': 'COLUM"),
        ({"question": "a", "anser": "b"}, {}, r"data.columns={'answer': 'anser'} reads 'anser'"),
        ({"rejected": "a", "choosen": "b"}, {}, r"data.columns={'chosen': 'choosen'} reads"),
        ({str(i): i for i in range(40)}, {}, "'11' and 28 more; name a column"),
    ],
)
def test_an_error_names_file_row_and_the_nearest_column(tmp_path, row, columns, message):
    good = {name: "a" for name in columns.values()} or {"prompt": "a"}
    path = write(tmp_path / "a.jsonl", f"{json.dumps(good)}\n{json.dumps(row)}\n")
    with pytest.raises(ValueError, match="a.jsonl, row 2.*" + message):
        open_dataset(path, columns=columns)


def test_a_choice_of_columns_is_checked_by_its_names():
    check_columns({name: "x" for name in COLUMNS}, "data.columns")
    with pytest.raises(ValueError, match="data.columns: no column is called 'promt'.*'prompt'"):
        check_columns({"promt": "a"}, "data.columns")
    with pytest.raises(ValueError, match="'prompt' needs the name of a column"):
        check_columns({"prompt": ""}, "data.columns")


def test_columns_belong_to_files_and_to_the_fingerprint(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"prompt": "a", "text": "b"}\n')
    plain = open_dataset(path).fingerprint
    assert open_dataset(path, columns={}).fingerprint == plain
    assert open_dataset(path, columns={"prompt": "text"}).fingerprint != plain
    with pytest.raises(ValueError, match="'task:arithmetic' has none: leave it empty"):
        open_dataset("task:arithmetic", columns={"prompt": "text"})


def test_a_row_of_several_files_is_named_by_its_own_file(tmp_path):
    write(tmp_path / "a.json", json.dumps(ROWS[:3]))
    write(tmp_path / "b.jsonl", "\n\n" + json.dumps(ROWS[3]) + "\n")
    dataset = open_dataset(str(tmp_path))
    assert dataset.place(2) == f"{tmp_path}/a.json, row 3"
    assert dataset.place(3) == f"{tmp_path}/b.jsonl, row 3"


# -- the hub --------------------------------------------------------------------------------------


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A cache of the hub with one data set, as a download leaves it; there is no network."""
    repo = tmp_path / "datasets--acme--sums"
    for name, answer in (("main/train", "1"), ("main/test", "2"), ("other/train", "3")):
        path = repo / "snapshots" / COMMIT / f"{name}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist([{"q": name, "a": answer}]), path)
    for ref in ("main", "v1.0"):
        (repo / "refs").mkdir(exist_ok=True)
        (repo / "refs" / ref).write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.mark.parametrize(
    ("spec", "answer"),
    [
        ("hf:acme/sums:main/train", "1"),
        ("hf:acme/sums:test", "2"),
        ("hf:acme/sums@v1.0:other/train", "3"),
        (f"hf:acme/sums@{COMMIT}:main/test", "2"),
    ],
)
def test_a_split_of_the_hub_is_read_from_its_cache(hub, spec, answer):
    dataset = open_dataset(spec, columns={"question": "q", "answer": "a"})
    assert (len(dataset), dataset[0].ground_truth) == (1, answer)
    assert dataset[0].data_source == "acme/sums"
    assert dataset.name == spec


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("hf:acme/sums", "several subsets with a split 'train': main, other; "),
        ("hf:acme/sums:dev", "the hub is not reachable. has no split 'dev'; it has 'main/test', "),
        ("hf:acme/sums:mian/train", "no split 'train' in subset 'mian'; .* did you mean :main/tr"),
        ("hf:acme/products:train", "not in the cache and the hub is not reachable"),
        ("hf:acme/sums@v9:test", "not in the cache and the hub is not reachable"),
        ("hf:acme/sums/more:test", "cannot open 'hf:acme/sums/more:test'"),
        ("hf:acme/sums:a/b/", "is not of the form hf:ORG/NAME"),
    ],
)
def test_a_data_set_of_the_hub_that_cannot_be_read(hub, spec, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
        open_dataset(spec, columns={"question": "q", "answer": "a"})
    assert "\n" not in str(caught.value)


def test_a_row_of_the_hub_is_named_by_its_file(hub):
    with pytest.raises(ValueError, match="test-00000-of-00001.parquet, row 1: none of the columns"):
        open_dataset("hf:acme/sums:test")


CARD = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: rows/*.FORM
  - split: test
    path: held.jsonl
---
# Sums
"""
FORMS = {
    "jsonl": lambda rows: "".join(json.dumps(row) + "\n" for row in rows).encode(),
    "json": lambda rows: json.dumps(rows).encode(),
    "csv": lambda rows: "".join(
        f"{q},{a}\n" for q, a in [("q", "a"), *map(dict.values, rows)]
    ).encode(),
    "arrow": lambda rows: arrow_of(rows),
}


def arrow_of(rows):
    table, sink = pa.Table.from_pylist(rows), pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("form", FORMS)
def test_a_split_of_the_hub_is_downloaded_in_every_form(form, tmp_path, monkeypatch):
    """Only its files are; afterwards it is read without the hub."""
    rows = [{"q": "1 + 1", "a": "2"}, {"q": "2 + 2", "a": "4"}]
    one, two = (FORMS[form](rows[i : i + 1]) for i in range(2))
    files = {f"rows/1.{form}": one, f"rows/2.{form}": two, "held.jsonl": b"{}", "big.bin": b"x"}
    files["README.md"] = CARD.replace("FORM", form).encode()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    columns = {"question": "q", "answer": "a"}
    with hub_of({"acme/sums": files}) as (address, fetched):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        where = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", where)
        dataset = open_dataset("hf:acme/sums", columns=columns)
        assert sorted(fetched) == ["README.md", f"rows/1.{form}", f"rows/2.{form}"]
        with pytest.raises(FileNotFoundError, match="no split 'dev'; it has 'main/test', 'main/tr"):
            open_dataset("hf:acme/sums:dev")
        with pytest.raises(ValueError, match="cannot open 'hf:acme/product'"):
            open_dataset("hf:acme/product")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    again = open_dataset("hf:acme/sums:main/train", columns=columns)
    for found in (dataset, again):
        assert [example.ground_truth for example in found] == ["2", "4"]
        assert found[0].prompt[0]["content"] == "1 + 1"
    with pytest.raises(
        FileNotFoundError, match="in the cache; the hub is not reachable. has no sp"
    ):
        open_dataset("hf:acme/sums:test")
