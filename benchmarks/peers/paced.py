"""Programs that alternate: each waits for a line on its stdin before it runs a step.

A program prints "STEP " and a record in JSON for each step. Needs the standard library only.
"""

import json
import subprocess
import sys
import tempfile


class Side:
    """A program that waits on its stdin until it may do a step."""

    def __init__(self, command: list[str]):
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True
        )

    def step(self, turns: int = 1) -> None:
        """Allows `turns` more steps, which begin when the current one has ended."""
        self.process.stdin.write("\n" * turns)
        self.process.stdin.flush()

    def result(self) -> dict[str, float]:
        """Waits for the record of a step. RuntimeError with the end of its log if it died."""
        for line in self.process.stdout:
            if line.startswith("STEP "):
                return json.loads(line.removeprefix("STEP "))
        self.process.wait()
        self.log.seek(0)
        raise RuntimeError(f"{self.process.args} ended:\n{self.log.read()[-3000:]}")

    def close(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        self.log.close()


def wait_for_turn() -> None:
    """Waits for a line on stdin, in a program that is a side."""
    if not sys.stdin.readline():
        sys.exit("the other side of --paced has ended")


def report(record: dict[str, float]) -> None:
    """Prints the record of a step."""
    print("STEP " + json.dumps(record), flush=True)
