"""scripts/train.py whose sampler hangs once it samples for step 3; run by
test_asynchronous_failures.py."""

import threading

from distflow_jax.commands.main import run_script
from distflow_jax.stream.producer import Producer

if __name__ == "__main__":
    round_of = Producer.collect

    def hanging(self):
        """A round of the scheduler, which never returns after step 2 has trained."""
        if self.admission.finished >= 2:
            threading.Event().wait()
        return round_of(self)

    Producer.collect = hanging
    run_script("train")
