"""Tools that the model calls in its text: the environment of a response that may calculate or run
code.

Calls have the model's own form (tool_forms.py), and its chat template writes schemas and results.
All calls of a turn are answered, in their order; what is wrong with one is its answer. A turn
without a call ends the response.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from distflow_jax.batch import Prompt
from distflow_jax.config.sandbox_config import SandboxConfig
from distflow_jax.did_you_mean import hint
from distflow_jax.environments.environment import Turn
from distflow_jax.environments.event_loop import in_thread, name_call
from distflow_jax.environments.tool_forms import FORMS, ToolCall, ToolForm, form_of
from distflow_jax.environments.tool_functions import Tool, Unsuccessful, by_name, load_tool
from distflow_jax.models.chat.message_parts import split_thought
from distflow_jax.models.tokenizer import Tokenizer


class Tools:
    """Answers the tool calls of a turn.

    Args:
      tools: names of built-in tools, "calculator", "python", "bash", or "path/file.py:function";
        or {name: one of these}. A function, plain or `async`, has parameters of simple types and
        returns text; of a class, each response calls an object of its own, whose close(), if there
        is one, ends it. A ValueError is the model's mistake, and its text is the answer. All other
        errors are failures of the tool, and so are those of decoding (json.JSONDecodeError,
        UnicodeError): what a service sends is no mistake of the model.
      form: a name of FORMS; "": that of the chat template.
      role: whose turn an answer is in the chat template; "": the form's.
      max_calls: calls of one turn that are answered; the rest get an error.
      max_characters: of one result; more is cut in the middle.
      sandbox: the run's section, for classes whose __init__ takes it.
    """

    counts = ("tool_calls", "tool_errors")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        tools: Mapping[str, str] | Sequence[str] | str,
        form: str = "",
        role: str = "",
        max_calls: int = 4,
        max_characters: int = 1000,
        sandbox: SandboxConfig | None = None,
    ):
        if max_calls < 1 or max_characters < 1:
            raise ValueError(
                f"max_calls and max_characters must be at least 1, got {max_calls} and "
                f"{max_characters}"
            )
        self._form, self._tools = _opened(tokenizer, tuple(by_name(tools).items()), form)
        self._tokenizer, self._role = tokenizer, role or self._form.role
        self._max_calls, self._max_characters = max_calls, max_characters
        self._chat, self._variables = False, None
        self._sandbox = sandbox or SandboxConfig()
        self._called: dict[str, Callable[..., Any]] = {}  # functions and objects, by name

    @classmethod
    def template_variables(cls, tokenizer: Tokenizer, **kwargs: Any) -> dict[str, Any]:
        """{"tools": their schemas}, for prompts; the arguments are those of __init__."""
        return {"tools": [tool.schema for tool in cls(tokenizer, **kwargs)._tools.values()]}

    @property
    def repeatable(self) -> bool:
        """Whether no turn leaves a trace here."""
        return not any(tool.has_state for tool in self._tools.values())

    def reset(self, prompt: Prompt) -> None:
        """Makes the objects of tools; looks whether the prompt is a chat, which has turns."""
        self._called = {name: tool.make(self._sandbox) for name, tool in self._tools.items()}
        self._chat = self._tokenizer.is_chat(prompt.text)
        self._variables = prompt.extra_info.get("chat_template_kwargs")

    async def step(self, tokens: np.ndarray, text: str) -> Turn:
        """Calls the tools that a turn, int32 [T] and its text, calls."""
        calls = self._form.read(split_thought(text)[1])
        if not calls:
            return Turn(done=True)
        answers = [await self._answer(call) for call in calls[: self._max_calls]]
        name_call("step")
        if len(calls) > self._max_calls:
            answers.append((f"error: a turn may have at most {self._max_calls} calls", False))
        failed = sum(not good for _, good in answers)
        logged = {"tool_calls": len(calls), "tool_errors": failed}
        return Turn(self._observation([answer for answer, _ in answers]), logged=logged)

    async def close(self) -> None:
        """Ends the objects of tools."""
        for name, made in self._called.items():
            if self._tools[name].has_state and hasattr(made, "close"):
                await in_thread(made.close)

    def _observation(self, answers: Sequence[str]) -> Any:
        """Results as ids of the chat's next turn; as text where the prompt is none."""
        if not self._chat or self._role != "tool":
            answers = ["\n".join(self._form.wrapped.format(answer) for answer in answers)]
        if not self._chat:
            return answers[0]
        return self._tokenizer.encode_turn(answers, role=self._role, variables=self._variables)

    async def _answer(self, call: ToolCall) -> tuple[str, bool]:
        """(answer for the model, whether the tool succeeded)."""
        try:
            return self._cut(await self._call(call)), True
        except (json.JSONDecodeError, UnicodeError):
            raise
        except Unsuccessful as result:
            return self._cut(str(result)), False
        except ValueError as error:
            return self._cut(f"error: {error}"), False

    async def _call(self, call: ToolCall) -> str:
        if call.problem:
            raise ValueError(call.problem)
        name = call.name or next(iter(self._tools))
        if name not in self._tools:
            raise ValueError(f"there is no tool {name[:40]!r}; {hint(name, self._tools)}")
        arguments = self._tools[name].bind(call.arguments)
        name_call(f"tool {name!r}")
        call_it = functools.partial(self._called[name], **arguments)
        result = await (call_it() if self._tools[name].is_async else in_thread(call_it))
        return self._tools[name].text_of(result)

    def _cut(self, text: str) -> str:
        text = text.encode("utf-8", "replace").decode()  # JSON may spell half of a character
        left_out = len(text) - self._max_characters
        if left_out <= 0:
            return text
        head = self._max_characters - self._max_characters // 2
        tail = text[len(text) - self._max_characters // 2 :]
        return f"{text[:head]} ... {left_out} characters left out ... {tail}"


@functools.lru_cache(maxsize=16)  # a run's responses have one tokenizer
def _opened(
    tokenizer: Tokenizer, named: tuple[tuple[str, str], ...], form: str
) -> tuple[ToolForm, dict[str, Tool]]:
    """The form of calls, and the tools by name. Raises ValueError or FileNotFoundError."""
    found = {name: load_tool(name, where) for name, where in named}
    form = form or form_of(tokenizer)
    if form not in FORMS:
        raise ValueError(f"unknown call format form={form!r}; {hint(form, FORMS)}")
    for tool in found.values():
        if form == "tags" and len(tool.required) > 1:
            raise ValueError(
                f"tool {tool.name!r} needs {len(tool.required)} arguments, but form='tags' passes "
                "only one: choose another form, or give the tool one argument"
            )
    return FORMS[form], found


def alone(tool: str) -> Callable[..., Tools]:
    """The environment of one tool."""
    return functools.partial(Tools, tools=(tool,))
