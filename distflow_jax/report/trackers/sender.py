"""A process that feeds one tracker from a run's folder.

A run starts one for each tracker but TensorBoard, as `python -P -m
distflow_jax.report.trackers.sender FOLDER NAME --project=P --last-step=N --seconds=S --commands`.
It obeys the lines of its input and answers in lines of JSON; see Follower. What the tracker's
package prints goes to FOLDER/trackers/NAME.log. It outlives a run that is killed, to store what the
run has written, and ends then within S seconds, whatever the package does.

By hand, it gives a tracker what it does not have yet of a run that has ended:

    python -P -m distflow_jax.report.trackers.sender runs/first wandb
"""

import argparse
import contextlib
import io
import json
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from distflow_jax.report.trackers.follower import Follower, Words
from distflow_jax.report.trackers.tracker import check_trackers
from distflow_jax.report.trackers.tracker_state import held, own_descriptor, state_path

ORPHAN_SECONDS = 60.0  # that remain after the run is gone
_NICE = 10  # the run's own threads come first
_INTERRUPTED = 130  # exit code after Ctrl-C


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0, or 1 where something could not be given."""
    parser = argparse.ArgumentParser(prog="python -P -m distflow_jax.report.trackers.sender")
    parser.add_argument("folder", type=pathlib.Path, help="the run's folder")
    parser.add_argument("tracker", help="a name as in observe.trackers")
    parser.add_argument("--project", default="", help="as in observe.tracker_project")
    parser.add_argument("--last-step", type=int, help="step that the run goes on from")
    parser.add_argument(
        "--seconds", type=float, default=ORPHAN_SECONDS, help="most after the end of the input"
    )
    parser.add_argument("--commands", action="store_true", help="obey the lines of the input")
    args = parser.parse_args(argv)
    if args.commands:
        _obey(args)
        return 0
    try:
        check_trackers([args.tracker])
        (args.folder / "metrics.jsonl").stat()
    except (OSError, ValueError) as error:
        parser.error(str(error))
    try:
        return _give_by_hand(args)
    except KeyboardInterrupt:
        return _INTERRUPTED


def _obey(args: argparse.Namespace) -> None:
    """Obeys the words of a run."""
    words = Words()
    threading.Thread(target=_read, args=(words, args.seconds), daemon=True).start()
    os.nice(_NICE)
    for number in (signal.SIGINT, signal.SIGTERM):  # the run decides when it ends
        signal.signal(number, lambda *_: None)
    state = state_path(args.folder, args.tracker)
    state.parent.mkdir(parents=True, exist_ok=True)
    # the process of a killed run may not have ended yet
    with _output(state.with_suffix(".log")) as answers, held(state, wait=True):

        def tell(message: Mapping[str, Any]) -> None:
            print(message.get("trace", ""), end="", file=sys.stderr, flush=True)
            told = {name: value for name, value in message.items() if name != "trace"}
            with contextlib.suppress(BrokenPipeError):  # the run is gone
                os.write(answers, f"{json.dumps(told)}\n".encode())

        follower = Follower(args.tracker, args.folder, args.project, args.last_step, tell)
        for word in words:
            follower.command(word)


def _read(words: Words, seconds: float) -> None:
    """Takes the words of the input, also while a package hangs, and ends the process after it."""
    # unbuffered: the interpreter could not end while a thread waits in sys.stdin
    for line in io.FileIO(0, closefd=False):
        words.put(line.decode().strip())
    words.put("lost")
    time.sleep(seconds)
    os._exit(1)


@contextlib.contextmanager
def _output(log: pathlib.Path) -> Iterator[int]:
    """The descriptor for answers; from then on all that is printed goes to `log`."""
    with own_descriptor(os.dup(1)) as answers, log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        yield answers


def _give_by_hand(args: argparse.Namespace) -> int:
    """Gives all rows of a run that has ended; prints what goes wrong."""
    state = state_path(args.folder, args.tracker)
    with held(state, wait=False) as free:
        if not free:
            print(
                f"{state.with_suffix('.lock')} is held: a run, or this command, feeds "
                f"{args.tracker} already; try again when it has ended",
                file=sys.stderr,
            )
            return 1
        told: dict[str, Any] = {"step": -1}

        def tell(message: Mapping[str, Any]) -> None:
            told.update(message)
            print(message.get("trace", ""), end="", file=sys.stderr)
            for kind in ("problem", "url"):
                if text := message.get(kind):
                    print(f"{args.tracker}: {text}", file=sys.stderr)

        follower = Follower(args.tracker, args.folder, args.project, args.last_step, tell)
        for word in ("begin", "end"):
            follower.command(word)
    print(f"{args.tracker} has {steps_text(told['step'])}")
    return int("problem" in told)


def steps_text(step: int) -> str:
    """The steps that a tracker has, for a message."""
    return "no step" if step < 0 else f"the steps to {step}"


if __name__ == "__main__":
    sys.exit(main())
