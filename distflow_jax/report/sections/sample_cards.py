"""Samples of a run: a card per prompt, with its responses in the order of their scores.

The page's script sorts them by other numbers, which stand in the attributes of each response.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from distflow_jax.report.charts import format_value
from distflow_jax.report.page_style import PICTURES, escaped, long_text
from distflow_jax.report.read_run import RunFolder, prompt_key

_MOST_CARDS, _MOST_RESPONSES = 12, 48  # of one file
_MOST_OF_CARD = 16  # responses
_MOST_EARLIER_TEXT = 1000  # characters
_MOST_PICTURES = 4  # of a card
_PICTURE = re.compile(r"data:image/(png|jpeg);base64,[A-Za-z0-9+/]{1,200000}={0,2}")
_ORDERS = ("score", "length", "advantage", "ending")  # of the responses of a card
# keys of a record that a card shows in a place of their own, or not at all
_KNOWN = {
    "uid",
    "row",
    "data_source",
    "prompt",
    "images",
    "response",
    "responses",
    "scores",
    "lengths",
    "finished",
    "ground_truth",
    "response_length",
    "score",
    "advantage",
}


@dataclasses.dataclass(frozen=True)
class ResponseCard:
    """A response; `more` are its other numbers by name."""

    text: Any
    score: Any = ""
    length: Any = ""
    finished: Any = None  # False: cut by a limit
    advantage: Any = ""
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def number(self) -> float:
        """The score as a number; NaN without one."""
        return float(self.score) if _is_number(self.score) else math.nan

    @property
    def orders(self) -> dict[str, float]:
        """The numbers that responses can be sorted by, by name; those that end are above others."""
        end = int(self.finished) if isinstance(self.finished, bool) else None
        found = {"score": self.score, "length": self.length, "advantage": self.advantage}
        found["ending"] = end
        return {name: float(value) for name, value in found.items() if _is_number(value)}


@dataclasses.dataclass(frozen=True)
class PromptCard:
    """A prompt with its responses, the best first."""

    prompt: Any
    truth: Any
    source: str
    answers: Sequence[ResponseCard]
    pictures: Sequence[str] = ()  # data URIs of small copies

    @property
    def mean(self) -> float:
        """Mean of the scores; NaN without any."""
        numbers = [a.number for a in self.answers if not math.isnan(a.number)]
        return sum(numbers) / len(numbers) if numbers else math.nan


def sample_cards(run: RunFolder) -> str:
    """HTML of the files of samples, one shown at a time; "" without any."""
    groups = {name: groups_of(records) for name, records in (run.samples | run.earlier).items()}
    options, files = [], []
    for name in run.samples:
        found = groups[name]
        if not found:
            continue
        body, shown = [], 0
        for key, group in list(found.items())[:_MOST_CARDS]:
            if shown >= _MOST_RESPONSES:
                break
            shown += min(len(group.answers), _MOST_OF_CARD)
            body.append(_card(group, _before(groups, name, key), f"{name}/{len(body)}"))
        left = len(found) - len(body)
        rest = f"{left} other prompts are in samples/{name}.jsonl" if left else ""
        note = f"<p class='about'>{escaped(rest)}</p>" if rest else ""
        hidden = " hidden" if options else ""
        value = escaped(name)  # the same after a live page has fetched its sections again
        files.append(
            f"<div class='samples' data-file='{value}'{hidden}>{''.join(body)}{note}</div>"
        )
        options.append(f"<option value='{value}'>{escaped(_title(name))}</option>")
    if not files:
        return ""
    return (
        f"<div class='toolbar'><select class='file' aria-label='step'>{''.join(options)}</select>"
        f"{_order_choice(groups[name] for name in run.samples)}"
        "<input class='grep' type='search' placeholder='find in samples' "
        f"aria-label='find in samples'></div>{''.join(files)}"
    )


def _order_choice(files: Iterable[Mapping[str, PromptCard]]) -> str:
    """The list of numbers that responses can be sorted by; "" for one alone."""
    known = {
        name
        for groups in files
        for group in groups.values()
        for answer in group.answers
        for name in answer.orders
    }
    if len(known) < 2:
        return ""
    options = "".join(
        f"<option value='{name}'>by {name}</option>" for name in _ORDERS if name in known
    )
    return f"<select class='order' aria-label='order of responses'>{options}</select>"


def groups_of(records: Iterable[Mapping[str, Any]]) -> dict[str, PromptCard]:
    """{key of the prompt: its responses}; see `responses_of`."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        if "prompt" in record or "response" in record or "responses" in record:
            found.setdefault(prompt_key(record), []).append(record)
    return {key: _group(rows) for key, rows in found.items()}


def responses_of(record: Mapping[str, Any]) -> list[ResponseCard]:
    """The response of a training step's record, or all to an evaluation's prompt."""
    if not isinstance(record.get("responses"), list):
        return [
            ResponseCard(
                record.get("response", ""),
                record.get("score", ""),
                record.get("response_length", ""),
                record.get("finished"),
                record.get("advantage", ""),
                {key: value for key, value in record.items() if key not in _KNOWN},
            )
        ]
    columns = [record.get(name) for name in ("scores", "lengths", "finished")]
    columns = [column if isinstance(column, list) else [] for column in columns]
    rows = itertools.zip_longest(record["responses"], *columns, fillvalue="")
    return [ResponseCard(*row) for row in itertools.islice(rows, len(record["responses"]))]


