"""Lines that a run prints on standard output, on a terminal or into a log file.

A terminal has a region at its bottom that is redrawn: the progress line, and what the run is
waiting for, with seconds. Elsewhere every line begins with the time, a long wait has one line when
it begins and one when it has ended, and no SILENCE is longer than 10 seconds: a line then says what
is under way. No line of a terminal is wider than it.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator

import rich.console
import rich.live
import rich.text

from distflow_jax.programs.units import format_seconds
from distflow_jax.report.log_lines import STAMP

LONG_WAIT = 3.0  # seconds after which a log file is told of a wait
SILENCE = 10.0  # seconds without a line, after which a log file is told what is under way
LEAST_TOLD = 1.0  # seconds of an earlier time of a phase that are worth a word
_LOOK = 0.25  # seconds between two looks at that
_OF_A_FILE = 10_000  # columns of a line that nobody wraps
LABEL = 10  # columns of a row's label
_LEAST_NAME = 16  # columns that a shortened name keeps
_SPOKEN = {
    "\N{HORIZONTAL ELLIPSIS}": "...",
    "\N{PLUS-MINUS SIGN}": "+-",
    "\N{RIGHTWARDS ARROW}": "->",
}

# phase -> words for a wait; a log file hears of the begin and end of these only
WAITS = {
    "open_model": "opening the model",
    "open_data": "reading and checking the data",
    "start_rewards": "starting the reward function",
    "compile_programs": "compiling the programs of the plan",
    "first_state": "loading weights or a checkpoint",
    "compile_sampler": "compiling the programs of the sampler",
    "testing": "evaluating",
    "save_checkpoint": "saving a checkpoint",
    "write_profile": "writing the profile",
    "close": "writing the last checkpoint and the report",
}


@dataclasses.dataclass(eq=False)
class _Wait:
    """A phase that is under way."""

    phase: str
    began: float
    announced: bool = False  # in a log file

    @property
    def words(self) -> str:
        return WAITS.get(self.phase, self.phase)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began


class ResponseCount:
    """How many of the `total` responses that a phase waits for have ended."""

    def __init__(self, total: int):
        self._total, self._ended = max(total, 1), 0

    def add(self, response: object) -> None:
        """Counts a response."""
        self._ended += 1

    def __str__(self) -> str:
        # each time the phase runs, and each round of a region, as many end
        return f"{self._ended % self._total} of {self._total} responses"


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
        self.details: dict[str, Callable[[], str]] = {}  # phase -> how far it is: "34 of 64"
        self.doing = ""  # what the phases belong to: "step 3/20"
        self._line = ""
        self._waits: list[_Wait] = []  # the innermost last
        self._took: dict[str, float] = {}  # phase -> seconds of its last time
        self._spoken = time.monotonic()  # time of the last line
        self._changed = threading.Condition(threading.RLock())
        self._speaker: threading.Thread | None = None
        self._live: rich.live.Live | None = None

    @property
    def width(self) -> int:
        """Columns of a line's text: of a log file, as many as it needs."""
        return self.console.width if self.is_live or self.in_cell else _OF_A_FILE

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
        with self._changed:
            self._spoken = time.monotonic()
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
        wait = _Wait(phase, time.monotonic())
        with self._changed:
            self._waits.append(wait)
            self._changed.notify()
        if self.is_live:
            self._redraw()
        elif self._speaker is None:
            self._speaker = threading.Thread(target=self._speak, name="terminal", daemon=True)
            self._speaker.start()
        try:
            yield
            with self._changed:
                self._took[phase] = wait.seconds
                if wait.announced:
                    self.print(f"{wait.words}: done in {format_seconds(wait.seconds)}")
        finally:
            with self._changed:
                self._waits.remove(wait)
            if self.is_live:
                self._redraw()

    def close(self) -> None:
        """Ends the region that is redrawn, whose progress line stays, and the thread.

        The thread keeps what `details` reads: the run, with its arrays and programs.
        """
        with self._changed:
            speaker, self._speaker = self._speaker, None
            self._changed.notify_all()
        if speaker is not None:
            speaker.join()
        if self._live is None:
            return
        self._waits = []
        self._live.stop()
        self._live = None
        if self._line:
            self.print(self._line)

    def _speak(self) -> None:
        """Says what a log file is to know of waits, while there are any."""
        own = threading.current_thread()
        with self._changed:
            while self._changed.wait_for(lambda: self._waits or self._speaker is not own):
                if self._speaker is not own:
                    return
                self._say(self._waits[-1])
                self._changed.wait_for(lambda: self._speaker is not own, _LOOK)

    def _say(self, wait: "_Wait") -> None:
        if wait.phase in WAITS and not wait.announced and wait.seconds >= LONG_WAIT:
            wait.announced = True
            self.print(f"{wait.words} ...")
        elif time.monotonic() - self._spoken >= SILENCE:
            detail = self.details.get(wait.phase, lambda: "")()
            took = self._took.get(wait.phase, 0.0)
            begin = f"{self.doing}, " if self.doing else ""
            words = [f"{begin}{wait.words}: {format_seconds(wait.seconds)} so far", detail]
            words += [f"the last one took {format_seconds(took)}"] if took >= LEAST_TOLD else []
            self.print(", ".join(filter(None, words)))

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
        for wait in self._waits[-1:]:
            lines.append(f"{wait.words} {format_seconds(wait.seconds)}")
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
