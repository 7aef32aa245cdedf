"""Assignment of prompts to samplers: longest expected first, to the least loaded sampler.

A pure function of numbers that every process has, so that all agree without communication.
"""

import base64
import threading
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

MEMORY = 0.5  # weight of the former estimate against the newest length


def deal(expected: Sequence[float], samplers: int, *, least: int = 1) -> list[list[int]]:
    """Prompts 0 .. B-1 -> samplers, each list with the longest expected first.

    Longest expected first, each to the sampler with the least expected tokens; every sampler gets
    `least` prompts first. Equal expectations give equal numbers of prompts, in turn.

    Raises ValueError if there are fewer than samplers * least prompts.
    """
    if len(expected) < samplers * least:
        raise ValueError(
            f"{len(expected)} prompts are too few for {samplers} samplers of {least} hosts each; "
            f"use at least {samplers * least}"
        )
    dealt: list[list[int]] = [[] for _ in range(samplers)]
    load = [0.0] * samplers
    for prompt in sorted(range(len(expected)), key=lambda i: (-expected[i], i)):
        needy = [s for s in range(samplers) if len(dealt[s]) < least]
        chosen = min(needy or range(samplers), key=lambda s: (load[s], len(dealt[s]), s))
        dealt[chosen].append(prompt)
        load[chosen] += expected[prompt]
    return dealt


class LengthEstimates:
    """Expected response length of every row of a data set, from earlier responses.

    The estimate for step k uses steps up to k - 1 - `staleness`: with a staleness of 1 step k's
    prompts are assigned while step k - 1 runs. The same on every process, with or without reading
    ahead, and after a resume.
    """

    def __init__(self, num_rows: int, staleness: int = 1):
        self._staleness = staleness
        self._length = np.zeros(num_rows, np.float32)  # 0: never answered
        self._pending: list[tuple[int, np.ndarray, np.ndarray]] = []  # (step, rows, lengths)
        self._lock = threading.Lock()

    def observe(self, step: int, rows: np.ndarray, lengths: np.ndarray) -> None:
        """Records the mean response length in tokens (at least 1) of a step's rows, [n] each."""
        with self._lock:
            self._pending.append((step, np.asarray(rows), np.asarray(lengths, np.float32)))
            # a start amid a batch asks for the state before it, and draws that batch again
            self._absorb(step - 1 - self._staleness)

    def expected(self, step: int, rows: np.ndarray) -> np.ndarray:
        """Expected tokens of each row, float32 [n]; an unknown row gets the mean of the known."""
        with self._lock:
            length = self._length_at(step - 1 - self._staleness)
            known = length[length > 0]
            mean = np.float32(known.mean(dtype=np.float64)) if len(known) else np.float32(1)
            found = length[rows]
        return np.where(found > 0, found, mean)

    def state(self, step: int) -> dict[str, Any]:
        """The estimates for a checkpoint after `step`, JSON-able.

        Those of later steps may have been used already: they are drawn ahead.
        """
        with self._lock:
            self._absorb(step - self._staleness)
            return {
                "length": base64.b64encode(zlib.compress(self._length.tobytes())).decode(),
                "pending": [[s, r.tolist(), n.tolist()] for s, r, n in self._pending],
            }

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from a checkpoint's state."""
        data = zlib.decompress(base64.b64decode(state["length"]))
        with self._lock:
            self._length = np.frombuffer(data, np.float32).copy()
            self._pending = [
                (s, np.array(r, np.int64), np.array(n, np.float32)) for s, r, n in state["pending"]
            ]

    def _absorb(self, last_step: int) -> None:
        """Takes the observations up to a step into the estimates."""
        self._length = self._length_at(last_step)
        self._pending = [entry for entry in self._pending if entry[0] > last_step]

    def _length_at(self, last_step: int) -> np.ndarray:
        """The estimates by observations up to a step; the same array where there are none."""
        length = self._length
        for step, rows, lengths in self._pending:
            if step <= last_step:
                length = length.copy() if length is self._length else length
                before = length[rows]
                mixed = MEMORY * before + (1 - MEMORY) * lengths
                length[rows] = np.where(before > 0, mixed, lengths)
        return length
