"""delayed_train.py, one process of which kills itself at an exact place of a step in partial
batches.

    KILL_AT=finish:3 KILL_PROCESS=1 python tests/support/killed_train.py --config=... --workdir=DIR

`finish:N`: inside the N-th end of an optimizer step, whose program is launched and not awaited.
`partial batch:N`: after the N-th partial batch, before the next one. Processes without the number
of KILL_PROCESS go on until the launcher ends them. DELAYS as in delayed_train.py.
"""

import os
import signal

from distflow_jax.cluster import job
from distflow_jax.commands.main import run_script
from distflow_jax.planning.partial_batches.partial_batch_programs import PartialBatchUpdate
from distflow_jax.stream.ahead import Ahead
from support import delayed_train

PLACES = {"finish": (PartialBatchUpdate, "finish"), "partial_batch": (Ahead, "record")}


def dying(method, calls: int):
    """The method, in whose N-th call the process dies after the work was launched."""
    left = iter(range(calls - 1, -1, -1))

    def called(*args, **kwargs):
        result = method(*args, **kwargs)
        if next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    return called


if __name__ == "__main__":
    delayed_train.delay_all()
    place, _, calls = os.environ.get("KILL_AT", "").partition(":")
    if place and str(job.find(os.environ).process_id) == os.environ["KILL_PROCESS"]:
        owner, name = PLACES[place]
        setattr(owner, name, dying(getattr(owner, name), int(calls)))
    run_script("train")
