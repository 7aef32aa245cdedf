"""Trains a model by reinforcement learning, or resumes a run.

    python scripts/train.py --config=configs/grpo_smollm2.py \\
        --workdir=runs/first --config.training.optimizer.lr=2e-6

In a checkout the same as `distflow train`; --help shows flags and examples.
"""

from distflow_jax.commands.main import run_script

if __name__ == "__main__":
    run_script("train")
