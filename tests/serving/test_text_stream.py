"""Text while tokens come: the same text in the end, never half a character, cut at stop strings."""

import random

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.serving.text_stream import StopText, TextStream


def fallback(*more):
    """A tokenizer that spells what its vocabulary lacks byte by byte, as Gemma's and Llama 2's."""
    words = ["<unk>", "</s>", "<s>", "▁", "a", "b", "▁a", "né", "\ufffd"]
    vocab = {word: index for index, word in enumerate([*words, *map("<0x{:02X}>".format, BYTE)])}
    merges = [("▁", "a")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>")
    )
    backend.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *more]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["</s>", "<s>"])
    return Tokenizer(backend=backend, vocab_size=320, pad_id=1, bos_id=None, stop_ids=(1,))


class Counted:
    """A tokenizer that counts the ids that it decodes."""

    def __init__(self, tokenizer):
        self._tokenizer, self.decoded = tokenizer, 0

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def decode(self, ids):
        self.decoded += len(ids)
        return self._tokenizer.decode(ids)


BYTE = range(256)
BYTES = Tokenizer.byte_level(320)
FALLBACK = fallback()
STRIPPED = fallback(decoders.Strip(" ", 1, 0))  # Llama 2's: without the first space
TEXTS = ["", "plain", "né 你好 🙂🙃 ﷽", "\ufffd real \ufffd", "<|im_start|>é<|im_end|>x", "é" * 50]


def streamed(tokenizer, ids):
    stream = TextStream(tokenizer)
    pieces = [stream.push(int(i)) for i in ids]
    return [*pieces, stream.rest()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_the_text(text, smollm2):
    for tokenizer in (BYTES, FALLBACK, STRIPPED, smollm2.tokenizer):
        ids = tokenizer.encode(text)
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_any_ids_are_their_text(seed, smollm2):
    """Bytes that are no UTF-8, ids without a meaning, special tokens within a character."""
    rng = np.random.default_rng(seed)
    cases = ((BYTES, 320), (FALLBACK, 320), (STRIPPED, 320), (smollm2.tokenizer, 49_152))
    for tokenizer, high in cases:
        ids = rng.integers(0, high, 60)
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.fixture(scope="module")
def parts(smollm2):
    """Ids that begin or end within a character."""
    return [i for i in range(49_152) if "\ufffd" in smollm2.tokenizer.decode([i])]


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_parts_of_characters_are_their_text(seed, smollm2, parts):
    """Tokens that end one character and begin another, and words between runs of bytes."""
    rng = np.random.default_rng(seed)
    ids = rng.choice(parts, 200)
    assert "".join(streamed(smollm2.tokenizer, ids)) == smollm2.tokenizer.decode(ids)
    words = ["你", "😀", "é", "a", " ", " a", "\ufffd", "\n"]
    ids = [FALLBACK.encode(words[i]) for i in rng.integers(0, len(words), 50)]
    noise = [rng.integers(0, 320, rng.integers(0, 2)) for _ in ids]  # between the characters
    ids = np.concatenate([x for pair in zip(ids, noise, strict=True) for x in pair])
    for tokenizer in (FALLBACK, STRIPPED):
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_character_comes_whole():
    pieces = streamed(BYTES, BYTES.encode("a🙂b"))
    assert pieces == ["a", "", "", "", "🙂", "b", ""]


def test_a_character_that_stays_unfinished_comes_at_the_end():
    assert streamed(BYTES, BYTES.encode("a🙂")[:3]) == ["a", "", "", "\ufffd"]


def test_a_run_of_bytes_comes_whole_and_words_come_at_once():
    """Bytes that follow could still make what is whole by itself unreadable."""
    ids = [*FALLBACK.encode("a你b😀a a"), 2, 319, 7]
    pieces = ["a", "", "", "", "你b", "", "", "", "", "😀a", " a", "", "", "né", ""]
    assert streamed(FALLBACK, ids) == pieces
    assert streamed(FALLBACK, FALLBACK.encode("b😀")) == ["b", "", "", "", "", "😀"]
    ids = FALLBACK.encode("b😀你a")
    assert streamed(FALLBACK, np.delete(ids, 6))[-2:] == ["\ufffd" * 6 + "a", ""]


@pytest.mark.parametrize(
    "tokenizer, run",
    [
        (BYTES, [257]),  # a special token
        (BYTES, [310]),  # an id without a meaning
        (BYTES, [255]),  # a byte that is no UTF-8
        (BYTES, [0xE4]),
        (BYTES, list("\ufffd".encode())),
        (BYTES, [97, 257]),
        (FALLBACK, [2]),
        (FALLBACK, [319]),
        (FALLBACK, [9 + 255]),
        (FALLBACK, [9 + byte for byte in "你".encode()]),
        (FALLBACK, [8]),  # U+FFFD itself
        (STRIPPED, [3]),
        (STRIPPED, [9 + 255, 4]),
    ],
)
def test_the_cost_of_a_token_does_not_grow(tokenizer, run):
    tokenizer, ids = Counted(tokenizer), (run * 2000)[:2000]
    text = "".join(streamed(tokenizer, ids))
    assert tokenizer.decoded <= 16 * 2000
    assert text == tokenizer.decode(ids)


def cut(pieces, stops):
    stop = StopText(stops)
    out = []
    for piece in pieces:
        out.append(stop.push(piece))
        if stop.stopped:
            return "".join(out), True
    return "".join(out) + stop.rest(), False


@pytest.mark.parametrize("seed", range(50))
def test_cut_at_the_stop_string_that_is_complete_first(seed):
    """However the text comes in pieces: over two letters, stop strings overlap all the time."""
    rng = random.Random(seed)
    text = "".join(rng.choices("ab", k=30))
    stops = ["".join(rng.choices("ab", k=rng.randint(1, 8))) for _ in range(rng.randint(0, 3))]
    for _ in range(10):
        cuts = sorted(rng.choices(range(31), k=rng.randint(0, 12)))
        pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, 30], strict=True)]
        whole, stopped = cut(pieces, stops)
        assert stopped == any(s in text for s in stops)
        assert text.startswith(whole)
        if not stopped:
            assert whole == text
        assert not any(s in whole for s in stops)
    letters, _ = cut(text, stops)
    ends = [text.find(s) + len(s) for s in stops if s in text]
    starts = [text.find(s) for s in stops if s in text and text.find(s) + len(s) == min(ends)]
    assert letters == (text[: min(starts)] if starts else text)


def test_only_what_may_be_a_stop_string_waits():
    stop = StopText(["END", "\n\n"])
    assert [stop.push(p) for p in ("x E", "N", "x\n", "y\n")] == ["x ", "", "ENx", "\ny"]
    assert stop.rest() == "\n" and not stop.stopped
