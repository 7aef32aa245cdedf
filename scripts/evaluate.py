"""Evaluates a model, or a run's trained weights, on a data set; writes JSON.

    python scripts/evaluate.py --config=configs/grpo_smollm2.py --out=base.json

In a checkout the same as `distflow evaluate`; --help shows flags and examples.
"""

from distflow_jax.commands.main import run_script

if __name__ == "__main__":
    run_script("evaluate")
