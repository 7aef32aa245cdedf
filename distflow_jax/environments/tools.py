"""Tools that the model calls by name in its text: the environment of a response that may calculate.

`<tool>12*7</tool>` calls the first tool there is, `<tool name="calculator">12*7</tool>` the one of
that name. All calls of a turn are answered, `<result>84</result>` each, in the chat template's turn
of a user where the model has one. A turn without a call ends the response.
"""

import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from distflow_jax import user_functions
from distflow_jax.batch import Prompt
from distflow_jax.environments.calculator import calculate
from distflow_jax.environments.environment import Turn
from distflow_jax.environments.event_loop import in_thread, name_call
from distflow_jax.models.tokenizer import Tokenizer

TOOLS: dict[str, Callable[[str], Any]] = {"calculator": calculate}

_NAME = r"""\s+name\s*=\s*(?:"([^"<>]*)"|'([^'<>]*)'|([^\s"'<>]+))"""
_OPENING, _CLOSING = re.compile(rf"<tool(?:{_NAME})?\s*>"), "</tool>"


class Tools:
    """Answers the tool calls of a turn.

    Args:
      tools: name -> a built-in tool's name or "path/file.py:function", a function of the text
        between the tags that returns text, plain or `async`. A ValueError is the model's mistake,
        and its text is the answer. All other errors are failures of the tool, and so are those of
        decoding (json.JSONDecodeError, UnicodeError): what a service sends is no mistake of the
        model.
      role: whose turn an answer is in the chat template, "user" or what else the template knows.
      max_calls: calls of one turn that are answered; the rest get an error.
      max_characters: of one result; more is cut.
    """

    repeatable = True  # a turn leaves no trace here
    counts = ("tool_calls", "tool_errors")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        tools: Mapping[str, str],
        role: str = "user",
        max_calls: int = 4,
        max_characters: int = 1000,
    ):
        if not tools:
            raise ValueError("tools must name at least one tool, got none")
        if max_calls < 1 or max_characters < 1:
            raise ValueError(
                f"max_calls and max_characters must be at least 1, got {max_calls} and "
                f"{max_characters}"
            )
        self._tools = {name: _load_tool(where) for name, where in tools.items()}
        self._tokenizer, self._role = tokenizer, role
        self._max_calls, self._max_characters = max_calls, max_characters
        self._chat, self._variables = False, None

    def reset(self, prompt: Prompt) -> None:
        """Looks whether the prompt is a chat: then answers are turns of it."""
        self._chat = self._tokenizer.is_chat(prompt.text)
        self._variables = prompt.extra_info.get("chat_template_kwargs")

    async def step(self, tokens: np.ndarray, text: str) -> Turn:
        """Calls the tools that a turn, int32 [T] and its text, calls."""
        calls = find_calls(text)
        if not calls:
            return Turn(done=True)
        answers = [await self._call(name, argument) for name, argument in calls[: self._max_calls]]
        name_call("step")
        if len(calls) > self._max_calls:
            answers.append((f"error: only {self._max_calls} calls in one turn", False))
        results = "\n".join(f"<result>{answer}</result>" for answer, _ in answers)
        failed = sum(not good for _, good in answers)
        observation: Any = results
        if self._chat:
            observation = self._tokenizer.encode_turn(
                results, role=self._role, variables=self._variables
            )
        return Turn(observation, logged={"tool_calls": len(calls), "tool_errors": failed})

    async def _call(self, name: str, argument: str) -> tuple[str, bool]:
        """(answer for the model, whether the tool succeeded)."""
        name = name or next(iter(self._tools))
        if name not in self._tools:
            return f"error: there is no tool {name[:40]!r}, only {', '.join(self._tools)}", False
        tool, argument = self._tools[name], argument.strip()
        name_call(f"tool {name!r}")
        try:
            if inspect.iscoroutinefunction(tool):
                answer = await tool(argument)
            else:
                answer = await in_thread(tool, argument)
        except (json.JSONDecodeError, UnicodeError):
            raise
        except ValueError as error:
            return f"error: {error}"[: self._max_characters], False
        return str(answer)[: self._max_characters], True


def find_calls(text: str) -> list[tuple[str, str]]:
    """(name or "", text between the tags) of each call, in time linear in the text's length.

    A call goes from the last opening tag before a closing one to that.
    """
    calls, at = [], 0
    while (end := text.find(_CLOSING, at)) >= 0:
        openings = list(_OPENING.finditer(text, at, end))
        for last in openings[-1:]:
            name = last[1] or last[2] or last[3] or ""
            calls.append((name.strip(), text[last.end() : end]))
        at = end + len(_CLOSING)
    return calls


# the environment of the calculator alone
calculator = functools.partial(Tools, tools={"calculator": "calculator"})


def _load_tool(where: str) -> Callable[[str], Any]:
    return user_functions.load_named(
        where, TOOLS, "tool", setting="tool", example="path/to/file.py:function"
    )
