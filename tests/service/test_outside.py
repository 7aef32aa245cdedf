"""A training that another program drives by five calls.

Nightly: the example of a program that drives a training runs in at most 60 lines.
"""

import importlib.util
import time

import numpy as np
import pytest
from support.paths import ROOT
from support.run_folders import json_lines

import distflow_jax as df
from distflow_jax.models.weights.source import open_model
from distflow_jax.report.run_writer import read_metrics
from distflow_jax.service.prompt_store import NotPutYet, PromptStore
from distflow_jax.service.trainer import Trainer

EXAMPLE = ROOT / "configs" / "examples" / "outside.py"
SMALL = {
    "model.source": "random:llama?hidden=32&layers=2&heads=4&kv_heads=2&mlp=64&vocab=512",
    "data.prompts_per_step": 4,
    "rollout.num_samples": 2,
    "mesh.devices": "0:1",
    "observe.trackers": (),
}
LAGGING = {"stream.workers": True, "stream.max_staleness": 1, "eval.dataset": ""}


def config_of(**changes):
    return df.load_config("tiny", SMALL | LAGGING | changes).config


@pytest.mark.slow
@pytest.mark.multiprocess
def test_example_trains_in_under_sixty_lines(tmp_path):
    assert len(EXAMPLE.read_text().splitlines()) < 60
    spec = importlib.util.spec_from_file_location("outside", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main(str(tmp_path), SMALL)
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if row["step"]]
    assert len(rows) == 5
    for row in rows:
        assert row["training/off_policy/trajectory_staleness/max"] <= 1
        assert row["rollout_corr/log_ratio_abs_max"] < 1
    assert rows[0]["rollout_corr/log_ratio_abs_max"] <= 1e-4


def test_store_grows_and_is_read_again(tmp_path):
    store = PromptStore(tmp_path / "prompts.jsonl", 3)
    assert len(store) == 3 and store.num_rows == 0
    with pytest.raises(NotPutYet):
        store[0]
    assert list(store.put([{"prompt": "a", "ground_truth": 1}, {"prompt": "b"}])) == [0, 1]
    assert (store[0].prompt, store[0].ground_truth, store[1].prompt) == ("a", 1, "b")
    with open(tmp_path / "prompts.jsonl", "a") as file:
        file.write('{"prompt": "c')  # a kill while a line was written
    again = PromptStore(tmp_path / "prompts.jsonl", 3)
    assert again.num_rows == 2 and again[1].prompt == "b"
    assert list(again.put([{"prompt": "d"}])) == [2]
    with pytest.raises(ValueError, match="4 prompts are more than the 3"):
        again.put([{"prompt": "e"}])
    content = (tmp_path / "prompts.jsonl").read_text()
    (tmp_path / "prompts.jsonl").write_text(content[:-1])  # whole but for its end
    third = PromptStore(tmp_path / "prompts.jsonl", 3)
    assert (tmp_path / "prompts.jsonl").read_text() == content
    assert [third[i].prompt for i in range(3)] == ["a", "b", "d"]


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"prompt": ""}, "'prompt' must be a text"),
        ({"text": "a"}, "unknown key 'text'"),
        ("a", "a row must have keys"),
        ({"prompt": "a", "extra_info": {"x": {1}}}, "values of JSON: Object of type set"),
        ({"prompt": "a", "extra_info": "x"}, "prompt 0 from outside: extra_info must be an object"),
        ({"prompt": "a", "data_source": 5}, "data_source must be text or null, got 5"),
    ],
)
def test_rows_that_are_refused(tmp_path, row, reason):
    store = PromptStore(tmp_path / "prompts.jsonl", 3)
    with pytest.raises(ValueError, match=reason):
        store.put([row])
    assert store.num_rows == 0
    if (tmp_path / "prompts.jsonl").exists():
        assert not json_lines(tmp_path / "prompts.jsonl")


@pytest.mark.parametrize("content", ["no row", "[1, 2]", '{"text": "a"}', '{"prompt": 1}\n'])
def test_a_file_of_something_else_is_left_as_it_is(tmp_path, content):
    (path := tmp_path / "prompts.jsonl").write_text(content)
    with pytest.raises(ValueError, match="prompts.jsonl, line 1: "):
        PromptStore(path, 3)
    assert path.read_text() == content


def test_rows_are_those_that_a_run_which_goes_on_has(tmp_path):
    stores = [PromptStore(tmp_path / "prompts.jsonl", 3)]
    stores[0].put([{"prompt": "a", "ground_truth": (1, 2), "extra_info": {1: 2}}])
    stores += [PromptStore(tmp_path / "prompts.jsonl", 3)]
    assert stores[0][0] == stores[1][0] and stores[0][0].ground_truth == [1, 2]


def test_calls_that_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match="stream.workers=True and stream.weight_update='in_flight'"
    ):
        Trainer(config_of(**{"stream.workers": False}), tmp_path)
    with pytest.raises(ValueError, match="has 2 that do"):
        Trainer(config_of(dag="remax"), tmp_path)
    with pytest.raises(ValueError, match="set eval.dataset='' in place of 'task:arithmetic'"):
        Trainer(config_of(**{"eval.dataset": "task:arithmetic"}), tmp_path)
    trainer = Trainer(config_of(), tmp_path)
    with pytest.raises(ValueError, match="more than data.max_prompt_length"):
        trainer.put_prompts_data([{"prompt": "a" * 1000}])
    assert trainer.put_prompts_data([{"prompt": "1 + 2 ="}]) == [0]
    with pytest.raises(ValueError, match="call init_engines before"):
        trainer.weight_sync_notify()
    with pytest.raises(ValueError, match="unknown column 'score'"):
        trainer.get_experience_data(["score"])
    with pytest.raises(ValueError, match="take weights by weight_sync_notify"):
        trainer.get_experience_data()
    with pytest.raises(ValueError, match="column 'rollout_logp' is missing"):
        trainer.put_experience_data({"uid": [], "response": []})


def test_a_training_without_the_prompts_of_a_step_ends_when_it_is_closed(tmp_path):
    trainer = Trainer(config_of(), tmp_path)
    trainer.init_engines()
    trainer.put_prompts_data([{"prompt": "1 + 2 ="}])
    trainer.close()
    assert trainer.weight_sync_notify() is None
    assert not (tmp_path / "task_buffers.json").exists()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_training_without_the_prompts_of_a_later_step_ends_with_its_checkpoint(tmp_path):
    seconds = {
        "stream.lease_seconds": 1.0,
        "stream.no_workers_seconds": 5.0,
        "stream.save_seconds": 0.5,
    }
    corrected = {"algorithm.correction": "token_tis"}
    config = df.load_config("tiny", SMALL | LAGGING | corrected | seconds).config
    trainer = Trainer(config, tmp_path)
    trainer.init_engines()
    trainer.put_prompts_data([{"prompt": "1 + 2 =", "ground_truth": "3"}] * 4)
    weights = trainer.weight_sync_notify()
    assert weights.version == 0
    time.sleep(6.0)  # the program lives, and has nothing to sample for longer than a lease
    uids = trainer.get_experience_data()["uid"]
    assert len(uids) == 8
    stop = min(open_model(config.model.source).tokenizer.stop_ids)
    responses = [np.full(1, stop, np.int32)] * 8
    trainer.put_experience_data({"uid": uids, "response": responses, "rollout_logp": [[-1.0]] * 8})
    assert trainer.weight_sync_notify(0).version == 1
    with pytest.raises(RuntimeError, match="exit code 75"):
        trainer.close()
    assert (tmp_path / "checkpoints" / "1").exists()
