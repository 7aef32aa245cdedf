"""Fields arrive whole on every layout, and no process receives more than its share.

Nightly: on up to 8 processes every field arrives whole, and no process receives more than its
share.
"""

import json
import os

import pytest
from support.paths import ROOT
from support.programs import finished

ROUNDING = 1.2  # payload over the fair share: headers, and shares that are not exactly equal


def moved(processes, devices, **options):
    """The reports of all processes, in order."""
    command = ["scripts/launch_local.py", f"--processes={processes}"]
    command += [f"--devices_per_process={devices}", "--", "tests/support/coordinator_worker.py"]
    command += [f"--{name}={value}" for name, value in options.items()]
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    env |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = finished(*command, env=env)
    lines = [line.split("REPORT ", 1)[1] for line in done.stdout.splitlines() if "REPORT" in line]
    reports = sorted(map(json.loads, lines), key=lambda report: report["process"])
    assert len(reports) == processes
    return reports


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "processes, devices, options",
    [
        pytest.param(2, 2, dict(fsdp=4, reference=2), marks=pytest.mark.slow),
        pytest.param(4, 1, dict(fsdp=4, reference=2, hosts=2), marks=pytest.mark.slow),
        pytest.param(4, 2, dict(fsdp=2, reference=8), marks=pytest.mark.slow),
        (2, 3, dict(fsdp=2, reference=2, apart=1)),
        pytest.param(2, 4, dict(fsdp=2, reference=4, apart=2), marks=pytest.mark.slow),
        pytest.param(2, 3, dict(fsdp=4, reference=1, apart=1), marks=pytest.mark.slow),
        pytest.param(8, 1, dict(fsdp=4, reference=2, hosts=2), marks=pytest.mark.slow),
        pytest.param(3, 2, dict(fsdp=3, reference=6), marks=pytest.mark.slow),
    ],
)
def test_no_process_receives_more_than_its_share(processes, devices, options):
    """Unequal lengths: the first quarter of the prompts has the long responses."""
    reports = moved(processes, devices, skew=1, **options)
    total = processes * devices
    for layout, ranks in (("actor", options["fsdp"]), ("reference", options["reference"])):
        copies = max(1, processes // ranks)  # processes that hold one rank
        assert sum(r["found"][layout] for r in reports) == 32 * 8 * copies
    assert all(r["moved"] for r in reports)
    load = reports[0]["tokens_per_rank"]
    assert max(load) <= 1.03 * sum(load) / len(load)
    # what both layouts want travels once: never more than the two shares together
    layouts = (options["fsdp"], options["reference"])
    fair = sum(reports[0]["batch"] * max(1, ranks // processes) / ranks for ranks in layouts)
    for report in reports:
        assert report["payload"] <= ROUNDING * fair, (report["payload"], fair)
        # rows of one device field, mesh to mesh: at most one share per device
        devices_here = total // processes
        assert report["reshard"] <= ROUNDING * report["reshard_share"] * devices_here + 1024


@pytest.mark.multiprocess
def test_nothing_moves_between_hosts_that_are_balanced():
    reports = moved(2, 2, skew=0, fsdp=4, reference=4)
    for report in reports:
        assert not report["moved"]
        assert report["payload"] == report["padding"] == report["reshard"] == 0
