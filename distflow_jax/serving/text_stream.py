"""Text of a response while its tokens come: whole characters only, cut at stop strings."""

from collections.abc import Sequence

from distflow_jax.models.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"  # what a decoder writes for bytes that are no (or not yet a) character


class TextStream:
    """Token ids in, text out as soon as it cannot change any more.

    A token may end within a character, and the text of a token may depend on the one before it, so
    the last tokens are decoded together. Only the last character can still change: the start of a
    character decodes to one replacement character, however many bytes of it are there.
    All pieces and `rest` together are `tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._window: list[int] = []  # ids that are decoded together
        self._given = 0  # characters of their text that have been given out
        self._last_whole = 0  # ids at the front of the window that end on a character

    def push(self, token: int) -> str:
        """Text that this token completes, often that of the token, sometimes ""."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        whole = not text.endswith(_UNFINISHED)
        piece = text[self._given : len(text) if whole else len(text) - 1]
        self._given += len(piece)
        if whole and piece:
            # one run of whole characters stays as what the next is decoded after
            del self._window[: self._last_whole]
            self._last_whole = len(self._window)
            self._given = len(self._tokenizer.decode(self._window))
        return piece

    def rest(self) -> str:
        """The text that is still held back once no token follows."""
        text = self._tokenizer.decode(self._window)
        piece = text[self._given :]
        self._given = len(text)
        return piece


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
