"""Starts N JAX processes of one job on this machine and merges their logs.

    python scripts/launch_local.py --processes=2 --devices_per_process=4 -- \\
        scripts/train.py --config=configs/grpo_smollm2.py --workdir=runs/two

In a checkout the same as `distflow launch local`; --help shows the flags.
"""

import sys

from distflow_jax.commands.launch.hosts import run_launcher

if __name__ == "__main__":
    run_launcher("local", sys.argv[1:], "python scripts/launch_local.py")
