"""The batches of benchmarks/coordinator.py, which both of its sides make alike.

Needs NumPy. A process has 64 sequences: G = 8 prompts of 128 tokens with S = 8 responses each,
heavy-tailed up to 1,024 tokens, T tokens together. With images there is one for each prompt.
"""

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

GROUPS, SAMPLES, PROMPT_TOKENS, MAX_RESPONSE, IMAGE = 8, 8, 128, 1024, 224
SEQUENCES = GROUPS * SAMPLES
OF_TOKENS = ("response", "response_mask", "rollout_logp")
TEXT = ("prompt", *OF_TOKENS, "score")
WARMUP, STEPS = 2, 10  # steps before those that are measured, and those

Shard = dict[str, np.ndarray]


class Case(NamedTuple):
    """The columns that move, and how the two stages divide them."""

    name: str
    fields: tuple[str, ...]
    shared_by: int  # processes to a data rank of the target stage

    @property
    def even(self) -> bool:
        """Whether all processes have about as many tokens; else they are unbalanced."""
        return self.shared_by == 1


CASES = (
    Case("text, kept", TEXT, 1),
    Case("text, changed", TEXT, 2),
    Case("image, kept", (*TEXT, "pixel_values"), 1),
    Case("image, changed", (*TEXT, "pixel_values"), 2),
)


def make_shard(process: int, case: Case) -> Shard:
    """The samples of one process, and their lengths: [G, ...] per prompt, [G S] per sequence, [T]
    per token."""
    rng = np.random.default_rng((process, case.even))
    if case.even:  # the quantiles of the distribution, a little off
        size = np.exp(np.sort(np.random.default_rng(0).normal(5.3, 0.9, SEQUENCES)))
        size = rng.permutation(size * rng.uniform(0.98, 1.02, SEQUENCES))
    else:  # all responses to a hard prompt are long
        size = np.exp(np.repeat(rng.normal(5.3, 0.6, GROUPS), SAMPLES) + rng.normal(0, 0.6, 64))
    length = np.clip(size, 4, MAX_RESPONSE).astype(np.int32)
    tokens = int(length.sum())
    shard = {
        "prompt": rng.integers(0, 32000, (GROUPS, PROMPT_TOKENS), np.int32),
        "response": rng.integers(0, 32000, tokens, np.int32),
        "response_mask": rng.random(tokens) < 0.95,
        "rollout_logp": -rng.exponential(1.0, tokens).astype(np.float32),
        "score": rng.random(SEQUENCES).astype(np.float32),
        "pixel_values": rng.integers(0, 256, (GROUPS, IMAGE, IMAGE, 3), np.uint8),
    }
    return {name: shard[name] for name in case.fields} | {"length": length}


def size(shard: Shard) -> int:
    """Bytes of the arrays."""
    return sum(array.nbytes for array in shard.values())


def sequences(shard: Shard) -> dict[str, Sequence[np.ndarray]]:
    """The columns of a shard, an entry for each sequence; those of a group share their prompt's."""
    cuts, found = np.cumsum(shard["length"])[:-1], {}
    for name, values in shard.items():
        if name in OF_TOKENS:
            found[name] = np.split(values, cuts)
        elif name == "score":
            found[name] = values
        elif name != "length":
            found[name] = [one for one in values for _ in range(SAMPLES)]
    return found


def checksums(columns: Mapping[str, Sequence[np.ndarray]]) -> list[int]:
    """A number for each sequence, of all its fields; in order of size."""
    found = []
    for entries in zip(*(columns[name] for name in sorted(columns)), strict=True):
        crc = 0
        for entry in entries:
            crc = zlib.crc32(np.ascontiguousarray(entry), crc)
        found.append(crc)
    return sorted(found)


def timed_steps(step: Callable[[], Any]) -> list[float]:
    """Seconds of each measured step."""
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return seconds
