"""Messages in all forms that data sets have, and what a template makes of rows when they open."""

import dataclasses
import json
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.chat_templates import TRAITS, write_tokenizer

from distflow_jax.config.data_config import DataConfig
from distflow_jax.data.dataset import open_dataset
from distflow_jax.data.loader import Loader
from distflow_jax.data.step_columns import loader_columns
from distflow_jax.models.tokenizer import Tokenizer

ASK = {"role": "user", "content": "What is 2 + 3?"}
SAY = {"role": "assistant", "content": "5"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def opened(tmp_path, *rows, **options):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return open_dataset(str(path), **options)


def refused(tmp_path, row, **options):
    with pytest.raises(ValueError) as error:
        opened(tmp_path, row, **options)
    assert "\n" not in str(error.value) and "rows.jsonl, row 1" in str(error.value)
    return str(error.value)


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """The tokenizer with the chat template of a trait."""
    folder = tmp_path_factory.mktemp("templates")
    return lambda name: Tokenizer.from_folder(write_tokenizer(folder / name, TRAITS[name]))


# -- text of messages ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        json.dumps([ASK]),
        json.dumps([{"role": "system", "content": "Be brief."}, ASK], indent=2),
        f"  {json.dumps([ASK])}\n",
        json.dumps([{"content": "Hi [1]", "role": "user", "name": None}]),
        json.dumps([{"from": "human", "value": "Hi"}]),
        json.dumps(ASK),
        json.dumps([{"role": "user", "content": "ünï \u2028 \U0001f600"}], ensure_ascii=False),
    ],
)
def test_json_text_of_messages_is_read(tmp_path, text):
    found = json.loads(text)
    found = [found] if isinstance(found, dict) else found
    wanted = [{"role": "user", "content": m["value"]} if "value" in m else m for m in found]
    assert opened(tmp_path, {"prompt": text})[0].prompt == wanted
    assert opened(tmp_path, {"conversations": text})[0].prompt == wanted


@pytest.mark.parametrize(
    "text",
    [
        str([ASK]),
        repr([{"content": "it's", "role": "user"}]),
        repr(np.array([ASK])),
        str(np.array([ASK, SAY])),
        str((ASK, SAY)),
        str(ASK),
        json.dumps([ASK])[:-1],
        json.dumps([ASK, SAY])[:-20],
        '[{"role": "user", "content": "a"},]',
        "[{'role': 'user', 'content': \"a]\"}]",
        json.dumps([ASK]) + ",\n",
    ],
)
def test_a_repr_of_messages_is_refused(tmp_path, text):
    for column in ("prompt", "messages"):
        message = refused(tmp_path, {column: text})
        assert f"column '{column}'" in message and "not valid JSON" in message


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (json.dumps(json.dumps([ASK])), "within quotes"),
        (json.dumps([json.dumps(ASK)]), "within quotes"),
        (repr(json.dumps([ASK]).encode()), "within quotes"),
        (repr(str([ASK])), "within quotes"),
        (json.dumps({"messages": [ASK]}), "an object with messages in 'messages'"),
        (
            json.dumps({"id": 1, "prompt": [{"from": "human", "value": "a"}]}),
            "messages in 'prompt'",
        ),
    ],
)
def test_messages_within_another_value_are_refused(tmp_path, text, problem):
    for column in ("prompt", "messages", "conversations"):
        message = refused(tmp_path, {column: text})
        assert f"column '{column}'" in message and problem in message


@pytest.mark.parametrize(
    "text",
    [
        '\'{"role": "user", "content": "x"}\' is JSON. Why?',
        '"role": "user", "content": "x"',
        '{"role": "user", "content": "a"} [1]',
        '{"x": {"role": 1, "content": 2}, "y": []}',
        "[INST] What is 2 + 3? [/INST]",
        "[1, 2, 3]",
        "[{'a': 1}, {'b': 2}]",
        '[{"role": "admin", "id": 1}]',
        '{"content": "a"}',
        json.dumps([ASK]) + " What is this?",
        json.dumps([ASK]) + "\nConvert it to a table [1].",
        str([ASK]) + " is a list of Python. Why?",
        "Here: " + json.dumps([ASK]),
        "{{ messages }}",
        "(a) {b}",
        "array([1, 2])",
        '{"role" and "content" are keys} of it',
        '{"a": {"role": "x", "content": "y"}}',
        '[["role", {"role": 1, "content": 2}]]',
        '[{"role": "user", "content": "a"}, 5]',
        "{'role': 'user', 'content': 'a'} is a dict.",
        "[{'role': 'user', 'content': 'a'}], or not?",
    ],
)
def test_honest_texts_stay(tmp_path, text):
    assert opened(tmp_path, {"prompt": text})[0].prompt == text
    assert opened(tmp_path, {"question": text, "answer": "1"})[0].prompt[0]["content"] == text


