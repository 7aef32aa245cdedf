"""Lines that a run prints on standard output, on a terminal or into a log file.

A terminal has a region at its bottom that is redrawn: the progress line, and what the run is
waiting for, with seconds. Elsewhere every line begins with the time, and a long wait has one line
when it begins and one when it has ended. No line is wider than the terminal, or than 80 columns.
"""

import contextlib
import threading
import time
from collections.abc import Iterator

import rich.console
import rich.live
import rich.text

from distflow_jax.programs.units import format_seconds
from distflow_jax.report.log_lines import STAMP

LONG_WAIT = 3.0  # seconds after which a log file is told of a wait
LABEL = 10  # columns of a row's label
_LEAST_NAME = 16  # columns that a shortened name keeps
_SPOKEN = {
    "\N{HORIZONTAL ELLIPSIS}": "...",
    "\N{PLUS-MINUS SIGN}": "+-",
    "\N{RIGHTWARDS ARROW}": "->",
}

# phase -> words for a wait; a log file hears of these only
WAITS = {
    "open_model": "opening the model",
    "open_data": "reading and checking the data",
    "start_rewards": "starting the reward function",
    "build": "compiling the programs of the plan",
    "first_state": "loading weights or a checkpoint",
    "compile_sampler": "compiling the programs of the sampler",
    "testing": "evaluating",
    "save_checkpoint": "saving a checkpoint",
    "write_profile": "writing the profile",
    "close": "writing the last checkpoint and the report",
}


class Terminal:
    """The output of one process; only one process of a job is `enabled`.

    A notebook shows progress in a cell of its own and no waits.
    """

    def __init__(self, *, enabled: bool = True, console: rich.console.Console | None = None):
        self.console = rich.console.Console() if console is None else console
        self.enabled = enabled
        self.began = time.time()  # seconds since 1970
        self.in_cell = self.console.is_jupyter
        self.is_live = enabled and self.console.is_terminal and not self.in_cell
        self._line = ""
        self._waits: list[tuple[str, float]] = []  # (words, beginning), the innermost last
        self._live: rich.live.Live | None = None

    @property
    def width(self) -> int:
        """Columns of a line's text."""
        return self.console.width - (0 if self.is_live or self.in_cell else len(_stamp()))

    @property
    def width_of_region(self) -> int:
        """Columns of a line that is redrawn: some terminals wrap after the last column."""
        return self.console.width - 1

    def print(self, text: str) -> None:
        """Prints a line above the region that is redrawn."""
        if not self.enabled:
            return
        text = _encodable(text, self.console.encoding)
        if self.in_cell:
            print(text)
            return
        stamp = "" if self.is_live else _stamp()
        self.console.print(
            f"{stamp}{text}", markup=False, highlight=False, soft_wrap=True, emoji=False
        )

    def row(self, label: str, rest: str, *, name: str = "") -> None:
        """Prints a label, a name and the text after it; a name that is too long is shortened."""
        room = self.width - LABEL
        name = shortened(name, max(room - len(rest), _LEAST_NAME))
        self.print(f"{label:<{LABEL}}{cut(name + rest, room)}")

    def whole(self, label: str, *lines: str) -> None:
        """Prints a label and lines that are to be copied: never shortened, one below the other."""
        for i, line in enumerate(lines):
            self.print(f"{'' if i else label:<{LABEL}}{line}")

    def show(self, line: str) -> None:
        """Replaces the progress line; nothing without a terminal."""
        self._line = line
        if self.is_live:
            self._redraw()

    @contextlib.contextmanager
    def activity(self, phase: str) -> Iterator[None]:
        """Shows that the run is in a phase, by its name or its words in WAITS."""
        if not self.enabled or self.in_cell:
            yield
            return
        words, start = WAITS.get(phase, phase), time.monotonic()
        if self.is_live:
            self._waits.append((words, start))
            self._redraw()
            try:
                yield
            finally:
                self._waits.pop()
                self._redraw()
        elif phase in WAITS:
            with self._announced(words, start):
                yield
        else:
            yield

    def close(self) -> None:
        """Ends the region that is redrawn; its progress line stays."""
        if self._live is None:
            return
        self._waits = []
        self._live.stop()
        self._live = None
        if self._line:
            self.print(self._line)

    @contextlib.contextmanager
    def _announced(self, words: str, start: float) -> Iterator[None]:
        begun = threading.Event()

        def begin() -> None:
            begun.set()
            self.print(f"{words} ...")

        timer = threading.Timer(LONG_WAIT, begin)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
        if begun.is_set():
            self.print(f"{words}: done in {format_seconds(time.monotonic() - start)}")

    def _redraw(self) -> None:
        if self._live is None:
            if not self._line and not self._waits:
                return
            self._live = rich.live.Live(
                get_renderable=self._region,
                console=self.console,
                refresh_per_second=4,
                transient=True,
            )
            self._live.start()
        self._live.refresh()

    def _region(self) -> rich.text.Text:
        lines = [self._line] if self._line else []
        for words, start in self._waits[-1:]:
            lines.append(f"{words} {format_seconds(time.monotonic() - start)}")
        text = "\n".join(cut(line, self.width_of_region) for line in lines)
        return rich.text.Text(_encodable(text, self.console.encoding), no_wrap=True)


def shortened(text: str, width: int) -> str:
    """A text of at most `width` columns, with its middle left out where it is longer.

    >>> shortened("random:llama?hidden=128&layers=4", 20)
    'random:lla…&layers=4'
    """
    if len(text) <= width:
        return text
    left = (width - 1) // 2 + (width - 1) % 2
    return f"{text[:left]}\N{HORIZONTAL ELLIPSIS}{text[len(text) - (width - 1 - left) :]}"


def cut(text: str, width: int) -> str:
    """A text of at most `width` columns, with its end left out where it is longer."""
    return text if len(text) <= width else f"{text[: width - 1]}\N{HORIZONTAL ELLIPSIS}"


def _stamp() -> str:
    return time.strftime(f"{STAMP} ")


def _encodable(text: str, encoding: str) -> str:
    """The text with the characters that an encoding lacks in other words."""
    try:
        text.encode(encoding)
        return text
    except UnicodeEncodeError:
        for character, words in _SPOKEN.items():
            text = text.replace(character, words)
        return text.encode(encoding, "replace").decode(encoding)
