"""Thoughts of answers: `<think>` and its like, around what a model writes before its answer."""

import re

TAGS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
}
_CLOSING = re.compile("|".join(map(re.escape, TAGS.values())))
# at the end of a prompt: a thought that is open, or one that is closed and empty
_BEGUN = re.compile(
    "|".join(rf"{re.escape(a)}\s*(?:{re.escape(b)}\s*)?\Z" for a, b in TAGS.items())
)


def split(answer: str) -> tuple[str, str]:
    """(thought without its tags, what follows it) of an answer; ("", answer) without a thought."""
    marks = list(_CLOSING.finditer(answer))
    if not marks:
        return "", answer
    thought = answer[: marks[-1].start()].lstrip()
    for tag in TAGS:
        thought = thought.removeprefix(tag)
    return thought.strip(), answer[marks[-1].end() :]


def begun(prompt: str) -> str:
    """The thought with which a prompt ends, open or empty; "" without any.

    >>> begun("assistant: <think>\\n")
    '<think>\\n'
    """
    found = _BEGUN.search(prompt)
    return found[0] if found else ""


def joined(begun: str, answer: str) -> str:
    """What follows a prompt that ends with `begun` for an answer.

    The answer's thought goes on where the prompt has opened one; without a thought it closes that.

    >>> joined("<think>", "<think>2 + 2.</think>4")
    '2 + 2.</think>4'
    """
    if not begun or _CLOSING.search(begun):
        return answer
    tag = begun.rstrip()
    bare = answer.lstrip()
    if bare.startswith(tag):
        bare = bare.removeprefix(tag)
        return bare.removeprefix("\n") if begun.endswith("\n") else bare
    return answer if TAGS[tag] in answer else f"\n{TAGS[tag]}\n\n{answer}"


def check_balance(begun: str, text: str, answer: str) -> None:
    """Raises ValueError if a template, which has made `text` of `answer` behind a prompt that ends
    with `begun`, leaves a thought open, closes one that is not open, or adds a second one."""
    whole = begun + text
    for tag, closing in TAGS.items():
        opens, closes, own = whole.count(tag), whole.count(closing), answer.count(tag)
        if opens > max(1, own):
            raise ValueError(f"the answer has a thought, and another {tag} is put before it")
        if opens - closes not in (0, own - answer.count(closing)):
            raise ValueError(f"{opens} of {tag} and {closes} of {closing} in the answer")
