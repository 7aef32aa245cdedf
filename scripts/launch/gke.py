"""Starts a run on Google Kubernetes Engine as a JobSet, one pod per host.

    python scripts/launch/gke.py --name=first --image=IMAGE --tpu=v5p --topology=4x4x4 \\
        --volume=shared:/shared -- \\
        scripts/train.py --config=configs/grpo_smollm2.py --workdir=/shared/runs/first

In a checkout the same as `distflow launch gke`; --help shows the flags.
"""

from distflow_jax.commands.launch import gke

if __name__ == "__main__":
    gke.run(program="python scripts/launch/gke.py")
