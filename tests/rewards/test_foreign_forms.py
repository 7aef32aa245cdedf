"""Reward functions of verl, TRL, Tunix and verifiers run unchanged, with exact values."""

import array
import math

import pytest
from support.paths import TESTS

from distflow_jax.config.data_config import RewardConfig
from distflow_jax.rewards.function_calls import score_requests
from distflow_jax.rewards.pool import RewardPool
from distflow_jax.rewards.records import RewardRequest
from distflow_jax.rewards.reward_function import load_reward

FOLDER = TESTS / "support" / "foreign_rewards"
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6 * 7?"}]


def rollout(text, /, truth="42", *, messages=CHAT, tokens=(1, 2), step=3, **columns):
    return RewardRequest(
        "openai/gsm8k",
        text,
        truth,
        columns,
        prompt="<s>Be brief. 6 * 7?",
        messages=messages,
        tokens=array.array("i", tokens),
        step=step,
    )


def scored(function, *requests, kwargs=None, weights=(), **options):
    reward = load_reward(f"{FOLDER}/{function}", kwargs or {}, weights)
    return score_requests(reward, requests, timeout_seconds=5, on_error=-9.0, **options)


def scores(*given, **options):
    results = scored(*given, **options)
    assert [result.error for result in results] == [None] * len(results)
    return [result.score for result in results]


def failure(*given, **options):
    (result,) = scored(*given, **options)
    assert result.score == -9.0
    return result.error.split("\n")[0]


# -- verl -----------------------------------------------------------------------------------------


def test_verl_scores_by_data_source_and_gets_reward_kwargs():
    of = "of_verl.py:compute_score"
    rows = [rollout("so #### 42"), rollout("#### 41"), rollout("it is 42")]
    assert scores(of, *rows) == [1.0, 0.1, 0]
    assert scores(of, *rows, kwargs={"method": "flexible"}) == [1.0, 0.1, 1.0]
    other = RewardRequest("aime", "#### 42", "42")
    assert "NotImplementedError: Reward function is not implemented" in failure(of, other)


def test_an_async_function_of_verl_returns_a_dict_whose_numbers_are_logged():
    row = {"question": "6 * 7?", "index": 5}
    first, second = scored(
        "of_verl.py:judged", rollout("42", **row), rollout("6", **row), kwargs={"judge": "me"}
    )
    assert (first.score, first.logged) == (2.0, {"acc": 1.0, "index": 5.0})
    assert (second.score, second.logged) == (0.0, {"acc": 0.0, "index": 5.0})


# -- TRL ------------------------------------------------------------------------------------------


def test_trl_gets_conversations_columns_and_may_skip_rows_and_log():
    rows = [rollout("<think>a</think> 42", solution="42"), rollout("7", solution=None)]
    first, second = scored("of_trl.py:accuracy_reward", *rows, conversational=True)
    assert first.score == 1.0 and math.isnan(second.score) and second.error is None
    assert first.logged == {"characters": 19.0, "longest": 19.0}
    assert scores("of_trl.py:think_format_reward", *rows, conversational=True) == [1.0, 0.0]
    assert scores("of_trl.py:last_turns", *rows, conversational=True) == [1.0, 1.0]


def test_a_prompt_of_text_is_one_message_where_conversations_are_wanted():
    row = rollout("42", messages=None)
    assert scores("of_trl.py:last_turns", row, conversational=True) == [0.0]


def test_trl_gets_columns_in_async_functions_token_ids_and_the_step():
    rows = [rollout("a", level="easy", tokens=(5,)), rollout("b", level="hard", tokens=(5, 6, 7))]
    assert scores("of_trl.py:level_reward", *rows) == [0.5, 2.0]
    assert scores("of_trl.py:by_progress", *rows) == [3.0, 3.0]
    assert scores("of_trl.py:cosine", *rows) == pytest.approx(
        [0.5 + 0.25 * 2**0.5, 0.5 - 0.25 * 2**0.5]
    )
    assert scores("of_trl.py:overlong", *rows) == [0.0, -0.5]
    message = "the rows have no column 'level', which the function takes; they have 'hint'"
    assert message in failure("of_trl.py:level_reward", rollout("a", hint=1))


def test_the_weighted_scores_of_several_functions_are_added():
    """As GRPOTrainer does: what one function skips counts for the others alone."""
    rows = [
        rollout("<think>a</think> 42", solution="42"),
        rollout("<think>a</think> 7", solution="42"),
        rollout("<think>a</think> 7", solution=None),
    ]
    for of in ("of_trl.py:reward_funcs", "of_trl.py:accuracy_reward,think_format_reward"):
        results = scored(of, *rows, weights=(2.0, 0.5), conversational=True)
        assert [result.score for result in results] == [2.5, 0.5, 0.5]
        assert [result.logged.get("accuracy_reward") for result in results] == [1.0, 0.0, None]
        assert {result.logged["think_format_reward"] for result in results} == {1.0}
    first, second, third = scored(
        "of_trl.py:accuracy_reward", *rows, weights=(3.0,), conversational=True
    )
    assert (first.score, second.score) == (3.0, 0.0) and math.isnan(third.score)


