"""scripts/worker.py, whose connections to the homes go through a proxy that the environment names.

A test can then cut this worker off the network, and no other process.
"""

from distflow_jax.commands.main import run_script
from distflow_jax.flow.workers import wire

DIRECT = ("grpc.enable_http_proxy", 0)

if __name__ == "__main__":
    wire._OPTIONS.remove(DIRECT)
    run_script("worker")
