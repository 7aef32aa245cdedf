"""Text of a response while its tokens come: whole characters only, cut at stop strings."""

import functools
from collections.abc import Sequence

from distflow_jax.models.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"  # what a decoder writes for bytes that are no (or not yet a) character
_CONTEXT = 4  # tokens that the next is decoded after: as many as an unfinished character may have
_MOST_CONTEXT = 8  # from so many on the context is cut


class TextStream:
    """Token ids in, text out as soon as it cannot change any more.

    A token may end within a character, and the text of a token may depend on the one before it, so
    the last tokens are decoded together. What can still change depends on the tokenizer's decoder:

    - A decoder of bytes writes one replacement character for the start of a character, however many
      bytes of it are there. Only that last one can change, and it begins in the last three tokens.
    - A decoder with byte fallback reads a run of byte tokens as a whole: one byte that fits nowhere
      makes replacement characters of them all. The run is held until a token of text ends it.

    Tokens without text are no part of either. All pieces and `rest` together are `tokenizer.decode`
    of all ids.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._silent, self._bytes = _kinds(tokenizer)
        self._window: list[int] = []  # ids that are decoded together
        self._given = 0  # characters of their text that have been given out

    def push(self, token: int) -> str:
        """Text that this token completes, often that of the token, sometimes ""."""
        if token in self._silent or not self._has_spelling(token):
            return ""
        self._window.append(token)
        if token in self._bytes:
            return ""
        text = self._tokenizer.decode(self._window)
        held = 1 if text.endswith(_UNFINISHED) and not self._bytes else 0
        piece = text[self._given : len(text) - held]
        self._given += len(piece)
        if len(self._window) >= _MOST_CONTEXT:
            del self._window[:-_CONTEXT]
            self._given = len(self._tokenizer.decode(self._window)) - held
        return piece

    def _has_spelling(self, token: int) -> bool:
        tokenizer = self._tokenizer
        return 0 <= token < tokenizer.vocab_size and bool(tokenizer.backend.id_to_token(token))

    def rest(self) -> str:
        """The text that is still held back once no token follows."""
        text = self._tokenizer.decode(self._window)
        piece = text[self._given :]
        self._given = len(text)
        return piece


@functools.lru_cache(maxsize=8)
def _kinds(tokenizer: Tokenizer) -> tuple[frozenset[int], frozenset[int]]:
    """Special ids, and those that the decoder reads as single bytes (byte fallback)."""
    backend = tokenizer.backend
    added = backend.get_added_tokens_decoder()
    silent = frozenset(index for index, token in added.items() if token.special)
    spelled = (f"<0x{byte:{style}}>" for byte in range(256) for style in ("02X", "02x"))
    found = (backend.token_to_id(spelling) for spelling in spelled)
    ids = frozenset(index for index in found if index is not None) - silent
    # without the fallback they are text: "<0xFF>"
    last = backend.token_to_id("<0xFF>")
    falls_back = last in ids and tokenizer.decode([last]) == _UNFINISHED
    return silent, ids if falls_back else frozenset()


class StopText:
    """Text in, text out up to the first stop string; what may be the start of one waits."""

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """The text certainly before any stop string. Sets `stopped` when one is complete."""
        text = self._held + piece
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        wait = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - wait :]
        return text[: len(text) - wait]

    def rest(self) -> str:
        """The text that was held back, once no text follows."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that are a start of `stop`, but not the whole of it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
