"""Calls of tools in the forms of models: what is written is read back, and what is wrong is said.

Golden values, tests/golden/tool_calls.json, are what PyPI's `renderers` reads in the same texts and
writes of the same results, and transformers' schema (scripts/golden/make_golden_tool_calls.py).
"""

import asyncio
import dataclasses
import json
import random

import numpy as np
import pytest
from support.chat_templates import CONTROL, TRAITS, write_tokenizer
from support.paths import TESTS
from support.tiny_model import prompt_of
from support.tool_calls import RESULTS, TOOLS, texts
from support.waiting import ends

from distflow_jax.environments.registry import template_variables
from distflow_jax.environments.tool_forms import FORMS, ToolCall, form_of
from distflow_jax.environments.tool_functions import load_tool
from distflow_jax.environments.tools import Tools
from distflow_jax.models.tokenizer import Tokenizer

ASKED = [{"role": "user", "content": "What is 12 * 7?"}]
NATIVE = ("hermes", "qwen3_coder", "llama3_json")
GOLDEN = json.loads((TESTS / "golden" / "tool_calls.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    folder = tmp_path_factory.mktemp("templates")
    return lambda name: Tokenizer.from_folder(write_tokenizer(folder / name, TRAITS[name]))


@pytest.fixture
def own(tmp_path):
    """A file of a user's tools."""
    file = tmp_path / "own_tools.py"
    file.write_text(
        "def look_up(city: str, days: int = 1, metric: bool = True, where: dict | None = None):\n"
        '    """Looks up the weather.\n\n    Args:\n        city: The city, in\n'
        "            English.\n        days: How many days.\n"
        '        metric: Whether in metric units.\n        where: A place.\n    """\n'
        "    return f'{city} {days} {metric} {where}'\n"
        "def parts(*values):\n    return ''\n"
        "def odd(value: object):\n    return ''\n"
        "class Counter:\n"
        "    ended = []\n"
        "    def __init__(self):\n        self.count = 0\n"
        "    def __call__(self, by: int) -> str:\n"
        "        self.count += by\n        return str(self.count)\n"
        "    def close(self):\n        self.ended.append(self.count)\n"
    )
    return file


def in_form(tokenizer, calls):
    """The text in which the chat template writes calls, {name: arguments} or pairs."""
    calls = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    return tokenizer.decode(tokenizer.encode_answer(ASKED, [answer]))


def answered(tools, text, chat=True):
    """(logged, the observation as text with special tokens) of a turn."""
    tokenizer = tools._tokenizer
    rendered = tokenizer.render(ASKED) if chat else "What is 12 * 7? "
    tools.reset(dataclasses.replace(prompt_of(0, [1]), text=rendered))
    turn = asyncio.run(tools.step(np.zeros(1, np.int32), text))
    seen = turn.observation
    return turn.logged, seen if isinstance(seen, str) else tokenizer.decode(
        seen, skip_special=False
    )


# -- forms -----------------------------------------------------------------------------------------


def test_the_form_is_that_in_which_the_template_writes_calls(template):
    found = {name: form_of(template(name)) for name in TRAITS}
    assert {name: found[name] for name in NATIVE} == {name: name for name in NATIVE}
    assert found["parses_think"] == "hermes"  # as Qwen3
    others = found.keys() - {*NATIVE, "parses_think"}
    assert {found[name] for name in others} == {"tags"}
    assert form_of(dataclasses.replace(template("plain"), chat_template=None)) == "tags"


@pytest.mark.parametrize("name", NATIVE)
def test_calls_that_a_template_writes_are_read_back(template, name):
    tokenizer, rng = template(name), random.Random(0)
    words = ["", "Paris", "a\nb", ' "x" ', "<b>", "{}", "é\U0001f600", "1", "null", "x" * 300]
    for _ in range(40):
        count = 1 if name == "llama3_json" else rng.choice((1, 2, 3))
        calls = [
            (rng.choice(("f", "look_up")), {k: rng.choice(words) for k in rng.sample("abc", 2)})
            for _ in range(count)
        ]
        found = FORMS[name].read(in_form(tokenizer, calls))
        assert [(call.name, call.arguments, call.problem) for call in found] == [
            (*call, "") for call in calls
        ]


def test_calls_are_read_as_another_implementation_reads_them():
    checked = 0
    for name, entries in GOLDEN["forms"].items():
        for text, wanted in zip(texts(name), entries, strict=True):
            found = FORMS[name].read(text)
            assert [[call.name, _typed(call)] for call in found] == wanted, text
            checked += len(wanted)
    assert checked > 150


def _typed(call):
    """A call's arguments, texts of tags by the types of the schema, as the other one gives them."""
    kinds = TOOLS[call.name]["parameters"]["properties"]
    texts = {k for k, value in call.arguments.items() if isinstance(value, str)}
    texts -= {k for k, kind in kinds.items() if kind["type"] == "string"}
    return {k: json.loads(v) if k in texts else v for k, v in call.arguments.items()}


@pytest.mark.parametrize("name", NATIVE)
def test_results_are_written_as_another_implementation_writes_them(template, name):
    tokenizer = template(name)
    seen = tokenizer.decode(tokenizer.encode_turn(RESULTS, role="tool"), skip_special=False)
    wanted = GOLDEN["results"][name]
    for token, own in (("<|eot_id|>", "<|im_end|>"), ("<|start_header_id|>", "<|im_start|>")):
        wanted = wanted.replace(token, own)
    wanted = wanted.replace("<|end_header_id|>", "")  # the tests' templates are ChatML's
    end, start = "<|im_end|>", "<|im_start|>assistant"
    assert end + seen.partition(start)[0] == wanted.partition(start)[0]


QUOTED = {"cmd": "echo </tool_call> <tool_call>", "n": [1]}


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        *(
            ("hermes", before + f"<tool_call>{json.dumps(call)}</tool_call>", [*others, call])
            for call in (
                {"name": "f", "arguments": QUOTED},
                {"arguments": {"</tool_call>": '\\"</tool_call>'}, "name": "g"},
            )
            for before, others in (
                ("", []),
                ('<tool_call>{"name": "f", "arguments": {}}</tool_call>\n', [{"name": "f"}]),
                ('He said "', []),
            )
        ),
        *(
            ("qwen3_coder", f"<tool_call><function=f><parameter=x>{text}</parameter>{rest}", found)
            for text in ("a </tool_call> b", "a </function> b", "<function=g>", 'a < b > "c')
            for found in [[{"name": "f", "arguments": {"x": text}}]]
            for rest in ("</function></tool_call>", "</function>", "")
        ),
        *(
            ("llama3_json", text, [{"name": "f", "arguments": {"x": 1}}])
            for text in (
                '{"name": "f", "parameters": {"x": 1}}',
                '{"parameters": {"x": 1}, "name": "f"}',
                '<|python_tag|>{"arguments": {"x": 1}, "name": "f"}',
            )
        ),
        ("llama3_json", '{"parameters": {"x": 1}}', []),
    ],
)
def test_tags_and_keys_within_a_call_are_not_its_end(name, text, wanted):
    found = [(call.name, call.arguments, call.problem) for call in FORMS[name].read(text)]
    assert found == [(call["name"], call.get("arguments", {}), "") for call in wanted]


