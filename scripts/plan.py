"""Prints a run's plan: order, reads and writes, layouts, sizes, programs.

    python scripts/plan.py --config=configs/grpo_smollm2.py \\
        --config.algorithm.kl_coef=0.04

In a checkout the same as `distflow plan`; --help shows flags and examples.
"""

from distflow_jax.commands.main import run_script

if __name__ == "__main__":
    run_script("plan")
