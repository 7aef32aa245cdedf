"""In verifiers' forms: functions of one rollout, plain and async, in a Rubric with a parser."""

import asyncio
import re


class XMLParser:
    """As verifiers' parsers do: the answer of text, or of the last message of the assistant."""

    def parse_answer(self, completion):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        found = re.search(r"<answer>(.*?)</answer>", text, re.DOTALL)
        return found and found.group(1).strip()


class Rubric:
    """The attributes of verifiers' Rubric that a trainer reads."""

    def __init__(self, funcs=None, weights=None, parser=None):
        self.funcs = funcs or []
        self.weights = weights or [1.0] * len(self.funcs)
        self.class_objects = {"parser": parser}


class RubricGroup:
    """verifiers' group of Rubrics."""

    def __init__(self, rubrics):
        self.rubrics = rubrics


def exact(completion, answer, **kwargs):
    return 1.0 if completion[-1]["content"].strip() == answer else 0.0


async def correct_answer(parser, completion, answer, **kwargs):
    await asyncio.sleep(0)
    return 1.0 if (parser.parse_answer(completion) or "") == answer else 0.0


async def tests_passed(completion, info, task):
    text = completion[-1]["content"]
    return sum(test in text for test in info["tests"]) / len(info["tests"]) * (task == "code")


def of_state(state):
    last = state["prompt"][-1]["content"]
    return float(len(last) + len(state["completion"][-1]["content"]) + state["level"])


def of_text(prompt, completion):
    return float(len(prompt) + len(completion))


def num_words(completion, **kwargs):
    return float(len(completion[-1]["content"].split()))


def best_of_group(completions, answers, states):
    return [1.0] * len(completions)


rubric = Rubric([correct_answer, num_words], weights=[1.0, 0.0], parser=XMLParser())
group = RubricGroup([rubric, Rubric([exact], weights=[0.5])])
