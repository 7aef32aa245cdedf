"""Progress of a run: the numbers of its graph after each step, and the time that is left."""

import re
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from distflow_jax.programs.text_table import text_table
from distflow_jax.programs.units import format_seconds
from distflow_jax.report import cells
from distflow_jax.report.terminal import Terminal, cut

REWARD = "critic/score/mean"
EVALUATION = "evaluation"  # label of evaluations, wherever a user sees one
CELL_SECONDS = 0.3  # between two updates of a cell's output
RECENT = 20  # steps whose median is the time of a coming step

_LOSS = re.compile(r"(?!critic/)(\w+)/loss")
_EVALUATED = re.compile(r"val-core/(.+)/reward/mean@\d+")
_BAR = 10  # columns of a terminal's bar


class TimeLeft:
    """The time that a run still takes: coming steps, evaluations and checkpoints.

    `coming` says for a step how many (evaluations, checkpoints) come once its metrics are there:
    a checkpoint of the step itself is saved after them. A step takes the median of the last ones,
    so that one which waited for a worker does not count; other times are means. The first step,
    which compiles, does not count.
    """

    def __init__(self, total_steps: int, coming: Callable[[int], tuple[int, int]]):
        self._total = total_steps
        self._coming = coming
        self._first: float | None = None
        self._steps: deque[float] = deque(maxlen=RECENT)
        self._extra: tuple[list[float], list[float]] = ([], [])  # evaluations, checkpoints

    def observe_step(self, metrics: Mapping[str, float]) -> None:
        """Takes the time of one step from its metrics."""
        seconds = metrics.get("perf/time_per_step")
        if seconds is not None and self._first is None:
            self._first = seconds
        elif seconds is not None:
            self._steps.append(seconds)

    def observe_rest(self, metrics: Mapping[str, float]) -> None:
        """Takes the times of an evaluation and a checkpoint from the metrics of one step."""
        for name, times in zip(("testing", "save_checkpoint"), self._extra, strict=True):
            if seconds := metrics.get(f"timing_s/{name}", 0.0):
                times.append(seconds)

    def after(self, step: int) -> float | None:
        """Seconds after step `step`; None before a second step was seen."""
        if not self._steps:
            return None
        extra = (
            number * statistics.fmean(times)
            for number, times in zip(self._coming(step), self._extra, strict=True)
            if times
        )
        return (self._total - step) * statistics.median(self._steps) + sum(extra)


