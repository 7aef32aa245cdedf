"""Packing: nothing lost or doubled, every row within its limits, every field where it belongs."""

import numpy as np
import pytest
from tiny_model import prompt_of, random_samples, rows_of

from distflow_jax import batch as batch_lib
from distflow_jax.batch import RowShape, Samples, deal_rows, first_fit_decreasing, rows_needed

BOTH = pytest.mark.parametrize("shared", [False, True], ids=["own prompts", "shared prompts"])
SHAPE = RowShape(mini_batches=2, rows=16, tokens=48, sequences=5)


def first_fit(prompt, response, group, *, tokens, sequences, shared):
    arrays = (np.asarray(x, np.int64) for x in (prompt, response, group))
    return first_fit_decreasing(*arrays, row_tokens=tokens, row_sequences=sequences, shared=shared)


def cost(row, prompt, response, group, shared):
    if not shared:
        return sum(prompt[i] + response[i] for i in row)
    prompts = {group[i]: prompt[i] for i in row}
    return sum(prompts.values()) + sum(response[i] for i in row)


def random_lengths(rng):
    """(prompt, response, group, longest sequence allowed, row tokens, row sequences)."""
    groups, size = rng.integers(1, 12), rng.integers(1, 9)
    longest_prompt, longest_response = rng.integers(1, 40), rng.integers(1, 40)
    prompt = np.repeat(rng.integers(1, longest_prompt + 1, groups), size)
    low = rng.choice([0, longest_response])  # varying, or all at the limit
    response = rng.integers(low, longest_response + 1, groups * size)
    group = np.repeat(rng.permutation(groups), size)
    longest = longest_prompt + longest_response
    tokens = longest + rng.integers(0, 4 * longest)
    return prompt, response, group, int(longest), int(tokens), int(rng.integers(1, 12))


@BOTH
def test_packing_loses_and_doubles_nothing(shared):
    rng = np.random.default_rng(0)
    for _ in range(300):
        *lengths, longest, tokens, sequences = random_lengths(rng)
        rows = first_fit(*lengths, tokens=tokens, sequences=sequences, shared=shared)
        assert sorted(i for row in rows for i in row) == list(range(len(lengths[0])))
        for row in rows:
            assert 0 < len(row) <= sequences
            assert cost(row, *lengths, shared) <= tokens
        assert len(rows) <= rows_needed(len(lengths[0]), longest, tokens, sequences)


@BOTH
@pytest.mark.parametrize(
    ("lengths", "tokens", "sequences"),
    [
        ([51] * 9, 100, 9),  # just over half: one per row
        ([50] * 9, 100, 9),  # exactly half
        ([34] * 10, 100, 9),  # just over a third
        ([100] * 4 + [1] * 40, 100, 9),  # crumbs fill no full row
        ([60, 60, 60, 40, 40, 40], 100, 9),
        ([51, 27, 26, 23, 23, 26, 27, 51] * 3, 103, 9),  # first-fit-decreasing's classic bad case
        ([1] * 25, 100, 4),  # the number of sequences is the limit
        ([100], 100, 1),
    ],
)
def test_bound_on_rows_holds_for_bad_cases(lengths, tokens, sequences, shared):
    for group_size in (1, 2, 5, len(lengths)):
        group = np.arange(len(lengths)) // group_size
        # one token of every sequence is prompt
        rows = first_fit(
            np.ones(len(lengths)),
            np.array(lengths) - 1,
            group,
            tokens=tokens,
            sequences=sequences,
            shared=shared,
        )
        assert len(rows) <= rows_needed(len(lengths), max(lengths), tokens, sequences)
        assert sorted(i for row in rows for i in row) == list(range(len(lengths)))


def test_bound_is_reached():
    """A smaller bound would be too small: all sequences at the limit fill all these rows."""
    rows = first_fit([20] * 7, [31] * 7, range(7), tokens=100, sequences=9, shared=False)
    assert len(rows) == rows_needed(7, 51, 100, 9) == 7


def test_a_group_that_fits_goes_into_one_row():
    group = np.repeat(np.arange(4), 4)
    rows = first_fit(np.full(16, 30), np.full(16, 5), group, tokens=60, sequences=8, shared=True)
    assert sorted(len(set(group[row])) for row in rows) == [1, 1, 1, 1]


def test_sharing_saves_prompts():
    group = np.zeros(8, int)
    for shared, wanted in ((False, 8), (True, 1)):
        rows = first_fit([50] * 8, [6] * 8, group, tokens=98, sequences=8, shared=shared)
        assert len(rows) == wanted


def test_a_sequence_longer_than_a_row_is_an_error():
    with pytest.raises(ValueError, match="65 tokens does not fit a row of 64.*row_tokens"):
        first_fit([30], [35], [0], tokens=64, sequences=4, shared=False)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_rows_are_dealt_evenly(ranks):
    rng = np.random.default_rng(1)
    for count in (0, 1, ranks, 3 * ranks + 1, 40):
        costs = rng.exponential(size=count)
        dealt = deal_rows(costs, ranks)
        assert sorted(r for rows in dealt for r in rows) == list(range(count))
        counts = [len(rows) for rows in dealt]
        assert max(counts) - min(counts) <= 1
        if count:
            loads = [sum(costs[r] for r in rows) for rows in dealt]
            assert max(loads) - min(loads) <= 2 * costs.max()


