"""Programs that alternate: each waits for a line on its stdin before it runs a step.

A program prints "STEP " and a record in JSON for each step. Needs the standard library only.
"""

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any


class Side:
    """A program that waits on its stdin until it may do a step; it ends with a `with` block."""

    def __init__(self, command: Sequence[str]):
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )

    def __enter__(self) -> "Side":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._log):
            with contextlib.suppress(BrokenPipeError):
                file.close()

    def step(self, request: str = "") -> dict[str, Any]:
        """The record of one step. RuntimeError with the end of its log if the program ended."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(("STEP ", "{")):
                return json.loads(line.removeprefix("STEP "))
        self._process.wait()
        self._log.seek(0)
        raise RuntimeError(f"{self._process.args} ended:\n{self._log.read()[-3000:]}")


def take_turns(
    commands: Mapping[str, Sequence[str]], rounds: int, warmup: int, turn: int = 1
) -> dict[str, list[dict[str, Any]]]:
    """Records of `rounds` turns of `turn` steps of each program, one running at a time, after
    `warmup` steps."""
    with contextlib.ExitStack() as stack:
        sides: dict[str, Side] = {}
        for name, command in commands.items():
            sides[name] = stack.enter_context(Side(command))
            for _ in range(warmup):
                sides[name].step()
        records: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        for _ in range(rounds):
            for name, side in sides.items():
                records[name] += [side.step() for _ in range(turn)]
        return records


def report(record: dict[str, Any]) -> None:
    """Prints the record of a step."""
    print("STEP " + json.dumps(record), flush=True)


def wait_for_turn() -> None:
    """Waits for a line on stdin, in a program that is a side."""
    if not sys.stdin.readline():
        sys.exit("the other side of --paced has ended")
