"""Packing and balance: nothing lost or doubled, no rank above the bound, little moved.

Nightly: the busiest rank is close to the least possible load, over thousands of random batches.
"""

import numpy as np
import pytest

from distflow_jax.coordinator.first_fit import Lengths, RowLimits, first_fit_decreasing, rows_bound
from distflow_jax.coordinator.packing import RowAssignment, assign

BOTH = pytest.mark.parametrize("shared", [False, True], ids=["own prompts", "shared prompts"])
THRESHOLD = 0.03


def first_fit(prompt, response, group, *, tokens, sequences, shared):
    arrays = (np.asarray(x, np.int64) for x in (prompt, response, group, np.zeros(len(group))))
    return first_fit_decreasing(Lengths(*arrays), RowLimits(tokens, sequences, shared))


def rows_needed(num_sequences, longest, tokens, sequences):
    return rows_bound(num_sequences, longest, RowLimits(tokens, sequences, False))


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


def draw(rng, kind, count, most):
    if kind == "uniform":
        return rng.integers(1, most + 1, count)
    if kind == "bimodal":
        short = rng.integers(1, max(2, most // 8), count)
        return np.where(rng.random(count) < 0.5, short, rng.integers(2 * most // 3, most, count))
    return np.minimum(1 + (rng.pareto(1.2, count) * most / 20).astype(int), most)


def random_step(rng, kind, *, per_rank):
    """(lengths, limits, ranks at each site) of one step."""
    ranks = int(rng.integers(1, 17))
    tokens = int(rng.choice([256, 1024]))
    size = int(rng.choice([1, 4, 8]))
    groups = max(1, -(-ranks * per_rank // size))
    sites = int(rng.choice([s for s in range(1, ranks + 1) if ranks % s == 0]))
    if rng.random() < 0.3:  # some sites sampled more than others
        site = np.sort(rng.integers(0, sites, groups))
    else:
        site = np.arange(groups) * sites // groups
    lengths = Lengths(
        prompt=np.repeat(rng.integers(1, tokens // 4, groups), size),
        response=draw(rng, kind, groups * size, tokens // 2),
        group=np.repeat(np.arange(groups), size),
        site=np.repeat(site, size),
    )
    limits = RowLimits(tokens, 64, bool(rng.integers(2)))
    return lengths, limits, np.split(np.arange(ranks), sites)


def tokens_by_rank(lengths, limits, assignment, ranks):
    load = np.zeros(ranks, np.int64)
    for row, rank in zip(assignment.rows, assignment.rank, strict=True):
        tokens = cost(row, lengths.prompt, lengths.response, lengths.group, limits.shared)
        assert tokens <= limits.tokens and 0 < len(row) <= limits.sequences
        load[rank] += tokens
    return load


def check(lengths, limits, ranks_of_site, assignment):
    """Checks the properties of every assignment; returns the imbalance in tokens."""
    ranks = sum(map(len, ranks_of_site))
    together = len(first_fit_decreasing(lengths, limits))
    assert sorted(i for row in assignment.rows for i in row) == list(range(len(lengths)))
    load = tokens_by_rank(lengths, limits, assignment, ranks)
    assert np.bincount(assignment.rank).max() <= -(-together // ranks) + 1
    return load.max() / load.mean() - 1


@pytest.mark.parametrize("kind", ["uniform", "bimodal", "heavy-tailed"])
@pytest.mark.parametrize("cases", [300, pytest.param(3000, marks=pytest.mark.slow)])
def test_busiest_rank_is_near_the_least_it_could_be(kind, cases):
    rng = np.random.default_rng(cases + len(kind))
    for _ in range(cases):
        step = random_step(rng, kind, per_rank=int(rng.integers(1, 8)))
        check(*step, assign(*step, threshold=THRESHOLD))
    for _ in range(cases // 9 + 1):
        step = random_step(rng, kind, per_rank=64)
        assert check(*step, assign(*step, threshold=THRESHOLD)) <= 0.03


def test_every_process_computes_the_same():
    step = random_step(np.random.default_rng(3), "uniform", per_rank=64)
    assert assign(*step, threshold=THRESHOLD) == assign(*step, threshold=THRESHOLD)


def lengths_of(prompt, response, site):
    n = len(response)
    return Lengths(np.full(n, prompt), np.array(response), np.arange(n), np.array(site))


def moved(lengths, ranks_of_site, assignment):
    home = {rank: site for site, ranks in enumerate(ranks_of_site) for rank in ranks}
    return [
        i
        for row, rank in zip(assignment.rows, assignment.rank, strict=True)
        for i in row
        if lengths.site[i] != home[rank]
    ]


def test_nothing_moves_where_it_would_gain_little():
    lengths = lengths_of(1, [9] * 64 + [9] * 63 + [8], [0] * 64 + [1] * 64)
    sites = [[0], [1]]
    assert not moved(
        lengths, sites, assign(lengths, RowLimits(64, 64, False), sites, threshold=0.03)
    )


def test_only_the_surplus_moves():
    lengths = lengths_of(1, [31] * 12 + [31] * 4, [0] * 12 + [1] * 4)
    sites = [[0], [1]]
    assignment = assign(lengths, RowLimits(64, 8, False), sites, threshold=0.03)
    assert np.bincount(assignment.rank).tolist() == [4, 4]
    assert len(moved(lengths, sites, assignment)) == 4


def test_a_threshold_above_the_gain_keeps_everything_where_it_is():
    lengths = lengths_of(1, [31] * 10 + [31] * 6, [0] * 10 + [1] * 6)
    sites = [[0], [1]]
    assert moved(lengths, sites, assign(lengths, RowLimits(64, 8, False), sites, threshold=0.1))
    assert not moved(lengths, sites, assign(lengths, RowLimits(64, 8, False), sites, threshold=0.3))


def test_a_static_room_is_kept_whatever_the_threshold():
    lengths = lengths_of(1, [31] * 12 + [31] * 4, [0] * 12 + [1] * 4)
    assignment = assign(lengths, RowLimits(64, 8, False), [[0], [1]], threshold=0.6, max_rows=4)
    assert np.bincount(assignment.rank).max() <= 4


def test_ranks_change_and_change_back():
    rng = np.random.default_rng(0)
    for m in range(1, 17):
        step = random_step(rng, "uniform", per_rank=8)
        packed = assign(*step, threshold=THRESHOLD)
        first = packed.spread(m)
        for n in range(1, 17):
            there = first.spread(n)
            assert np.bincount(there.rank, minlength=n).max() <= -(-len(packed.rows) // n)
            assert sorted(there.rows) == sorted(packed.rows)
            assert RowAssignment(there.rows, there.rank).spread(m) == first


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_a_group_that_must_stay_together_does(seed, shared):
    rng = np.random.default_rng(seed)
    groups, sites = int(rng.integers(1, 40)), int(rng.integers(1, 5))
    group = np.repeat(np.arange(groups), 2)
    prompt = np.repeat(rng.integers(1, 20, groups), 2)
    response, site = rng.integers(1, 20, 2 * groups), np.repeat(rng.integers(0, sites, groups), 2)
    limits = RowLimits(tokens=128, sequences=6, shared=shared, group_size=2)
    lengths = Lengths(prompt, response, group, site)
    found = assign(lengths, limits, [[s] for s in range(sites)], threshold=0.03)
    assert sorted(i for row in found.rows for i in row) == list(range(2 * groups))
    for row in found.rows:
        members = np.array(row)
        assert sorted(group[members].tolist()) == sorted(np.repeat(np.unique(group[members]), 2))
        prompts = np.unique(members // 2) * 2 if shared else members
        assert response[members].sum() + prompt[prompts].sum() <= limits.tokens
        assert len(row) <= limits.sequences
    with pytest.raises(ValueError, match="which must stay in one row, does not fit a row of 8"):
        small = RowLimits(tokens=8, sequences=6, shared=shared, group_size=2)
        long = Lengths(np.array([2, 2]), np.array([4, 4]), np.zeros(2, int), np.zeros(2, int))
        assign(long, small, [[0]], threshold=0.03)