def _group(records: Sequence[Mapping[str, Any]]) -> PromptCard:
    first = records[0]
    found = [response for record in records for response in responses_of(record)]
    found.sort(key=lambda answer: -answer.number if not math.isnan(answer.number) else math.inf)
    return PromptCard(
        first.get("prompt", ""),
        first.get("ground_truth", ""),
        str(first.get("data_source", "")),
        found,
        pictures_of(first),
    )


def pictures_of(record: Mapping[str, Any]) -> tuple[str, ...]:
    """The data URIs among the images of a record; a file may hold anything."""
    value = record.get("images")
    uris = value[:_MOST_PICTURES] if isinstance(value, list) else ()
    return tuple(u for u in uris if isinstance(u, str) and _PICTURE.fullmatch(u))


def _before(
    groups: Mapping[str, Mapping[str, PromptCard]], name: str, key: str
) -> tuple[str, PromptCard] | None:
    """The same prompt in the newest earlier file of the same kind."""
    kind, step = _kind(name)
    places = [(_kind(other)[1], other) for other in groups if _kind(other)[0] == kind]
    for place, other in sorted(places, reverse=True):
        if place < step and key in groups[other]:
            return other, groups[other][key]
    return None


def _kind(name: str) -> tuple[str, int]:
    stem = name.rstrip("0123456789")
    return stem, int(name[len(stem) :] or 0)


def _title(name: str) -> str:
    kind, step = _kind(name)
    words = {"": "step", "eval-": "evaluation at step", "nonfinite-": "not finite, step"}
    return f"{words[kind]} {step}" if kind in words else name


def _card(group: PromptCard, before: tuple[str, PromptCard] | None, key: str) -> str:
    count = len(group.answers)
    facts = [f"{count} response{'' if count == 1 else 's'}"]
    if not math.isnan(group.mean):
        facts.append(f"mean score {format_value(group.mean)}")
    if group.truth not in ("", None):
        facts.append(f"<b>truth</b> {long_text(group.truth, 300)}")
    if group.source:
        facts.append(escaped(group.source))
    shown = "".join(_response(answer, group) for answer in group.answers[:_MOST_OF_CARD])
    left = count - _MOST_OF_CARD
    more = f"<li class='about'>{left} more, with lower scores</li>" if left > 0 else ""
    return (
        f"<article class='card'><div class='prompt'>{_shown(group.pictures)}"
        f"<div class='text'>{long_text(group.prompt)}</div>"
        f"<p class='about'>{' · '.join(facts)}</p></div>"
        f"<ol class='responses'>{shown}{more}</ol>{_earlier(before, group, key)}</article>"
    )


def _shown(pictures: Sequence[str]) -> str:
    """HTML of the pictures of a prompt; "" without any."""
    if not pictures:
        return ""
    shown = "".join(f"<img src='{uri}' alt='image {n}'>" for n, uri in enumerate(pictures, 1))
    return f"{PICTURES}{shown}</div>"


def _earlier(before: tuple[str, PromptCard] | None, now: PromptCard, key: str) -> str:
    if before is None:
        return ""
    name, group = before
    change = ""
    if not math.isnan(group.mean) and not math.isnan(now.mean):
        change = f": mean score {format_value(group.mean)}, now {format_value(now.mean)}"
    shown = "".join(
        _response(answer, group, _MOST_EARLIER_TEXT) for answer in group.answers[:_MOST_OF_CARD]
    )
    return (
        f"<details class='earlier' data-key='{escaped(key)}'><summary>the same prompt, "
        f"{escaped(_title(name))}{escaped(change)}</summary>"
        f"<ol class='responses'>{shown}</ol></details>"
    )


def _response(answer: ResponseCard, group: PromptCard, most: int = 3000) -> str:
    chips = []
    if answer.score != "":
        score = format_value(answer.score) if _is_number(answer.score) else long_text(answer.score)
        share = _share(answer, group)
        chips.append(f"<b class='score' style='--share:{share:.2f}'>{score}</b>")
    if _is_number(answer.advantage):
        about = "mean over the tokens that the policy chose"
        chips.append(f"<span title='{about}'>advantage {format_value(answer.advantage)}</span>")
    elif len(group.answers) > 1 and not math.isnan(answer.number):
        gap = answer.number - group.mean
        text = f"{'+' if gap > 0 else ''}{format_value(gap)}"
        chips.append(f"<span title='score less the mean score of the prompt'>vs mean {text}</span>")
    if _is_number(answer.length):
        chips.append(f"<span>{format_value(answer.length)} tokens</span>")
    if isinstance(answer.finished, bool):
        word = "ended" if answer.finished else "cut by the limit"
        chips.append(f"<span class='{'' if answer.finished else 'cut'}'>{word}</span>")
    for name, value in answer.more.items():
        if isinstance(value, str | bool) or _is_number(value):
            value = format_value(value) if _is_number(value) else str(value)
            chips.append(f"<span>{escaped(name)} {long_text(value, 100)}</span>")
    numbers = "".join(f" data-{name}='{value!r}'" for name, value in answer.orders.items())
    return (
        f"<li{numbers}><div class='chips'>{''.join(chips)}</div>"
        f"<div class='text'>{long_text(answer.text, most)}</div></li>"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _share(answer: ResponseCard, group: PromptCard) -> float:
    """Place of a score between the least and the greatest of its prompt, 0 to 1."""
    numbers = [a.number for a in group.answers if not math.isnan(a.number)]
    if math.isnan(answer.number) or not numbers or max(numbers) == min(numbers):
        return 0.0
    return (answer.number - min(numbers)) / (max(numbers) - min(numbers))
