"""Progress of a run on a terminal or in a notebook, and tables at its start."""

import time
from collections.abc import Iterable, Mapping

import rich.console
import rich.progress
import rich.table
import rich.text

from distflow_jax.report import cells

REWARD = "critic/score/mean"
CELL_SECONDS = 0.3  # between two updates of a cell's output

# metric -> (label, format)
SHOWN = {
    REWARD: ("reward", "{:.3f}"),
    "response_length/mean": ("length", "{:.1f}"),
    "perf/throughput": ("tokens/s", "{:.0f}"),
}


class Progress:
    """The progress line of one run: step, reward, response length, tokens/s and time left.

    A terminal has one line at the bottom that is redrawn, a notebook one output of the cell with
    the curve of the reward; elsewhere each step prints a line. tokens/s are per device, as
    `perf/throughput` is. The time left is estimated from the steps of this process without the
    first, which compiles. Only one process is `enabled`.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        done_steps: int = 0,
        enabled: bool = True,
        console: rich.console.Console | None = None,
    ):
        self._console = rich.console.Console() if console is None else console
        self._total = total_steps
        self._enabled = enabled
        self._first: tuple[int, float] | None = None
        self._bar = None
        self._cell = cells.LiveOutput() if enabled and self._console.is_jupyter else None
        self._rewards: list[tuple[int, float]] = []
        self._state: tuple[str, int] | None = None  # the cell's text, and its step
        self._shown = 0.0  # time of the cell's last update
        if enabled and self._console.is_terminal:
            self._bar = rich.progress.Progress(
                rich.progress.TextColumn("step {task.completed}/{task.total}"),
                rich.progress.BarColumn(bar_width=20),
                rich.progress.TextColumn("{task.description}"),
                console=self._console,
            )
            self._task = self._bar.add_task("", total=total_steps, completed=done_steps)
            self._bar.start()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows step `step` of 1..total_steps, which has ended, with its metrics."""
        if not self._enabled:
            return
        words = [
            f"{label} {style.format(metrics[name])}"
            for name, (label, style) in SHOWN.items()
            if name in metrics
        ]
        now = time.monotonic()
        if self._first is None:
            self._first = (step, now)
        elif step > self._first[0]:
            first_step, first_time = self._first
            left = (now - first_time) / (step - first_step) * (self._total - step)
            words.append(f"left {format_seconds(left)}")
        text = "  ".join(words)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=text)
        elif self._cell is not None:
            self._rewards += [(step, metrics[REWARD])] if REWARD in metrics else []
            self._state = (f"step {step}/{self._total}  {text}", step)
            if now - self._shown >= CELL_SECONDS:
                self._shown = now
                self._show_cell()
        else:
            self.print(f"step {step}/{self._total}  {text}")

    def print(self, text: str) -> None:
        """Prints a line above the progress line."""
        if self._cell is not None:
            print(text)
        elif self._enabled:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Shows the last state and stops updating it."""
        if self._bar is not None:
            self._bar.stop()
        if self._state is not None:
            self._show_cell()

    def _show_cell(self) -> None:
        words, step = self._state
        self._cell.show(cells.progress_html(words, step, self._total, self._rewards), words)


def table(
    title: str,
    rows: Iterable[tuple[str, object, str]],
    *,
    console: rich.console.Console | None = None,
) -> None:
    """Prints (name, value, meaning) rows under a title: a run's derived sizes at its start."""
    grid = rich.table.Table(title=title, title_justify="left", show_header=False)
    grid.add_column()
    grid.add_column(justify="right")
    grid.add_column(style="dim")
    for name, value, meaning in rows:
        text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else value
        grid.add_row(rich.text.Text(str(name)), rich.text.Text(str(text)), rich.text.Text(meaning))
    (rich.console.Console() if console is None else console).print(grid)


def introduce(
    title: str,
    rows: Iterable[tuple[str, object, str]],
    plan: str,
    *,
    console: rich.console.Console | None = None,
) -> None:
    """Prints a run's sizes and its plan, folded in a notebook."""
    console = rich.console.Console() if console is None else console
    if not console.is_jupyter:
        table(title, rows, console=console)
        print(plan, flush=True)
        return
    body = cells.size_table(rows)._repr_html_() + cells.preformatted(plan)
    cells.LiveOutput().show(cells.details(title, body), title)


def format_seconds(seconds: float) -> str:
    """7 -> "7s", 67 -> "1m07s", 3667 -> "1h01m"."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
