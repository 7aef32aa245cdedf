"""Writes a run's trained model, or a model source as it is, as a Hugging Face folder.

    python scripts/export.py --workdir=runs/first --out=exports/first

In a checkout the same as `distflow export`; --help shows flags and examples.
"""

from distflow_jax.commands.main import run_script

if __name__ == "__main__":
    run_script("export")
