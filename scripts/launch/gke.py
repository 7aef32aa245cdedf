"""Starts a run on Google Kubernetes Engine as a JobSet, one pod per host.

    python scripts/launch/gke.py --name=first --image=IMAGE --tpu=v5p --topology=2x2x2 \\
        --volume=shared:/shared -- \\
        train --config=grpo_smollm2 --workdir=/shared/runs/first

The image holds the package, not this checkout.

In a checkout the same as `distflow launch gke`; --help shows the flags.
"""

import sys

from distflow_jax.commands.launch.hosts import run_launcher

if __name__ == "__main__":
    run_launcher("gke", sys.argv[1:], "python scripts/launch/gke.py")