def test_answers_in_json_text(tmp_path):
    row = {"prompt": json.dumps([ASK]), "completion": json.dumps([SAY])}
    (found,) = opened(tmp_path, row)
    assert (found.prompt, found.chosen) == ([ASK], "5")
    pair = {"chosen": json.dumps([ASK, SAY]), "rejected": json.dumps([ASK, SAY | {"content": "6"}])}
    (found,) = opened(tmp_path, pair)
    assert (found.prompt, found.chosen, found.rejected) == ([ASK], "5", "6")
    # an answer may be JSON of something else
    call = json.dumps([{"name": "add", "arguments": {}}])
    assert opened(tmp_path, {"prompt": [ASK], "completion": call})[0].chosen == call
    assert "expected text, got" in refused(tmp_path, {"question": json.dumps([ASK]), "answer": "1"})


# -- ShareGPT --------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["conversations", "messages"])
@pytest.mark.parametrize(
    ("name", "role"),
    [
        *(("human", "user"), ("user", "user"), ("Human", "user"), ("system", "system")),
        *(("tool", "tool"), ("observation", "tool"), ("function_response", "tool")),
    ],
)
def test_roles_of_sharegpt(tmp_path, column, name, role):
    turns = [{"from": name, "value": "a"}, {"from": "human", "value": "b", "weight": 1}]
    (found,) = opened(tmp_path, {column: [*turns, {"from": "gpt", "value": "c"}]})
    asked = {"role": "user", "content": "b", "weight": 1}
    assert (found.prompt, found.chosen) == ([{"role": role, "content": "a"}, asked], "c")


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ({"from": "alice", "value": "a"}, "message 0 is from 'alice', not human, gpt"),
        ({"from": None, "value": "a"}, "message 0 is from 'none', not"),
        ({"value": "a"}, "message 0 is from"),
        ({"role": "human", "content": "a"}, "role 'human' without from and value: write 'user'"),
        ({"role": "gpt", "content": "a"}, "role 'gpt' without from and value: write 'assistant'"),
        ({"from": "human", "content": "a"}, "message 0 needs text in 'role'"),
    ],
)
def test_other_roles_are_refused(tmp_path, message, wanted):
    for column in ("prompt", "messages"):
        assert wanted in refused(tmp_path, {column: [message, SAY, ASK]})


# -- answers ---------------------------------------------------------------------------------------


def test_turns_before_an_answers_last_belong_to_the_prompt(tmp_path):
    again = {"role": "user", "content": "Sure?"}
    (found,) = opened(tmp_path, {"prompt": [ASK], "completion": [SAY, again, SAY]})
    assert (found.prompt, found.chosen) == ([ASK, SAY, again], "5")
    pair = {"prompt": [ASK], "chosen": [ASK, SAY], "rejected": [ASK, SAY | {"content": "6"}]}
    (found,) = opened(tmp_path, pair)
    assert (found.prompt, found.chosen, found.rejected) == ([ASK], "5", "6")
    for row, wanted in (
        ({"prompt": [ASK], "completion": [SAY, ASK]}, "must be messages that end with the assist"),
        ({"prompt": "Sum?", "completion": [SAY, again, SAY]}, "one where the prompt is text"),
        (pair | {"rejected": [SAY, again, SAY]}, "has other messages before its answer"),
    ):
        assert wanted in refused(tmp_path, row)


