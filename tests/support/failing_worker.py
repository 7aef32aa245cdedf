"""scripts/worker.py, whose engine takes no group of some prompts; run by test_worker_batches.py.

FAILS=COUNTER,COUNTER python tests/support/failing_worker.py --config=... --join=...
"""

import os

from distflow_jax.commands.main import run_script
from distflow_jax.environments.episode_sampler import EpisodeSampler

if __name__ == "__main__":
    fails = {int(counter) for counter in os.environ["FAILS"].split(",")}
    submit = EpisodeSampler.submit

    def fail(self, key, request, progress):
        """Refuses some prompts, as an engine does that has no room for them."""
        if key[0] in fails:
            raise ValueError(f"prompt {key[0]} has no room here")
        submit(self, key, request, progress)

    EpisodeSampler.submit = fail
    run_script("worker")
