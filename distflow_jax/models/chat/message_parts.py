"""Messages in the form that a chat template reads, and reference answers behind rendered prompts.

Messages are without nulls, and in text or lists of parts. Templates of models that see images may
read lists of parts alone, and leave out a content that is text without an error.
"""

import functools
import html
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from distflow_jax.models.chat.render import render
from distflow_jax.parsing.one_line import shown

THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")  # of an assistant's message
_PROBE = "probe"
_READS_TYPES = ("'type'", '"type"', ".type")


def checked(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """The messages without keys that are null, and with a thought under the names of all templates,
    as transformers gives them. Raises ValueError for others, and without any."""
    if not messages:
        raise ValueError("a conversation without messages")
    found = []
    for index, given in enumerate(messages):
        message = (
            {k: v for k, v in given.items() if v is not None} if isinstance(given, Mapping) else {}
        )
        if not isinstance(message.get("role"), str) or not _is_content(message):
            raise ValueError(
                f"message {index} must be a dict with role and content, got {shown(given)}"
            )
        if not _is_list_of_calls(message.get("tool_calls", [])):
            raise ValueError(
                f"tool_calls of message {index} must be a list of objects with name and "
                f"arguments, got {shown(message['tool_calls'])}"
            )
        for thought in [message[key] for key in THOUGHT_KEYS if key in message][:1]:
            message = {"thinking": thought, **message, "reasoning_content": thought}
        found.append(message)
    return found


def _is_content(message: Mapping[str, Any]) -> bool:
    """Whether a content is text or a list of parts; a call needs none."""
    content = message.get("content", "" if "tool_calls" in message else None)
    is_list = isinstance(content, list | tuple)
    return isinstance(content, str) or (is_list and all(isinstance(p, Mapping) for p in content))


def _is_list_of_calls(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(call, Mapping) and isinstance(call.get("function", call), Mapping)
        for call in value
    )


def in_parts(template: str, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with their texts as lists of one part where the template reads only lists."""
    if not any(text in template for text in _READS_TYPES) or not _reads_only_parts(template):
        return [dict(message) for message in messages]
    return [
        {**message, "content": _parts(message["content"])}
        if isinstance(message.get("content"), str)
        else dict(message)
        for message in messages
    ]


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


@functools.lru_cache(maxsize=32)
def _reads_only_parts(template: str) -> bool:
    return not _writes(template, _PROBE) and _writes(template, _parts(_PROBE))


def _writes(template: str, content: Any) -> bool:
    """Whether the template writes the text of such a content."""
    message = {"role": "user", "content": content}
    variables = {"messages": [message], "add_generation_prompt": False, "tools": None}
    try:
        return _PROBE in render(template, variables | {"documents": None})
    except ValueError:
        return False


OPEN, CLOSE = "<think>", "</think>"  # around an assistant's thought


def check_contents(messages: Sequence[Mapping[str, Any]], text: str) -> None:
    """Raises ValueError for a message with a content, or a call of a tool, that is not in `text`,
    the rendered messages.

    Space, the case of letters and escapes may differ, and an assistant's thought may be left out.
    """
    for index, message in enumerate(messages):
        if not has_contents(message, text):
            raise left_out(index, message)


def has_contents(message: Mapping[str, Any], text: str) -> bool:
    """Whether a text has a message's content and the names of the tools that it calls."""
    names = [str(call["name"]) for call in called(message) if "name" in call]
    return all(is_written(piece, text, message["role"]) for piece in (*texts(message), *names))


def called(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The functions that a message calls, {"name", "arguments"} each."""
    return [call.get("function", call) for call in message.get("tool_calls", ())]


def with_probes(index: int, message: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The message with other contents, names and arguments of calls, and these words.

    What a message says itself may be in another one's text, or in the schema of a tool.
    """
    content, words = message.get("content"), []
    if content and isinstance(content, str):
        content = f"zq{index}qz"
        words = [content]
    calls = []
    for number, call in enumerate(message.get("tool_calls", ())):
        function = call.get("function", call)
        name, value = f"zq{index}name{number}qz", f"zq{index}value{number}qz"
        arguments: Any = {"zqkeyqz": value} if function.get("arguments") else {}
        words += [name, *arguments.values()]
        if isinstance(function.get("arguments"), str):
            arguments = json.dumps(arguments)
        function = {**function, "name": name, "arguments": arguments}
        calls.append({**call, "function": function} if "function" in call else function)
    probes = {"content": content, "tool_calls": calls}
    return {key: probes.get(key, value) for key, value in message.items()}, words


def left_out(index: int, message: Mapping[str, Any]) -> ValueError:
    """The error for a message that is not in the text."""
    return ValueError(
        f"the chat template leaves out a part of message {index}, {shown(message)}: use a role "
        "and keys that it writes, or leave the message out"
    )


def up_to_end(turn: Mapping[str, Any], text: str, ends: Iterable[str]) -> str:
    """An answer's text up to the first end token behind what `turn` says; all without any.

    The model does not sample text after the end of its turn. Raises ValueError if the template
    writes a part of the answer there.
    """
    thought = squeezed(split_thought(in_text(turn))[0])
    cuts = sorted(found.end() for end in ends for found in re.finditer(re.escape(end), text))
    for cut in cuts:
        if has_contents(turn, text[:cut]) and thought in squeezed(text[:cut]):
            return text[:cut]
    if not cuts:
        return text
    raise ValueError(
        f"the chat template writes a part of an answer behind an end token, "
        f"{shown(text[cuts[-1] :])}: add the token that ends it to eos_token_id of "
        "generation_config.json"
    )


def is_written(piece: str, text: str, role: str) -> bool:
    """Whether a content of a role's is in a text, perhaps in another form or without a thought."""
    if piece in text:
        return True
    piece = split_thought(piece)[1] if role == "assistant" else piece
    escaped = json.dumps(piece, ensure_ascii=False)[1:-1], json.dumps(piece)[1:-1]
    found = squeezed(f"{text}\0{html.unescape(text)}")
    return any(squeezed(form) in found for form in (piece, *escaped))


def squeezed(text: str) -> str:
    """A text without space and the case of letters."""
    return "".join(text.casefold().split())


def split_thought(answer: str) -> tuple[str, str]:
    """(thought without its tags, what follows it) of an answer; ("", answer) without a thought."""
    thought, _, final = answer.rpartition(CLOSE)
    return thought.strip().removeprefix(OPEN).strip(), final


def texts(message: Mapping[str, Any]) -> list[str]:
    """The texts of a message's content."""
    content = message.get("content") or ""
    return [content] if isinstance(content, str) else [p["text"] for p in content if "text" in p]


_EMPTY = re.compile(rf"\A\s*{OPEN}\s*{CLOSE}\s*")
_CLOSED = re.compile(rf"\A\s*(?:{OPEN})?\s*{CLOSE}\s*")  # behind a thought that a prompt opens
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
    is_closed = CLOSE in opening and not thought  # the prompt has the answer's empty thought
    if CLOSE in answer:
        if thought or is_closed or rest.count(CLOSE) > answer.count(CLOSE):
            rest = (_CLOSED if opening else _EMPTY).sub("", rest)
        written = squeezed(rest)
        kept = squeezed(thought or CLOSE) in written[: written.rfind(squeezed(final))]
        if not kept and not is_closed:
            rest = answer.removesuffix(final.lstrip()) + rest.lstrip()
    text = _joined(opening, rest)
    opens, closes = ((opening + text).count(tag) for tag in (OPEN, CLOSE))
    own = answer.count(OPEN)
    begins = max(own, bool(opening))  # a prompt's thought may be the one that the answer ends
    if opens > max(1, own) or opens - closes not in (0, begins - answer.count(CLOSE)):
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
    """An assistant's message as one text: its thought in tags, where it has a key of its own.

    Raises ValueError for a thought that is no text, and for one in its content, too.
    """
    key, thought = next(((key, turn[key]) for key in THOUGHT_KEYS if turn.get(key)), ("", ""))
    if not isinstance(thought, str):
        raise ValueError(f"an answer's {key!r} must be text, got {shown(thought)}")
    if thought and CLOSE in "".join(texts(turn)):
        raise ValueError(
            f"an answer has a thought in its content and one under {key!r}: leave one out"
        )
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
