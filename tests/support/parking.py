"""Held sequences that lose their slots at random, as if others needed them."""

import numpy as np
import pytest

from distflow_jax.rollout.scheduling.step_loop import StepLoop


def park_at_random(patch: pytest.MonkeyPatch, share: float = 0.3, seed: int = 0) -> None:
    """Before each round every held sequence is parked with this probability."""
    rng, plain = np.random.default_rng(seed), StepLoop.decode_round

    def of_some_parked(loop):
        for slot in list(loop.slots.held):
            if rng.random() < share:
                loop.park(slot)
        plain(loop)

    patch.setattr(StepLoop, "decode_round", of_some_parked)
