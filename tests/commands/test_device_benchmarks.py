"""benchmarks/gpu.py on this machine: all parts run, the most worth first, and say what they found;
a second call goes on where the first one stopped.

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


@pytest.fixture
def tasks(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("device.tasks")


PARTS = ("check", "update", "decode", "step", "kernels", "batch", "async")
ABOUT = {"device_kind": "a", "devices": 1, "jax": "1", "settings": {"remat": "none"}}


def test_parts_come_by_their_worth(tasks):
    found = [task.name for task in tasks.ordered(PARTS, ["1b", "3b"], (4, 1), ["pages"])]
    assert found == [
        "check small",
        *("update 1b micro_rows=4", "decode 1b", "step 1b", "kernels 1b", "batch 1b", "async 1b"),
        *("update 3b micro_rows=1", "decode 3b", "step 3b"),
        *("update 1b micro_rows=1", "kernels 1b attention=pages"),
    ]
    assert [task.name for task in tasks.ordered(["step"], ["1b"], (4,), [])] == ["step 1b"]


def test_what_is_worth_most_is_done_in_seven_minutes(tasks):
    """As far as the expected seconds hold: check, update, decode, step and kernels."""
    models, left = ["1b", "3b"], 7 * 60
    for task in tasks.ordered(PARTS, models, (4, 1), []):
        left -= tasks.expected_seconds(task, models, quick=False)
        if task.part == "kernels":
            break
    assert left >= 0


def run_until(tasks, path, seconds, run):
    """A call of so many seconds, of which each task takes ten."""
    results, clock = tasks.Results(path, ABOUT), [seconds]

    def timed(task):
        clock[0] -= 10
        return run(task)

    found = list(tasks.ordered(PARTS[:4], ["1b"], (4,), []))
    late = tasks.run_left(found, results, seconds=lambda task: 10, left=lambda: clock[0], run=timed)
    return [task.name for task in late], {one["task"]: one for one in results.all()}


def test_a_second_call_goes_on_where_the_first_one_stopped(tasks, tmp_path):
    path, begun = tmp_path / "x.json", []

    def fail_once(task):
        begun.append(task.name)
        failed = task.part == "update" and begun.count(task.name) == 1
        return {"error": "x", "traceback": "y"} if failed else {"seconds": len(begun)}

    late, found = run_until(tasks, path, 25, fail_once)
    assert begun == ["check small", "update 1b micro_rows=4"] and late == ["decode 1b", "step 1b"]
    late, found = run_until(tasks, path, 1000, fail_once)
    assert begun[2:] == ["update 1b micro_rows=4", "decode 1b", "step 1b"] and late == []
    assert [found[name]["seconds"] for name in found] == [1, 3, 4, 5]
    assert run_until(tasks, path, 1000, fail_once) == ([], found) and len(begun) == 5


def test_nothing_is_timed_after_a_wrong_number(tasks, tmp_path):
    path, holds = tmp_path / "x.json", []
    late, found = run_until(tasks, path, 1000, lambda task: {"holds": bool(holds)})
    assert list(found) == ["check small"] and len(late) == 3
    holds.append("mended")
    late, found = run_until(tasks, path, 1000, lambda task: {"holds": bool(holds)})
    assert len(found) == 4 and late == []


@pytest.mark.parametrize("key", list(ABOUT))
def test_results_of_another_machine_are_not_continued(tasks, tmp_path, key):
    path = tmp_path / "x.json"
    run_until(tasks, path, 1000, lambda task: {})
    with pytest.raises(ValueError, match=f"has results with {key} .*; name another file"):
        tasks.Results(path, ABOUT | {key: "other"})


def run(*arguments, devices=1):
    return finished(*arguments, env=haste.environment(devices=devices), codes=None)


@pytest.mark.slow
def test_every_part_runs_on_a_cpu(tmp_path):
    command = ("benchmarks/gpu.py", "--quick", "--minutes=60", f"--out={tmp_path / 'all.json'}")
    found = run(*command)
    assert found.returncode == 0, found.stdout + found.stderr
    tree = json.loads((tmp_path / "all.json").read_text())
    results = {result["task"].split()[0]: result for result in tree["results"]}
    assert tuple(results) == PARTS
    for part in ("update", "decode", "step", "batch", "async"):
        assert results[part]["compilations"] == 0 and "error" not in results[part]
    assert 0 < results["update"]["mfu"] < 1 and 0 < results["decode"]["bandwidth_share"] < 1
    assert results["step"]["medians"]["response_length/mean"] > 10
    age = "training/off_policy/trajectory_staleness/mean"
    assert 0 < results["async"]["medians"][age] <= 1 and age not in results["step"]["medians"]
    assert results["batch"]["micro_rows"] == results["batch"]["tried"][-1]["micro_rows"] == 4
    (table,) = (
        one for one in tree["results"] if one["task"].startswith("kernels") and "rows" in one
    )
    assert table["rows"]["blocks"]["seconds"] > 0 and table["rows"]["plain causal"]["seconds"] > 0
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
    assert run(*command).returncode == 0  # nothing is left to be done
    assert json.loads((tmp_path / "all.json").read_text())["results"] == tree["results"]


@pytest.mark.slow
def test_what_does_not_fit_is_told_and_the_rest_goes_on(tmp_path):
    models = "random:lama,random:llama?hidden=64&layers=2&vocab=512"
    arguments = ("--quick", "--parts=update", f"--models={models}", f"--out={tmp_path / 'x.json'}")
    found = run("benchmarks/gpu.py", *arguments, "--micro-rows=2", devices=2)
    assert found.returncode == 0, found.stderr
    first, second = json.loads((tmp_path / "x.json").read_text())["results"]
    assert "did you mean 'llama'" in first["error"] and first["error"] in found.stdout
    assert second["micro_rows"] == 4 and second["mfu"] > 0 and second["compilations"] == 0
