"""scripts/train.py that writes when its sampler takes weights; run by test_publishing.py.

    SWAPS=FOLDER python tests/support/marked_swaps.py --config=configs/tiny.py --workdir=DIR

FOLDER/PID.jsonl has a line for each swap: the version, its beginning and end on the clock that all
processes of the machine share, and whether the sampler was interrupted in its work for it. Samplers
are slower than the training, so that they always have work. No class is passed over, however busy
the machine is.
"""

import json
import os
import pathlib
import time

from distflow_jax.commands.main import run_script
from distflow_jax.flow.producer import Producer
from distflow_jax.flow.publishing import swap_turns
from distflow_jax.flow.sampling_thread import SamplingThread

ROUND_SECONDS = 0.2
whole, quick = SamplingThread._load, Producer.round


def late(self):
    """A round of the sampler that takes its time."""
    time.sleep(ROUND_SECONDS)
    return quick(self)


def marked(self, left, version):
    """Takes weights, and notes it."""
    producer = self._producer
    started = time.monotonic()
    paused = producer.sampler.busy and not producer.has_idle_slots and self._wanted is None
    whole(self, left, version)
    line = [version, started, time.monotonic(), paused]
    with (pathlib.Path(os.environ["SWAPS"]) / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(f"{json.dumps(line)}\n")


if __name__ == "__main__":
    swap_turns.FIRST_SECONDS = swap_turns.LEAST_SECONDS = 600.0
    SamplingThread._load, Producer.round = marked, late
    run_script("train")
