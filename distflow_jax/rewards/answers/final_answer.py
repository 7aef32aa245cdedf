"""The final answer of a response, by the one rule that rewards and majority votes share.

Only what follows the thought counts, and an unfinished thought, tag or box holds no answer. Of the
places below the last one in the text is the answer:

- a whole `<answer>..</answer>`,
- a whole box; boxes joined by "or", "and" or a comma are one list,
- `#### ANSWER`,
- an anchored phrase, "the answer is ANSWER" or "Answer: ANSWER".

Without any of these it is a formula that closes the response, or the whole response if that is an
expression. A number that merely occurs is no answer.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

_THOUGHT = r"(?:seed:)?(?:think|thinking|thoughts?|reasoning)"
_OPENED = rf"<{_THOUGHT}>|\[THINK\]|◁think▷"
_OPENS_THOUGHT = re.compile(_OPENED, re.IGNORECASE)
_ENDS_OPEN = re.compile(rf"(?:{_OPENED})\s*\Z", re.IGNORECASE)
_CLOSES_THOUGHT = re.compile(rf"</{_THOUGHT}>|\[/THINK\]|◁/think▷", re.IGNORECASE)
_LONGEST_TAG = 64  # characters of a prompt's end in which an opening tag is looked for

_ANSWER_TAG = re.compile(r"<(/?)(?:final_)?answer>", re.IGNORECASE)
_HASHES = re.compile(r"(?<!#)####(?!#)[^\S\n]*([^\n]*)")
# \boxed{, also with two backslashes or with the \b that JSON makes a backspace of; \boxed 5
_BOX_OR_BRACE = re.compile(
    r"(?P<box>(?:\\+b|\x08)oxed\s*\{|\\+f(?:rame)?box\s*\{)"
    r"|\\+boxed\s+(?P<bare>[-\w.,/]+)|\\.|[{}]",
    re.DOTALL,
)
_HEADING = r"^[#*_\s]*(?:the\s+)?(?:final\s+|correct\s+)?answers?[*_:\s]*\n\s*"
_PHRASE = re.compile(
    r"\banswers?\s+are\b\s*:?\s*"
    r"|(?<![</_])\banswer\b(?!>)[^\n.:=<]{0,60}?(?:\s(?:is|was|equals|(?:would|should|must|will)\s+be)\b"
    r"(?:\s+(?:therefore|thus|simply|just|exactly|indeed|equal\s+to))?\s*:?|\**\s*[:=])\s*"
    rf"|{_HEADING}",
    re.IGNORECASE | re.MULTILINE,
)
_MARKUP = re.compile(r"[\s*_`]*")
_FORMULA = re.compile(
    r"\$\$(?P<a>(?:\\.|[^$\\])+?)\$\$|(?<!\\)\$(?P<b>(?:\\.|[^$\\\n])+?)\$"
    r"|\\\[(?P<c>(?:\\(?!\])|[^\\])+?)\\\]|\\\((?P<d>(?:\\(?!\))|[^\\])+?)\\\)",
    re.DOTALL,
)
_JOIN = re.compile(
    r"[,;]?\s*(?:(?:and|or)\b|\\(?:text|mathrm)\s*\{\s*(?:and|or)\s*\}|\\(?:lor|land|vee|wedge)\b)"
    r"\s*(?P<of>[A-Za-z]\w*(?:_\{?\w+\}?)?\s*=)?|[,;]\s*(?:[A-Za-z]\w*(?:_\{?\w+\}?)?\s*=)?",
)
_DELIMITERS = re.compile(r"\\[()\[\],;!]|\\q?quad\b|[$*~]")
_PERCENT = re.compile(r"\s*(?:\\?%|percent\b)", re.IGNORECASE)
_WORDS = "and|or|pi|sqrt|sin|cos|tan|cot|ln|log|exp|mod|inf|infinity|percent|degrees?"
_TOKEN = re.compile(  # of an expression outside a formula's delimiters
    rf"\s*(?:\\(?:text|mathrm|mathbf|textbf)\s*\{{[^{{}}]*\}}|\\[A-Za-z]+|\\[^A-Za-z\s(\[]"
    r"|[0-9]+(?:[.,:'][0-9]+)*(?:e[-+]?[0-9]+)?|\.[0-9]+"
    rf"|(?:{_WORDS})\b|[A-Za-z](?![A-Za-z'’])"
    r"|[-+*/^=<>!%|(){}\[\]_$,;°≤≥≠±×÷·√π∞−∪∈²³½€£])",
    re.IGNORECASE,
)
_OPERAND = re.compile(r"[0-9½]|\\[A-Za-z]|[π∞√]")
_SENTENCE = re.compile(r"(?:[.!?](?=\s|$)|\n)")
_TRAILING = " \t\n.,;:!?*_`"
_UNFINISHED = ("$", "\\(", "\\[", "<")  # begin a formula or a tag, which has no end
_CLOSING_WORDS = 3  # words that may follow the formula with which a response closes
_TEXT_WORDS = 12  # words of an answer that is text


class _Place(NamedTuple):
    """An answer at characters [start, end) of a text."""

    start: int
    end: int
    answer: str


def final_answer(response: str, prompt: str = "") -> str:
    r"""The final answer of a response as it is written there; "" if there is none.

    `prompt` is the text that the model was given: one that ends with `<think>` opens the thought.

    >>> final_answer(r"<think>Is it 4?</think> It is \boxed{-2} or \boxed{5}.")
    '-2, 5'
    """
    text = after_thought(response, prompt)
    boxes, open_box = _boxes(text)
    tags, open_tag = _tagged(text)
    unfinished = max(open_box, open_tag)
    whole = [*tags, *_joined(text, boxes), *_after_hashes(text), *_phrases(text)]
    if whole:
        place = max(whole, key=lambda place: place.start)
        return place.answer if place not in tags else _inside(place.answer)
    return "" if unfinished >= 0 else _without_a_mark(text)


def after_thought(response: str, prompt: str = "") -> str:
    """The part of a response that follows its thought; "" for a thought that is not closed.

    The thought is opened in the response or by the end of the prompt.
    """
    closed = [tag.end() for tag in _CLOSES_THOUGHT.finditer(response)]
    if not closed and _ENDS_OPEN.search(prompt[-_LONGEST_TAG:]):
        return ""
    text = response[closed[-1] :] if closed else response
    opened = _OPENS_THOUGHT.search(text)
    return text[: opened.start()] if opened else text


def boxed(text: str) -> str | None:
    r"""The content of the last whole `\boxed{}` or list of these in a text; None without one."""
    joined = _joined(text, _boxes(text)[0])
    return joined[-1].answer if joined else None


def last_box(text: str) -> str | None:
    r"""The content of the last whole `\boxed{}` of a text; None without one."""
    boxes = _boxes(text)[0]
    return boxes[-1].answer if boxes else None


def is_expression(text: str) -> bool:
    """Whether a text begins with a mathematical expression and has at most two words after it."""
    start = _MARKUP.match(text).end()
    found = _formula(text, start) or _plain(text, start)
    if found is None or not found.answer:
        return False
    rest = text[found.end :].strip(_TRAILING)
    return "\n" not in rest and len(rest.split()) <= 2


def _boxes(text: str) -> tuple[list[_Place], int]:
    """(whole boxes in order, the start of an unfinished one behind these or -1), in linear time.

    Of boxes in each other the outermost whole one is taken.
    """
    opened: list[tuple[int, int]] = []  # (start of the box or -1, start of the content)
    found: list[_Place] = []
    for brace in _BOX_OR_BRACE.finditer(text):
        if brace["bare"]:
            found.append(_Place(brace.start(), brace.end(), brace["bare"].strip(_TRAILING)))
        elif brace["box"]:
            opened.append((brace.start(), brace.end()))
        elif brace[0] == "{":
            opened.append((-1, brace.end()))
        elif brace[0] == "}" and opened:
            start, begin = opened.pop()
            if start >= 0:
                while found and found[-1].start > start:
                    found.pop()
                found.append(_Place(start, brace.end(), text[begin : brace.start()].strip()))
    unfinished = max((start for start, _ in opened), default=-1)
    return found, unfinished if not found or unfinished > found[-1].start else -1


def _joined(text: str, places: list[_Place]) -> list[_Place]:
    """Places with those that a conjunction or a comma joins as one list."""
    joined: list[_Place] = []
    for place in places:
        before = joined[-1] if joined else None
        if before and place.start - before.end < _LONGEST_TAG and before.answer:
            between = _DELIMITERS.sub(" ", text[before.end : place.start]).strip()
            if _JOIN.fullmatch(between):
                joined[-1] = _Place(before.start, place.end, f"{before.answer}, {place.answer}")
                continue
        joined.append(place)
    return joined


def _tagged(text: str) -> tuple[list[_Place], int]:
    """(whole answer tags, the start of an unfinished one behind these or -1)."""
    found, opened = [], None
    for tag in _ANSWER_TAG.finditer(text):
        if not tag[1]:
            opened = tag
        elif opened is not None:
            content = text[opened.end() : tag.start()].strip()
            found.append(_Place(opened.start(), tag.end(), content))
            opened = None
    return found, -1 if opened is None else opened.start()


def _inside(content: str) -> str:
    """The answer in an answer tag: what the content marks as such, or else all of it."""
    if not content or is_expression(content):
        return content
    return _without_a_mark(content) or content


def _after_hashes(text: str) -> Iterator[_Place]:
    """Lines after `####` that hold an expression; the last line of a text may hold any text."""
    for found in _HASHES.finditer(text):
        if is_expression(found[1]) or not text[found.end() :].strip():
            yield _Place(found.start(), found.end(), _stripped(found[1]))


def _phrases(text: str) -> Iterator[_Place]:
    """Anchored phrases that an expression follows."""
    for phrase in _PHRASE.finditer(text):
        start = _MARKUP.match(text, phrase.end()).end()
        found = _formula(text, start) or _plain(text, start)
        if found is not None and found.answer:
            yield _Place(phrase.start(), found.end, found.answer)


def _without_a_mark(text: str) -> str:
    """The answer of a text without a tag, a box, `####` or a phrase with an expression."""
    phrases = list(_PHRASE.finditer(text))
    if phrases:
        after = text[phrases[-1].end() :].strip(" \t*_`")
        if after.startswith(_UNFINISHED):
            return ""
        after = _stripped(_SENTENCE.split(after, maxsplit=1)[0])
        negated = after.lower().startswith("not ")
        return after if len(after.split()) <= _TEXT_WORDS and not negated else ""
    closing = _closing_formula(text)
    if closing:
        return closing
    text = text.strip()
    short = "\n" not in text and len(text.split()) <= _CLOSING_WORDS
    return _stripped(text) if is_expression(text) or (short and "$" not in text) else ""


def _closing_formula(text: str) -> str:
    """The formulas with which a text ends, apart from punctuation and a few words; "" if none."""
    formulas = _joined(
        text,
        [_Place(f.start(), f.end(), (f["a"] or f["b"] or f["c"] or f["d"]).strip())
         for f in _FORMULA.finditer(text)],
    )  # fmt: skip
    if not formulas:
        return ""
    rest = text[formulas[-1].end :]
    percent = "%" if _PERCENT.match(rest) else ""
    rest = rest.strip(_TRAILING)
    ends = len(rest.split()) <= _CLOSING_WORDS and not _SENTENCE.search(rest)
    return formulas[-1].answer + percent if ends else ""


def _formula(text: str, start: int) -> _Place | None:
    """The formula that begins at a place, with those that are joined to it."""
    found: list[_Place] = []
    formula = _FORMULA.match(text, start)
    while formula:
        content = (formula["a"] or formula["b"] or formula["c"] or formula["d"]).strip()
        found = _joined(text, [*found, _Place(formula.start(), formula.end(), content)])
        if len(found) > 1:  # it is not joined to the first one
            break
        formula = _FORMULA.search(text, formula.end(), formula.end() + _LONGEST_TAG)
    if not found:
        return None
    percent = _PERCENT.match(text, found[0].end)
    return found[0]._replace(answer=found[0].answer + ("%" if percent else ""))


def _plain(text: str, start: int) -> _Place | None:
    """The expression without delimiters that begins at a place; None without one."""
    end = start
    while token := _TOKEN.match(text, end):
        line_ends = "\n" in token[0]
        if line_ends and end > start:
            break
        end = token.end()
    run = text[start:end]
    answer = run.strip(_TRAILING)
    follows = re.match(r"\s+([A-Za-z]+)", text[end:])
    if "$" in answer and not re.match(r"[-(]?\$\s?[0-9.]", answer):
        return None  # a formula that does not end
    if not _OPERAND.search(answer):
        letter = answer.strip("()[]{}$ ")
        if len(letter) != 1 or not letter.isalpha():
            return None
        bare = answer == letter
        if bare and follows and (letter in "AaIi" or letter.islower()):
            return None  # an article or a variable in a sentence
    return _Place(start, start + len(run.rstrip(_TRAILING)), answer)


def _stripped(text: str) -> str:
    return text.strip().strip(_TRAILING).strip()
