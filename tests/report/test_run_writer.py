"""metrics.jsonl and samples hold each step once, exactly, after restarts and failed writes too."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from distflow_jax.report.json_lines import json_line
from distflow_jax.report.read_run import read_run
from distflow_jax.report.run_writer import RunWriter, read_metrics, write_atomic


def steps(folder):
    return [row["step"] for row in read_metrics(folder / "metrics.jsonl")]


def test_floats_read_back_exactly(tmp_path):
    writer = RunWriter(tmp_path)
    values = {f"a/{i}": x for i, x in enumerate(np.random.default_rng(0).normal(size=50) ** 21)}
    values |= {"a/third": np.float32(1) / np.float32(3), "a/device": jnp.float32(0.1), "a/n": 7}
    writer.metrics(1, values)
    writer.close()
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert row == {"step": 1} | {name: float(value) for name, value in values.items()}
    assert isinstance(row["a/n"], int)


def test_nan_and_infinity_are_valid_json(tmp_path):
    writer = RunWriter(tmp_path)
    writer.metrics(1, {"a/nan": math.nan, "a/up": math.inf, "a/down": np.float32(-math.inf)})
    writer.samples(1, [json_line({"score": math.nan, "tokens": np.array([1, 2])})])
    writer.close()

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert line == {"step": 1, "a/nan": "NaN", "a/up": "Infinity", "a/down": "-Infinity"}
    (row,) = read_metrics(tmp_path / "metrics.jsonl")
    assert math.isnan(row["a/nan"]) and row["a/up"] == math.inf and row["a/down"] == -math.inf
    sample = json.loads((tmp_path / "samples" / "1.jsonl").read_text(), parse_constant=refuse)
    assert sample == {"score": "NaN", "tokens": [1, 2]}


@pytest.mark.parametrize("torn", ["", '{"step": 6, "a/b": 0.', '{"step": 6}'])
def test_a_resumed_run_holds_each_step_once(tmp_path, torn):
    writer = RunWriter(tmp_path)
    for step in range(1, 6):
        writer.metrics(step, {"a/b": step / 7})
        for kind in ("", "eval-", "nonfinite-"):
            writer.samples(f"{kind}{step}", [json_line({"text": "früher"})])
    writer.close()
    before = (tmp_path / "metrics.jsonl").read_text()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)  # what a kill in the middle of a write leaves
    writer = RunWriter(tmp_path, resume_step=3)
    assert steps(tmp_path) == [1, 2, 3]
    assert {p.stem for p in (tmp_path / "samples").iterdir()} == {
        f"{kind}{step}" for step in (1, 2, 3) for kind in ("", "eval-", "nonfinite-")
    }
    for step in (4, 5):
        writer.metrics(step, {"a/b": step / 7})
    writer.close()
    assert (tmp_path / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize(("resume_step", "kept"), [(3, {0, 3}), (2, {0}), (5, {0, 3})])
def test_late_metrics_of_a_step_join_its_own(tmp_path, resume_step, kept):
    writer = RunWriter(tmp_path)
    for step in range(1, 6):
        if step in (2, 5):
            writer.late_metrics(step - 2, {"val-core/a": step})
        writer.metrics(step, {"a/b": step / 7})
    with pytest.raises(ValueError, match="step 6 before its own: 5 ended"):
        writer.late_metrics(6, {})
    writer.close()
    writer = RunWriter(tmp_path, resume_step=resume_step)
    writer.close()
    found = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in found] == list(range(resume_step + 1))
    assert {row["step"] for row in found if "val-core/a" in row} == kept
    assert all(row["a/b"] == row["step"] / 7 for row in found[1:])
    shown = read_run(tmp_path).rows
    assert {step for step, row in shown.items() if "val-core/a" in row} == kept
    assert all(row["a/b"] == step / 7 for step, row in shown.items() if step)


def test_a_fresh_start_drops_the_steps_of_a_run_without_a_checkpoint(tmp_path):
    writer = RunWriter(tmp_path)
    writer.metrics(0, {"a/b": 1})
    writer.metrics(1, {"a/b": 2})
    writer.close()
    RunWriter(tmp_path).close()
    assert steps(tmp_path) == []


def test_lines_are_on_disk_at_once(tmp_path):
    writer = RunWriter(tmp_path)
    writer.metrics(1, {"a/b": 1.5})
    assert steps(tmp_path) == [1]
    writer.close()


def test_steps_go_forward(tmp_path):
    writer = RunWriter(tmp_path, resume_step=3)
    with pytest.raises(ValueError, match="step 3 after those of step 3"):
        writer.metrics(3, {})
    with pytest.raises(ValueError, match="'a/b' must be a number"):
        writer.metrics(4, {"a/b": np.zeros(2)})
    writer.close()


def test_only_the_enabled_process_writes(tmp_path):
    writer = RunWriter(tmp_path / "run", enabled=False)
    writer.config({"seed": 1})
    writer.plan("1. rollout")
    writer.metrics(1, {"a/b": 1})
    writer.samples(1, ["{}"])
    writer.close()
    assert not (tmp_path / "run").exists()


def test_config_and_plan(tmp_path):
    writer = RunWriter(tmp_path / "run")
    writer.config({"training": {"lr": 1e-6}, "names": ["ä"]})
    writer.plan("1. rollout")
    writer.close()
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config == {"training": {"lr": 1e-6}, "names": ["ä"]}
    assert (tmp_path / "run" / "plan.txt").read_text() == "1. rollout\n"


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "plan.txt"
    write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "new \ud800")
    assert path.read_text() == "old"
