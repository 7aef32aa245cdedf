"""benchmarks/queues.py on this machine: groups pass through task buffers; the numbers mean
nothing.

Nightly: clients of several processes pass groups through two task buffers.
"""

import json

import pytest
from support.programs import finished


@pytest.mark.slow
@pytest.mark.multiprocess
def test_groups_pass_through_two_buffers(tmp_path):
    """Clients of several processes are answered by several task buffers (stream/task_buffer.py,
    stream/links/)."""
    flags = ["--buffers=2", "--cells=1 x 200:4", "--seconds=10"]  # a busy machine starts slowly
    finished("benchmarks/queues.py", *flags, f"--json={tmp_path / 'found.json'}")
    (found,) = json.loads((tmp_path / "found.json").read_text())
    assert found["groups/s"] > 0 and found["CPU-ms"] > found["of the busiest"] > 0
    assert 0 < found["ms, median"] <= found["99 % below"]
    assert 0 < found["MiB of servers"] < found["MiB of all"]
