"""Reference answers behind rendered prompts, and prompts that end amid an answer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distflow_jax.models.chat import thoughts
from distflow_jax.models.chat.contents import is_written, left_out, squeezed, texts
from distflow_jax.models.chat.message_parts import THOUGHT_KEYS
from distflow_jax.parsing.one_line import shown

_OPEN_END = "\ufdd3"  # behind the content of a message that is continued; no text has it


def answer_text(start: str, whole: str, turn: Mapping[str, Any], end: Callable[[], str]) -> str:
    """The text that follows a prompt for an answer, as the model would write it.

    Args:
      start, whole: prompt, and prompt with answer, as the template renders them.
      turn: the assistant's message, of which `whole` may lack the thought.
      end: gives the template's text behind an answer, to its end token.

    The template's own text, where that goes on from `start` and has the thought. Else the answer as
    it is, whose thought joins one that the prompt has opened. Raises ValueError if the template
    begins an answer otherwise than the prompt ends, or does not balance the thought's tags.
    """
    answer, begun = in_text(turn), thoughts.begun(start)
    thought, final = thoughts.split(answer)
    rest = whole.removeprefix(start)
    if whole.startswith(start) and is_written(thought, rest) and is_written(final, rest):
        text = rest
    elif whole.startswith(start.removesuffix(begun)):
        text = thoughts.joined(begun, answer) + end()
    else:
        at = next((i for i, (a, b) in enumerate(zip(start, whole, strict=False)) if a != b), 0)
        raise ValueError(
            f"the chat template begins an answer in a conversation with {shown(whole[at:])}, and "
            f"its generation prompt ends with {shown(start[at:])}: make them alike"
        )
    try:
        thoughts.check_balance(begun, text, answer)
    except ValueError as error:
        raise ValueError(
            f"the chat template does not fit the answer's thought ({error}): leave the thought "
            "out, or set data.template_kwargs, as {'enable_thinking': True}"
        ) from None
    return text


def in_text(turn: Mapping[str, Any]) -> str:
    """An assistant's message as one text: its thought in tags, where it has a key of its own."""
    content = "".join(texts(turn))
    thought = next((turn[key] for key in THOUGHT_KEYS if turn.get(key)), "")
    return f"<think>\n{thought.strip()}\n</think>\n\n{content}" if thought else content


def with_answer(prompt: Sequence[Mapping[str, Any]], turn: Mapping[str, Any]) -> list[Any]:
    """The messages of a prompt and its answer, which goes on with a last message of its role."""
    *before, last = prompt
    if last["role"] != turn["role"]:
        return [*prompt, turn]
    return [*before, {**last, **turn, "content": "".join([*texts(last), *texts(turn)])}]


def marked_end(message: Mapping[str, Any]) -> dict[str, Any]:
    """An assistant's message that is to be continued, with a mark behind its text."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": f"{content}{_OPEN_END} "}
    if not content or "text" not in content[-1]:
        raise ValueError(
            "the last message is the assistant's and has no text to continue: add what follows it, "
            "such as the results of its calls"
        )
    end = {**content[-1], "text": f"{content[-1]['text']}{_OPEN_END} "}
    return {**message, "content": [*content[:-1], end]}


def until_mark(text: str, message: Mapping[str, Any]) -> str:
    """A rendered conversation as far as the mark of its last message, as transformers ends it."""
    before, mark, behind = text.rpartition(_OPEN_END)
    if not behind.startswith(" "):  # the template takes space from the end of a content
        before = before.rstrip()
    if not mark or squeezed("".join(texts(message))) not in squeezed(before):
        raise left_out(-1, message)
    return before