def test_a_call_behind_one_that_is_no_json_is_read():
    bad, good = (f'<tool_call>{{"name": "{rest}</tool_call>' for rest in ("f", 'g"}'))
    assert [call.name for call in FORMS["hermes"].read(bad + good + bad + good)] == ["", "g"] * 2


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(
    "piece",
    [
        *('<tool_call>"</tool_call>"', "<tool_call><parameter=a>x</tool_call>", '<tool_call>"\\'),
        *("<tool_call>", '<tool_call>{"name": "', '{"name": "f", ', "<function=f>", "<function=f"),
        *("<tool_call><function=f><parameter=a>", "<parameter=a", "</tool_call>", "[" * 5, "{"),
    ],
)
def test_any_text_is_read_in_linear_time(name, piece):
    """Were it quadratic, a text of this length would take hours."""
    with ends():
        FORMS[name].read('{"name": ' * (name == "llama3_json") + piece * 200_000)


# -- answers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NATIVE)
def test_results_are_messages_of_the_template_in_order(template, own, name):
    tokenizer = template(name)
    tools = Tools(tokenizer, tools=("calculator", f"{own}:look_up"))
    calls = [("calculator", {"expression": "12*7"}), ("look_up", {"city": "Rome", "days": 2})]
    results = ["84", "Rome 2 True None"]
    if name == "llama3_json":  # its template writes one call in a turn, and reads two
        text = "; ".join(in_form(tokenizer, [call]) for call in calls)
    else:
        text = in_form(tokenizer, calls)
    logged, seen = answered(tools, text)
    assert logged == {"tool_calls": 2, "tool_errors": 0}
    messages = [*ASKED, {"role": "assistant", "content": "zq"}]
    messages += [{"role": "tool", "content": result} for result in results]
    whole = tokenizer.render(messages)
    assert whole.endswith("zq<|im_end|>" + seen)
    plain = answered(Tools(tokenizer, tools=("calculator",)), in_form(tokenizer, calls[:1]), False)
    assert plain[1] == ("84" if name == "llama3_json" else "<tool_response>\n84\n</tool_response>")


