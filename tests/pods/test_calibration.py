"""Rates measured on a chip in place of published ones."""

import json

import pytest

from distflow_jax.pods.calibration import calibrated
from distflow_jax.pods.efficiency import DECODE, DECODE_EXPERTS, TRAINING, TRAINING_EXPERTS, Range
from distflow_jax.pods.topology import open_topology

POD = open_topology("h100:2x8")
CHIP = POD.chip
# as benchmarks/gpu.py writes them: two models, one of them also with layers computed again
UPDATES = [
    {"part": "update", "model": "a", "mfu": 0.4, "remat": "none"},
    {"part": "update", "model": "a", "mfu": 0.36, "remat": "full"},
    {"part": "update", "model": "b", "error": "RESOURCE_EXHAUSTED"},
]
BYTES = 0.8 * CHIP.memory_bandwidth * 0.5  # read in half a second at four fifths of the peak
DECODES = [
    {"part": "decode", "seconds": [1.0 + s, 1.1 + s], "first_token_seconds": [0.1, 0.2],
     "decoded": 100, "least_bytes_per_device": BYTES}
    for s in (0.0, 0.1)
]  # fmt: skip
TREE = {
    "device_kind": "NVIDIA H100 80GB HBM3",
    "measured": {"flops": 7e14, "memory_bandwidth": 0.8 * CHIP.memory_bandwidth},
    "results": [{"part": "check", "comparisons": []}, *UPDATES, *DECODES],
}


@pytest.fixture
def of(tmp_path):
    def write(**changes):
        path = tmp_path / "gpu.json"
        path.write_text(json.dumps(TREE | changes))
        return calibrated(POD, path)

    return write


def test_measured_rates_replace_published_ones(of):
    found, published = of().efficiency, POD.efficiency
    assert found.source == "measured" and published.source == "published"
    assert found.work[TRAINING].compute == Range(pytest.approx(0.4 / 1.1), pytest.approx(0.48))
    assert found.work[DECODE].memory == Range(pytest.approx(0.8 / 1.1), pytest.approx(0.8))
    # 0.9 and 1.0 s without the first token, half a second of which reads weights and cache
    assert found.step == Range(pytest.approx(0.4 / 100), pytest.approx(1.1 * 0.5 / 100))
    for kind in (TRAINING_EXPERTS, DECODE_EXPERTS):
        assert found.work[kind] == published.work[kind]
    assert found.links == published.links


def test_what_was_not_measured_stays_published(of):
    found, published = of(results=[]).efficiency, POD.efficiency
    assert found.work[TRAINING].compute == published.work[TRAINING].compute
    assert found.step == published.step
    measured = TREE["measured"] | {"link_bandwidth": 0.7 * CHIP.link_bandwidth}
    found = of(measured=measured).efficiency
    assert found.links == Range(pytest.approx(0.7 / 1.1), pytest.approx(0.7))


def test_no_share_is_above_the_peak(of):
    measured = {"flops": 1e16, "memory_bandwidth": 2 * CHIP.memory_bandwidth}
    assert of(measured=measured).efficiency.work[DECODE].memory.high == 1.0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"device_kind": "NVIDIA H200"}, "measured on 'NVIDIA H200', but h100:2x8 has h100"),
        ({"device_kind": "cpu"}, "measured on 'cpu', but .*run benchmarks/gpu.py there"),
        ({"device_kind": 3}, "device_kind must be text, got 3"),
        ({"measured": []}, "measured must be an object"),
        ({"measured": {}}, "measured has no 'memory_bandwidth'"),
        ({"measured": {"memory_bandwidth": -1}}, "memory_bandwidth must be a positive"),
        ({"results": {}}, "results must be a list of objects"),
        ({"results": [{"part": "update", "mfu": 0.3}]}, "'update' has no 'remat'"),
        ({"results": [DECODES[0] | {"seconds": "x"}]}, "seconds must be a list of finite numbers"),
        ({"results": [DECODES[0] | {"decoded": 0}]}, "decoded must be an integer from 1"),
        ({"results": [DECODES[0] | {"seconds": [1.0]}]}, "1 seconds and 2 first_token_seconds"),
        ({"results": [DECODES[0] | {"seconds": [], "first_token_seconds": []}]}, "0 seconds"),
    ],
)
def test_what_is_no_such_table_is_refused_in_one_line(of, changes, says):
    with pytest.raises(ValueError, match=says) as found:
        of(**changes)
    assert "--calibrate=" in str(found.value) and "\n" not in str(found.value)


@pytest.mark.parametrize("text", ["[]", "{}", "no json", '{"results": []}'])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "gpu.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="gpu.json") as found:
        calibrated(POD, path)
    assert "\n" not in str(found.value)
