"""The final answer of a response, by the one rule that rewards and majority votes share.

Only what follows the thought counts, and an unfinished thought, tag or box holds no answer. Of the
places below the last one in the text is the answer:

- a whole `<answer>..</answer>`,
- a whole box; boxes joined by "or", "and" or a comma are one list,
- `#### ANSWER`,
- an anchored phrase, "the answer is ANSWER" or "Answer: ANSWER".

Without any of these it is a formula that closes the response, or the whole response if that is an
expression. A number that merely occurs is no answer, nor is a premise ("let x = 5"), a doubt
("perhaps the answer is 5"), a question or what the next words take back ("but that is wrong").
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

_THOUGHT = r"(?:seed:)?(?:think|thinking|thoughts?|reasoning)"
_OPENED = rf"<{_THOUGHT}>|\[THINK\]|◁think▷"
_OPENS_THOUGHT = re.compile(_OPENED, re.IGNORECASE)
_ENDS_OPEN = re.compile(rf"(?:{_OPENED})\s*\Z", re.IGNORECASE)
_CLOSES_THOUGHT = re.compile(rf"</{_THOUGHT}>|\[/THINK\]|◁/think▷", re.IGNORECASE)
_NEAR = 64  # characters around a place in which a rule looks for what belongs to it

_ANSWER_TAG = re.compile(r"<(/?)(?:final[_ ])?answer\s*>", re.IGNORECASE)
_OPENS_ANSWER = re.compile(r"<(?:final[_ ])?answer\s*>|box(?:ed)?\s*\{", re.IGNORECASE)
_HASHES = re.compile(r"(?<!#)####(?!#)[^\S\n]*((?:(?!</)[^\n])*)")
# \boxed{, also with other numbers of backslashes or with the \b that JSON makes a backspace of
_BOX_OR_BRACE = re.compile(
    r"(?P<box>(?:\\?(?<![A-Za-z])[bB]|\x08)oxed\s*\{|\\f(?:rame)?box\s*\{)"
    r"|\\boxed(?P<bare>\s+[-\w.,/]+|\d[\d.,/]*)|\\.|[{}]",
    re.DOTALL,
)
_HEADING = r"^[#*_ \t]*(?:the\s+)?(?:final\s+|correct\s+)?answers?[*_: \t]*\n\s*"
_PHRASE = re.compile(
    r"\banswers?\s+are\b\s*:?\s*"
    r"|(?P<doubt>(?:\b(?:if|whether|unless|perhaps|maybe|suppose|assum(?:e|ing))"
    r"|(?:\bnot|n['’]t|\bcannot)\s+(?:think|say|believe|sure|certain|clear)(?:\s+that)?)\W+(?:(?:the|my|final|correct)\s+)*)?"
    r"(?<![</_])(?<!\bto )\b(?:answer|(?:correct|right)\s+(?:option|choice))\b(?!>)"
    r"(?:[^\n.:=<]{0,60}?\s(?:is|was|equals|(?:would|should|must|will)\s+be)\b"
    r"(?:\s+(?:therefore|thus|simply|just|exactly|indeed|about|approximately|equal\s+to))?\s*:?"
    r"|(?:\s*\([^\n()]{0,40}\)|,?\s+(?:to|of|for|in|as|rounded)\b[^\n.:=<]{0,60})?\**\s*[:=])\s*"
    rf"|{_HEADING}",
    re.IGNORECASE | re.MULTILINE,
)
_TAKEN_BACK = re.compile(  # after an answer
    r"(?i)\W*(?:(?:but|however|no|wait|actually|hmm|oh)\b\W*)*(?:(?:that|this|it|which)(?:['’]s"
    r"|\s+(?:is|was|seems))|is|was)\s+(?:not\s+(?:right|correct)|wrong|incorrect|a\s+mistake)\b"
)
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_MARKUP = re.compile(r"[\s*_`]*")
_FORMULA = re.compile(
    r"\$\$(?P<a>(?:\\.|[^$\\])+?)\$\$|(?<!\\)\$(?P<b>(?:\\.|[^$\\\n])+?)\$"
    r"|\\\[(?P<c>(?:\\[^\[\]]|[^\\])+?)\\\]|\\\((?P<d>(?:\\[^()]|[^\\])+?)\\\)",
    re.DOTALL,
)
_JOIN = re.compile(
    r"[,;]?\s*(?:(?:and|or)\b|\\(?:text|mathrm)\s*\{\s*(?:and|or)\s*\}|\\(?:lor|land|vee|wedge)\b)"
    r"\s*(?P<of>[A-Za-z]\w*(?:_\{?\w+\}?)?\s*=)?|[,;]\s*(?:[A-Za-z]\w*(?:_\{?\w+\}?)?\s*=)?",
)
_DELIMITERS = re.compile(r"\\[()\[\],;!]|\\q?quad\b|[$*~]")
_PERCENT = re.compile(r"\s*(?:\\?%|percent\b)", re.IGNORECASE)
_WORDS = "and|or|pi|sqrt|sin|cos|tan|cot|ln|log|exp|mod|inf|infinity|percent|degrees?|[ap]\\.?m"
_TOKEN = re.compile(  # of an expression outside a formula's delimiters
    rf"\s*(?:\\(?:text|mathrm|mathbf|textbf)\s*\{{[^{{}}]*\}}|\\[A-Za-z]+|\\[^A-Za-z\s(\[]"
    r"|[0-9]+(?:[.,:'][0-9]+)*(?:e[-+]?[0-9]+)?|\.[0-9]+"
    rf"|(?:{_WORDS})\b|[A-Za-z](?![A-Za-z'’])"
    r"|<(?![/|]|[A-Za-z]+\s*>)"  # which opens no tag
    r"|[-+*/^=>!%|(){}\[\]_$,;°≤≥≠±×÷·√π∞−∪∈²³½€£])",
    re.IGNORECASE,
)
_OPERAND = re.compile(r"[0-9½]|\\[A-Za-z]|[π∞√]")
_SENTENCE = re.compile(r"([.!?](?=\s|$)|\n)")
_TRAILING = " \t\n.,;:!?*_`(-"
# what a sentence goes on with after an expression: "12, and the", "12, I think", "5 (a prime)"
_BEGINS_CLAUSE = re.compile(
    r"(?:[,;(]\s*(?:(?:and|or)\b\s*)?(?:a|I)?|\s(?:and\b(?:\s+I)?|or\b))\s*\Z"
)
_CLAUSE = re.compile(  # not "3 and a half", nor "(t, a for all a", whose a is no article
    r"\s+(?!(?:half|quarter|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|bit|few|little"
    r"|for|where|when|if|with|which|is|are)\b)[A-Za-z]"
)
_PREMISE = re.compile(r"(?i)\b(?:let|suppose|assume|if|given|since|because)\s+(?:that\s+)?\W*\Z")
_END_OF_PROOF = re.compile(r"\${0,2}\\(?:blacksquare|square|Box|qed)(?![A-Za-z])\${0,2}")
_GOES_ON = re.compile(r"(?i)\W*(?:and|but|or|so|then|now|wait|which|since|if|when|where|let|we)\b")
# an unfinished formula or tag, "not 5", an equation in a sentence
_NO_TEXT_ANSWER = re.compile(r"(?i)[$<]|\\[(\[]|not\b|.*=")
# "The total is 42" in a tag or after "Final Answer:", and \text{Total: } before an expression
_STATED = re.compile(r"\b(?:is|are|equals)\b:?|(?<=[a-z]{2})(?::| =)(?=\s)")
_LABEL = re.compile(r"\\(?:text|mathrm)\s*\{[^{}]*(?:\b(?:is|are|equals)\b|[=:])\s*\}(?=\s*\S)")
_CLOSING_WORDS = 3  # words that may follow the formula with which a response closes
_TEXT_WORDS = 12  # words of an answer that is text


class _AnswerPlace(NamedTuple):
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
    boxes = _joined(text, _boxes(text))
    whole = [*_tagged(text), *boxes, *_after_hashes(text), *_phrases(text)]
    if whole:
        place = max(whole, key=lambda place: place.start)
        return "" if _TAKEN_BACK.match(text, place.end) else _inside(place.answer)
    return "" if _OPENS_ANSWER.search(text) else _without_a_mark(text)


def after_thought(response: str, prompt: str = "") -> str:
    """The part of a response that follows its thought; "" for a thought that is not closed.

    The thought is opened in the response or by the end of the prompt.
    """
    closed = [tag.end() for tag in _CLOSES_THOUGHT.finditer(response)]
    if not closed and _ENDS_OPEN.search(prompt[-_NEAR:]):
        return ""
    text = response[closed[-1] :] if closed else response
    opened = _OPENS_THOUGHT.search(text)
    return text[: opened.start()] if opened else text


def boxed(text: str) -> str | None:
    r"""The content of the last whole `\boxed{}` or list of these in a text; None without one."""
    joined = _joined(text, _boxes(text))
    return joined[-1].answer if joined else None


def last_box(text: str) -> str | None:
    r"""The content of the last whole `\boxed{}` of a text; None without one."""
    boxes = _boxes(text)
    return boxes[-1].answer if boxes else None


def is_expression(text: str) -> bool:
    """Whether a text begins with a mathematical expression and has at most two words after it."""
    found = _expression(text, 0)
    if found is None:
        return False
    rest = text[found.end :].strip(_TRAILING)
    return "\n" not in rest and len(rest.split()) <= 2


def _boxes(text: str) -> list[_AnswerPlace]:
    """Whole boxes in order, in linear time; of boxes in each other the outermost one."""
    opened: list[tuple[int, int]] = []  # (start of the box or -1, start of the content)
    found: list[_AnswerPlace] = []
    for brace in _BOX_OR_BRACE.finditer(text):
        if brace["bare"]:
            found.append(_AnswerPlace(brace.start(), brace.end(), _stripped(brace["bare"])))
        elif brace["box"]:
            opened.append((brace.start(), brace.end()))
        elif brace[0] == "{":
            opened.append((-1, brace.end()))
        elif brace[0] == "}" and opened:
            start, begin = opened.pop()
            if start >= 0:
                while found and found[-1].start > start:
                    found.pop()
                found.append(_AnswerPlace(start, brace.end(), text[begin : brace.start()].strip()))
    return found


def _joined(text: str, places: list[_AnswerPlace]) -> list[_AnswerPlace]:
    """Places with those that a conjunction or a comma joins as one list."""
    joined: list[_AnswerPlace] = []
    for place in places:
        before = joined[-1] if joined else None
        if before and place.start - before.end < _NEAR and 0 < len(before.answer) < 4000:
            between = _DELIMITERS.sub(" ", text[before.end : place.start]).strip()
            if _JOIN.fullmatch(between):
                joined[-1] = _AnswerPlace(
                    before.start, place.end, f"{before.answer}, {place.answer}"
                )
                continue
        joined.append(place)
    return joined


def _tagged(text: str) -> Iterator[_AnswerPlace]:
    """Whole answer tags."""
    opened = None
    for tag in _ANSWER_TAG.finditer(text):
        if tag[1] and opened is not None:
            content = text[opened.end() : tag.start()].strip()
            yield _AnswerPlace(opened.start(), tag.end(), content)
        opened = None if tag[1] else tag


def _inside(content: str) -> str:
    """The answer in a tag or a box: what the content marks as such, or else all of it."""
    content = _LABEL.sub("", content, count=1) if _LABEL.match(content) else content
    if not content or is_expression(content):
        return content
    return _value_of(_without_a_mark(content) or content)


def _value_of(sentence: str) -> str:
    """The expression after the verb of a sentence, if that ends it; else the sentence."""
    stated = _STATED.search(sentence)
    value = sentence[stated.end() :] if stated else ""
    return _stripped(value) if is_expression(value) else sentence


def _after_hashes(text: str) -> Iterator[_AnswerPlace]:
    """Lines after `####` that hold an expression; the last line of a text may hold any text."""
    for found in _HASHES.finditer(text):
        if is_expression(found[1]) or not text[found.end() :].strip():
            yield _AnswerPlace(found.start(), found.end(), _stripped(found[1]))


def _phrases(text: str) -> Iterator[_AnswerPlace]:
    """Anchored phrases that an expression follows, which is no question."""
    for phrase in _PHRASE.finditer(text):
        found = None if phrase["doubt"] else _expression(text, phrase.end())
        if found is not None and text[found.end : found.end + 1] != "?":
            yield _AnswerPlace(phrase.start(), found.end, found.answer)


def _without_a_mark(text: str) -> str:
    """The answer of a text without a tag, a box, `####` or a phrase with an expression."""
    phrases = [phrase for phrase in _PHRASE.finditer(text) if not phrase["doubt"]]
    if phrases:
        after = text[phrases[-1].end() :].strip(" \t*_`")
        after, *end = _SENTENCE.split(after, maxsplit=1)
        none = "?" in end or _NO_TEXT_ANSWER.match(after) or len(after.split()) > _TEXT_WORDS
        return "" if none else _value_of(_stripped(after))
    closing = _closing_formula(text)
    if closing:
        return closing
    text = text.strip()
    short = len(text.split()) <= _CLOSING_WORDS and not re.search(r"\n|\$|\\[(\[]", text)
    return _stripped(text) if short or is_expression(text) else ""


def _closing_formula(text: str) -> str:
    """The formulas with which a text ends, apart from punctuation and a few words; "" if none."""
    text = _END_OF_PROOF.sub("", text)
    found = [_AnswerPlace(*f.span(), f[f.lastgroup or 0].strip()) for f in _FORMULA.finditer(text)]
    if not (formulas := _joined(text, found)):
        return ""
    start, end, answer = formulas[-1]
    percent = _PERCENT.match(text, end)
    rest = text[percent.end() if percent else end :].strip(" \t\n*_`")
    words = re.split(r"[.,;:!?\n]", rest, maxsplit=1)[0]
    ends = len(words.split()) <= _CLOSING_WORDS and not re.search(r"\w", rest[len(words) :])
    before = text[max(0, start - _NEAR) : start]
    if not ends or rest.startswith("?") or _GOES_ON.match(words) or _PREMISE.search(before):
        return ""
    return answer + ("%" if percent else "")


def _expression(text: str, at: int) -> _AnswerPlace | None:
    """The expression behind white space and markup at a place; None without a whole one."""
    start = _MARKUP.match(text, at).end()
    found = _formula(text, start) or _plain(text, start)
    braces = _BRACE.findall(found.answer) if found else []
    return found if found and found.answer and braces.count("{") == braces.count("}") else None


def _formula(text: str, start: int) -> _AnswerPlace | None:
    """The formula that begins at a place, with those that are joined to it."""
    found: list[_AnswerPlace] = []
    formula = _FORMULA.match(text, start)
    while formula:
        content = formula[formula.lastgroup or 0].strip()
        found = _joined(text, [*found, _AnswerPlace(formula.start(), formula.end(), content)])
        if len(found) > 1:  # it is not joined to the first one
            break
        formula = _FORMULA.search(text, formula.end(), formula.end() + _NEAR)
    if not found:
        return None
    percent = _PERCENT.match(text, found[0].end)
    return found[0]._replace(answer=found[0].answer + ("%" if percent else ""))


def _plain(text: str, start: int) -> _AnswerPlace | None:
    """The expression without delimiters that begins at a place; None without one."""
    end = start
    while (token := _TOKEN.match(text, end)) and not ("\n" in token[0] and end > start):
        end = token.end()
    run = text[start:end]
    if _CLAUSE.match(text, end):
        run = _BEGINS_CLAUSE.sub("", run)
    answer = _stripped(run)
    follows = re.match(r"\s+[A-Za-z]", text[end : end + _NEAR])
    if "$" in answer and not re.match(r"[-(]?\$\s?[0-9.]", answer):
        return None  # a formula that does not end
    if not _OPERAND.search(answer):
        letter = answer.strip("()[]{}$ ")
        if len(letter) != 1 or not letter.isalpha():
            return None
        bare = answer == letter
        if bare and follows and (letter in "AaIi" or letter.islower()):
            return None  # an article or a variable in a sentence
    return _AnswerPlace(start, start + len(run.rstrip(_TRAILING)), answer)


def _stripped(text: str) -> str:
    return text.strip(" \t\n*_`").rstrip(_TRAILING)
