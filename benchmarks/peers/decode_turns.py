"""Common parts of the sides of benchmarks/decode.py: the work, the clock, alternation.

Each side is a process that stays resident. It gets requests as lines of JSON on its stdin and
answers with lines of JSON on its stdout. Runs in the peers' environments too: needs numpy only.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

RESERVED_IDS = 3  # a peer pads with 0; prompts hold none of the first ids


@dataclasses.dataclass(frozen=True)
class Case:
    """Work of one round: `prompts` x `samples` responses of fixed lengths.

    `limits`: the length of every response in tokens, with those to one prompt next to each other.
    `slots`: responses decoded at once. `capacity`: tokens of a slot's cache, for sides with this
    setting (0: as many as the case needs).
    """

    name: str
    prompts: int
    samples: int
    prompt_length: int
    slots: int
    limits: tuple[int, ...]
    capacity: int = 0

    @property
    def responses(self) -> int:
        """Number of responses."""
        return self.prompts * self.samples

    @property
    def fixed(self) -> bool:
        """Whether all responses run at once with one length: they have one time to first token."""
        return len(set(self.limits)) == 1 and self.responses <= self.slots

    def prompt_ids(self, vocab: int, turn: int) -> np.ndarray:
        """Prompts of a round, int32 [prompts, prompt_length]; new ones every round."""
        shape = (self.prompts, self.prompt_length)
        return np.random.default_rng(turn).integers(RESERVED_IDS, vocab, shape, dtype=np.int32)

    def batches(self, limits: tuple[int, ...]) -> Iterator[tuple[range, int]]:
        """(prompts, longest response) of each batch of `slots`, for peers that refill no slots."""
        width, prompts = self.slots // self.samples, len(limits) // self.samples
        for first in range(0, prompts, width):
            part = range(first, min(first + width, prompts))
            yield part, max(limits[part.start * self.samples : part.stop * self.samples])


class Decoder(Protocol):
    """A side that is ready for a case."""

    def warm_up(self, ids: np.ndarray) -> None:
        """Compiles and runs everything that `decode` will use."""

    def decode(self, ids: np.ndarray, limits: tuple[int, ...]) -> int:
        """Answers the prompts; returns the number of useful tokens, that is sum(limits)."""

    def measures(self) -> dict[str, Any]:
        """Measurements next to a round, outside of its clock: ceilings, compilations."""

    def peak_gb(self) -> float:
        """Peak memory in units of 2^30 bytes; on CPU since the round began."""


def clocked(function: Callable[[], Any]) -> tuple[Any, float, float]:
    """(its result, wall seconds, CPU-seconds of all threads of this process)."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = function()
    return result, time.perf_counter() - wall, time.process_time() - cpu


def peak_resident_gb() -> float:
    """Peak resident size of this process in units of 2^30 bytes. Linux."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 2**20
    raise RuntimeError("/proc/self/status has no VmHWM")


def _reset_peak() -> None:
    """Resets the peak (proc(5), clear_refs); prints a note where that is not permitted."""
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        print("peak memory cannot be reset here: it includes earlier rounds")


def play(decoder: Decoder, case: Case, vocab: int, turn: int) -> dict[str, Any]:
    """One round of a side: seconds, CPU-seconds, useful tokens, seconds to the first tokens."""
    ids = case.prompt_ids(vocab, turn)
    record = decoder.measures() | {"load": os.getloadavg()[0]}
    _reset_peak()
    if case.fixed:  # every response has its first token
        ones = (1,) * case.responses
        _, record["first_token_s"], _ = clocked(lambda: decoder.decode(ids, ones))
    tokens, seconds, cpu = clocked(lambda: decoder.decode(ids, case.limits))
    assert tokens == sum(case.limits), f"{tokens} tokens came, {sum(case.limits)} were asked for"
    record |= {"seconds": seconds, "cpu_s": cpu, "tokens": tokens, "peak_gb": decoder.peak_gb()}
    return record


def serve(open_side: Callable[[dict[str, Any]], Callable[[Case], Decoder]]) -> None:
    """Main of a side: opens it with the options of argv[1], then runs a case or round per line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not mix with answers

    def answer(record: dict[str, Any]) -> None:
        answers.write(json.dumps(record) + "\n")
        answers.flush()

    options = json.loads(sys.argv[1])
    vocab = options["shape"]["vocab_size"]
    begin = open_side(options)
    case, decoder = None, None
    for line in sys.stdin:
        request = json.loads(line)
        if "case" in request:
            decoder = None  # frees the previous case first
            case = Case(**request["case"] | {"limits": tuple(request["case"]["limits"])})
            decoder = begin(case)
            decoder.warm_up(case.prompt_ids(vocab, 0))
            decoder.measures()
            answer({"case": case.name})
        else:
            answer(play(decoder, case, vocab, request["round"]))


class Side:
    """A side as the benchmark sees it."""

    def __init__(self, command: list[str], options: dict[str, Any]):
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [*command, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def begin(self, case: Case) -> None:
        """Prepares the side for a case, warm-up included."""
        self._ask({"case": dataclasses.asdict(case)})

    def play(self, turn: int) -> dict[str, Any]:
        """One round, the first is 1; see `play`."""
        return self._ask({"round": turn})

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._process.poll() is None:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            if line := self._process.stdout.readline():
                return json.loads(line)
        self._process.wait()
        self._log.seek(0)
        raise RuntimeError(f"{self._process.args} ended:\n{self._log.read()[-3000:]}")

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._log.close()
