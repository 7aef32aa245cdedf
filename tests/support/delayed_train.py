"""scripts/train.py whose sampler and trainer are late at random; run by test_samplers_apart.py.

    DELAYS=SEED python tests/support/delayed_train.py --config=configs/tiny.py --workdir=DIR

Decode calls, steps and weight syncs wait up to 0.2 seconds, by the seed and the process. Nothing
waits without DELAYS. A reward function is late by itself: REWARD is the text of one.
"""

import os
import random
import time

from distflow_jax.commands.main import run_script
from distflow_jax.rollout.engine.engine import RolloutEngine
from distflow_jax.runtime.sample_source import Synchronous
from distflow_jax.stream.ahead import Ahead

LONGEST = 0.2  # seconds
REWARD = f"""
import os, random, time

def digits(solution_str):
    if os.environ.get("DELAYS") and random.random() < 0.2:
        time.sleep(random.uniform(0, {LONGEST}))
    return sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))
"""


def late(method, draw: random.Random, share: float):
    """The method, which waits first in a share of its calls."""

    def waiting(*args, **kwargs):
        if draw.random() < share:
            time.sleep(draw.uniform(0, LONGEST))
        return method(*args, **kwargs)

    return waiting


def delay_all() -> None:
    """Has this process's decode calls, steps and weight syncs wait, if DELAYS is set."""
    if seed := os.environ.get("DELAYS"):
        draw = random.Random(f"{seed} {os.getpid()}")
        RolloutEngine.generate = late(RolloutEngine.generate, draw, 0.2)
        for source in (Synchronous, Ahead):
            source.begin = late(source.begin, draw, 1.0)
            source.update_weights = late(source.update_weights, draw, 1.0)


if __name__ == "__main__":
    delay_all()
    run_script("train")
