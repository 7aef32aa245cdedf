"""benchmarks/gpu.py on this machine: all parts run, and say what they found.

Nightly: every part of the device benchmarks runs on a CPU; one that does not fit is reported and
the rest continues.
"""

import importlib
import json
import math

import jax
import pytest
from support import haste
from support.paths import ROOT
from support.programs import finished

from distflow_jax.models.parameters import num_params
from distflow_jax.models.weights.source import open_model
from distflow_jax.parallel.mesh import MeshSizes, role_mesh
from distflow_jax.planning.chips import CHIPS, chip_of
from distflow_jax.pods.topology import present_pod

SHAPES = ROOT / "configs" / "shapes"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("TPU v5 lite", "v5e"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", "tpu7x"),
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("NVIDIA A100-SXM4-80GB", "a100_80"),
        ("NVIDIA A100 80GB PCIe", None),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", None),
        ("NVIDIA H200 NVL", None),  # another chip, of which the peak alone is known
        ("cpu", None),
    ],
)
def test_chips_by_the_names_that_jax_gives(kind, name):
    assert chip_of(kind) == (name and CHIPS[name])


def test_the_devices_that_are_there_are_a_pod():
    pod = present_pod(CHIPS["h100"])
    assert (pod.size, pod.hosts, pod.compiles) == (jax.device_count(), 1, True)
    mesh = role_mesh(MeshSizes(fsdp=4, tensor=2))
    assert pod.numbers(mesh).tolist() == list(range(8))
    assert pod.interconnect.span(range(8)).ring == pytest.approx(CHIPS["h100"].link_bandwidth)


@pytest.mark.parametrize(("name", "count"), [("1b", 1_235_814_400), ("3b", 3_212_749_824)])
def test_a_folder_of_shapes_gives_random_weights(name, count):
    source = open_model(f"random:{SHAPES / f'llama32_{name}'}")
    assert num_params(source.config) == count and source.params() is None
    assert source.config.rope_scaling.factor == 32
    assert source.tokenizer.decode(source.tokenizer.encode("12 + 35")) == "12 + 35"


@pytest.mark.parametrize(
    ("spec", "error", "says"),
    [
        (f"random:{SHAPES}/llama32_1b?layers=2", ValueError, "remove .layers=2"),
        (f"random:{SHAPES}/none", FileNotFoundError, "shapes/none has no config.json"),
    ],
)
def test_a_folder_that_is_none_is_said_in_one_line(spec, error, says):
    with pytest.raises(error, match=says) as found:
        open_model(spec)
    assert "\n" not in str(found.value)


def test_what_is_no_number_is_wrong(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    check = importlib.import_module("device.check")
    assert check.Comparison("logp", 0.1, 0.2).holds
    for error in (0.3, math.nan, math.inf):
        wrong = check.Comparison("logp", error, 0.2)
        assert not wrong.holds and str(wrong).startswith("WRONG")


def run(*arguments, devices=1):
    return finished(*arguments, env=haste.environment(devices=devices), codes=None)


@pytest.mark.slow
def test_every_part_runs_on_a_cpu(tmp_path):
    found = run("benchmarks/gpu.py", "--quick", f"--out={tmp_path / 'all.json'}")
    assert found.returncode == 0, found.stdout + found.stderr
    tree = json.loads((tmp_path / "all.json").read_text())
    results = {result["part"]: result for result in tree["results"]}
    assert list(results) == ["check", "update", "decode", "step"]
    for part in ("update", "decode", "step"):
        assert results[part]["compilations"] == 0 and "error" not in results[part]
    assert 0 < results["update"]["mfu"] < 1 and 0 < results["decode"]["bandwidth_share"] < 1
    assert results["step"]["medians"]["response_length/mean"] > 10
    assert {s["segment"] for s in results["step"]["segments"]} == {
        "rollout",
        "advantage",
        "actor_train",
        "update_weights",
    }
    for segment in results["step"]["segments"]:
        assert segment["predicted_seconds"] > 0 and segment["segment"] in found.stdout
        ratio = segment["measured_seconds"] / segment["predicted_seconds"]
        assert segment["ratio"] == pytest.approx(ratio)
    assert "WRONG" not in found.stdout and "| s a step |" in found.stdout


@pytest.mark.slow
def test_what_does_not_fit_is_told_and_the_rest_goes_on(tmp_path):
    models = "random:lama,random:llama?hidden=64&layers=2&vocab=512"
    arguments = ("--quick", "--parts=update", f"--models={models}", f"--out={tmp_path / 'x.json'}")
    found = run("benchmarks/gpu.py", *arguments, "--micro-rows=2", devices=2)
    assert found.returncode == 0, found.stderr
    first, second = json.loads((tmp_path / "x.json").read_text())["results"]
    assert "did you mean 'llama'" in first["error"] and first["error"] in found.stdout
    assert second["micro_rows"] == 4 and second["mfu"] > 0 and second["compilations"] == 0
