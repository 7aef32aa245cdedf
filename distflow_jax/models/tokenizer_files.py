"""The parts of a tokenizer, read from a Hugging Face folder or GGUF metadata, or made of bytes."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from distflow_jax.models.chat.render import MOST_TEMPLATE
from distflow_jax.parsing.checked_fields import IDS, OBJECTS, SIZE, TEXT, Kind, check_fields
from distflow_jax.parsing.json_text import MOST_FILE_BYTES, read_json_object, read_text
from distflow_jax.parsing.one_line import one_line

Parts = dict[str, Any]  # fields of Tokenizer by their names

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
_GGUF_CONTROL, _GGUF_USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type


def read_folder(path: Path, most: int | None) -> Parts:
    """The parts of a Hugging Face folder, see Tokenizer.from_folder."""
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
    extra = settings.get("extra_special_tokens")  # by name, or a list
    sources = _read_json(path / "special_tokens_map.json"), settings, extra
    for source in sources:
        for name, value in source.items() if isinstance(source, Mapping) else ():
            value = value.get("content") if isinstance(value, Mapping) else value
            if name.endswith("_token") and isinstance(value, str):
                special[name] = value
    stop = [special.get("eos_token")]
    for name in ("generation_config.json", "config.json"):
        ids = _read_json(path / name).get("eos_token_id")
        stop += ids if isinstance(ids, list) else [ids]
    template_file = path / "chat_template.jinja"
    if template_file.is_file():
        template = read_text(template_file, MOST_TEMPLATE)
    else:
        older = _read_json(path / "chat_template.json")  # of processors, with the images' models
        template = settings.get("chat_template") or older.get("chat_template")
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


def read_gguf(fields: Mapping[str, Any], origin: str) -> Parts:
    """The parts in GGUF metadata, see Tokenizer.from_gguf."""
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
    template = fields.get("tokenizer.chat_template")
    return _assemble(backend, special, stop, template, origin=origin)


def byte_level(vocab_size: int) -> Parts:
    """The parts of a tokenizer with one id per byte, see Tokenizer.byte_level."""
    used = 256 + len(BYTE_LEVEL_SPECIALS)
    if vocab_size < used:
        raise ValueError(f"a byte-level tokenizer needs a vocabulary of {used}, got {vocab_size}")
    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(BYTE_LEVEL_SPECIALS))
    special = {"pad_token": "<|pad|>", "eos_token": "<|im_end|>"}
    parts = _assemble(backend, special, ["<|im_end|>"], CHATML, origin="byte level")
    return parts | {"vocab_size": vocab_size}


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
) -> Parts:
    """Resolves special tokens to ids; `stop` holds spellings and ids, and None is skipped."""
    stop = [backend.token_to_id(end) if isinstance(end, str) else end for end in stop]
    stop += [backend.token_to_id(end) for end in _TURN_ENDS if template and end in template]
    stop_ids = tuple(dict.fromkeys(end for end in stop if end is not None))
    if not stop_ids:
        unknown = f" ({special['eos_token']!r} is none)" if "eos_token" in special else ""
        raise ValueError(
            f"the tokenizer of {origin} has no end token: set eos_token to one of its tokens"
            f"{unknown}"
        )
    ids = {name: backend.token_to_id(token) for name, token in special.items()}
    pad_id = ids.get("pad_token")
    return {
        "backend": backend,
        "vocab_size": 1 + max(backend.get_vocab(with_added_tokens=True).values()),
        "pad_id": stop_ids[0] if pad_id is None else pad_id,
        "bos_id": ids.get("bos_token"),
        "stop_ids": stop_ids,
        "chat_template": template,
        "special_tokens": dict(special),
        "origin": origin,
    }


def _read_json(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    found = read_json_object(path)
    check_fields(found, _SETTINGS_KINDS, str(path))
    return found
