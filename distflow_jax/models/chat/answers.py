"""Reference answers behind rendered prompts, and prompts that end amid an answer."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distflow_jax.models.chat.message_parts import (
    CLOSE,
    OPEN,
    THOUGHT_KEYS,
    left_out,
    split_thought,
    squeezed,
    texts,
)
from distflow_jax.parsing.one_line import shown

_EMPTY = re.compile(rf"\A\s*{OPEN}\s*{CLOSE}\s*")
_BEGUN = re.compile(rf"{OPEN}\s*(?:{CLOSE}\s*)?\Z")
_OPEN_END = "\ufdd3"  # behind the content of a message that is continued; no text has it


def answer_text(start: str, whole: str, turn: Mapping[str, Any]) -> str:
    """The text that follows a prompt for an answer.

    `start` and `whole` are prompt, and prompt with answer, as a template renders them. It is the
    template's own text, and before it the thought if the template cuts that; a thought joins one
    that the prompt opens. Raises ValueError if the template begins answers in two ways, or adds
    half of a thought or a second one.
    """
    answer, opening = in_text(turn), begun(start)
    (thought, final), base = split_thought(answer), start.removesuffix(opening)
    if not whole.startswith(base):
        at = next((i for i, (a, b) in enumerate(zip(start, whole, strict=False)) if a != b), 0)
        raise ValueError(
            f"the chat template begins an answer in a conversation with {shown(whole[at:])}, and "
            f"its generation prompt ends with {shown(start[at:])}: make them alike"
        )
    rest = whole.removeprefix(start if whole.startswith(start) else base)
    if CLOSE in answer:
        rest = _EMPTY.sub("", rest) if thought else rest
        written = squeezed(rest)
        if squeezed(thought or CLOSE) not in written[: written.rfind(squeezed(final))]:
            rest = answer.removesuffix(final.lstrip()) + rest.lstrip()
    text = _joined(opening, rest)
    opens, closes = ((opening + text).count(tag) for tag in (OPEN, CLOSE))
    own = answer.count(OPEN)
    if opens > max(1, own) or opens - closes not in (0, own - answer.count(CLOSE)):
        raise ValueError(
            f"the chat template makes {opens} {OPEN} and {closes} {CLOSE} around an answer with "
            f"{own}: leave out its thought, or set data.template_kwargs, as enable_thinking"
        )
    return text


def begun(prompt: str) -> str:
    """The thought with which a prompt ends, open or empty; "" without any."""
    found = _BEGUN.search(prompt)
    return found[0] if found else ""


def _joined(opening: str, answer: str) -> str:
    """An answer behind a prompt that ends with a thought, whose thought joins that or closes it."""
    if not opening or CLOSE in opening:
        return answer
    if answer.lstrip().startswith(OPEN):
        return answer.lstrip().removeprefix(OPEN).removeprefix(opening.removeprefix(OPEN))
    return answer if CLOSE in answer else f"\n{CLOSE}\n\n{answer}"


def in_text(turn: Mapping[str, Any]) -> str:
    """An assistant's message as one text: its thought in tags, where it has a key of its own."""
    thought = next((turn[key] for key in THOUGHT_KEYS if turn.get(key)), "")
    before = f"{OPEN}\n{thought.strip()}\n{CLOSE}\n\n" if thought else ""
    return before + "".join(texts(turn))


def with_answer(prompt: Sequence[Mapping[str, Any]], turn: Mapping[str, Any]) -> list[Any]:
    """The messages of a prompt and its answer, which goes on with a last message of its role."""
    *before, last = prompt
    if last["role"] != turn["role"]:
        return [*prompt, turn]
    return [*before, {**last, **turn, "content": "".join([*texts(last), *texts(turn)])}]


def continued(messages: Sequence[Mapping[str, Any]], write: Callable[[list[Any]], str]) -> str:
    """The text that `write` renders of messages, as far as the last content, where transformers
    cuts it."""
    *before, last = messages
    if not isinstance(content := last.get("content"), str):
        raise ValueError("the last message is the assistant's and has no text: add what follows it")
    marked = write([*before, {**last, "content": f"{content}{_OPEN_END} "}])
    text, _, behind = marked.rpartition(_OPEN_END)
    if not behind.startswith(" "):  # the template takes space from the end of a content
        text = text.rstrip()
    if squeezed(content) not in squeezed(text):
        raise left_out(len(before), last)
    return text
