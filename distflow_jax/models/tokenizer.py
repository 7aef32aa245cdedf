"""Tokenizer: text <-> token ids, and conversations -> text by the model's own chat template.

Made from a Hugging Face folder, from GGUF metadata, or byte-level for random models. All three are
a `tokenizers` tokenizer with the ids that generation needs.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from distflow_jax.data.example import Conversation
from distflow_jax.images.placing import ANSWER, ANSWERED
from distflow_jax.models import tokenizer_files
from distflow_jax.models.chat import render as chat
from distflow_jax.models.chat import thoughts
from distflow_jax.models.chat.answers import (
    answer_text,
    in_text,
    marked_end,
    until_mark,
    with_answer,
)
from distflow_jax.models.chat.contents import check_contents, left_out, squeezed
from distflow_jax.models.chat.dialect import MARKS
from distflow_jax.models.chat.message_parts import checked, in_parts
from distflow_jax.models.chat.render import check_names

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
    def from_gguf(cls, fields: Mapping[str, Any]) -> "Tokenizer":
        """Reads GGUF metadata of a byte-level BPE tokenizer (`tokenizer.ggml.model` "gpt2").

        Raises ValueError for any other kind and for invalid metadata.
        """
        return cls(**tokenizer_files.read_gguf(fields))

    @classmethod
    def byte_level(cls, vocab_size: int) -> "Tokenizer":
        """One id per byte, then <|pad|>, <|im_start|>, <|im_end|>; higher ids are unused."""
        return cls(**tokenizer_files.byte_level(vocab_size))

    def with_settings(self, variables: Mapping[str, Any], date: str) -> "Tokenizer":
        """The same with data.template_kwargs and data.date. Raises ValueError for variables that
        the chat template does not read."""
        if variables:
            try:
                check_names(self.chat_template or "", variables)
            except ValueError as error:
                raise ValueError(f"data.template_kwargs={dict(variables)}: {error}") from None
        return dataclasses.replace(self, variables=dict(variables), date=date)

    def encode(self, text: str) -> np.ndarray:
        """Text -> ids, int32 [T]; special tokens only where the text spells them.

        Raises ValueError for text with half of a character (a lone surrogate).
        """
        if not text.isascii() and (half := _LONE.search(text)):
            raise ValueError(
                f"half of a character (the lone surrogate {half[0]!r}) at character "
                f"{half.start() + 1} of a text: write the whole character, or leave it out"
            )
        encoding = self.backend.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, np.int32)
        if _BREAK not in text:
            return ids
        return ids[[text[start:end] != _BREAK for start, end in encoding.offsets]]

    def plain(self, text: str) -> str:
        """A text of others, of which `encode` makes no control token, whatever it spells.

        Control tokens are the special ones and those that the chat template writes.
        """
        text = text.replace(_BREAK, "\ufffd")
        return _control_tokens(self).sub(lambda found: f"{found[0][0]}{_BREAK}{found[0][1:]}", text)

    def count(self, text: str, enough: int) -> int:
        """Tokens of a text, or a bound of them that is at most `enough`: a token has a byte."""
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
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The model's input text: a string unchanged, messages through the chat template.

        A prompt that ends with the assistant's message is left open there. `tools`: JSON schemas of
        functions, as in the variables of a Conversation. Raises ValueError for messages that the
        template rejects or does not write in full, and without a template.
        """
        if isinstance(prompt, str):
            return prompt
        messages = checked(prompt)
        variables = {**getattr(prompt, "variables", {}), **({"tools": tools} if tools else {})}
        last = messages[-1] if messages else {}
        if goes_on := add_generation_prompt and last.get("role") == "assistant":
            open_end = [*messages[:-1], marked_end(last)]
            text = until_mark(self._written(open_end, variables, False), last)
        else:
            text = self._written(messages, variables, add_generation_prompt)
        check_contents(messages, variables.get("tools"), text)
        if all(message.keys() == {"role", "content"} for message in messages):
            lost = _left_out(self, tuple(message["role"] for message in messages))
            if lost is not None:
                raise left_out(lost, messages[lost])
        return text

    def _written(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        add_generation_prompt: bool,
        *,
        marked: bool = False,
    ) -> str:
        """What the chat template makes of messages."""
        if self.chat_template is None:
            raise ValueError(
                "the model has no chat template: use prompts that are strings, not messages, or "
                "an instruction-tuned model"
            )
        check_names(self.chat_template, variables)
        given = {
            **{"tools": None, "documents": None},
            **self.special_tokens,
            **self.variables,
            **variables,
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
        token. An answer in messages is the last one, with its thought. See answers.answer_text.
        """
        turn = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer[-1]
        turn = checked([turn])[0]
        if isinstance(prompt, str):
            return np.append(self.encode(in_text(turn)), np.int32(self.stop_ids[0]))

        def whole(turn: Mapping[str, Any]) -> str:
            turns = Conversation(with_answer(prompt, turn), getattr(prompt, "variables", {}))
            return self.render(turns, add_generation_prompt=False)

        def end() -> str:
            behind = whole({"role": "assistant", "content": ANSWER}).partition(ANSWER)[2]
            return self._until_stop(behind)

        text = answer_text(self.render(prompt), whole(turn), turn, end)
        ids = self.encode(text)
        ends = np.flatnonzero(np.isin(ids, self.stop_ids))
        if len(ends):
            return ids[: ends[-1] + 1]  # the model does not sample text after the end of its turn
        end()
        spelled = {self.backend.id_to_token(end): end for end in self.stop_ids}
        written = [id for token, id in spelled.items() if token and token in self.chat_template]
        return np.append(ids, np.int32(written[-1] if written else self.stop_ids[-1]))

    def encode_generated(self, prompt: Messages) -> tuple[str, np.ndarray, np.ndarray]:
        """A conversation whose assistant's turns are learned, with the marks of its template.

        Returns (the text before the first of {% generation %}, ids int32 [T], bool [T] within
        these). Raises ValueError for a template without them.
        """
        text = self.render(prompt, add_generation_prompt=False)
        variables = getattr(prompt, "variables", {})
        marked = self._written(checked(prompt), variables, False, marked=True)
        pieces = re.split("|".join(MARKS), marked)
        if len(pieces) < 2 or "".join(pieces) != text:
            raise ValueError(
                "the chat template marks no text of this conversation by {% generation %}: give "
                "the model one that does, or use data.train_on=answer"
            )
        encoding = self.backend.encode(text, add_special_tokens=False)
        ids, (starts, ends) = np.array(encoding.ids, np.int32), np.array(encoding.offsets).T
        bounds = np.cumsum([len(piece) for piece in pieces])
        within = [
            (starts < b) & (ends > a) for a, b in zip(bounds[::2], bounds[1::2], strict=False)
        ]
        mask = np.any(within, axis=0)
        if mask[:1].any() or not np.isin(ids[within[-1]], self.stop_ids).any():
            raise ValueError(
                "the chat template's {% generation %} begins the conversation, or marks no end "
                "token of the last answer: mend the template, or use data.train_on=answer"
            )
        return pieces[0], ids, mask

    def _until_stop(self, behind: str) -> str:
        """The text behind an answer as far as the token that ends it; "" without one.

        Raises ValueError if another control token ends it.
        """
        ids, token = self.encode(behind), _control_tokens(self).search(behind)
        for end in [self.backend.id_to_token(id) for id in ids if id in self.stop_ids][:1]:
            return behind[: behind.index(end) + len(end)]
        if token:
            raise ValueError(
                f"the chat template ends an answer with {token[0]!r}, which is no end token of the "
                "model: add its id to eos_token_id of generation_config.json"
            )
        return ""

    def check_end(self) -> None:
        """Raises ValueError if the template ends an answer with a token that ends no response."""
        try:
            whole = self.render(ANSWERED, add_generation_prompt=False)
        except ValueError:
            return  # it writes other conversations
        self._until_stop(whole.partition(ANSWER)[2])

    def is_chat(self, text: str) -> bool:
        """Whether a rendered prompt is a conversation: it has the end of a user's message."""
        try:
            behind = self.render([{"role": "user", "content": ANSWER}]).partition(ANSWER)[2]
        except ValueError:  # no template, or one of other conversations
            return False
        behind = behind.removesuffix(thoughts.begun(behind))
        return bool(behind.strip()) and behind in text

    def encode_turn(
        self, text: str, *, role: str = "user", variables: Mapping[str, Any] | None = None
    ) -> np.ndarray:
        """Ids of a turn of `role` that follows the model's own, int32 [T].

        They are appended to the sampled end token: the template's text after it, the turn, and the
        start of the model's next turn. No control token is made of `text`. `variables`: of the
        chat template, as those of a Conversation. Raises ValueError if the template cannot
        render such a turn.
        """
        turn = {"role": role, "content": self.plain(text)}
        whole = self.render(Conversation([*ANSWERED, turn], variables))
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
def _control_tokens(tokenizer: Tokenizer) -> re.Pattern[str]:
    """The spellings of special tokens, and of added ones in the chat template, like <think>."""
    added = tokenizer.backend.get_added_tokens_decoder().values()
    template = tokenizer.chat_template or ""
    spelled = [t.content for t in added if t.special or _is_tag(t.content, template)]
    return re.compile("|".join(map(re.escape, sorted(spelled, key=len, reverse=True))) or r"(?!)")


def _is_tag(token: str, template: str) -> bool:
    """Whether a template writes an added token that is no word and no space."""
    return token in template and len(token.strip()) > 2 and not token[0].isalnum()


@functools.lru_cache(maxsize=256)
def _left_out(tokenizer: Tokenizer, roles: tuple[str, ...]) -> int | None:
    """The first message that the template leaves out of a conversation of these roles.

    Found by contents that occur nowhere else: "5" may be in the text of another message.
    """
    messages = [{"role": role, "content": f"zq{i}qz"} for i, role in enumerate(roles)]
    try:
        text = squeezed(tokenizer._written(messages, {}, False))
    except ValueError:
        return None
    return next((i for i in range(len(roles)) if f"zq{i}qz" not in text), None)