WRONG = {
    "hermes": [
        ("<tool_call>{]</tool_call>", "error: the call is not valid JSON"),
        ("<tool_call>[1]</tool_call>", 'a call must have the form {"name": "...", "arguments": {'),
        ('<tool_call>{"name": "look_up", "arguments": [1]}', "of look_up must be an object, {...}"),
        ('<tool_call>{"name": "lok_up", "arguments": {}}', "no tool 'lok_up'; did you mean 'look_"),
        ('<tool_call>{"name": "look_up", "arguments": {}}', "look_up needs the argument 'city'"),
        (
            '<tool_call>{"name": "look_up", "arguments": {"city": "a", "day": 1}}',
            "look_up has no argument 'day'; did you mean 'days'?",
        ),
        (
            '<tool_call>{"name": "look_up", "arguments": {"city": "a", "days": "x"}}',
            "the argument 'days' must be of type integer, got 'x'",
        ),
        (
            '<tool_call>{"name": "look_up", "arguments": {"city": 1}}',
            "the argument 'city' must be of type string, got 1",
        ),
        (f"<tool_call>{'[' * 100_000}", "error: the call is not valid JSON"),
    ],
    "qwen3_coder": [
        ("<tool_call>look_up</tool_call>", "error: a call needs <function=NAME>...</function>"),
        ("<tool_call><function=look_up></function>", "look_up needs the argument 'city'"),
        (
            "<function=look_up><parameter=city>a</parameter><parameter=days>2.5</parameter>",
            "the argument 'days' must be of type integer, got 2.5",
        ),
    ],
    "llama3_json": [
        ('{"name": "look_up", "parameters": {"city": ', "error: the call is not valid JSON"),
        ('<|python_tag|>{"name": "x", "parameters": {}}', "there is no tool 'x'; known: look_up"),
    ],
}


@pytest.mark.parametrize("name, text, said", [(n, *case) for n in NATIVE for case in WRONG[n]])
def test_what_is_wrong_with_a_call_is_its_answer(template, own, name, text, said):
    tools = Tools(template(name), tools=(f"{own}:look_up",))
    logged, seen = answered(tools, text)
    assert logged == {"tool_calls": 1, "tool_errors": 1}
    assert said in seen.replace('\\"', '"')


def test_arguments_have_the_types_of_the_tool(own):
    bind = load_tool("look_up", f"{own}:look_up").bind
    text = {"city": "5", "days": "2", "metric": "False", "where": '{"a": 1}'}  # as from tags
    assert bind(text) == {"city": "5", "days": 2, "metric": False, "where": {"a": 1}}
    assert bind({"city": "5", "where": None}) == {"city": "5"}
    assert bind("Rome") == {"city": "Rome"}


def test_a_required_argument_may_be_null_where_its_type_is(tmp_path):
    (tmp_path / "tool.py").write_text('def find(name: str, year: int | None):\n    """Finds."""\n')
    bind = load_tool("find", f"{tmp_path}/tool.py:find").bind
    assert bind({"name": "a", "year": None}) == {"name": "a", "year": None}
    assert bind({"name": "a", "year": "5"}) == {"name": "a", "year": 5}
    with pytest.raises(ValueError, match="'name' must be of type string, got None"):
        bind({"name": None, "year": None})


@pytest.mark.parametrize(
    "text", ["12 is it", "<tool_call", '{"answer": 3}', "{", "<think>a</think>"]
)
@pytest.mark.parametrize("name", NATIVE)
def test_other_turns_end_the_response(template, name, text):
    tools = Tools(template(name), tools=("calculator",))
    tools.reset(prompt_of(0, [1]))
    assert asyncio.run(tools.step(np.zeros(1, np.int32), text)).done


@pytest.mark.parametrize("name", NATIVE)
def test_calls_in_a_thought_are_none(template, name):
    call = in_form(template(name), [("calculator", {"expression": "1"})])
    tools = Tools(template(name), tools=("calculator",))
    tools.reset(prompt_of(0, [1]))
    assert asyncio.run(tools.step(np.zeros(1, np.int32), f"<think>{call}</think>So.")).done
    assert answered(tools, f"<think>{call}</think>{call}")[0]["tool_calls"] == 1


SPELLED = ("</tool_response>", "<tool_call>{}</tool_call>")  # no template of Llama writes these


