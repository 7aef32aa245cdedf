"""The answer to --async: which lengths are read, what they cost, and what is suggested."""

import json

import numpy as np
import pytest
from support.tiny_config import tiny_config

from distflow_jax.pods import async_plan
from distflow_jax.pods.async_plan import AsyncPlan, Option, plan_async
from distflow_jax.pods.given_lengths import read_lengths
from distflow_jax.pods.schedules import SYNCHRONOUS, step_seconds
from distflow_jax.pods.topology import open_topology

SMALL = [
    "model.source=random:llama?hidden=64&layers=2&heads=4&kv_heads=4&mlp=128&vocab=512",
    "data.prompts_per_step=8",
    "rollout.num_samples=4",
    "rollout.num_slots=32",
    "rollout.max_response_length=200",
    "training.row_tokens=512",
    "eval.dataset=",
]
TEN_AND_TWENTY = {10: 3, 20: 1}


def config_of(*assignments):
    return tiny_config(*SMALL, *assignments)


def written(folder, name, text):
    path = folder / name
    path.write_text(text)
    return path


def read(path, **changes):
    return read_lengths(path, config_of(*(f"{k}={v}" for k, v in changes.items())), 4)


@pytest.mark.parametrize(
    "name, text",
    [
        ("a.json", "[10, 10, 20, 10]"),
        ("b.json", "[[10, 3], [20, 1]]"),
        ("c.json", '{"10": 3, "20": 1}'),
        ("d.csv", "10\n20\n10\n10\n"),
        ("e.csv", "length,count\n10,2\n20,1\n10,1\n"),
        ("f", " [[10, 3], 20]"),
    ],
)
def test_lengths_are_read_in_every_form(tmp_path, name, text):
    found = read(written(tmp_path, name, text))
    assert dict(zip(found.tokens.tolist(), found.counts.tolist(), strict=True)) == TEN_AND_TWENTY
    assert (found.mean, found.longest) == (12.5, 20)
    drawn = found.drawn(np.random.default_rng(0), 40_000)
    assert drawn.mean() == pytest.approx(12.5, rel=0.01)


@pytest.mark.parametrize(
    "text, problem",
    [
        ("[]", "has no lengths"),
        ("[[10, 0]]", "has no lengths"),
        ("", "has no lengths"),
        ("[10, -5]", "entry 2 must have a length of at least 1 .* got -5"),
        ("[[10, -1]]", r"entry 1 must have .* got \[10, -1\]"),
        ("[10.5]", "entry 1 must be a length, .* got 10.5"),
        ("[true]", "entry 1 must be .* got (true|True)"),
        ("10\nmany\n", "entry 2 must be .* got '?many"),
        ("[201]", "201 tokens, above rollout.max_response_length=200"),
        ("[[1, 2, 3]]", "entry 1 must be"),
        ('{"a": [', "not valid JSON"),
    ],
)
def test_other_content_is_refused_in_one_line(tmp_path, text, problem):
    with pytest.raises(ValueError, match=problem) as error:
        read(written(tmp_path, "lengths", text))
    assert "--async" in str(error.value) and "\n" not in str(error.value)


