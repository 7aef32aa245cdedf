"""Tools: exact arithmetic that no text can make expensive, and calls found in a turn's text."""

import asyncio
import dataclasses
import math
import re
from decimal import Decimal

import numpy as np
import pytest
from support.tiny_model import prompt_of
from support.waiting import HANG, calls_of, ends

from distflow_jax.environments.calculator import calculate
from distflow_jax.environments.episodes import Episode, episode_metrics, episode_sums
from distflow_jax.environments.registry import CallLimits, Environments
from distflow_jax.environments.tool_forms import FORMS
from distflow_jax.environments.tools import Tools, alone
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.rollout.requests import Response

TOKENIZER = Tokenizer.byte_level(300)
MESSAGES = [{"role": "user", "content": "What is 12 * 7?"}]


@pytest.mark.parametrize(
    "text, value",
    [
        ("12*7", "84"),
        (" 1,000 + 234 ", "1234"),
        ("2 + 3 * 4 - 1", "13"),
        ("(2 + 3) * 4", "20"),
        ("-3 ** 2", "-9"),
        ("2 ** -1", "0.5"),
        ("2 ^ 3 ^ 2", "512"),
        ("--3 - -2", "5"),
        ("7 // 2", "3"),
        ("-7 % 3", "2"),
        ("0.1 + 0.2", "0.3"),
        ("1 / 3", "0.333333333333"),
        ("2/3*3", "2"),
        ("$5 × 3 ÷ 2", "7.5"),
        ("10 \N{MINUS SIGN} 4", "6"),
        (".5 + 1.", "1.5"),
        ("2 ** 0.5", "1.41421356237"),
        ("(-1) ** 123456789123456789", "-1"),
        ("0 ** 0", "1"),
        ("1/10**20", "1e-20"),
        ("(" * 98 + "007" + ")" * 98, "7"),
        ("-" * 199 + "1", "-1"),
    ],
)
def test_arithmetic(text, value):
    assert calculate(text) == value