@BOTH
@pytest.mark.parametrize("ranks", [1, 4])
def test_fields_come_back_as_they_went_in(shared, ranks):
    for seed in range(20):
        samples = random_samples(seed, groups=6, size=4)
        _, placement = rows_of(samples, SHAPE, shared=shared, ranks=ranks)
        rng = np.random.default_rng(seed)
        values = [rng.normal(size=len(r)).astype(np.float32) for r in samples.response]
        field = batch_lib.token_field(samples, placement, values)
        back = batch_lib.from_token_field(samples, placement, field)
        for got, wanted in zip(back, values, strict=True):
            np.testing.assert_array_equal(got, wanted)
        assert np.count_nonzero(field) == sum(map(np.count_nonzero, values))
        scores = rng.normal(size=len(samples)).astype(np.float32)
        placed = batch_lib.sequence_field(placement, scores)
        np.testing.assert_array_equal(
            batch_lib.from_sequence_field(placement, placed, len(samples)), scores
        )


@BOTH
@pytest.mark.parametrize("ranks", [1, 4])
def test_every_sequence_can_be_read_back_from_its_row(shared, ranks):
    """Walks back along `previous` from a response's last token: that must give the response and
    then its prompt, whoever else shares it; positions count down to 0."""
    for seed in range(20):
        samples = random_samples(seed, groups=6, size=4)
        rows, placement = rows_of(samples, SHAPE, shared=shared, ranks=ranks)
        used = np.zeros(rows.tokens.shape, int)
        seen = []
        for k, r, slot in zip(*np.nonzero(rows.valid), strict=True):
            i = placement.sample_at[k][r][slot]
            seen.append(i)
            prompt, response = samples.prompt[i], samples.response[i]
            segment, parent = slot + 1, rows.parent[k, r, slot]
            assert rows.group[k, r, slot] == prompt.counter
            assert rows.length[k, r, slot] == samples.response_mask[i].sum()
            # prompts are dealt to mini-batches as whole groups, by their number
            assert k == prompt.counter * SHAPE.mini_batches // 6

            at = np.flatnonzero(rows.segment[k, r] == segment)[-len(response) :]
            np.testing.assert_array_equal(rows.tokens[k, r, at], response)
            np.testing.assert_array_equal(rows.response_mask[k, r, at], samples.response_mask[i])
            place, path = at[-1], []
            for position in range(len(prompt.tokens) + len(response) - 1, -1, -1):
                assert rows.position[k, r, place] == position
                in_response = position >= len(prompt.tokens)
                assert rows.segment[k, r, place] == (segment if in_response else parent)
                path.append(rows.tokens[k, r, place])
                used[k, r, place] += 1
                before = rows.previous[k, r, place]
                assert before < place or position == 0
                place = before
            np.testing.assert_array_equal(path[::-1], [*prompt.tokens, *response])
        assert sorted(seen) == list(range(len(samples)))
        # nothing else lies in the rows, and only prompts are shared
        np.testing.assert_array_equal(used > 0, rows.segment > 0)
        assert shared or used.max() == 1
        own = (rows.segment > 0) & (rows.segment <= SHAPE.sequences)
        assert not shared or used[own].max() == 1
        assert not rows.response_mask[rows.segment == 0].any()
        np.testing.assert_array_equal(
            batch_lib.filled_tokens(samples, placement), (rows.segment > 0).sum(-1)
        )


def test_shared_prompts_lie_above_the_sequences():
    samples = random_samples(3, groups=2, size=3, prompt=(4, 4), response=(2, 3))
    rows, _ = rows_of(samples, RowShape(1, 1, 48, 6), shared=True)
    assert set(np.unique(rows.parent[rows.valid])) == {7, 8}
    for parent in (7, 8):
        assert (rows.segment == parent).sum() == 4  # once, not three times
    rows, _ = rows_of(samples, RowShape(1, 1, 48, 6), shared=False)
    np.testing.assert_array_equal(rows.parent[0, 0], np.arange(1, 7))


@BOTH
def test_empty_response_takes_no_token(shared):
    prompt = prompt_of(0, [5, 6, 7])
    responses = [np.zeros(0, np.int32), np.array([9], np.int32)]
    masks = [np.zeros(0, bool), np.ones(1, bool)]
    samples = Samples([prompt, prompt], np.arange(2, dtype=np.int32), responses, masks)
    rows, placement = rows_of(samples, RowShape(1, 1, 12, 2), shared=shared)
    assert rows.valid.all()
    assert sorted(rows.length[0, 0]) == [0, 1]
    assert rows.response_mask.sum() == 1
    fields = batch_lib.from_token_field(samples, placement, rows.tokens)
    assert [len(x) for x in fields] == [0, 1] and fields[1][0] == 9


def test_packing_depends_on_lengths_alone():
    first = random_samples(5, groups=6, size=4)
    other = random_samples(5, groups=6, size=4)
    other.response = [np.zeros_like(r) for r in other.response]
    placements = [rows_of(s, SHAPE, shared=True, ranks=2)[1] for s in (first, other)]
    assert placements[0] == placements[1]
