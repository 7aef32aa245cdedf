"""The ranker of rows that were never answered."""

import numpy as np
import pytest

from distflow_jax.data.prompt_assignment import LengthEstimates
from distflow_jax.data.ranking.length_ranker import LEAST, LengthRanker


def data_of(seed=0, rows=400):
    """Prompts, sources and lengths that follow from both and from the place in the file."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(50, 500, rows)
    sources = rng.choice(["code", "maths"], rows)
    place = np.sin(np.arange(rows) / 20)
    logs = 3 + 0.5 * np.log(prompts) + (sources == "code") + place + 0.1 * rng.standard_normal(rows)
    return prompts.tolist(), sources.tolist(), np.exp(logs)


def test_unseen_rows_are_ranked_by_prompt_source_and_neighbours():
    prompts, sources, lengths = data_of()
    ranker, known, unseen = LengthRanker(prompts, sources), lengths.copy(), np.arange(0, 400, 4)
    known[unseen] = 0
    found = ranker.expected(known, unseen)
    longest = set(np.argsort(-lengths[unseen])[:20])
    assert len(longest & set(np.argsort(-found)[:20])) >= 16
    assert np.corrcoef(np.log(found), np.log(lengths[unseen]))[0, 1] > 0.95
    one_source = LengthRanker(prompts, ["all"] * 400).expected(known, unseen)
    assert np.corrcoef(np.log(one_source), np.log(lengths[unseen]))[0, 1] < 0.95


def test_a_row_does_not_know_its_own_answer():
    prompts, sources, lengths = data_of()
    ranker, other = LengthRanker(prompts, sources), lengths.copy()
    other[7] *= 50
    before, after = (ranker.expected(x, np.array([7]))[0] for x in (lengths, other))
    assert after == pytest.approx(before, rel=0.2)


def test_the_same_history_gives_the_same_numbers():
    prompts, sources, lengths = data_of()
    found = [LengthRanker(prompts, sources).expected(lengths, np.arange(400)) for _ in range(2)]
    assert np.array_equal(*found) and found[0].dtype == np.float64
    backwards = LengthRanker(prompts, sources).expected(lengths, np.arange(400)[::-1])
    assert np.array_equal(backwards[::-1], found[0])


def test_little_history_gives_the_mean():
    prompts, sources, lengths = data_of()
    ranker, known = LengthRanker(prompts, sources), np.zeros(400)
    assert ranker.expected(known, np.array([3, 4])).tolist() == [1.0, 1.0]
    known[: LEAST - 1] = lengths[: LEAST - 1]
    few = ranker.expected(known, np.array([100, 300]))
    assert few[0] == few[1] == pytest.approx(np.exp(np.log(known[: LEAST - 1]).mean()), rel=1e-3)
    same = LengthRanker([9] * 40, ["a"] * 40).expected(np.full(40, 5.0), np.arange(3))
    assert same.tolist() == [5.0] * 3


def test_estimates_ask_the_ranker_for_rows_without_a_history_alone():
    prompts, sources, lengths = data_of()
    estimates = LengthEstimates(400, lag=1)
    estimates.unseen = LengthRanker(prompts, sources).expected
    estimates.observe(1, np.arange(200), lengths[:200])
    found = estimates.expected(3, np.array([0, 200, 399]))
    assert found[0] == np.float32(lengths[0]) and found[1] != found[2]
    restored = LengthEstimates(400, lag=1)
    restored.unseen = LengthRanker(prompts, sources).expected
    restored.restore(estimates.state(2))
    assert np.array_equal(restored.expected(3, np.array([0, 200, 399])), found)