@pytest.mark.parametrize(
    "text, message",
    [
        ("1/0", "division by zero"),
        ("5 % (3 - 3)", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("", "empty"),
        ("twelve", "not arithmetic: 'twelve'"),
        ("__import__('os')", "not arithmetic"),
        ("1,00", "not arithmetic"),
        ("1 2", "not arithmetic: '1 2'"),
        ("1 +", "not arithmetic"),
        ("(1", "not arithmetic"),
        ("* 3", "not arithmetic"),
        ("2(3)", "not arithmetic"),
        ("...", "not arithmetic"),
        ("(-8) ** 0.5", "root of a negative"),
        ("9 ** 9 ** 9", "too large"),
        ("1.5 ** 99999.5", "too large"),
        ("10 ** 50", "more than 50 digits"),
        ("1" * 201, "longer than 200"),
        ("**".join("2" * 60), "too large"),
    ],
)
def test_what_is_no_arithmetic_is_said_in_words(text, message):
    with pytest.raises(ValueError, match=message):
        calculate(text)


def test_arithmetic_agrees_with_pythons_and_ends_soon():
    """Random texts of its characters: a value or a ValueError, in a few calls."""
    rng = np.random.default_rng(0)
    values = 0
    for _ in range(1000):
        text = "".join(rng.choice(list("0123456789+-*/%(). "), rng.integers(1, 30)))
        assert calls_of(lambda text=text: calculate(text)) < 2000
        try:
            got = calculate(text)
        except ValueError:
            continue
        values += 1
        if "//" in text or "%" in text or any(f"0{d}" in text for d in "0123456789"):
            continue  # rounded the other way by floats, or octal to Python
        wanted = eval(text)  # noqa: S307  of the characters above
        if not isinstance(wanted, complex):
            assert float(Decimal(got)) == pytest.approx(wanted, rel=1e-9, abs=1e-300)
    assert values > 50


calculator = alone("calculator")


def find_calls(text):
    """(name or "", text between the tags) of each call."""
    return [(call.name, call.arguments) for call in FORMS["tags"].read(text)]


def turn(environment, text, *, chat=True):
    """(its answer to a turn of that text, the observation as text with special tokens)."""
    rendered = TOKENIZER.render(MESSAGES) if chat else "What is 12 * 7? "
    prompt = prompt_of(0, TOKENIZER.encode(rendered))
    environment.reset(type(prompt)(**{**vars(prompt), "text": rendered}))
    answer = asyncio.run(environment.step(TOKENIZER.encode(text), text))
    seen = answer.observation
    return answer, seen if isinstance(seen, str) else TOKENIZER.decode(seen, skip_special=False)


def test_a_call_is_answered_in_a_turn_of_the_chat():
    answer, seen = turn(calculator(TOKENIZER), "I need <tool>12*7</tool>.")
    assert not answer.done and answer.logged == {"tool_calls": 1, "tool_errors": 0}
    # what the template would have written after the answer's own <|im_end|>
    whole = TOKENIZER.render(
        [
            *MESSAGES,
            {"role": "assistant", "content": "I need <tool>12*7</tool>."},
            {"role": "user", "content": "<result>84</result>"},
        ]
    )
    assert whole == TOKENIZER.render(MESSAGES) + "I need <tool>12*7</tool>.<|im_end|>" + seen


def test_a_prompt_that_is_plain_text_is_answered_so():
    assert turn(calculator(TOKENIZER), "<tool>12*7</tool>", chat=False)[1] == "<result>84</result>"


@pytest.mark.parametrize("text", ["#### 84", "", "<tool>12*7", "12*7</tool>", "<Tool>1</Tool>"])
def test_a_turn_without_a_call_ends_the_response(text):
    assert turn(calculator(TOKENIZER), text)[0].done


@pytest.mark.parametrize(
    "text, result",
    [
        ("<tool>1/0</tool>", "error: division by zero"),
        ("<tool>nonsense</tool>", "error: not arithmetic: 'nonsense'"),
        ('<tool name="search">1</tool>', "error: there is no tool 'search'; known: calculator"),
        ('<tool name="calculator">1+1</tool>', "2"),
        ("<tool>\n2 *\n3 </tool>", "6"),
        ("<tool></tool>", "error: the expression is empty"),
    ],
)
def test_errors_of_a_tool_come_back_as_text(text, result):
    answer, seen = turn(calculator(TOKENIZER), text, chat=False)
    assert seen == f"<result>{result}</result>" and not answer.done
    assert answer.logged == {"tool_calls": 1, "tool_errors": int(result.startswith("error"))}


def test_all_calls_of_a_turn_are_answered_up_to_a_number():
    tools = calculator(TOKENIZER, max_calls=2)
    _, seen = turn(tools, "<tool>1</tool> and <tool>2</tool>", chat=False)
    assert seen == "<result>1</result>\n<result>2</result>"
    answer, seen = turn(tools, "<tool>1</tool>" * 5, chat=False)
    assert seen.endswith("<result>error: a turn may have at most 2 calls</result>")
    assert answer.logged == {"tool_calls": 5, "tool_errors": 1}


@pytest.mark.parametrize(
    "name, kwargs", [("calculator", {}), ("tools", {"tools": {"add": "calculator"}})]
)
def test_calls_are_counted_in_every_response(name, kwargs):
    """Also where the model never ends a turn, of which the environment hears nothing."""
    environments = Environments(name, kwargs, TOKENIZER, calls=CallLimits(HANG))
    assert environments.counts == ("tool_calls", "tool_errors")
    ids, logp = np.zeros(2, np.int32), np.zeros(2, np.float32)
    response = Response(prompt_of(0, [1]), 0, ids, logp, logp, finished=False, version=ids)
    mask, logged = np.ones(2, bool), dict.fromkeys(environments.counts, 0.0)
    silent = Episode(response, mask, 0.0, 1, "turn_length", logged)
    calling = dataclasses.replace(silent, logged={"tool_calls": 3, "tool_errors": 1})
    found = episode_metrics([episode_sums([silent, calling, silent, silent])], 1)
    assert found["environment/tool_calls"] == 0.75 and found["environment/tool_errors"] == 0.25
    assert episode_metrics([episode_sums([silent])], 1)["environment/tool_calls"] == 0
    for odd in (math.nan, math.inf):  # of one response: the mean of the others is kept
        odd = dataclasses.replace(silent, logged={"tool_calls": odd, "tool_errors": 1})
        found = episode_metrics([episode_sums([silent, calling]), episode_sums([odd])], 1)
        assert found["environment/tool_calls"] == 1.5 and found["environment/tool_errors"] == 2 / 3
        assert "environment/tool_calls" not in episode_metrics([episode_sums([odd])], 1)


def test_calls_are_those_of_one_regular_expression():
    """For any text, including calls within calls and unclosed tags."""
    opening = r'<tool(?: name="([^"<>]*)")?>'
    call = re.compile(rf"{opening}((?:(?!{opening}).)*?)</tool>", re.DOTALL)
    parts = ["<tool>", '<tool name="a">', '<tool name="', "</tool>", "1+1", "\n", '">', "<", ""]
    rng, found = np.random.default_rng(0), 0
    for _ in range(2000):
        text = "".join(rng.choice(parts, rng.integers(1, 12)))
        wanted = [(name.strip(), argument) for name, argument, _ in call.findall(text)]
        assert find_calls(text) == wanted, text
        found += len(wanted)
    assert found > 400


@pytest.mark.parametrize(
    "tag",
    [
        *('<tool name="a">', "<tool name='a'>", "<tool name=a>", '<tool  name="a">'),
        *('<tool name="a" >', '<tool name = "a">', '<tool\nname="a">', '<tool name=" a ">'),
    ],
)
def test_spellings_of_a_call_by_name(tag):
    assert find_calls(f"so {tag}1+1</tool>.") == [("a", "1+1")]
    assert find_calls(f"<tool>0{tag}1</tool>") == [("a", "1")]


@pytest.mark.parametrize(
    "text",
    [
        *("<TOOL>1</TOOL>", "<tools>1</tools>", "<tool>1</ tool>", "</tool>1<tool>", "<tool/>"),
        *(
            '<tool id="a">1</tool>',
            "<tool name=>1</tool>",
            '<tool name="a>1</tool>',
            "< tool>1</tool>",
        ),
    ],
)
def test_spellings_that_are_no_call(text):
    assert find_calls(text) == []


@pytest.mark.parametrize("tag", ["<tool>", '<tool name="calculator">', '<tool name="'])
def test_openings_without_an_end_are_found_at_once(tag):
    """A model that repeats itself must not hold up the others: the time is linear in the text.
    Were it quadratic, a text of this length would take a day."""
    with ends():
        assert find_calls(tag * 1_000_000) == []
        assert len(find_calls(tag + ">1</tool>" + tag * 1_000_000)) == (tag[-1] == ">")


def test_tools_of_ones_own(tmp_path):
    file = tmp_path / "own_tools.py"
    file.write_text("def shout(text):\n    return text.upper() * 3\n")
    tools = Tools(
        TOKENIZER, tools={"shout": f"{file}:shout", "sum": "calculator"}, max_characters=5
    )
    assert turn(tools, "<tool>ab</tool>", chat=False)[1] == (
        "<result>ABA ... 1 characters left out ... AB</result>"
    )
    assert turn(tools, '<tool name="sum">1+1</tool>', chat=False)[1] == "<result>2</result>"
    with pytest.raises(ValueError, match="unknown tool 'calcluator'; did you mean 'calculator'"):
        Tools(TOKENIZER, tools={"a": "calcluator"})
    with pytest.raises(ValueError, match="at least one tool"):
        Tools(TOKENIZER, tools={})


def test_a_turn_of_the_chat_needs_a_template_that_has_it():
    odd = "{% for m in messages %}{{ m.content }}{% endfor %}"
    odd = dataclasses.replace(TOKENIZER, chat_template=odd)
    with pytest.raises(ValueError, match="no end of an answer before a turn of 'user'"):
        odd.encode_turn("1")
    plain = dataclasses.replace(TOKENIZER, chat_template=None)
    assert not plain.is_chat(TOKENIZER.render(MESSAGES))
    assert TOKENIZER.is_chat(TOKENIZER.render(MESSAGES)) and not TOKENIZER.is_chat("12 * 7 = ")
