"""Samples for a run with stream.workers, on devices that the run does not have.

    python scripts/worker.py --config=configs/tiny.py --join=runs/far

In a checkout the same as `distflow worker`; --help shows flags and examples.
"""

from distflow_jax.commands.main import run_script

if __name__ == "__main__":
    run_script("worker")
