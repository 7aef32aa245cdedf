"""Numbers of an evaluation: the answer that most responses give."""

import pytest

from distflow_jax.stages.evaluate import vote


@pytest.mark.parametrize("number", ["0", "0.00", "-0", "1"])
def test_the_most_frequent_number_wins_whichever_it_is(number):
    texts = [f"so {number}", f"it is {number}", f"hence {number}.", "5", "also 5"]
    assert vote(texts, [1.0, 1.0, 1.0, 0.0, 0.0]) == 1
    assert vote(texts[2:], [1.0, 0.0, 0.0]) == 0


def test_without_a_number_the_whole_text_is_the_answer():
    assert vote(["North", "south", " north\n", "0"], [1.0, 0.0, 1.0, 0.0]) == 1
    assert vote(["a", "b"], [0.5, 1.0]) == 0.5  # the first one wins a tie
