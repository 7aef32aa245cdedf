"""Every logged response is sampled again from its uid alone.

Nightly: any logged response, whatever its graph, is sampled again from its uid alone, token for
token.
"""

import collections
import dataclasses

import numpy as np
import pytest
from support.run_folders import json_lines
from support.tiny_config import tiny_config

from distflow_jax import run
from distflow_jax.planning.plan_run import prepare
from distflow_jax.report.run_writer import read_metrics
from distflow_jax.rollout.requests import GroupRequest, SamplingParams
from distflow_jax.rollout.scheduling.scheduler import run_requests
from distflow_jax.runtime.samplers.standalone_sampler import open_answerer

SETTINGS = [
    "model.source=random:llama?hidden=32&layers=2&heads=4&kv_heads=2&mlp=64&vocab=259",
    "training.steps=1",
    "rollout.num_slots=16",
    "eval.dataset=",
]

AHEAD = ["stream.max_staleness=1", "mesh.devices=0:1", "mesh.roles={'ROLLOUT': {'devices': '1:2'}}"]
PARTIAL_BATCHES = ["stream.partial_batches=counter", "stream.partial_batch_prompts=4"]


def sampled_again(config, records):
    """Text and number of tokens of each record's response, each from a request of its own."""
    prepared = prepare(config)
    prepared.rewards.close()
    answerer = open_answerer(config, prepared.source)
    sampling = dataclasses.replace(SamplingParams.of_training(config.rollout), num_samples=1)
    requests = [
        GroupRequest(prepared.loader.prompt(counter), sampling, first_sample=sample)
        for counter, sample in (record["uid"] for record in records)
    ]
    state = answerer.state
    _, responses, _ = run_requests(answerer.engine, state.params, state.decode, requests)
    decode = prepared.source.tokenizer.decode
    return [(decode(r.tokens, skip_special=False), len(r.tokens)) for r in responses]


def check_advantages(records, metrics):
    """Advantages of grpo are standard scores within a prompt; other graphs have none."""
    found = [record["advantage"] for record in records if "advantage" in record]
    if "critic/advantages/max" not in metrics:
        assert not found
        return
    assert max(found) == metrics["critic/advantages/max"] > 0
    assert min(found) == metrics["critic/advantages/min"] < 0
    scores, advantages = collections.defaultdict(list), collections.defaultdict(list)
    for record, advantage in zip(records, found, strict=True):
        scores[record["uid"][0]].append(record["score"])
        advantages[record["uid"][0]].append(advantage)
    for prompt, values in scores.items():
        spread = np.std(values, ddof=1) if len(set(values)) > 1 else 1.0
        wanted = (np.array(values) - np.mean(values)) / spread
        np.testing.assert_allclose(advantages[prompt], wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(["dag=grpo", "rollout.num_samples=4"], marks=pytest.mark.slow),
        pytest.param(["dag=dapo", "rollout.num_samples=2"], marks=pytest.mark.slow),
        pytest.param(["dag=online_dpo", "rollout.num_samples=4"], marks=pytest.mark.slow),
        pytest.param(
            ["dag=online_dpo", "rollout.num_samples=4", "stream.max_staleness=1"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["dag=online_dpo", "rollout.num_samples=2", "stream.max_staleness=1"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["dag=online_dpo", "rollout.num_samples=4", *AHEAD, *PARTIAL_BATCHES],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["grpo", "dapo", "online_dpo", "ahead", "ahead, pairs", "in partial batches"],
)
def test_a_logged_response_is_sampled_again_from_its_uid(settings, tmp_path):
    config = tiny_config(*SETTINGS, *settings)
    assert run.train_here(config, tmp_path) == run.EXIT_DONE
    records = json_lines(tmp_path / "samples" / "1.jsonl")
    (metrics,) = [m for m in read_metrics(tmp_path / "metrics.jsonl") if m["step"] == 1]
    uids = [tuple(record["uid"]) for record in records]
    assert len(set(uids)) == len(uids) > 0
    if config.dag == "dapo":
        assert metrics["training/sampling_rounds"] > 1
    if (
        config.dag == "online_dpo" and config.rollout.num_samples > 2
    ):  # the better one of a pair comes first, whatever its number
        assert any(sample > 1 for _, sample in uids)
    check_advantages(records, metrics)
    logged = [(record["response"], record["response_length"]) for record in records]
    assert sampled_again(config, records[::-1]) == logged[::-1]
