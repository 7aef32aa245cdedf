"""Starts a run on the hosts of a Cloud TPU VM, by gcloud's ssh.

    python scripts/launch/tpu_vm.py --name=my-tpu --zone=us-east5-a \\
        --accelerator_type=v5p-32 -- \\
        scripts/train.py --config=configs/grpo_smollm2.py --workdir=/shared/runs/first

In a checkout the same as `distflow launch tpu_vm`; --help shows the flags.
"""

import sys

from distflow_jax.commands.launch.hosts import run_launcher

if __name__ == "__main__":
    run_launcher("tpu_vm", sys.argv[1:], "python scripts/launch/tpu_vm.py")
