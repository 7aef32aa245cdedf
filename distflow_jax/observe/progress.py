"""What a person watches: a progress line, and tables at the start."""

import time
from collections.abc import Iterable, Mapping

import rich.console
import rich.progress
import rich.table
import rich.text

# metric -> (label, format)
SHOWN = {
    "critic/score/mean": ("reward", "{:.3f}"),
    "response_length/mean": ("length", "{:.1f}"),
    "perf/throughput": ("tokens/s", "{:.0f}"),
}


class Progress:
    """The progress line of one run: step, reward, response length, tokens/s and time left.

    On a terminal one line at the bottom is redrawn; elsewhere each step prints a line of its own.
    tokens/s are per device, as `perf/throughput` is. The time left is estimated from the steps of
    this process, the first apart, because compilation makes it slow. Only one process is `enabled`.
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
        """Shows step `step` of 1..total_steps, just ended, with what its metrics say."""
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
        else:
            self.print(f"step {step}/{self._total}  {text}")

    def print(self, text: str) -> None:
        """Prints a line above the progress line."""
        if self._enabled:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Leaves the last state of the line on the screen."""
        if self._bar is not None:
            self._bar.stop()


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


def format_seconds(seconds: float) -> str:
    """7 -> "7s", 67 -> "1m07s", 3667 -> "1h01m"."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
