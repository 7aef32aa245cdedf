"""benchmarks/partial_batch_cost.py on this machine: all parts run; the numbers mean nothing."""

import json

import pytest
from support.programs import finished


def measured(tmp_path, *flags):
    finished("benchmarks/partial_batch_cost.py", *flags, f"--json={tmp_path / 'found.json'}")
    (found,) = json.loads((tmp_path / "found.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.multiprocess
def test_parts_of_a_partial_batch_on_two_processes(tmp_path):
    found = measured(tmp_path, "--processes=2", "--steps=3")
    assert found["processes"] == 2 and 0 < found["seconds"] <= found["late"]
    assert all(seconds > 0 for seconds in found["parts"].values())


@pytest.mark.slow
def test_a_step_in_partial_batches_beside_the_step_at_once(tmp_path):
    found = measured(tmp_path, "--models=tiny", "--steps=2", "--rounds=1")
    assert 0 < found["rows"] <= found["partial_batch_rows"]
    assert found["once"] > 0 and found["partial_batches"] > 0
