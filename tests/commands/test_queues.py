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
    flags = ["--buffers=2", "--clients=4", "--seconds=1", f"--json={tmp_path / 'found.json'}"]
    finished("benchmarks/queues.py", *flags)
    (found,) = json.loads((tmp_path / "found.json").read_text())
    assert found["groups_per_second"] > 0 and found["cpu_ms"] > found["cpu_ms_busiest"] > 0
    assert 0 < found["p50_ms"] <= found["p99_ms"]