def test_answers_keep_their_thoughts_and_calls(tmp_path):
    thought = SAY | {"reasoning_content": "2 and 3."}
    (found,) = opened(tmp_path, {"messages": [ASK, thought]})
    assert (found.chosen, found.ground_truth) == ([thought], "5")
    (found,) = opened(tmp_path, {"messages": [ASK, SAY | {"reasoning_content": None, "name": "A"}]})
    assert found.chosen == "5"
    call = {"role": "assistant", "content": None, "tool_calls": [TOOL | {"id": 1}]}
    (found,) = opened(tmp_path, {"messages": [ASK, call]})
    assert found.chosen == [call]
    result = {"role": "tool", "content": "5"}
    assert opened(tmp_path, {"prompt": [ASK, call, result]})[0].prompt == [ASK, call, result]
    assert "needs text in 'content'" in refused(
        tmp_path, {"prompt": [ASK, call | {"tool_calls": []}]}
    )


# -- variables of the template ---------------------------------------------------------------------


@pytest.mark.parametrize("nothing", [None, "", [], "[]", "null"])
def test_rows_without_tools(tmp_path, nothing):
    (found,) = opened(tmp_path, {"prompt": [ASK], "tools": nothing})
    assert found.prompt == [ASK] and not hasattr(found.prompt, "variables")


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)]])
def test_tools_of_a_row_are_in_its_prompt(tmp_path, template, tools):
    dataset = opened(tmp_path, {"prompt": [ASK], "tools": tools}, {"question": "Hi", "answer": "5"})
    assert json.dumps([TOOL]) in template("lists_tools").render(dataset[0].prompt)
    assert "Tools" not in template("lists_tools").render(dataset[1].prompt)
    assert dataset[0].extra_info["tools"] == [TOOL]
    again = pickle.loads(pickle.dumps(dataset[0].prompt))
    assert template("lists_tools").render(again) == template("lists_tools").render(
        dataset[0].prompt
    )


@pytest.mark.parametrize("given", [{"enable_thinking": False}, '{"enable_thinking": false}'])
def test_variables_of_a_row(tmp_path, template, given):
    rows = [{"prompt": [ASK], "chat_template_kwargs": x} for x in (given, None, "", {})]
    dataset = opened(tmp_path, *rows)
    texts = [template("thinking_switch").render(example.prompt) for example in dataset]
    assert texts[0] == texts[1] + "<think>\n\n</think>\n\n"
    assert len(set(texts[1:])) == 1
    renamed = {"prompt": [ASK], "switches": given}
    dataset = opened(tmp_path, renamed, columns={"chat_template_kwargs": "switches"})
    assert template("thinking_switch").render(dataset[0].prompt) == texts[0]


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"tools": "no"}, "column 'tools': not valid JSON"),
        ({"tools": {"name": "add"}}, "column 'tools': expected JSON schemas, or JSON of it, got"),
        ({"tools": [1]}, "column 'tools': expected JSON schemas"),
        ({"chat_template_kwargs": [1]}, "column 'chat_template_kwargs': expected an object"),
        ({"chat_template_kwargs": "[]{"}, "column 'chat_template_kwargs': not valid JSON"),
        ({"chat_template_kwargs": '{"a": 1, "a": 2}'}, "kwargs': key 'a' occurs twice"),
        ({"prompt": "text", "tools": [TOOL]}, "column 'tools': is for the chat template"),
    ],
)
def test_variables_that_are_none(tmp_path, row, wanted):
    assert wanted in refused(tmp_path, {"prompt": [ASK]} | row)


def test_a_table_gives_no_message_the_keys_of_others(tmp_path, template):
    call = {"function": {"name": "add", "arguments": {"a": 1, "b": None}}}
    other = {"function": {"name": "is_prime", "arguments": {"n": 7}}}
    result = {"role": "tool", "content": "5", "name": "add"}
    rows = [
        {"messages": [ASK, SAY | {"content": None, "tool_calls": [call, other]}, result]},
        {"messages": [ASK], "tools": [TOOL, {"type": "function", "function": {"name": "b"}}]},
    ]
    path = tmp_path / "rows.parquet"
    pq.write_table(
        pa.Table.from_pylist(rows, pa.Table.from_pylist([{**rows[1], **rows[0]}, rows[1]]).schema),
        path,
    )
    dataset = open_dataset(str(path))
    assert dataset[1].prompt == [ASK]
    assert dataset[1].prompt.variables["tools"][1] == {
        "type": "function",
        "function": {"name": "b"},
    }
    calls = dataset[0].prompt[1]["tool_calls"]
    assert [c["function"]["arguments"] for c in calls] == [{"a": 1}, {"n": 7}]
    text = template("tool_calls").render(dataset[0].prompt)
    assert 'add{"a": 1}is_prime{"n": 7}' in text
    # a null that somebody wrote into JSON stays
    written = opened(tmp_path, rows[0])[0].prompt
    assert 'add{"a": 1, "b": null}' in template("tool_calls").render(written)


