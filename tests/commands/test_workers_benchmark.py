"""benchmarks/workers.py on this machine: all parts run; the numbers mean nothing.

Nightly: the benchmark of workers that join, take weights and pull them runs.
"""

import json

import pytest
from support import haste
from support.programs import finished


@pytest.mark.slow
@pytest.mark.multiprocess
def test_workers_join_take_weights_and_pull_them(tmp_path):
    """By the wire, gRPC and sockets the same weights come (stream/weight_client.py)."""
    flags = ("--quick", f"--json={tmp_path / 'found.json'}")
    finished("benchmarks/workers.py", *flags, env=haste.environment(1))
    found = json.loads((tmp_path / "found.json").read_text())
    joins, loads, wire = (found[part] for part in ("joins", "loads", "wire"))
    assert 0 < joins["ready"][0] < joins["first_step"][0]
    assert loads["loads"] > 0 and 0 < loads["load_seconds"] < loads["step_seconds"]
    assert wire["megabytes"] > 30 and all(min(one) > 0 for one in wire["seconds"].values())
