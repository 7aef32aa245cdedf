"""Starts a run as a managed job of SkyPilot, one process per node.

    python scripts/launch/skypilot.py --name=first --gpu=H100 --nodes=2 --volume=shared:/shared \\
        --setup='pip install -e .[gpu]' -- \\
        train --config=grpo_smollm2 --workdir=/shared/runs/first

In a checkout the same as `distflow launch skypilot`; --help shows the flags.
"""

import sys

from distflow_jax.commands.launch.hosts import run_launcher

if __name__ == "__main__":
    run_launcher("skypilot", sys.argv[1:], "python scripts/launch/skypilot.py")
