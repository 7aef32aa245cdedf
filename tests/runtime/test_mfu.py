"""The reported speed of a run on devices with a known peak, and the programs that a second start
finds compiled.

Nightly: a run reports MFU where the peak is known, and a second start compiles nothing again.
"""

import json

import jax
import numpy as np
import pytest
from support.tiny_config import tiny_config

from distflow_jax import run
from distflow_jax.models.model_flops import BatchWork
from distflow_jax.planning.chips import peak_flops
from distflow_jax.programs import program_folder
from distflow_jax.report.run_writer import read_metrics
from distflow_jax.runtime import mfu

SMALL = "model.source=random:llama?hidden=32&layers=2&heads=4&kv_heads=2&mlp=64&vocab=512"


def config_of(*assignments):
    return tiny_config(SMALL, *assignments)


@pytest.mark.parametrize(
    ("kind", "tera"),
    [
        ("TPU v4", 275),
        ("TPU v5 lite", 197),
        ("TPU v5", 459),
        ("TPU v5p", 459),
        ("TPU v6 lite", 918),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA A10", 125),
        ("NVIDIA A10G", 70),
        ("NVIDIA GeForce RTX 4090", 165),
    ],
)
def test_peaks_by_the_names_that_jax_gives(kind, tera):
    assert peak_flops(kind) == tera * 1e12


@pytest.mark.parametrize("kind", ["cpu", "TPU v3", "NVIDIA H100", "NVIDIA A16", "NVIDIA H20"])
def test_no_peak_is_made_up(kind):
    assert peak_flops(kind) is None
    assert peak_flops("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None


def test_images_of_all_processes_count():
    work = mfu.with_images(BatchWork(10, 4, 55, 30), np.array([512, 3, 40, 600, 300]))
    assert work == BatchWork(10, 4, 55, 30, patches=40, patch_pairs=600, window_pairs=300)


def test_steps_that_never_come_cannot_be_profiled(tmp_path):
    config = config_of("training.steps=3", "observe.profile_steps=3:4")
    with pytest.raises(ValueError, match=r"'3:4' ends after training.steps=3"):
        run.train_here(config, tmp_path)


@pytest.mark.slow
def test_a_run_of_devices_with_a_peak(tmp_path, monkeypatch):
    peak = 1e9
    monkeypatch.setattr(mfu, "peak_flops", lambda kind: peak)
    monkeypatch.delenv(program_folder.VARIABLE)  # that of the tests
    more = ["training.steps=2", "eval.dataset=", "algorithm.kl_coef=0.1", "training.epochs=2"]
    more += [f"compilation_cache={tmp_path / 'compiled'}", "observe.profile_steps=2"]
    config, steps = config_of(*more), {}
    for name in ("first", "second"):
        jax.clear_caches()
        assert run.train_here(config, tmp_path / name) == 0
        assert list((tmp_path / name / "profile" / "process_0").rglob("*.xplane.pb"))
        steps[name] = [r for r in read_metrics(tmp_path / name / "metrics.jsonl") if r["step"]]
    for row in steps["first"]:
        # 12 FLOPs a weight and token in two epochs, and attention; the update is part of the step
        weights = 2 * (3 * 32 * 64 + 2 * 32 * 32 + 2 * 32 * 16)
        tokens = row["global_seqlen/balanced_max"]
        assert row["perf/mfu/actor"] > 12 * weights * tokens / row["timing_s/step"] / (8 * peak)
    for first, second in zip(*steps.values(), strict=True):
        assert second["actor/grad_norm"] == first["actor/grad_norm"]
    start = steps["second"][0]
    assert start["perf/compilations_fetched"] == start["perf/compilations"] > 20
    assert [row[-1]["perf/compilations"] for row in steps.values()] == [0, 0]
    text = " ".join((tmp_path / "first" / "plan.txt").read_text().split())
    assert "XLA options, 8 cpu: xla_cpu_" in text
    assert json.loads((tmp_path / "first" / "config.json").read_text())["compilation_cache"]
