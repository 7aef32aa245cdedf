"""Tokenizer: text <-> token ids, and conversations -> text by the model's own chat template.

Made from a Hugging Face folder, from GGUF metadata, or byte-level for random models. All three are
a `tokenizers` tokenizer with the ids that generation needs.
"""

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from distflow_jax.images.placing import ANSWERED
from distflow_jax.models.chat import render as chat
from distflow_jax.models.chat.message_parts import in_parts
from distflow_jax.models.chat.render import MOST_TEMPLATE
from distflow_jax.parsing.checked_fields import IDS, OBJECTS, SIZE, TEXT, Kind, check_fields
from distflow_jax.parsing.json_text import MOST_FILE_BYTES, read_json_object, read_text
from distflow_jax.parsing.one_line import one_line, shown

Messages = Sequence[Mapping[str, Any]]  # [{"role": "user", "content": "..."}, ...]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BYTE_LEVEL_SPECIALS = ("<|pad|>", "<|im_start|>", "<|im_end|>")

# Tokens that end a turn; those in the chat template end a response, like the end token.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|eom_id|>")

_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")

# GGUF's `tokenizer.ggml.pre` -> pre-tokenizer, which splits text before the byte-pair merges.
_GGUF_PRE = {
    "default": "gpt-2",
    "gpt-2": "gpt-2",
    "smollm": "digits",
    "starcoder": "digits",
    "refact": "digits",
    "command-r": "digits",
    "codeshell": "digits",
    "llama-bpe": "llama3",
    "llama3": "llama3",
    "llama-v3": "llama3",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
}
_SETTINGS_KINDS = {  # of the JSON files beside tokenizer.json
    "eos_token_id": IDS.or_null(),
    "chat_template": Kind(
        "text, or a list of objects with name and template",
        lambda value: value is None or TEXT.fits(value) or OBJECTS.fits(value),
    ),
}
_NAMED_TEMPLATE = {"name": TEXT, "template": TEXT}
_LONE = re.compile("[\ud800-\udfff]")
_GGUF_CONTROL, _GGUF_USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type


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

    @classmethod
    def from_folder(cls, path: str | Path, *, most: int | None = None) -> "Tokenizer":
        """Reads tokenizer.json of a Hugging Face folder and the settings beside it.

        Added tokens with ids of `most` or above are dropped; their spelling is then plain text.
        Raises FileNotFoundError without tokenizer.json, ValueError for invalid files.
        """
        return _from_folder(Path(path), most)

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any]) -> "Tokenizer":
        """Reads GGUF metadata of a byte-level BPE tokenizer (`tokenizer.ggml.model` "gpt2").

        Raises ValueError for any other kind and for invalid metadata.
        """
        return _from_gguf(fields)

    @classmethod
    def byte_level(cls, vocab_size: int) -> "Tokenizer":
        """One id per byte, then <|pad|>, <|im_start|>, <|im_end|>; higher ids are unused."""
        return _byte_level(vocab_size)

    def encode(self, text: str) -> np.ndarray:
        """Text -> ids, int32 [T]; special tokens only where the text spells them.

        Raises ValueError for text with half of a character (a lone surrogate).
        """
        if not text.isascii() and (half := _LONE.search(text)):
            raise ValueError(
                f"half of a character (the lone surrogate {half[0]!r}) at character "
                f"{half.start() + 1} of a text: write the whole character, or leave it out"
            )
        return np.array(self.backend.encode(text, add_special_tokens=False).ids, np.int32)

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

        `tools`: JSON schemas of functions, for templates that list them in the prompt. Raises
        ValueError for messages without a chat template, and for messages that it rejects.
        """
        if isinstance(prompt, str):
            return prompt
        if self.chat_template is None:
            raise ValueError(
                "the model has no chat template: use prompts that are strings, not messages, or "
                "an instruction-tuned model"
            )
        messages = [_checked_message(index, message) for index, message in enumerate(prompt)]
        return chat.render(
            self.chat_template,
            {
                "messages": in_parts(self.chat_template, messages),
                "add_generation_prompt": add_generation_prompt,
                "tools": tools,
                "documents": None,
                **self.special_tokens,
            },
        )

    def encode_prompt(self, prompt: str | Messages) -> tuple[str, np.ndarray]:
        """The model's input text (see render) and its ids, int32 [T]."""
        text = self.render(prompt)
        return text, self.encode(text)

    def encode_answer(self, prompt: str | Messages, answer: str | Messages) -> np.ndarray:
        """Ids of a reference answer, as the model would have sampled it, int32 [T].

        The last id ends the turn: by the chat template, or for a plain-text prompt by the end
        token. An answer in messages is the content of the last one.
        """
        text = answer if isinstance(answer, str) else answer[-1]["content"]
        if isinstance(prompt, str):
            return np.append(self.encode(text), np.int32(self.stop_ids[0]))
        start = self.render(prompt)
        turn = {"role": "assistant", "content": text}
        whole = self.render([*prompt, turn], add_generation_prompt=False)
        if not whole.startswith(start):  # the template renders a generation prompt differently
            return np.append(self.encode(text), np.int32(self._turn_end()))
        ids = self.encode(whole[len(start) :])
        ends = np.flatnonzero(np.isin(ids, self.stop_ids))
        if not len(ends):
            return np.append(ids, np.int32(self._turn_end()))
        return ids[: ends[-1] + 1]  # the model does not sample text after the end of its turn

    def _turn_end(self) -> int:
        """The stop id in the chat template; without one there, the last stop id."""
        spelled = {self.backend.id_to_token(end): end for end in self.stop_ids}
        written = [end for token, end in spelled.items() if token and token in self.chat_template]
        return written[-1] if written else self.stop_ids[-1]

    def is_chat(self, text: str) -> bool:
        """Whether a rendered prompt is a chat conversation that ends where the answer begins."""
        if self.chat_template is None:
            return False
        message = [{"role": "user", "content": "."}]
        asked = self.render(message, add_generation_prompt=False)
        return text.endswith(self.render(message).removeprefix(asked))

    def encode_turn(self, text: str, *, role: str = "user") -> np.ndarray:
        """Ids of a turn of `role` that follows the model's own, int32 [T].

        They are appended to the sampled end token: the template's text after it, the turn, and the
        start of the model's next turn. Raises ValueError if the template cannot render such a turn.
        """
        whole = self.render([*ANSWERED, {"role": role, "content": text}])
        return self.encode_behind_answer(whole, role)

    def encode_behind_answer(self, whole: str, role: str) -> np.ndarray:
        """Ids of what follows the end token of an answer, int32 [T].

        `whole`: as the template renders ANSWERED and a turn of `role`, or where that begins.
        Raises ValueError if there is no end token.
        """
        start = self.render(ANSWERED[:1])
        ids = self.encode(whole.removeprefix(start))
        ends = np.flatnonzero(np.isin(ids, self.stop_ids))
        if not whole.startswith(start) or not len(ends):
            raise ValueError(
                f"the chat template has no end of an answer before a turn of {role!r}: return "
                "token ids from the environment, or use plain-text prompts"
            )
        return ids[ends[0] + 1 :]


