"""Numbers of an evaluation: the answer that most responses give."""

import math
import types

import pytest

from distflow_jax.stages.evaluate import Scored, validation_metrics, vote


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


def test_responses_without_a_score_do_not_count():
    def of(source, scores):
        texts = [f"text {i}" for i in range(len(scores))]
        prompt = types.SimpleNamespace(data_source=source, counter=0)
        return Scored(prompt, texts, [1, 2, 2], scores, [1] * 3, [True] * 3)

    nan = math.nan
    rows = [of("a", [1.0, nan, 0.0]), of("a", [nan] * 3), of("b", [nan] * 3)]
    found = validation_metrics(rows, 3)
    assert found["val-core/a/reward/mean@3"] == 0.5
    assert found["val-core/a/reward/maj@3/mean"] == 1
    assert found["val-aux/a/num_prompts"] == 1
    assert not [name for name in found if "/b/" in name]
