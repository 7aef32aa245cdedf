"""The end of a run in a few lines: what it reached, where its report is, and what to do next."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from distflow_jax.programs.text_table import broken_command
from distflow_jax.report.headline import edges, series
from distflow_jax.report.read_run import RunFolder, read_samples
from distflow_jax.report.terminal import LABEL, Terminal

_CORE, _AUX = "val-core/", "val-aux/"
# (metric, label): the mean of a run's first steps and of its last ones is printed
_NUMBERS = (
    ("critic/score/mean", "reward"),
    ("rewards/accuracies", "pair acc"),
    ("reward_model/accuracy", "pair acc"),
)
_LOSSES = ("actor/loss", "reward_model/loss")  # where nothing is scored


@dataclasses.dataclass(frozen=True)
class RunEnd:
    """One start of a run at its end, as the commands that may follow need it, or as it begins."""

    folder: str
    answers: bool  # the trained model is a policy, which answers prompts
    stopped: bool = False  # before its last step; the same command resumes it
    waits: bool = False  # it has only begun, and workers are to sample for it


Commands = Callable[[RunEnd], Mapping[str, str]]  # {"evaluate": command, ...}


def no_commands(end: RunEnd) -> Mapping[str, str]:
    """No command: the run was not started by one."""
    return {}


def worker_command(folder: str, commands: Commands) -> str:
    """The command that starts a worker of a run."""
    found = commands(RunEnd(folder, answers=True, waits=True))
    return found.get("worker", f"distflow worker --config=... --join={folder}")


def print_end(terminal: Terminal, run: RunFolder, folder: pathlib.Path) -> None:
    """Prints evaluations before and after with their standard error, rewards or losses, and the
    report's path. Nothing of it is there for a run without a step."""
    if not any(run.rows):
        return
    for source, (before, after) in evaluations(run).items():
        label = "accuracy" if _is_accuracy(folder, run.rows) else "score"
        prompts = f"{after.prompts} prompts of {source}" if after.prompts else source
        first = "" if before is None else f"{before} -> "
        when = "" if after.step else " before step 1; none since"
        terminal.row(label, f"{first}{after}{when} ({prompts})")
    rows = {step: row for step, row in run.rows.items() if step}
    shown = [(name, label) for name, label in _NUMBERS if series(rows, name)]
    if not series(rows, _NUMBERS[0][0]):
        shown = [(name, "loss") for name in _LOSSES if series(rows, name)] + shown
    for name, label in shown:
        first, last = edges(list(series(rows, name).values()))
        terminal.row(label, f"{first:.3f} -> {last:.3f} (first and last steps)")
    if (folder / "report.html").is_file():
        terminal.whole("report", str(folder / "report.html"))


class EvaluationScore:
    """A mean score of the weights after `step` steps, with its standard error, and the number of
    prompts."""

    def __init__(self, row: Mapping[str, float], step: int, source: str, kind: str, samples: str):
        self.step = step
        self.mean = row[f"{_CORE}{source}/{kind}/mean@{samples}"]
        self.error = row.get(f"{_AUX}{source}/{kind}/stderr@{samples}")
        self.prompts = int(row.get(f"{_AUX}{source}/num_prompts", 0))

    def __str__(self) -> str:
        error = "" if self.error is None else f" \N{PLUS-MINUS SIGN} {self.error:.3f}"
        return f"{self.mean:.3f}{error}"


def evaluations(run: RunFolder) -> dict[str, tuple[EvaluationScore | None, EvaluationScore]]:
    """{data source: (the first evaluation if there are two, the last)}."""
    found: dict[str, list[EvaluationScore]] = {}
    for step, row in run.rows.items():
        for name in row:
            if not name.startswith(_CORE) or "/mean@" not in name:
                continue
            source, kind, mean = name.removeprefix(_CORE).rsplit("/", 2)
            samples = mean.partition("@")[2]
            found.setdefault(source, []).append(EvaluationScore(row, step, source, kind, samples))
    return {
        source: (several[0] if len(several) > 1 else None, several[-1])
        for source, several in found.items()
    }


def print_commands(terminal: Terminal, commands: Mapping[str, str]) -> None:
    """Prints commands, each on lines that a shell joins again."""
    for name, command in commands.items():
        terminal.whole(name, *broken_command(command, terminal.width - LABEL))


def _is_accuracy(folder: pathlib.Path, rows: Mapping[int, Any]) -> bool:
    """Whether all scores of the last evaluation are 0 or 1."""
    steps = [step for step, row in rows.items() if any(name.startswith(_CORE) for name in row)]
    try:
        records = read_samples(folder, f"eval-{max(steps)}")
    except (ValueError, OSError):
        return False
    scores = [score for record in records for score in record.get("scores", ())]
    return bool(scores) and all(score in (0, 1) for score in scores)