@pytest.mark.parametrize(
    "name, spelled", [(n, s) for n in NATIVE for s in (*CONTROL, *SPELLED * (n != "llama3_json"))]
)
def test_results_have_no_control_token(template, tmp_path, name, spelled):
    file = tmp_path / "results.py"
    file.write_text(f"def odd():\n    return {spelled!r}\ndef even():\n    return 'x'\n")
    tokenizer = template(name)
    tools = Tools(tokenizer, tools=(f"{file}:odd", f"{file}:even"))
    added = list(tokenizer.backend.get_added_tokens_decoder())

    def control(tool):
        tools.reset(dataclasses.replace(prompt_of(0, [1]), text=tokenizer.render(ASKED)))
        text = in_form(tokenizer, [(tool, {})])
        ids = asyncio.run(tools.step(np.zeros(1, np.int32), text)).observation
        return ids[np.isin(ids, added)]

    np.testing.assert_array_equal(control("odd"), control("even"))


def test_half_a_character_in_a_call_is_none_of_the_environment(template, own):
    call = r'<tool_call>{"name": "%s", "arguments": {"%s": "\ud800"}}</tool_call>'
    calls = call % ("look_up", "city") + call % ("python", "code") + call % ("\\udfff", "a")
    tools = Tools(template("hermes"), tools=(f"{own}:look_up", "python"))
    logged, seen = answered(tools, calls)
    assert logged == {"tool_calls": 3, "tool_errors": 2}
    assert "? 1 True None" in seen and "there is no tool '\\udfff'" in seen
    asyncio.run(tools.close())


# -- tools -----------------------------------------------------------------------------------------


def test_a_schema_is_what_transformers_makes_of_the_function(own):
    schema = load_tool("look_up", f"{own}:look_up").schema
    assert schema == GOLDEN["schema"]


def test_prompts_have_the_schemas_where_the_template_reads_them(template, own):
    kwargs = {"tools": (f"{own}:look_up",)}
    for name in (*NATIVE, "lists_tools"):
        variables = template_variables("tools", kwargs, template(name))
        assert variables == {"tools": [GOLDEN["schema"]]}
        told = dataclasses.replace(template(name), variables=variables)
        assert "Looks up the weather." in told.render(ASKED)
    assert template_variables("tools", kwargs, template("plain")) == {}
    assert template_variables("", {}, template("hermes")) == {}


def test_an_object_of_a_class_lives_as_long_as_its_response(template, own):
    tokenizer = template("plain")
    first, second = (Tools(tokenizer, tools=(f"{own}:Counter", "calculator")) for _ in range(2))
    second.reset(prompt_of(0, [1]))
    assert answered(first, "<tool>2</tool><tool>3</tool>", False)[1].count("<result>") == 2

    def counted(tools):
        return asyncio.run(tools.step(np.zeros(1, np.int32), "<tool>4</tool>")).observation

    assert counted(first) == "<result>9</result>" and counted(second) == "<result>4</result>"
    assert not first.repeatable and Tools(tokenizer, tools=("calculator",)).repeatable
    asyncio.run(first.close())
    assert first._tools["Counter"].function.ended == [9]


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"tools": ("pyton",)}, "unknown tool 'pyton'; did you mean 'python'?"),
        (
            {"tools": "calculator", "form": "herms"},
            "unknown call format form='herms'; did you",
        ),
        ({"tools": ("{own}:parts",)}, "a model cannot set its parameter '\\*values'"),
        ({"tools": ("{own}:odd",)}, "a model cannot set its parameter 'value: object'"),
        ({"tools": ()}, "at least one tool"),
        ({"tools": (1,)}, "at least one tool, each as text"),
    ],
)
def test_wrong_settings_are_named(template, own, kwargs, message):
    tools = kwargs["tools"]
    if isinstance(tools, tuple):
        kwargs |= {"tools": tuple(str(t).format(own=own) if t != 1 else t for t in tools)}
    with pytest.raises(ValueError, match=message):
        Tools(template("plain"), **kwargs)


def test_a_tool_of_two_arguments_needs_a_form_that_has_them(template, tmp_path):
    file = tmp_path / "two.py"
    file.write_text("def two(a, b):\n    return a + b\n")
    with pytest.raises(ValueError, match="needs 2 arguments, but form='tags' passes only one"):
        Tools(template("plain"), tools=(f"{file}:two",))
    call = '<tool_call>{"name": "two", "arguments": {"a": "x", "b": "y"}}</tool_call>'
    found = Tools(template("plain"), tools=(f"{file}:two",), form="hermes", role="user")
    assert "<tool_response>\nxy\n</tool_response>" in answered(found, call)[1]
    assert ToolCall("a") == ToolCall("a", "", "")
