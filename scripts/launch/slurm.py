"""Starts a run on a Slurm cluster, one process per node.

    python scripts/launch/slurm.py --nodes=4 --gpus_per_node=8 --time=04:00:00 -- \\
        scripts/train.py --config=configs/grpo_smollm2.py --workdir=runs/first

In a checkout the same as `distflow launch slurm`; --help shows the flags.
"""

from distflow_jax.commands.launch import slurm

if __name__ == "__main__":
    slurm.run(program="python scripts/launch/slurm.py")