def _from_folder(path: Path, most: int | None) -> Tokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise FileNotFoundError(
            f"{path} has no tokenizer.json: save the model's fast tokenizer there"
        )
    if file.stat().st_size > MOST_FILE_BYTES:
        raise ValueError(f"{file} has more than {MOST_FILE_BYTES} bytes: no tokenizer has")
    with _package_errors(f"{file} cannot be read"):
        if most is None:
            backend = tokenizers.Tokenizer.from_file(str(file))
        else:
            backend = tokenizers.Tokenizer.from_str(_without_added(file, most))
    backend.no_truncation()
    backend.no_padding()
    special = {}
    settings = _read_json(path / "tokenizer_config.json")
    for source in (_read_json(path / "special_tokens_map.json"), settings):
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            value = source.get(name)
            value = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(value, str):
                special[name] = value
    stop = [special.get("eos_token")]
    for name in ("generation_config.json", "config.json"):
        ids = _read_json(path / name).get("eos_token_id")
        stop += ids if isinstance(ids, list) else [ids]
    template_file = path / "chat_template.jinja"
    if template_file.is_file():
        template = read_text(template_file, MOST_TEMPLATE)
    else:
        template = settings.get("chat_template")
    if isinstance(template, list):  # several named ones
        place = f"{path / 'tokenizer_config.json'}: chat_template"
        for entry in template:
            named = {key: entry.get(key) for key in _NAMED_TEMPLATE}
            check_fields(named, _NAMED_TEMPLATE, place)
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return _assemble(backend, special, stop, template, origin=str(path))


def _without_added(file: Path, most: int) -> str:
    """A tokenizer.json without the added tokens with ids of `most` or above."""
    content = read_json_object(file)
    check_fields(content, {"added_tokens": OBJECTS.or_null()}, str(file))
    added = content.get("added_tokens") or []
    for token in added:
        check_fields({"id": token.get("id")}, {"id": SIZE}, f"{file}: added_tokens")
    kept = [token for token in added if token["id"] < most]
    return json.dumps({**content, "added_tokens": kept})


