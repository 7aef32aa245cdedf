"""Writes tests/golden/templates.json: what transformers makes of conversations.

Of each template of tests/support/chat_templates.py and each of its conversations: a digest of text
and ids; `error` where transformers raises, and `lost` where the text lacks a content. Of templates
with {% generation %} also a digest of ids and of which of them it encloses, `none` without any.

    python -m venv /tmp/golden && /tmp/golden/bin/pip install -r scripts/golden/requirements.txt
    PYTHONPATH=tests /tmp/golden/bin/python scripts/golden/make_golden_templates.py
"""

import datetime
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import transformers
from support.chat_templates import DATE, READS, TRAITS, conversations, write_tokenizer
from transformers.utils import chat_template_utils

OUT = Path(__file__).parents[2] / "tests" / "golden" / "templates.json"


class Day(datetime.datetime):
    """A clock that stands."""

    @classmethod
    def now(cls, tz: Any = None) -> "Day":
        """The first moment of DATE."""
        return cls.fromisoformat(DATE)


def digest(*values: Any) -> str:
    """Eight hexadecimal digits of values of JSON."""
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=4).hexdigest()


def is_lost(messages: list[dict], text: str, render: Any) -> bool:
    """Whether a content or a call of a tool is not in the text. `render` gives the text of other
    messages: a short content may be there by accident, and a tool's name in its schema."""

    def bare(value: str) -> str:
        return "".join(value.lower().split())

    def there(value: str) -> bool:
        forms = value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]
        return any(bare(form) in bare(text) for form in forms)

    for message in messages:
        content = message.get("content") or ""
        if message["role"] == "assistant":
            content = content.split("</think>")[-1]
        if not there(content):
            return True
        if content and "qzword" not in render([*rest(messages, message, "qzword")]):
            return True
        for call in message.get("tool_calls") or []:
            given = [with_words(m, call) for m in messages]
            wanted = ["qzname", "qzword"] if call["function"]["arguments"] else ["qzname"]
            if any(word not in render(given) for word in wanted):
                return True
    return False


def with_words(message: dict, call: dict) -> dict:
    """The message with a name and an argument in `call` that no other text has."""
    arguments: Any = {"qzkey": "qzword"} if call["function"]["arguments"] else {}
    if isinstance(call["function"]["arguments"], str):
        arguments = json.dumps(arguments)
    other = {**call, "function": {"name": "qzname", "arguments": arguments}}
    calls = [other if each is call else each for each in message.get("tool_calls") or []]
    return {**message, "tool_calls": calls} if calls else message


def made(tokenizer: Any, messages: list[dict], variables: dict, parts: bool) -> str:
    """The entry of one conversation as a prompt; `parts`: with contents in parts."""
    last = messages[-1]["role"] == "assistant"
    how = {"add_generation_prompt": not last, "continue_final_message": last} | variables

    def apply(messages: list[dict], **kind: Any) -> Any:
        given = in_parts(messages) if parts else messages
        return tokenizer.apply_chat_template(given, **kind, **how)

    try:
        text, ids = apply(messages, tokenize=False), apply(messages, return_dict=False)
        lost = is_lost(messages, text, lambda other: apply(other, tokenize=False))
    except Exception:  # a template raises what it likes
        return "error"
    return "lost" if lost else digest(text, ids)


def rest(messages: list[dict], message: dict, word: str) -> list[dict]:
    """The messages with a word for the content of one."""
    return [{**m, "content": word} if m is message else m for m in messages]


def in_parts(messages: list[dict]) -> list[dict]:
    """Messages with lists of parts for their texts."""
    return [
        {**m, "content": [{"type": "text", "text": m["content"]}]} if m.get("content") else m
        for m in messages
    ]


def marked(tokenizer: Any, messages: list[dict]) -> str:
    """The entry of one conversation as a demonstration."""
    try:
        found = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
    except Exception:  # a template raises what it likes
        return "error"
    mask = found["assistant_masks"]
    return digest(found["input_ids"], mask) if any(mask) else "none"


def main() -> None:
    """Makes the file."""
    chat_template_utils.datetime = Day
    entries = {}
    for name, template in TRAITS.items():
        with tempfile.TemporaryDirectory() as folder:
            write_tokenizer(Path(folder), template)
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            entries[name] = []
            for messages, variables in conversations():
                read = {k: x for k, x in variables.items() if READS.get(name) == k}
                entries[name].append(made(tokenizer, messages, read, name == "only_parts"))
            if "generation" in name:
                key = f"{name}: marks"
                entries[key] = [marked(tokenizer, messages) for messages, _ in conversations()]
    found = {"transformers": transformers.__version__, "entries": entries}
    OUT.write_text(json.dumps(found, separators=(",", ":")).replace("],", "],\n") + "\n")
    for name, row in entries.items():
        print(name, {kind: row.count(kind) for kind in ("error", "lost")}, len(row))


main()