# -- Tunix ----------------------------------------------------------------------------------------


def test_tunix_gets_text_and_adds_its_functions():
    answer = "<reasoning>6 * 7</reasoning> <answer>{}</answer>"
    rows = [rollout(text, answer="42") for text in (answer.format(42), answer.format(41), "42")]
    assert scores("of_tunix.py:match_format_exactly", *rows) == [3.0, 3.0, 0]
    assert scores("of_tunix.py:match_format_exactly,check_answer", *rows) == [6.0, 2.0, 0]


def test_a_config_of_maxtext_is_what_reward_kwargs_or_a_column_must_give():
    message = "no column 'tmvp_config', which the function takes; they have 'answer'"
    assert message in failure("of_tunix.py:check_numbers", rollout("42", answer="42"))


# -- verifiers ------------------------------------------------------------------------------------


def test_verifiers_gets_messages_the_answer_and_columns():
    of = "of_verifiers.py"
    assert scores(f"{of}:exact", rollout(" 42 "), rollout("4")) == [1.0, 0.0]
    code = {"info": {"tests": ["a", "b"]}, "task": "code"}
    text = {"info": '{"tests": ["a", "z"]}', "task": "code"}  # verifiers reads JSON text, too
    rows = [rollout("a b", **code), rollout("a b", **text), rollout("a", info={"tests": "a"})]
    assert scores(f"{of}:tests_passed", *rows) == [1.0, 0.5, 0.0]
    assert scores(f"{of}:of_state", rollout("abc", level=10)) == [6 + 3 + 10]
    assert scores(f"{of}:of_text", rollout("abc", messages=None)) == [
        len("<s>Be brief. 6 * 7?") + 3
    ]
    assert "KeyError: 'level'" in failure(f"{of}:of_state", rollout("abc"))


def test_a_rubric_gives_its_weights_and_its_parser():
    rows = [rollout("so <answer>42</answer>"), rollout("41")]
    first, second = scored("of_verifiers.py:rubric", *rows)
    assert (first.score, first.logged) == (1.0, {"correct_answer": 1.0, "num_words": 2.0})
    assert (second.score, second.logged) == (0.0, {"correct_answer": 0.0, "num_words": 1.0})
    assert scores("of_verifiers.py:rubric", *rows, weights=(2.0, 0.25)) == [2.5, 0.25]
    assert scores("of_verifiers.py:group", *rows, rollout("42")) == [1.0, 0.0, 0.5]


def test_an_async_part_that_fails_is_the_failure_of_its_response():
    rows = [rollout("<answer>42</answer>"), rollout("<answer>42</answer>", truth=None)]
    first, second = scored("of_verifiers.py:rubric,tests_passed", *rows, kwargs={})
    assert first.score == second.score == -9.0 and "KeyError: 'tests'" in first.error


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("of_verifiers.py:correct_answer", {}, "takes a parser, which its Rubric has: name the R"),
        ("of_verifiers.py:match", {}, "has no 'match'; it has exact, correct_answer, tests_passed"),
        ("of_trl.py:none", {}, "names no function: it is empty"),
        ("of_trl.py:math", {}, r"math is <module .* which cannot be called; name a function, a li"),
        (
            "of_trl.py:reward_funcs",
            {"weights": (1.0,)},
            "reward.weights has 1 numbers for 2 functions: accuracy_reward, think_format_reward",
        ),
        ("of_verl.py:judged", {"kwargs": {"juge": 1}}, "takes no 'juge'; did you mean 'judge'?"),
        ("of_verl.py:judged", {"kwargs": {"ground_truth": 1}}, "an argument that the run itself p"),
        ("of_trl.py:by_progress", {"kwargs": {"trainer_state": 1}}, "that the run itself passes"),
    ],
)
def test_what_does_not_fit_is_named_with_the_fix(function, options, message):
    with pytest.raises(ValueError, match=message):
        scored(function, rollout("42"), **options)


def test_a_function_of_a_whole_group_is_refused_on_the_first_row():
    message = "the rows have no column 'answers', 'states', which the function takes"
    assert message in failure("of_verifiers.py:best_of_group", rollout("42"))


def test_workers_run_several_functions_of_one_file():
    config = RewardConfig(
        function=f"{FOLDER}/of_tunix.py:match_format_exactly,check_answer",
        weights=(1.0, 0.5),
        num_workers=1,
    )
    answer = "<reasoning>6 * 7</reasoning> <answer>{}</answer>"
    with RewardPool(config) as pool:
        rows = [rollout(answer.format(n), answer="42") for n in (42, 41)]
        first, second = pool.score(rows)
    assert (first.score, second.score) == (4.5, 2.5)
    assert second.logged == {"match_format_exactly": 3.0, "check_answer": -1.0}