# -- rows when they open ---------------------------------------------------------------------------

GOOD = {"prompt": [ASK], "completion": "5"}
BAD = {  # row, and the trait whose template does not write it
    "system": ({"prompt": [{"role": "system", "content": "Be brief."}, ASK]}, "no_system"),
    "role": ({"prompt": [{"role": "USER", "content": "What is 2 + 3?"}]}, "known_roles"),
    "short": ({"prompt": [ASK, SAY, {"role": "tool", "content": "3"}]}, "known_roles"),
    "tools": ({"prompt": [ASK], "tools": [TOOL]}, "plain"),
    "kwargs": ({"prompt": [ASK], "chat_template_kwargs": {"enable_thinking": False}}, "plain"),
    "calls": ({"prompt": [ASK, SAY | {"tool_calls": [TOOL]}, ASK]}, "plain"),
    "end": ({"prompt": [ASK, {"role": "assistant", "tool_calls": [TOOL]}]}, "tool_calls"),
}


def loader_of(dataset, tokenizer, answers=0, **config):
    config = {"prompts_per_step": 1, "max_prompt_length": 400, "shuffle": False} | config
    config = DataConfig(**config)
    return Loader(dataset, tokenizer, config, seed=0, answers=answers, max_answer=99)


@pytest.mark.parametrize("answers", [0, 1])
@pytest.mark.parametrize("overlong", ["error", "drop", "truncate_left"])
@pytest.mark.parametrize("kind", BAD)
def test_a_row_that_the_template_does_not_write_is_found_at_opening(
    tmp_path, template, kind, overlong, answers
):
    row, name = BAD[kind]
    dataset, tokenizer = opened(tmp_path, GOOD, GOOD, GOOD | row), template(name)
    with pytest.raises(ValueError) as error:
        loader_of(dataset, tokenizer, answers, overlong=overlong)
    line = str(error.value)
    assert "\n" not in line and line.startswith(f"{tmp_path / 'rows.jsonl'}, row 3: ")
    assert ("chat template" in line and tokenizer.origin in line) or kind == "end"
    assert ("data.system_prompt" in line) == (kind == "system")


def test_an_answer_that_does_not_fit_is_found_at_opening(tmp_path, template):
    thought = {"prompt": [ASK], "completion": "<think>so</think>5"}
    row = thought | {"chat_template_kwargs": {"enable_thinking": False}}
    dataset = opened(tmp_path, thought, row)
    assert len(loader_of(dataset, template("thinking_switch")).rows) == 2  # nobody reads answers
    with pytest.raises(ValueError, match="row 2: the chat template makes 2 <think>"):
        loader_of(dataset, template("thinking_switch"), 1)


def test_rows_within_the_limit_are_not_encoded(tmp_path, template, monkeypatch):
    tokenizer, encoded = template("plain"), []
    encode = Tokenizer.encode
    monkeypatch.setattr(
        Tokenizer, "encode", lambda self, text: encoded.append(text) or encode(self, text)
    )
    dataset = opened(tmp_path, *({"prompt": [ASK | {"content": "a" * n}]} for n in (5, 60, 900)))
    loader = loader_of(dataset, tokenizer, overlong="drop", max_prompt_length=150)
    assert [len(text) > 900 for text in encoded] == [True]
    assert loader.rows.tolist() == [0, 1] and loader.dropped_for == {"prompt": 1}
    # the limit is one of tokens, not of characters
    most = len(tokenizer.encode_prompt(dataset[1].prompt)[1])
    assert len(loader_of(dataset, tokenizer, overlong="drop", max_prompt_length=most).rows) == 2
    assert len(loader_of(dataset, tokenizer, overlong="drop", max_prompt_length=most - 1).rows) == 1


# -- data.train_on ---------------------------------------------------------------------------------


