"""Results of reward functions: unscored items, invalid numbers, answers and votes."""

import logging
import math

import pytest

from distflow_jax.config.data_config import RewardConfig
from distflow_jax.observe.metrics import merge
from distflow_jax.rewards.function_calls import result_from, score_requests
from distflow_jax.rewards.math_answer import boxed_only, math_verify, math_verify_anchored
from distflow_jax.rewards.math_answer import math as math_reward
from distflow_jax.rewards.pool import RewardPool, failures
from distflow_jax.rewards.records import OF_RUN, RewardRequest, RewardResult, VoteRequest
from distflow_jax.rewards.registry import ANSWERS, REWARDS, same_answers
from distflow_jax.rewards.reward_function import RewardFunction, WeightedFunction, load_reward
from distflow_jax.stages.reward import _sums


def one(function):
    return RewardFunction((WeightedFunction("one", function),))


def scored(function, *solutions, truth="5", **options):
    requests = [RewardRequest("s", solution, truth) for solution in solutions]
    return score_requests(one(function), requests, timeout_seconds=2, on_error=-1.0, **options)


def returning(values):
    def function(prompts, completions):
        return values

    return function


@pytest.mark.parametrize(
    ("odd", "score", "error"),
    [
        (None, math.nan, None),
        ({"score": None, "tokens": 3}, math.nan, None),
        (math.nan, -1.0, "score of nan"),
        (math.inf, -1.0, "score of inf"),
        ({"score": -math.inf}, -1.0, "score of -inf"),
        ("good", -1.0, "returned 'good'"),
        ({}, -1.0, "expected a number"),
        (object(), -1.0, "expected a number"),
    ],
)
def test_an_item_of_a_batch_concerns_itself_alone(odd, score, error):
    first, middle, last = scored(returning([1.0, odd, 0.5]), "a", "b", "c")
    assert (first.score, last.score) == (1.0, 0.5) and not first.error and not last.error
    assert middle.score == pytest.approx(score, nan_ok=True)
    assert middle.error is None if error is None else error in middle.error


def test_a_function_of_one_response_that_returns_nothing_is_mistaken():
    def forgot(solution_str):
        pass

    assert "expected a number" in scored(forgot, "a")[0].error
    assert math.isnan(result_from({"score": None}).score)


def test_the_error_of_a_function_for_conversations_names_the_option():
    def trl(prompts, completions, **columns):
        return [float(len(completion[0]["content"])) for completion in completions]

    def trl_get(prompts, completions):
        return [float(len(c[0].get("content"))) for c in completions]

    for function in (trl, trl_get):
        summary = scored(function, "ab")[0].error.split("\n")[0]
        assert "reward.conversational=True" in summary
        assert scored(function, "ab", "c", conversational=True)[1].score == 1.0
    other = scored(returning([1]), "a", "b")[0].error
    assert "conversational" not in other


def test_conversational_is_refused_for_a_function_of_one_response():
    with RewardPool(RewardConfig(function="gsm8k", conversational=True)) as pool:
        with pytest.raises(ValueError, match="conversational=True is for functions of"):
            pool.check(RewardRequest("s", "5", "5"))


def test_numbers_that_are_none_are_left_out_of_means_and_counted():
    numbers = [{"acc": math.nan}, {"acc": 1.0}, {"acc": 0.0}, {"acc": math.inf, "x": -math.inf}]
    assert merge([_sums(numbers)]) == {"acc": 0.5}
    results = [RewardResult(1.0, entry) for entry in numbers]
    with RewardPool(RewardConfig()) as pool:
        assert pool.check_error_rate([failures(results)])["reward/not_finite"] == 3


def test_responses_that_are_not_scored_are_counted_and_a_step_of_them_ends_the_run():
    some = [RewardResult(math.nan), RewardResult(0.5)]
    with RewardPool(RewardConfig()) as pool:
        counts = pool.check_error_rate([failures(some), failures(some)])
        assert counts == {"reward/errors": 0, "reward/timeouts": 0, "reward/not_scored": 2}
        with pytest.raises(RuntimeError, match="scored none of 1 responses"):
            pool.check_error_rate([failures(some[:1])])


@pytest.mark.parametrize(
    "first, warns", [(["no"] * 3 + ["5"], True), (["5"] * 2 + ["no"] * 2, False)]
)
def test_step_one_warns_if_most_responses_have_no_answer(caplog, first, warns):
    with RewardPool(RewardConfig(function="gsm8k")) as pool:
        steps = [pool.score([RewardRequest("s", x, "5") for x in step]) for step in (first, ["no"])]
        with caplog.at_level(logging.WARNING, "distflow_jax"):
            found = [pool.check_error_rate([failures(step)]) for step in steps]
    assert found[0]["reward/no_answer"] == first.count("no") and found[1]["reward/no_answer"] == 1
    assert [("data.prompt_suffix" in r.message) for r in caplog.records] == [True] * warns


@pytest.mark.parametrize("name", [name for name, f in REWARDS.items() if f in ANSWERS])
def test_built_in_functions_say_what_the_answer_is(name):
    result = scored(REWARDS[name], r"It is \boxed{5}.", "I do not know")
    assert result[0].answer == "5" and result[1].answer == ""


def test_a_function_of_the_user_may_say_what_the_answer_is():
    assert result_from({"score": 1, "answer": 42}).answer == "42"
    assert result_from({"score": 1, "answer": None}).answer == ""
    assert result_from(1).answer is None and result_from({"score": 1}).answer is None
    assert result_from({"score": 1, "answer": "x", "acc": 0.5}).logged == {"acc": 0.5}


