"""Numbers of an evaluation: the answer that most responses give."""

import concurrent.futures
import math
import threading
import types

import pytest
from support.waiting import HANG

from distflow_jax.config.data_config import RewardConfig
from distflow_jax.rewards.pool import FailedRewards, RewardPool
from distflow_jax.rewards.records import RewardResult
from distflow_jax.stages import evaluate
from distflow_jax.stages.evaluate import Evaluation, Scored, validation_metrics, vote


def test_the_most_frequent_answer_wins_and_the_first_of_equals():
    texts = ["North", "south", " north\n", "0"]
    assert vote(texts, [1.0, 0.0, 1.0, 0.0]) == 1
    assert vote(["a", "b"], [0.5, 1.0]) == 0.5
    assert vote(texts, [1.0, 0.0, 0.5, 0.25], votes=["x", "y", "z", "y"]) == 0


@pytest.mark.parametrize(
    ("texts", "scores", "score"),
    [
        (
            ["So \\boxed{\\frac{3}{2}}."]
            + ["Hence it is \\boxed{\\frac{1}{2}}", "\\boxed{\\frac{1}{2}}"],
            [1, 0, 0],
            0,
        ),
        (["In step 2 I choose B.", "In step 2 I choose A.", "In step 2 I choose A."], [0, 1, 1], 1),
        (["Area 9 cm^2", "Area 12 cm^2", "Area 12 cm^2"], [1, 0, 0], 0),
        (["The answer is Paris.", "Answer: paris", "Rome"], [1, 1, 0], 1),
        (["\\boxed{3}", "\\boxed{0.5}", "\\boxed{\\frac12}"], [0, 1, 1], 1),
        (["\\boxed{\\text{A}}", "\\boxed{B}", "The answer is (B)."], [1, 0, 0], 0),
        (["I saw 3 boys.\nFour girls"] + ["I saw 3 boys.\nFive girls"] * 2, [1, 0, 0], 0),
    ],
)
def test_texts_vote_by_their_final_answers(texts, scores, score):
    assert vote(texts, scores) == score


@pytest.fixture
def pool():
    with RewardPool(RewardConfig()) as pool:
        yield pool


def of(source, scores, errors=(None,) * 3):
    texts = [f"text {i}" for i in range(len(scores))]
    prompt = types.SimpleNamespace(data_source=source, counter=0)
    rewards = [RewardResult(s, error=e) for s, e in zip(scores, errors, strict=True)]
    return Scored(prompt, texts, [1, 2, 2], scores, [1] * 3, [True] * 3, rewards)


def test_responses_without_a_score_do_not_count(pool):
    nan = math.nan
    rows = [of("a", [1.0, nan, 0.0]), of("a", [nan] * 3), of("b", [nan] * 3)]
    found = validation_metrics(rows, 3, pool)
    assert found["val-core/a/reward/mean@3"] == 0.5
    assert found["val-core/a/reward/maj@3/mean"] == 1
    assert found["val-aux/a/num_prompts"] == 1
    assert [name for name in found if "/b/" in name and "reward/mean" in name] == []


def test_failed_rewards_are_counted_for_each_source(pool):
    fine = [of(source, [1.0, 1.0, 0.0]) for source in "ab" for _ in range(10)]
    failed = ["timeout", "exception: the judge is down", None]
    found = validation_metrics([*fine, of("a", [0.0, 0.0, 1.0], failed)], 3, pool)
    counts = {name: x for name, x in found.items() if name.endswith(("/errors", "/timeouts"))}
    assert counts == {
        "val-aux/a/reward/errors": 1,
        "val-aux/a/reward/timeouts": 1,
        "val-aux/b/reward/errors": 0,
        "val-aux/b/reward/timeouts": 0,
    }


def test_a_judge_that_is_down_is_no_accuracy_of_0():
    def down(requests):
        return [RewardResult(0.0, error="exception: ConnectionError") for _ in requests]

    prompts = [types.SimpleNamespace(data_source="a", counter=i) for i in range(4)]
    asked = [
        types.SimpleNamespace(**vars(p) | {"counter": evaluate.FIRST_COUNTER + p.counter})
        for p in prompts
    ]
    responses = [types.SimpleNamespace(prompt=p, tokens=[1], finished=True) for p in asked]
    episodes = [types.SimpleNamespace(response=r, reward=0.0) for r in responses]
    with RewardPool(RewardConfig()) as pool, pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "score", down)
        patch.setattr(evaluate, "request_for", lambda *_: None)
        tokenizer = types.SimpleNamespace(decode=lambda tokens: "text")
        sampling = types.SimpleNamespace(num_samples=1)
        scored = Evaluation(None, tokenizer, pool, prompts, sampling, slice(0, 4)).score(episodes)
        with pytest.raises(FailedRewards, match="4 of 4 rewards failed .*: ConnectionError") as end:
            validation_metrics(scored, 1, pool)
    assert end.value.metrics == {"val-aux/a/reward/errors": 4, "val-aux/a/reward/timeouts": 0}


def test_all_processes_raise_where_the_rewards_of_one_failed(monkeypatch, pool):
    class Threads:  # in place of processes
        all_met, given = threading.Barrier(2, timeout=HANG), {}

        def all_gather_json(self, value):
            self.given[threading.get_ident()] = value
            self.all_met.wait()
            return list(self.given.values())

    monkeypatch.setattr(evaluate, "processes", Threads())
    failed = of("a", [0.0] * 3, ["exception: down"] * 3)
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        parts = ([failed], [of("b", [1.0] * 3)] * 8)
        calls = [threads.submit(validation_metrics, part, 3, pool) for part in parts]
    for call in calls:
        with pytest.raises(RuntimeError, match="3 of 27 rewards failed .*: exception: down"):
            call.result()
