"""Packing: nothing lost or doubled, every row within its limits, every field where it belongs."""

import numpy as np
import pytest
from support.tiny_model import prompt_of, random_samples, rows_of, sequences_of

from distflow_jax import batch as batch_lib
from distflow_jax.batch import RowShape, Samples
from distflow_jax.data.step_columns import uid_column

BOTH = pytest.mark.parametrize("shared", [False, True], ids=["own prompts", "shared prompts"])
SHAPE = RowShape(mini_batches=2, rows=16, tokens=48, sequences=5)


@BOTH
@pytest.mark.parametrize("ranks", [1, 4])
def test_fields_come_back_as_they_went_in(shared, ranks):
    for seed in range(20):
        samples = random_samples(seed, groups=6, size=4)
        _, placement = rows_of(samples, SHAPE, shared=shared, ranks=ranks)
        rng = np.random.default_rng(seed)
        values = [rng.normal(size=len(r)).astype(np.float32) for r in samples.response]
        field = batch_lib.token_field(sequences_of(samples), placement, values)
        back = batch_lib.from_token_field(sequences_of(samples), placement, field)
        assert sorted(back) == list(range(len(samples)))
        for i, wanted in enumerate(values):
            np.testing.assert_array_equal(back[i], wanted)
        assert np.count_nonzero(field) == sum(map(np.count_nonzero, values))
        scores = rng.normal(size=len(samples)).astype(np.float32)
        placed = batch_lib.sequence_field(placement, scores)
        assert batch_lib.from_sequence_field(placement, placed) == dict(enumerate(scores))


@BOTH
def test_tokens_of_prompts_have_theirs_once_in_a_row(shared):
    """A column of several numbers for every token, those of the prompt first."""
    column = batch_lib.TokenColumn((2, 3), "int8", prompt=True, fill=-1)
    samples = random_samples(1, groups=6, size=4)
    rows, placement = rows_of(samples, SHAPE, shared=shared)
    # of a token its own number, and its place in the sequence
    values = []
    for prompt, response in zip(samples.prompt, samples.response, strict=True):
        tokens = np.concatenate([prompt.tokens, response])
        numbers = np.stack([tokens % 100, np.arange(len(tokens))], axis=1)
        values.append(np.repeat(numbers[:, :, None], 3, 2).astype(np.int8))
    field = batch_lib.token_field(sequences_of(samples), placement, values, column)
    assert field.shape == (*rows.tokens.shape, 2, 3) and field.dtype == np.int8
    there = rows.segment > 0
    np.testing.assert_array_equal(field[there][:, 0, 2], rows.tokens[there] % 100)
    np.testing.assert_array_equal(field[there][:, 1, 0], rows.position[there])
    assert (field[~there] == -1).all()
    assert column.entry_shape(5, 3) == (8, 2, 3)
    assert batch_lib.ONE_NUMBER.entry_shape(5, 3) == (3,)


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
            i = placement.at[k][r][slot]
            seen.append(i)
            prompt, response = samples.prompt[i], samples.response[i]
            segment, parent = slot + 1, rows.parent[k, r, slot]
            assert rows.group[k, r, slot] == prompt.counter
            assert rows.member[k, r, slot] == samples.uid[i, 1]
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
    samples = Samples([prompt, prompt], uid_column([prompt], 2), responses, masks)
    rows, placement = rows_of(samples, RowShape(1, 1, 12, 2), shared=shared)
    assert rows.valid.all()
    assert sorted(rows.length[0, 0]) == [0, 1]
    assert rows.response_mask.sum() == 1
    fields = batch_lib.from_token_field(sequences_of(samples), placement, rows.tokens)
    assert [len(fields[i]) for i in (0, 1)] == [0, 1] and fields[1][0] == 9


def test_packing_depends_on_lengths_alone():
    first = random_samples(5, groups=6, size=4)
    other = random_samples(5, groups=6, size=4)
    other.response = [np.zeros_like(r) for r in other.response]
    placements = [rows_of(s, SHAPE, shared=True, ranks=2)[1] for s in (first, other)]
    assert placements[0] == placements[1]