@pytest.mark.parametrize("name", sorted(OF_RUN))
def test_a_function_may_not_log_what_the_run_logs(name, tmp_path):
    def batch(prompts, completions, log_metric):
        log_metric(name, 7)
        return [1.0 for _ in completions]

    wrong = f"the reward function logs {name!r}, a name of the run: choose another"
    for function in (lambda solution_str: {"score": 1.0, name: 7}, batch):
        (result,) = scored(function, "a")
        assert wrong in result.error and result.score == -1.0
    assert result_from({"score": 1.0, name: "none", f"{name}_of_mine": 7}).score == 1.0
    file = tmp_path / "named.py"
    file.write_text(f"def fine(solution_str): return 1\ndef {name}(solution_str): return 1\n")
    assert load_reward(f"{file}:{name}", {}).kind == "row"
    with pytest.raises(
        ValueError, match=f"'{name}' of reward .* has a name under which the run logs"
    ):
        load_reward(f"{file}:fine,{name}", {})


def test_equal_answers_vote_together():
    answers = ("1/2", r"\frac12", "0.5", "2", "x", " X ", r"\boxed{")
    assert same_answers(math_reward, answers) == (0, 0, 0, 3, 4, 4, 6)
    assert same_answers(len, answers) == (0, 1, 2, 3, 4, 4, 6)
    assert scored_votes(answers) == (0, 0, 0, 3, 4, 4, 6)
    with RewardPool(RewardConfig(function="math", num_workers=1)) as pool:
        assert pool.equal_answers([answers, ("3", "3.0")]) == [(0, 0, 0, 3, 4, 4, 6), (0, 0)]
    with RewardPool(RewardConfig(function="gsm8k")) as pool:
        assert pool.equal_answers([("a", "A", "b")]) == [(0, 0, 2)]


def scored_votes(answers):
    return scored_one(VoteRequest(answers)).votes


def scored_one(vote):
    return score_requests(one(math_reward), [vote], timeout_seconds=2, on_error=0.0)[0]


@pytest.mark.parametrize(
    ("response", "truth", "boxed", "plain", "anchored", "ours"),
    [  # verl's math_reward; math-verify 0.9.0; TRL's accuracy_reward; math
        (r"So \boxed{\frac{1}{2}}.", r"\frac12", 1, 1, 1, 1),
        (r"So \boxed{0.5}.", r"\frac12", 1, 1, 1, 1),
        (r"So \boxed{0.25}.", r"\frac14", 0, 1, 1, 1),
        (r"So \boxed{x=7}.", "7", 1, 1, 1, 1),
        (r"So \boxed{5 \text{ cm}}.", "5", 1, 1, 1, 1),
        ("So it is 5.", "5", 0, 1, 0, 0),
        ("<think>There are 5 boys, and", "5", 0, 1, 0, 0),
        ("<answer>-3</answer>", "-3", 0, 0, 0, 1),
        ("The answer is $5$.", "5", 0, 1, 1, 1),
    ],
)
def test_functions_of_others_judge_as_theirs(response, truth, boxed, plain, anchored, ours):
    functions = (boxed_only, math_verify, math_verify_anchored, math_reward)
    assert [f("", response, truth) for f in functions] == [boxed, plain, anchored, ours]


@pytest.mark.parametrize("truth", [None, math.nan, "", "  ", []])
def test_a_missing_truth_is_an_error_and_no_answer(truth):
    for function in (math_reward, math_verify, math_verify_anchored):
        with pytest.raises(ValueError, match="ground truth"):
            function("", r"\boxed{5}", truth)
    assert REWARDS["exact"]("", "None", truth) == 0


@pytest.mark.parametrize(
    ("written", "cleaned"),
    [  # strip_string of verl, verl/utils/reward_score/math_reward.py, 2026
        (r"\frac12", r"\frac{1}{2}"),
        (r"\frac1{72}", r"\frac{1}{72}"),
        (r"\frac{1}{2}", r"\frac{1}{2}"),
        (r"\sqrt3", r"\sqrt{3}"),
        (r"\sqrt{3x}", r"\sqrt{3x}"),
        (r"\sqrt ab", r"\sqrt{}ab"),
        ("1/2", r"\frac{1}{2}"),
        ("-1/2", r"\frac{-1}{2}"),
        ("1/x", "1/x"),
        ("0.5", r"\frac{1}{2}"),
        (".5", r"\frac{1}{2}"),
        ("x=5", "5"),
        ("xy=5", "5"),
        ("xyz=5", "xyz=5"),
        (r"\left(1\right)", "(1)"),
        (r"5\text{ cm}", "5"),
        (r"5\text{cm}", r"5\text{cm}"),
        (r"50\%", "50"),
        ("50%", "50%"),
        (r"60^{\circ}", "60"),
        (r"\$5", "5"),
        (r"1\!000", "1000"),
        (r"\dfrac12", r"\frac{1}{2}"),
        (r"\tfrac{a}{b}", r"\frac{a}{b}"),
        ("3\n", "3"),
        ("{.5}", "{0.5}"),
        ("1 .5", "10.5"),
        (r"\\frac12", r"\frac{1}{2}"),
        ("a/b/c", "a/b/c"),
        ("10/2", r"\frac{10}{2}"),
    ],
)
def test_boxed_only_cleans_texts_as_verl_does(written, cleaned):
    assert boxed_only("", rf"\boxed{{{written}}}", cleaned) == 1
    assert boxed_only("", rf"\boxed{{{written}}}", cleaned + "7") == 0
