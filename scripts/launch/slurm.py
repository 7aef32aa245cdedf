"""Starts a run on a Slurm cluster, one process per node.

    python scripts/launch/slurm.py --nodes=4 --gpus_per_node=8 --time=04:00:00 -- \\
        scripts/train.py --config=configs/grpo_smollm2.py --workdir=runs/first

In a checkout the same as `distflow launch slurm`; --help shows the flags.
"""

import sys

from distflow_jax.commands.launch.hosts import run_launcher

if __name__ == "__main__":
    run_launcher("slurm", sys.argv[1:], "python scripts/launch/slurm.py")
