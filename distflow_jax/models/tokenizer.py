"""Tokenizer: text <-> token ids, and conversations -> text by the model's own chat template.

Made from a Hugging Face folder, from GGUF metadata, or byte-level for random models. All three are
a `tokenizers` tokenizer with the ids that generation needs.
"""

import dataclasses
import datetime
import functools
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from distflow_jax.images.placing import ANSWER, ANSWERED
from distflow_jax.models import tokenizer_files
from distflow_jax.models.chat import message_parts
from distflow_jax.models.chat import render as chat
from distflow_jax.models.chat.dialect import MARKS
from distflow_jax.models.chat.message_parts import checked, in_parts

Messages = Sequence[Mapping[str, Any]]  # [{"role": "user", "content": "..."}, ...]

_LONE = re.compile("[\ud800-\udfff]")
_BREAK = "\ufdd2"  # within a control token that is spelled; no text has it


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer with its chat template. Immutable; can be pickled.

    `vocab_size` is one more than the largest id in use. `stop_ids` end a response: the end token,
    then the ends of a chat turn. `pad_id` may equal one of these, so masks mark padding, not ids.
    """

    backend: tokenizers.Tokenizer = dataclasses.field(repr=False)
    vocab_size: int
    pad_id: int
    bos_id: int | None
    stop_ids: tuple[int, ...]
    chat_template: str | None = dataclasses.field(default=None, repr=False)
    # variables of the chat template: {"bos_token": "<s>", "eos_token": ...}
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    # further variables of all conversations, data.template_kwargs
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    date: str = ""  # YYYY-MM-DD, which templates write; "": the time in UTC
    origin: str = ""  # the file or folder it was read from

    @classmethod
    def from_folder(cls, path: str | Path, *, most: int | None = None) -> "Tokenizer":
        """Reads tokenizer.json of a Hugging Face folder and the settings beside it.

        Added tokens with ids of `most` or above are dropped; their spelling is then plain text.
        Raises FileNotFoundError without tokenizer.json, ValueError for invalid files.
        """
        return cls(**tokenizer_files.read_folder(Path(path), most))

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any], origin: str = "GGUF metadata") -> "Tokenizer":
        """Reads GGUF metadata of a byte-level BPE tokenizer (`tokenizer.ggml.model` "gpt2").

        `origin`: their file, for messages. Raises ValueError for any other kind and for invalid
        metadata.
        """
        return cls(**tokenizer_files.read_gguf(fields, origin))

    @classmethod
    def byte_level(cls, vocab_size: int) -> "Tokenizer":
        """One id per byte, then <|pad|>, <|im_start|>, <|im_end|>; higher ids are unused."""
        return cls(**tokenizer_files.byte_level(vocab_size))

    @functools.cached_property
    def fingerprint(self) -> str:
        """A hash of what ids depend on beside the text and its messages."""
        template = self.chat_template or ""
        today = "" if "date" not in template and "strftime" not in template else self._today
        parts = (self.backend.to_str(), template, self.special_tokens, self.variables, today)
        text = repr([*parts, self.stop_ids, self.bos_id])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def _today(self) -> str:
        return self.date or f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"

    def encode(self, text: str) -> np.ndarray:
        """Text -> ids, int32 [T]; special tokens only where the text spells them.

        Raises ValueError for text with half of a character (a lone surrogate).
        """
        if not text.isascii() and (half := _LONE.search(text)):
            raise ValueError(
                f"half of a character (the lone surrogate {half[0]!r}) at character "
                f"{half.start() + 1} of a text: write the whole character, or leave it out"
            )
        # a batch leaves the interpreter to other threads, the watchdog's among them
        (encoding,) = self.backend.encode_batch([text], add_special_tokens=False)
        ids = np.array(encoding.ids, np.int32)
        if _BREAK not in text:
            return ids
        return ids[[text[start:end] != _BREAK for start, end in encoding.offsets]]

    def _encode_behind(self, before: str, text: str) -> np.ndarray:
        """Ids of a text that follows another one, int32 [T]: SentencePiece begins a text with a
        space of its own, which it does not have there. Where a token would span both, alone."""
        if not before or not _begins_with_space(self):
            return self.encode(text)
        known, whole = self.encode(before), self.encode(before + text)
        count = len(known)
        starts = self.backend.encode(before + text, add_special_tokens=False).offsets[count:]
        apart = np.array_equal(whole[:count], known) and all(at >= len(before) for at, _ in starts)
        return whole[count:] if apart else self.encode(text)

    def plain(self, text: str) -> str:
        """A text of others, of which `encode` makes no control token, whatever it spells: none of
        the special ones, nor of those that the chat template writes."""
        spelled = _control_tokens(self)
        return spelled.sub(lambda t: t[0][0] + _BREAK + t[0][1:], text.replace(_BREAK, "\ufffd"))

    def count(self, text: str, enough: int) -> int:
        """Tokens of a text, or a bound of them that is at most `enough`."""
        most = 1 + len(text.encode("utf-8", "surrogatepass"))  # some put a token before the text
        # a normalizer may make several characters of one that is not ASCII
        if most <= enough and (text.isascii() or self.backend.normalizer is None):
            return most
        return len(self.encode(text))

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Ids -> text; unused ids give "", bytes that are not UTF-8 give U+FFFD."""
        used = np.asarray(ids, np.int64).ravel()
        used = used[(used >= 0) & (used < self.vocab_size)]
        return self.backend.decode(used.tolist(), skip_special_tokens=skip_special)

    def render(
        self,
        prompt: str | Messages,
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The model's input text: a string unchanged, messages through the chat template.

        A prompt that ends with the assistant's message is left open there. `variables`: of the
        template, {"tools": [...]}; None: those of a Conversation (data/example.py). Raises
        ValueError without a template, and for messages that it rejects or leaves out.
        """
        if isinstance(prompt, str):
            return prompt
        messages = checked(prompt)
        variables = getattr(prompt, "variables", {}) if variables is None else variables
        if add_generation_prompt and messages and messages[-1]["role"] == "assistant":
            text = message_parts.continued(
                messages, lambda open: self._written(open, variables, False)
            )
        else:
            text = self._written(messages, variables, add_generation_prompt)
        message_parts.check_contents(messages, text)
        for i in self._left_out(messages, variables):
            raise message_parts.left_out(i, messages[i])
        return text

    def _left_out(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> list[int]:
        """Messages that the template leaves out, though the text has what they say elsewhere."""
        if all(message.keys() == {"role", "content"} for message in messages):
            lost = _tried(self, tuple(message["role"] for message in messages))[0]
            return [i for i in lost if messages[i]["content"]]
        probes = [message_parts.with_probes(i, message) for i, message in enumerate(messages)]
        try:
            written = self._written([message for message, _ in probes], variables, False)
        except ValueError:  # it writes other conversations
            return []
        text = message_parts.squeezed(written)
        return [i for i, (_, words) in enumerate(probes) if any(word not in text for word in words)]

    def _written(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        add_generation_prompt: bool,
        marked: bool = False,
    ) -> str:
        """The chat template's text of messages."""
        if self.chat_template is None:
            raise ValueError(
                "the model has no chat template: use prompts that are strings, not messages, or "
                "an instruction-tuned model"
            )
        own = {**self.variables, **variables}
        chat.check_names(self.chat_template, own)
        given = {
            **{"tools": None, "documents": None},
            **self.special_tokens,
            **own,
            "messages": in_parts(self.chat_template, messages),
            "add_generation_prompt": add_generation_prompt,
        }
        return chat.render(self.chat_template, given, date=self.date, marked=marked)

    def encode_prompt(self, prompt: str | Messages) -> tuple[str, np.ndarray]:
        """The model's input text (see render) and its ids, int32 [T]."""
        text = self.render(prompt)
        return text, self.encode(text)

    def encode_answer(self, prompt: str | Messages, answer: str | Messages) -> np.ndarray:
        """Ids of a reference answer, as the model would have sampled it, int32 [T].

        The last id ends the turn: by the chat template, or for a plain-text prompt by the end
        token. An answer in messages is the last one, with its thought; see chat/message_parts.py.
        """
        turn = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer[-1]
        (turn,) = checked([turn])
        if isinstance(prompt, str):
            if message_parts.called(turn):
                raise ValueError("an answer that calls tools needs a prompt of messages, not text")
            ids = self._encode_behind(prompt, message_parts.in_text(turn))
            return np.append(ids, np.int32(self.stop_ids[0]))
        turns = message_parts.with_answer(prompt, turn)
        given = getattr(prompt, "variables", {})
        whole = self.render(turns, add_generation_prompt=False, variables=given)
        self.check_end(message["role"] for message in turns)
        before = self.render(prompt)
        text = message_parts.answer_text(before, whole, turn)
        ids = self._encode_behind(before, message_parts.up_to_end(turn, text, self._ends))
        if len(ids) and ids[-1] in self.stop_ids:
            return ids
        spelled = [id for end, id in self._ends.items() if end in self.chat_template]
        return np.append(ids, np.int32((spelled or self.stop_ids)[-1]))

    @property
    def _ends(self) -> dict[str, int]:
        """The stop ids by their spellings."""
        spelled = {self.backend.id_to_token(end): end for end in self.stop_ids}
        return {text: end for text, end in spelled.items() if text}

    def encode_generated(self, prompt: Messages) -> tuple[str, np.ndarray, np.ndarray]:
        """A conversation of which the text within {% generation %} is learned.

        Returns (the text before the first of it, ids int32 [T], whether each is learned, bool [T]).
        Raises ValueError for a template that marks none, or no end token.
        """
        given = getattr(prompt, "variables", {})
        marked = self._written(checked(prompt), given, False, marked=True)
        pieces = re.split("|".join(MARKS), marked)
        text = self.render(prompt, add_generation_prompt=False)
        encoding = self.backend.encode(text, add_special_tokens=False)
        ids, (starts, ends) = np.array(encoding.ids, np.int32), np.array(encoding.offsets).T
        at = np.cumsum([len(piece) for piece in pieces])
        within = [(starts < b) & (ends > a) for a, b in zip(at[::2], at[1::2], strict=False)]
        if "".join(pieces) != text or not pieces[0] or not within:
            raise ValueError(
                "the chat template marks nothing behind a prompt by {% generation %}: give the "
                "model one that does, or use data.train_on=answer"
            )
        if not np.isin(ids[within[-1]], self.stop_ids).any():
            raise ValueError("the chat template's {% generation %} has no end token of an answer")
        return pieces[0], ids, np.any(within, axis=0)

    def check_end(self, roles: Iterable[str] = ("user", "assistant")) -> None:
        """Raises ValueError if the template ends an answer, the last of a conversation of such
        roles, with control tokens of which none ends a response."""
        spelled = _control_tokens(self).findall(_tried(self, tuple(roles))[1])
        if spelled and not {self.backend.token_to_id(t) for t in spelled} & set(self.stop_ids):
            raise ValueError(
                f"the chat template ends an answer with {spelled[0]!r}, which ends no response: "
                "add its id to eos_token_id of generation_config.json"
            )

    def is_chat(self, text: str) -> bool:
        """Whether a rendered prompt is a conversation: it has the end of a user's message."""
        try:
            behind = self.render([{"role": "user", "content": ANSWER}]).partition(ANSWER)[2]
        except ValueError:  # no template, or one of other conversations
            return False
        behind = behind.removesuffix(message_parts.begun(behind))
        return bool(behind.strip()) and behind in text

    def encode_turn(
        self,
        text: str | Sequence[str],
        *,
        role: str = "user",
        variables: Mapping[str, Any] | None = None,
    ) -> np.ndarray:
        """Ids of a turn of `role` that follows the model's own, int32 [T].

        They are appended to the sampled end token: the template's text after it, the turn, in which
        `text` makes no control token, and the start of the model's next turn. Several texts are
        messages one after the other. `variables` as of render. Raises ValueError if the template
        cannot render such a turn.
        """
        texts = [text] if isinstance(text, str) else text
        turns = [{"role": role, "content": self.plain(each)} for each in texts]
        whole = self.render([*ANSWERED, *turns], variables=variables)
        behind = whole.partition(ANSWER)[2]
        if not all(message_parts.has_contents(turn, behind) for turn in turns):
            raise ValueError(
                f"the chat template does not write a turn of {role!r} behind the answer before it: "
                "use another role, or return token ids from the environment"
            )
        return self.encode_behind_answer(whole, role)

    def encode_behind_answer(self, whole: str, role: str) -> np.ndarray:
        """Ids of what follows the end token of an answer, int32 [T].

        `whole`: as the template renders ANSWERED and a turn of `role`, or where that begins.
        Raises ValueError if there is no end token.
        """
        ids = self.encode(whole.partition(ANSWER)[2])
        ends = np.flatnonzero(np.isin(ids, self.stop_ids))
        if not len(ends):
            raise ValueError(
                f"the chat template has no end of an answer before a turn of {role!r}: return "
                "token ids from the environment, or use plain-text prompts"
            )
        return ids[ends[0] + 1 :]


@functools.lru_cache(maxsize=16)
def _begins_with_space(tokenizer: Tokenizer) -> bool:
    """Whether the tokenizer begins each text with a space of its own."""
    first = tokenizer.backend.encode("x", add_special_tokens=False).tokens[:1]
    return bool(first) and first[0].startswith("▁")


@functools.lru_cache(maxsize=16)
def _control_tokens(tokenizer: Tokenizer) -> re.Pattern[str]:
    """The spellings of special tokens, and of tags like <think> that the chat template writes."""
    written, tag = tokenizer.chat_template or "", re.compile(r"\W\S+\W")
    tokens = [
        token.content
        for id, token in tokenizer.backend.get_added_tokens_decoder().items()
        if token.special
        or id in tokenizer.stop_ids
        or (tag.fullmatch(token.content) and token.content in written)
    ]
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")


@functools.lru_cache(maxsize=256)
def _tried(tokenizer: Tokenizer, roles: tuple[str, ...]) -> tuple[tuple[int, ...], str]:
    """(messages that the template leaves out of a conversation of these roles, text behind it).

    Found by contents that occur nowhere else: "5" may be in the text of another message.
    """
    words = [f"zq{i}qz" for i in range(len(roles))]
    messages = [{"role": r, "content": word} for r, word in zip(roles, words, strict=True)]
    try:
        text = tokenizer._written(messages, {}, False)
    except ValueError:  # it writes other conversations
        return (), ""
    found = message_parts.squeezed(text)
    lost = tuple(i for i, word in enumerate(words) if word not in found)
    return lost, text.partition(words[-1])[2]
