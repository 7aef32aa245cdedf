"""The reward stage: scores keep their order, lengths are punished, and numbers are reported."""

import types

import numpy as np
import pytest

from distflow_jax.batch import Prompt
from distflow_jax.config.data_config import RewardConfig
from distflow_jax.coordinator.coordinator import merge_parts
from distflow_jax.dag.graph import Node
from distflow_jax.data.step_columns import uid_column
from distflow_jax.models.tokenizer import Tokenizer
from distflow_jax.rewards.pool import RewardPool
from distflow_jax.rollout.requests import Response
from distflow_jax.stages.registry import STAGES, resolve
from distflow_jax.stages.reward import build_reward
from distflow_jax.stages.stage_context import ResponseHooks

TOKENIZER = Tokenizer.byte_level(300)
REWARDS = """
def score(data_source, solution_str, ground_truth, extra_info=None):
    result = {"score": float(solution_str == ground_truth), "length": len(solution_str)}
    return result | ({"digits": 1} if solution_str.isdigit() else {})

def picky(solution_str):
    return 1 / (solution_str != "x")
"""


def scores_of(config, responses, *, early=False):
    """The stage on responses to one prompt whose answer is "47"; one token is one byte.

    With `early` it is told of each as it ends, the last first; `early` may be the numbers of some.
    """
    prompt = Prompt(0, 0, np.zeros(3, np.int32), "?", "source", "47", {})
    listener = ResponseHooks()
    with RewardPool(config) as pool:
        stage = build_reward(
            types.SimpleNamespace(
                node=Node("reward", "REWARD", "COMPUTE", writes=["score", "unshaped_score"]),
                prefix="",
                reward=config,
                rewards=pool,
                tokenizer=TOKENIZER,
                max_response_length=10,
                prompts_per_step=1,
                early_rewards=early,
                on_response=listener,
                waiting=lambda name: lambda: None,
            )
        )
        ended = range(len(responses)) if early is True else early or ()
        for sample in reversed(ended):
            tokens = np.array(TOKENIZER.encode(responses[sample]), np.int32)
            none = np.zeros(len(tokens), np.float32)
            version = np.zeros(len(tokens), np.int32)
            listener(Response(prompt, sample, tokens, none, none, True, version))
        fields = {
            "uid": uid_column([prompt], len(responses)),
            "prompt": [prompt] * len(responses),
            "response": [TOKENIZER.encode(text) for text in responses],
        }
        state, written, metrics = stage(None, fields, {})
    assert state is None and written["score"].dtype == np.float32
    return written["score"], merge_parts(metrics)


def test_scores_are_those_of_the_function():
    scores, metrics = scores_of(RewardConfig(function="exact"), ["47", "48", "47"])
    np.testing.assert_array_equal(scores, [1, 0, 1])
    assert metrics == {"reward/errors": 0, "reward/timeouts": 0}


def test_long_responses_are_punished_up_to_the_limit_of_the_rollout():
    config = RewardConfig(function="exact", overlong_buffer=4, overlong_penalty=2.0)
    scores, metrics = scores_of(config, ["47", "6" * 6, "7" * 7, "8" * 8, "0" * 10])
    np.testing.assert_allclose(scores, [1, 0, -0.5, -1, -2])
    assert metrics["reward/overlong_penalty"] == pytest.approx(-3.5 / 5)
    capped = RewardConfig(
        function="exact", overlong_buffer=4, overlong_penalty=2.0, overlong_cap=True
    )
    scores, _ = scores_of(capped, ["47", "9" * 9, "0" * 10])
    np.testing.assert_allclose(scores, [1, -1, -1])


def test_a_length_penalty_may_be_a_share_of_the_limit():
    absolute = scores_of(RewardConfig(function="exact", overlong_buffer=4), ["47", "0" * 9])
    share = scores_of(RewardConfig(function="exact", overlong_buffer=0.4), ["47", "0" * 9])
    np.testing.assert_array_equal(absolute[0], share[0])
    with pytest.raises(ValueError, match="overlong_buffer must be a whole number of tokens, or"):
        RewardConfig(overlong_buffer=3.5)


def test_numbers_beside_the_score_become_means_over_the_rows_that_have_them(tmp_path):
    file = tmp_path / "stage_rewards.py"
    file.write_text(REWARDS)
    config = RewardConfig(function=f"{file}:score", num_workers=1)
    scores, metrics = scores_of(config, ["47", "abc", "4"])
    np.testing.assert_array_equal(scores, [1, 0, 0])
    assert metrics["reward/length"] == pytest.approx(2.0)
    assert metrics["reward/digits"] == 1.0
    config = RewardConfig(
        function=f"{file}:picky", num_workers=1, on_error=-1.0, max_error_rate=0.5
    )
    scores, metrics = scores_of(config, ["a", "x", "b"])
    np.testing.assert_array_equal(scores, [1, -1, 1])
    assert metrics == {"reward/errors": 1, "reward/timeouts": 0}


@pytest.mark.parametrize("role, kind", sorted(STAGES))
def test_a_node_must_name_the_fields_of_its_stage(role, kind):
    def node(reads, writes):
        return types.SimpleNamespace(
            id="n",
            role=role,
            type=kind,
            fn=None,
            is_users=False,
            options={},
            reads={x: x for x in reads},
            writes={x: x for x in writes},
        )

    stage = STAGES[role, kind]
    assert resolve([node(stage.reads | {"more"}, stage.writes)]) == {"n": stage.build}
    for field in stage.reads:
        with pytest.raises(ValueError, match=f"reads {field}: add that to the node's reads"):
            resolve([node(stage.reads - {field}, stage.writes)])
    for field in stage.writes:
        with pytest.raises(ValueError, match=f"writes {field}: add that to the node's writes"):
            resolve([node(stage.reads, stage.writes - {field})])
    with pytest.raises(ValueError, match="does not write more: take that out"):
        resolve([node(stage.reads, stage.writes | {"more"})])


def test_scores_are_the_same_early_or_late(tmp_path):
    file = tmp_path / "early_rewards.py"
    file.write_text(REWARDS)
    config = RewardConfig(function=f"{file}:score", num_workers=2)
    responses = ["47", "abc", "4", "47"]
    (late, numbers), (early, early_numbers), (some, some_numbers) = (
        scores_of(config, responses, early=early) for early in (False, True, [1])
    )
    np.testing.assert_array_equal(early, late)
    np.testing.assert_array_equal(some, late)
    assert early_numbers == some_numbers == numbers


def test_a_batch_function_waits_for_all_responses(tmp_path):
    """It sees them together: told of each alone, it could not rank them."""
    file = tmp_path / "batch_rewards.py"
    file.write_text(
        "def rank(completions, **kwargs):\n    return [len(completions)] * len(completions)\n"
    )
    config = RewardConfig(function=f"{file}:rank", num_workers=1)
    scores, _ = scores_of(config, ["1", "2", "3"], early=True)
    np.testing.assert_array_equal(scores, [3, 3, 3])
