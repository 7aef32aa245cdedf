"""Serves a model, or a run's trained weights, over gRPC: JetStream's protocol and a fuller one.

    python scripts/serve.py --config=configs/grpo_smollm2.py

In a checkout the same as `distflow serve`; --help shows flags and examples.
"""

from distflow_jax.commands.main import run_script

if __name__ == "__main__":
    run_script("serve")