@contextlib.contextmanager
def _package_errors(place: str) -> Iterator[None]:
    """Turns what `tokenizers` raises, in Rust a panic too, into a ValueError that names a place."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # the package raises nothing narrower
        raise ValueError(f"{place}: {one_line(str(error))}") from error


def _from_gguf(fields: Mapping[str, Any]) -> Tokenizer:
    kind = fields.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ValueError(
            f"GGUF tokenizer {kind!r} is not supported, only byte-level BPE ('gpt2'): use the "
            "model's Hugging Face folder with tokenizer.json"
        )
    pre = fields.get("tokenizer.ggml.pre", "default")
    if pre not in _GGUF_PRE:
        raise ValueError(
            f"GGUF pre-tokenizer {pre!r} is not supported, only {', '.join(sorted(_GGUF_PRE))}"
        )
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        if key not in fields:
            raise ValueError(f"GGUF metadata lacks {key}")
    tokens = fields["tokenizer.ggml.tokens"]
    style = _GGUF_PRE[pre]
    with _package_errors("GGUF metadata holds no valid tokenizer"):
        model = models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]],
            # Llama 3 looks a whole word up in the vocabulary before it applies merges.
            ignore_merges=style == "llama3",
        )
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = _pre_tokenizer(style)
    backend.decoder = decoders.ByteLevel()
    if style == "qwen2":
        backend.normalizer = normalizers.NFC()
    types = fields.get("tokenizer.ggml.token_type", ())
    added = [
        tokenizers.AddedToken(token, normalized=False, special=kind == _GGUF_CONTROL)
        for token, kind in zip(tokens, types, strict=False)
        if kind in (_GGUF_CONTROL, _GGUF_USER_DEFINED)
    ]
    # both kinds in one call, in the order of their ids; add_tokens respects `special` of each
    backend.add_tokens(added)
    special = {}
    for name, key in (
        ("bos_token", "bos"),
        ("eos_token", "eos"),
        ("pad_token", "padding"),
        ("unk_token", "unknown"),
    ):
        index = fields.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None and index < len(tokens):
            special[name] = tokens[index]
    stop = [fields.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    if style == "qwen2":
        # the metadata has one end token; generation_config.json, its source, has both
        stop.append("<|endoftext|>")
    return _assemble(
        backend, special, stop, fields.get("tokenizer.chat_template"), origin="GGUF metadata"
    )


def _byte_level(vocab_size: int) -> Tokenizer:
    used = 256 + len(BYTE_LEVEL_SPECIALS)
    if vocab_size < used:
        raise ValueError(f"a byte-level tokenizer needs a vocabulary of {used}, got {vocab_size}")
    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(BYTE_LEVEL_SPECIALS))
    special = {"pad_token": "<|pad|>", "eos_token": "<|im_end|>"}
    tokenizer = _assemble(backend, special, ["<|im_end|>"], CHATML, origin="byte level")
    return dataclasses.replace(tokenizer, vocab_size=vocab_size)


def _byte_characters() -> list[str]:
    """The printable character of byte-level BPE for each byte (Radford et al. 2019)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _pre_tokenizer(style: str) -> pre_tokenizers.PreTokenizer:
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if style == "gpt-2":
        return whole
    if style == "digits":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole])
    words = tokenizers.Regex(_LLAMA3_WORDS if style == "llama3" else _QWEN2_WORDS)
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _assemble(
    backend: tokenizers.Tokenizer,
    special: Mapping[str, str],
    stop: Sequence[str | int | None],
    template: str | None,
    *,
    origin: str,
) -> Tokenizer:
    """Resolves special tokens to ids; `stop` holds spellings and ids, and None is skipped."""
    stop = [backend.token_to_id(end) if isinstance(end, str) else end for end in stop]
    stop += [backend.token_to_id(end) for end in _TURN_ENDS if template and end in template]
    stop_ids = tuple(dict.fromkeys(end for end in stop if end is not None))
    if not stop_ids:
        raise ValueError(f"the tokenizer of {origin} has no end token: set eos_token")
    ids = {name: backend.token_to_id(token) for name, token in special.items()}
    pad_id = ids.get("pad_token")
    return Tokenizer(
        backend=backend,
        vocab_size=1 + max(backend.get_vocab(with_added_tokens=True).values()),
        pad_id=stop_ids[0] if pad_id is None else pad_id,
        bos_id=ids.get("bos_token"),
        stop_ids=stop_ids,
        chat_template=template,
        special_tokens=dict(special),
    )


def _read_json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    found = read_json_object(path)
    check_fields(found, _SETTINGS_KINDS, str(path))
    return found


def _checked_message(index: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
        raise ValueError(
            f"message {index} must be a dict with role and content, got {shown(message)}"
        )
    return dict(message)
