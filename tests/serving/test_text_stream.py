"""Text while tokens come: the same text in the end, never half a character, cut at stop strings."""

import random

import numpy as np
import pytest

from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.serving.text_stream import StopText, TextStream

BYTES = Tokenizer.byte_level(320)
TEXTS = ["", "plain", "né 你好 🙂🙃 ﷽", "\ufffd real \ufffd", "<|im_start|>é<|im_end|>x", "é" * 50]


def streamed(tokenizer, ids):
    stream = TextStream(tokenizer)
    pieces = [stream.push(int(i)) for i in ids]
    return [*pieces, stream.rest()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_the_text(text, smollm2):
    for tokenizer in (BYTES, smollm2.tokenizer):
        ids = tokenizer.encode(text)
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("seed", range(20))
def test_pieces_of_any_ids_are_their_text(seed, smollm2):
    """Bytes that are no UTF-8, ids without a meaning, special tokens within a character."""
    rng = np.random.default_rng(seed)
    for tokenizer, high in ((BYTES, 320), (smollm2.tokenizer, 49_152)):
        ids = rng.integers(0, high, 60)
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_character_comes_whole():
    pieces = streamed(BYTES, BYTES.encode("a🙂b"))
    assert pieces == ["a", "", "", "", "🙂", "b", ""]


def test_a_character_that_stays_unfinished_comes_at_the_end():
    assert streamed(BYTES, BYTES.encode("a🙂")[:3]) == ["a", "", "", "\ufffd"]


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