def test_generation_learns_all_turns_of_the_assistant(tmp_path, template):
    again = {"role": "user", "content": "Sure?"}
    yes = {"role": "assistant", "content": "Yes: 5."}
    dataset = opened(tmp_path, {"messages": [ASK, SAY, again, yes]}, {"messages": [ASK, yes]})
    tokenizer = template("generation")
    loader = loader_of(dataset, tokenizer, 1, train_on="generation", prompts_per_step=2)
    columns = loader_columns(next(loader), 1)
    whole = [[ASK, SAY, again, yes], [ASK, yes]]
    for prompt, response, mask, messages in zip(
        columns["prompt"], columns["response"], columns["response_mask"], whole, strict=True
    ):
        ids = np.append(prompt.tokens, response)
        text = tokenizer.render(messages, add_generation_prompt=False)
        assert tokenizer.decode(ids, skip_special=False) == text
        assert prompt.text == tokenizer.render([ASK])
        learned = [m["content"] + "<|im_end|>\n" for m in messages if m["role"] == "assistant"]
        assert tokenizer.decode(response[mask], skip_special=False) == "".join(learned)
    # the answer alone, as ever
    columns = loader_columns(next(loader_of(dataset, tokenizer, 1)), 1)
    assert tokenizer.decode(columns["response"][0], skip_special=False) == "Yes: 5.<|im_end|>"
    assert columns["response_mask"][0].all()
    # a cut answer has a cut mask
    short = loader_of(dataset, tokenizer, 1, train_on="generation", overlong="truncate_left")
    short._max_answer = 3
    (prompt,) = next(short)
    assert [len(x) for x in (*prompt.answers, *prompt.answer_masks)] == [3, 3]


def test_generation_needs_marks_and_messages(tmp_path, template):
    rows = {"messages": [ASK, SAY]}, {"prompt": "2 + 3 =", "completion": "5"}
    for row, name, message in (
        (rows[0], "plain", "row 1: the chat template marks nothing"),
        (rows[1], "generation", "row 1: data.train_on=generation needs messages"),
    ):
        with pytest.raises(ValueError, match=message):
            loader_of(opened(tmp_path, row), template(name), 1, train_on="generation")
    with pytest.raises(ValueError, match="data.date must be a date like 2026-01-31"):
        DataConfig(date="today")


# -- files -----------------------------------------------------------------------------------------


def test_lines_of_a_file_end_at_newlines_alone(tmp_path):
    odd = ["a\u2028b", "a\u2029b", "a\x85b", "a\u000bb", "a\u001cb", "a\rb", "a\x0cb"]
    path = tmp_path / "rows.jsonl"
    rows = [json.dumps({"prompt": text}, ensure_ascii=False) for text in odd]
    path.write_bytes("\n".join(rows).encode() + b"\r\n\n\x0b\n" + b'{"prompt": "last"}\r\n')
    dataset = open_dataset(str(path))
    assert [example.prompt for example in dataset] == [*odd, "last"]
    assert dataset.place(7).endswith("row 10")


def test_a_template_beside_processors_is_read(tmp_path):
    folder = write_tokenizer(tmp_path, TRAITS["plain"])
    config = folder / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    trims = {"chat_template": TRAITS["trims"]}
    (folder / "chat_template.json").write_text(json.dumps(trims))
    assert Tokenizer.from_folder(folder).chat_template == TRAITS["plain"]
    config.write_text(json.dumps({**settings, "chat_template": None}))
    assert Tokenizer.from_folder(folder).chat_template == TRAITS["trims"]
    (folder / "chat_template.jinja").write_text(TRAITS["date"])
    assert Tokenizer.from_folder(folder).chat_template == TRAITS["date"]
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text('{"chat_template": 5}')
    with pytest.raises(ValueError, match="chat_template.json"):
        Tokenizer.from_folder(folder)


def test_special_tokens_are_variables_of_the_template(tmp_path):
    folder = write_tokenizer(tmp_path, "{{ sep_token }}{{ messages[0].content }}")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"sep_token": {"content": "</s>"}, "add_bos_token": True, "image_token": 5}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert Tokenizer.from_folder(folder).render([ASK]) == "</s>" + ASK["content"]
    plain = dataclasses.replace(Tokenizer.from_folder(folder), chat_template=None)
    with pytest.raises(ValueError, match="has no chat template"):
        plain.render([ASK])