def run_folder(folder, *, gen=6.0, devices=4, staleness=0):
    """A run of two steps, of which the first compiles; lengths 10 to 40."""
    (folder / "samples").mkdir()
    records = [{"uid": [0, i], "response_length": n} for i, n in enumerate((10, 20, 30, 40))]
    text = "".join(json.dumps(record) + "\n" for record in records)
    written(folder / "samples", "2.jsonl", text)
    written(folder / "samples", "eval-2.jsonl", json.dumps({"response_length": 100}) + "\n")
    row = {"timing_s/gen": gen, "timing_s/reward": 1.0, "timing_s/score": 32.0}
    row |= {"timing_s/update_weights": 0.5, "perf/time_per_step": gen + 4.5}
    row["timing_s/save_checkpoint"] = 5.0  # after the step's time
    first = row | {"step": 1, "timing_s/gen": 100.0, "perf/time_per_step": 900.0}
    rows = [first, row | {"step": 2}, row | {"step": 3}]
    written(folder, "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    settings = {"data": {"prompts_per_step": 8}, "rollout": {"num_samples": 4}}
    settings |= {"mesh": {"rollout_tensor": 1}, "stream": {"max_staleness": staleness}}
    written(folder, "config.json", json.dumps(settings))
    event = {"event": "start", "devices": f"{devices} x cpu", "processes": 2}
    written(folder, "events.jsonl", json.dumps(event) + "\n")
    return folder


def test_a_run_gives_lengths_and_seconds(tmp_path):
    found = read(run_folder(tmp_path))
    assert sorted(found.tokens.tolist()) == [10, 20, 30, 40]
    seconds = found.measured
    assert (seconds.generation, seconds.training, seconds.weight_update) == (6.0, 3.0, 0.5)
    assert seconds.reward == 2.0  # 32 s over half of the 32 responses: one of two processes


def test_folders_that_do_not_suit_the_plan_are_refused(tmp_path):
    with pytest.raises(ValueError, match="is not a run folder"):
        read(tmp_path)
    run_folder(tmp_path, devices=2)
    with pytest.raises(ValueError, match="ran on 2 devices, but --topology has 4"):
        read(tmp_path)
    with pytest.raises(ValueError, match=r"use --config\.data\.prompts_per_step=8"):
        read(tmp_path, **{"data.prompts_per_step": 16})
    (other := tmp_path / "ahead").mkdir()
    run_folder(other, staleness=1)
    with pytest.raises(ValueError, match="stream.max_staleness=1, whose times overlap"):
        read(other)


@pytest.fixture(scope="module")
def pod():
    return open_topology("gpu:2x4")


@pytest.fixture(scope="module")
def found(pod, tmp_path_factory):
    """A file with a heavy tail, on two hosts of four."""
    path = written(tmp_path_factory.mktemp("lengths"), "a.json", "[[10, 90], [200, 10]]")
    config = config_of()
    return plan_async(pod, config, (), read_lengths(path, config, pod.size))


def test_every_option_has_a_layout_of_the_pod(found):
    names = [option.name for option in found.options]
    assert names[:2] == ["synchronous", "shared devices"]
    assert {"own devices", "workers", "own devices, partial batches"} <= set(names)
    assert all(option.seconds > 0 and 4 % option.width == 0 for option in found.options[1:])


def test_the_flags_of_an_option_are_a_run(found, pod):
    """plan_run accepts all of them, on the devices that are left for the trainers of workers."""
    from_flags = async_plan._Layouts(pod, config_of(), ())
    for option in found.options:
        machine = pod.machine
        if "stream.workers" in option.settings:
            trainers = option.settings["mesh.data"] * option.settings["mesh.fsdp"]
            hosts = trainers // pod.per_host
            machine = async_plan.dataclasses.replace(machine, processes=hosts, devices=trainers)
        assert from_flags._planned(option.settings, machine).config.mesh.rollout_tensor
        assert all(f"--config.{key}=" in option.flags for key in option.settings)


def test_the_simplest_of_equal_options_is_suggested(pod, found):
    def of(*seconds):
        options = [Option(f"{i}", "", 1, s, {}) for i, s in enumerate(seconds)]
        return AsyncPlan(pod, found.lengths, tuple(options)).best.name

    assert of(1.0, 0.97, 0.96) == "0"
    assert of(1.0, 0.9, 0.88) == "1"
    assert of(1.0, 2.0, 0.5) == "2"


def test_measured_seconds_are_those_of_the_model(pod, tmp_path):
    """A synchronous step of the model takes what the run took."""
    config = config_of()
    lengths = read_lengths(run_folder(tmp_path, devices=8), config, pod.size)
    layouts = async_plan._Layouts(pod, config, ())
    work = async_plan._priced(pod, layouts.base, lengths)
    (own,) = layouts.on_all([1], 0)
    bare = async_plan.dataclasses.replace(work, draw=lambda g: (work.draw(g)[0], np.zeros(4)))
    assert work.draw(3)[1].tolist() == [2.0] * 4
    # generation 6, training 3, weights 0.5; the drawn tokens of a few steps differ from the mean
    assert step_seconds(bare, SYNCHRONOUS, own.layout, 20, 1) == pytest.approx(9.5, rel=0.05)
