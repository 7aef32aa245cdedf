"""The program that a response contains."""

import re

from distflow_jax.rewards.answers.final_answer import after_thought

# a fence that closes begins or ends a line, so that ``` within code does not
_BLOCK = re.compile(
    r"```[ \t]*([\w+#.-]*)[^\n`]*(?=\n)(.*?)(?:\n[ \t]*```|```[ \t]*(?=\n|\Z)|\Z)", re.DOTALL
)
_PYTHON = frozenset({"python", "python3", "py"})
_BEGUN = re.compile(r"```(?:python3?|py)\n[^`]*\Z")


def program_of(response: str, prompt: str = "") -> str:
    """The program of a response; "" if there is none.

    Of the text after the thought it is the last block fenced by ``` that is marked as Python, else
    the last fenced block, else all of the text. A block that is not closed ends with the response.
    If `prompt` ends inside a block marked as Python, the program is that block.

    >>> program_of("First: ```python\\nx = 1\\n``` prints: ```text\\n2\\n```")
    'x = 1'
    """
    if begun := _BEGUN.search(prompt):
        found = _BLOCK.findall(begun[0] + response)[:1]
    else:
        text = after_thought(response, prompt)
        blocks = _BLOCK.findall(text)
        found = [block for block in blocks if block[0].lower() in _PYTHON] or blocks
    program = found[-1][1] if found else text
    return program.strip("\n") if program.strip() else ""
