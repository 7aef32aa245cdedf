"""The program that a response contains."""

import re

from distflow_jax.rewards.answers.final_answer import after_thought

_BLOCK = re.compile(r"```[ \t]*([\w+#.-]*)[^\n`]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)
_PYTHON = frozenset({"python", "python3", "py"})
_OPENED = re.compile(r"```(?:python3?|py)?\s*\Z")


def program_of(response: str, prompt: str = "") -> str:
    """The program of a response; "" if there is none.

    Of the text after the thought it is the last block fenced by ``` that is marked as Python, else
    the last fenced block, else all of the text. A block that is not closed ends with the response.
    The end of `prompt` may have opened the first one.

    >>> program_of("First: ```python\\nx = 1\\n``` prints: ```text\\n2\\n```")
    'x = 1'
    """
    opened = _OPENED.search(prompt[-16:])
    text = after_thought(f"{opened[0].rstrip()}\n{response}" if opened else response)
    blocks = [(mark.lower(), body) for mark, body in _BLOCK.findall(text)]
    marked = [body for mark, body in blocks if mark in _PYTHON]
    program = (marked or [body for _, body in blocks] or [text])[-1]
    return program.strip("\n") if program.strip() else ""
