"""scripts/train.py that notes the memory resident after each step; run by test_running_ahead.py.

    RESIDENT=FILE python tests/support/measured_train.py --config=configs/tiny.py --workdir=DIR

Every process appends a line of bytes to FILE for each step. Linux.
"""

import gc
import os
import pathlib

from distflow_jax import run
from distflow_jax.commands.main import run_script

if __name__ == "__main__":
    one_step = run.Run.run_step

    def measured(self):
        """A step, and what is resident after it."""
        metrics = one_step(self)
        gc.collect()
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        with open(os.environ["RESIDENT"], "a") as file:
            file.write(f"{pages * os.sysconf('SC_PAGE_SIZE')}\n")
        return metrics

    run.Run.run_step = measured
    run_script("train")
