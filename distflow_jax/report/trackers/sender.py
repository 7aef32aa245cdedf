"""A process that feeds one tracker from a run's folder.

A run starts one for each tracker but TensorBoard, as `python -m distflow_jax.report.trackers.sender
FOLDER NAME --project=P --last-step=N --commands`. It obeys the lines of its input and answers in
lines of JSON; see Follower. What the tracker's package prints goes to FOLDER/trackers/NAME.log. It
outlives a run that is killed, to store what the run has written, and ends then within a minute.

By hand, it gives a tracker what it does not have yet of a run that has ended:

    python -m distflow_jax.report.trackers.sender runs/first wandb
"""

import argparse
import contextlib
import fcntl
import json
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from distflow_jax.report.trackers.follower import Follower
from distflow_jax.report.trackers.tracker import check_trackers, file_name

_ORPHAN_SECONDS = 60.0  # that remain after the run is gone
_NICE = 10  # the run's own threads come first


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 where something could not be given."""
    parser = argparse.ArgumentParser(prog="python -m distflow_jax.report.trackers.sender")
    parser.add_argument("folder", type=pathlib.Path, help="the run's folder")
    parser.add_argument("tracker", help="a name as in observe.trackers")
    parser.add_argument("--project", default="", help="as in observe.tracker_project")
    parser.add_argument("--last-step", type=int, help="step that the run goes on from")
    parser.add_argument("--commands", action="store_true", help="obey the lines of the input")
    args = parser.parse_args(argv)
    if not args.commands:
        check_trackers([args.tracker])
        (args.folder / "metrics.jsonl").stat()
    os.nice(_NICE)
    for number in (signal.SIGINT, signal.SIGTERM):  # the run decides when it ends
        signal.signal(number, lambda *_: None)
    place = args.folder / "trackers"
    place.mkdir(parents=True, exist_ok=True)
    name = file_name(args.tracker)
    with (place / f"{name}.lock").open("w") as lock, _output(place / f"{name}.log") as answers:
        # the process of a killed run may not have ended yet
        fcntl.flock(lock, fcntl.LOCK_EX)
        told: list[str] = []

        def tell(message: dict[str, Any]) -> None:
            print(message.pop("trace", ""), end="", file=sys.stderr, flush=True)
            told.extend(message.keys())
            with contextlib.suppress(BrokenPipeError):  # the run is gone
                os.write(answers, f"{json.dumps(message)}\n".encode())

        follower = Follower(args.tracker, args.folder, args.project, args.last_step, tell)
        for word in _commands() if args.commands else ("begin", "end"):
            follower.command(word)
    return int("problem" in told and not args.commands)


def _commands() -> Iterable[str]:
    """The words of the input, and a last "lost" if its end comes without an "end"."""
    for line in sys.stdin:
        yield line.strip()
        if line.strip() == "end":
            return
    threading.Thread(target=_end_soon, daemon=True).start()
    yield "lost"


def _end_soon() -> None:
    time.sleep(_ORPHAN_SECONDS)
    os._exit(1)


@contextlib.contextmanager
def _output(log: pathlib.Path) -> Iterator[int]:
    """The descriptor for answers; from then on all that is printed goes to `log`."""
    answers = os.dup(1)
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        yield answers
    os.close(answers)


if __name__ == "__main__":
    sys.exit(main())
