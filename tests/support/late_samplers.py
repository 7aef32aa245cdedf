"""scripts/train.py whose samplers are late at random, one of them five times; run by
test_partial_batch_order.py.

    LATE=SEED python tests/support/late_samplers.py --config=configs/tiny.py --workdir=DIR

Each decode call waits up to 0.1 seconds, those of the last process up to 0.5. Python hashes strings
in another way in every process.
"""

import os
import random
import sys
import time

from distflow_jax.cluster import job
from distflow_jax.commands.main import run_script
from distflow_jax.rollout.engine.engine import RolloutEngine

LONGEST = 0.1  # seconds
SLOWEST = 5  # times as late as the others

if __name__ == "__main__":
    own = str(os.getpid())  # which a process keeps when it starts its program anew
    if os.environ.get("PYTHONHASHSEED") != own:
        environment = os.environ | {"PYTHONHASHSEED": own}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    here = job.find(os.environ)
    draw = random.Random(f"{os.environ['LATE']} {here.process_id}")
    longest = LONGEST * (SLOWEST if here.process_id == here.num_processes - 1 else 1)
    generate = RolloutEngine.generate

    def late(*args, **kwargs):
        """A decode call that waits first."""
        time.sleep(draw.uniform(0, longest))
        return generate(*args, **kwargs)

    RolloutEngine.generate = late
    run_script("train")
