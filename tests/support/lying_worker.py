"""scripts/worker.py of a worker that lies: LIE names what it tells of all that it has sampled."""

import os

import numpy as np

from distflow_jax.commands.main import run_script
from distflow_jax.stream.frames import frames
from distflow_jax.stream.links import buffer_talk

LIES = {
    "ids": lambda arrays: {**arrays, "tokens": np.full_like(arrays["tokens"], 10**9)},
    "log-probs": lambda arrays: {**arrays, "logp": arrays["logp"] - np.float32(1.5)},
}


def lying_frame(facts, found):
    """A frame with samples, in place of frames.samples_frame."""
    frame = frames.samples_frame(facts, found)
    return frames.Frame(frame.facts, LIES[os.environ["LIE"]](frame.arrays))


if __name__ == "__main__":
    buffer_talk.samples_frame = lying_frame
    run_script("worker")
