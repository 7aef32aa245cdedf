"""Generates responses to a prompt, or to every line of a file.

    python scripts/generate.py --config=configs/grpo_smollm2.py \\
        --prompt="What is 12 + 35?"

In a checkout the same as `distflow generate`; --help shows flags and examples.
"""

from distflow_jax.commands.main import run_script

if __name__ == "__main__":
    run_script("generate")