class RunProgress:
    """The progress of one run: step, the numbers of its graph, speed and time left.

    The metrics of a step decide which numbers these are: reward where something was scored, losses
    where nothing was, the accuracy of pairs, and the critic's loss. A terminal has one line that is
    redrawn, a notebook one output of the cell with the curve of the reward; elsewhere each step
    prints a line. tokens/s are per device, as `perf/throughput` is.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        terminal: Terminal | None = None,
        done_steps: int = 0,
        coming: Callable[[int], tuple[int, int]] = lambda step: (0, 0),
    ):
        self._terminal = Terminal() if terminal is None else terminal
        self._total = total_steps
        self._left = TimeLeft(total_steps, coming)
        self._evaluated: list[tuple[str, str]] = []
        self._cell = None
        if self._terminal.enabled and self._terminal.in_cell:
            self._cell = cells.LiveOutput()
        self._rewards: list[tuple[int, float]] = []
        self._last: tuple[int, Mapping[str, float]] | None = None  # the last step's
        self._shown = 0.0  # time of the cell's last update
        self._terminal.show(self._line(done_steps, [], self._terminal.width_of_region))

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows step `step` of 1..total_steps, which has ended but for its evaluation."""
        if not self._terminal.enabled:
            return
        self._left.observe_step(metrics)
        self._last = step, metrics
        if self._cell is not None:
            self._rewards += [(step, metrics[REWARD])] if REWARD in metrics else []
        self._show()

    def observe(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes all metrics of a step, and shows its evaluation, if there is one."""
        self._left.observe_rest(metrics)
        if evaluation_numbers(metrics):
            self.evaluation(metrics, step)

    def evaluation(self, metrics: Mapping[str, float], step: int = 0) -> None:
        """Shows an evaluation: of the untrained weights, or of those after `step` steps."""
        terminal, self._evaluated = self._terminal, evaluation_numbers(metrics)
        if not terminal.enabled:
            return
        if not (terminal.in_cell or terminal.is_live):
            begin = f"after step {step}" if step else "before step 1"
            terminal.print(fitted(begin, self._evaluated, terminal.width))
        elif self._last is not None:
            self._show()

    def close(self) -> None:
        """Shows the last state in its cell."""
        if self._cell is not None and self._last is not None:
            self._show_cell()

    def _show(self) -> None:
        terminal, (step, _) = self._terminal, self._last
        if terminal.is_live:
            terminal.show(self._line(step, self._words(), terminal.width_of_region))
        elif self._cell is None:
            terminal.print(fitted(f"step {step}/{self._total}", self._words(), terminal.width))
        elif time.monotonic() - self._shown >= CELL_SECONDS:
            self._shown = time.monotonic()
            self._show_cell()

    def _words(self) -> list[tuple[str, str]]:
        """Numbers of the last step; where they are redrawn, those of the last evaluation too."""
        step, metrics = self._last
        words = numbers(metrics)
        if self._terminal.is_live or self._cell is not None:
            words += self._evaluated
        left = self._left.after(step)
        return words if left is None else [*words, ("left", format_seconds(left))]

    def _line(self, step: int, words: Sequence[tuple[str, str]], width: int) -> str:
        filled = _BAR * step // self._total if self._total else 0
        full, empty = "\N{BOX DRAWINGS HEAVY HORIZONTAL}", "\N{BOX DRAWINGS LIGHT HORIZONTAL}"
        begin = f"step {step}/{self._total}"
        text = fitted(f"{begin} {full * filled}{empty * (_BAR - filled)}", words, width)
        # without the bar more numbers fit
        return text if text.count("  ") == len(words) else fitted(begin, words, width)

    def _show_cell(self) -> None:
        step = self._last[0]
        pairs = (" ".join(pair) for pair in self._words())
        words = "  ".join([f"step {step}/{self._total}", *pairs])
        self._cell.show(cells.progress_html(words, step, self._total, self._rewards), words)


def numbers(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """(label, value) of the numbers that belong to a step's graph, the most important first."""
    found: list[tuple[str, str]] = []

    def add(label: str, name: str, style: str = "{:.3f}") -> None:
        if name in metrics:
            found.append((label, style.format(metrics[name])))

    add("reward", REWARD)
    if not found:
        losses = [name for name in metrics if _LOSS.fullmatch(name)]
        for name in losses:
            add("loss" if len(losses) == 1 else f"{name.split('/')[0]} loss", name)
    add("pair acc", "rewards/accuracies")
    add("accuracy", "reward_model/accuracy")
    add("value loss", "critic/vf_loss")
    add("length", "response_length/mean", "{:.1f}")
    add("tokens/s", "perf/throughput", "{:.0f}")
    add("slots busy", "perf/slots_busy_share", "{:.0%}")
    return found


def evaluation_numbers(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """(label, value) of the mean scores of an evaluation; a label for each of several sources."""
    found = {m[1]: metrics[name] for name in metrics if (m := _EVALUATED.fullmatch(name))}
    several = len(found) > 1
    return [
        (f"{EVALUATION} {name}" if several else EVALUATION, f"{value:.3f}")
        for name, value in found.items()
    ]


def table(title: str, rows: Iterable[tuple[str, object, str]]) -> None:
    """Prints (name, value, meaning) rows under a title: a run's derived sizes."""
    print(f"{title}\n\n{size_lines(rows)}\n", flush=True)


def size_lines(rows: Iterable[tuple[str, object, str]]) -> str:
    """(name, value, meaning) rows as a table of text."""
    words = [("size", "", "meaning")]
    for name, value, meaning in rows:
        counted = isinstance(value, int) and not isinstance(value, bool)
        words.append((str(name), f"{value:,}" if counted else str(value), meaning))
    return text_table(words)


def introduce_in_cell(
    title: str, rows: Iterable[tuple[str, object, str]], plan: str, terminal: Terminal
) -> None:
    """Shows a run's sizes and its plan folded in a notebook's cell; nothing elsewhere."""
    if terminal.in_cell:
        body = cells.size_table(rows)._repr_html_() + cells.preformatted(plan)
        cells.LiveOutput().show(cells.details(title, body), title)


# what a narrow line leaves out first
_DISPENSABLE = ("length", "tokens/s", "value loss", EVALUATION)


def fitted(begin: str, words: Sequence[tuple[str, str]], width: int) -> str:
    """One line of at most `width` columns; words of least interest are left out where needed.

    >>> fitted("step 1/2", [("reward", "0.250"), ("length", "9.5"), ("left", "4s")], 34)
    'step 1/2  reward 0.250  left 4s'
    """
    words = list(words)
    for dispensable in (None, *_DISPENSABLE):
        words = [pair for pair in words if pair[0] != dispensable]
        text = "  ".join([begin, *(" ".join(pair) for pair in words)])
        if len(text) <= width:
            return text
    return cut(text, width)
