"""Writes report.html of a run's folder again, for a finished, running or killed run.

    python scripts/report.py --workdir=runs/first

In a checkout the same as `distflow report`; --help shows flags and examples.
"""

from distflow_jax.commands.main import run_script

if __name__ == "__main__":
    run_script("report")
