"""Checks versions, devices, memory, disks, caches and ports, and suggests fixes.

    python scripts/doctor.py

In a checkout the same as `distflow doctor`; --help shows flags and examples.
"""

from distflow_jax.commands.main import run_script

if __name__ == "__main__":
    run_script("doctor")
