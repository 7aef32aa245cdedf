"""scripts/train.py that notes the memory resident after each step; run by test_running_ahead.py.

    RESIDENT=FILE python tests/support/measured_train.py --config=configs/tiny.py --workdir=DIR

Every process appends a line of bytes to FILE for each step. Linux.
"""

import gc
import os
import pathlib

from distflow_jax.commands.main import run_script
from distflow_jax.runtime.recorder import Recorder

if __name__ == "__main__":
    step = Recorder.step

    def measured(self, *measurements):
        """The record of a step, and what is resident after it."""
        step(self, *measurements)
        gc.collect()
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        with open(os.environ["RESIDENT"], "a") as file:
            file.write(f"{pages * os.sysconf('SC_PAGE_SIZE')}\n")

    Recorder.step = measured
    run_script("train")
