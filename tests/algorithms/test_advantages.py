"""Every advantage of the table against float64 NumPy over plain lists, and what must not change it.

K = 2 mini-batches: statistics are over both.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from support import formulas
from support.partial_batches import rows_of_groups
from support.ragged import QUICK, SHAPE, SIZES, Packed, assert_close, draw, pack, random_sequences

from distflow_jax.algorithms.advantages import ESTIMATORS, Outcome
from distflow_jax.algorithms.whole_batch import advantage_waits
from distflow_jax.batch import RowShape
from distflow_jax.config.algorithm_config import AlgorithmConfig
from distflow_jax.config.algorithm_tables import ADVANTAGES

TWO = RowShape(2, SHAPE.rows, SHAPE.tokens, SHAPE.sequences)
GROUPS = 9
CASES = {  # options that differ from 1 or from the default, so that each has its part
    "gae": ("gae", {"gamma": 0.9, "lam": 0.8}, formulas.gae),
    "gae, undiscounted": ("gae", {"gamma": 1.0, "lam": 1.0}, formulas.gae),
    "grpo": ("grpo", {}, formulas.grpo),
    "dr_grpo": ("dr_grpo", {}, formulas.dr_grpo),
    "grpo_passk": ("grpo_passk", {"norm_adv_by_std_in_grpo": True}, formulas.grpo_passk),
    "grpo_passk, no sd": ("grpo_passk", {"norm_adv_by_std_in_grpo": False}, formulas.grpo_passk),
    "rloo": ("rloo", {}, formulas.rloo),
    "reinforce_plus_plus": ("reinforce_plus_plus", {"gamma": 0.9}, formulas.reinforce_plus_plus),
    "reinforce_plus_plus, undiscounted": (
        "reinforce_plus_plus",
        {"gamma": 1.0},
        formulas.reinforce_plus_plus,
    ),
    "reinforce_plus_plus_baseline": (
        "reinforce_plus_plus_baseline",
        {},
        formulas.reinforce_plus_plus_baseline,
    ),
    "remax": ("remax", {}, formulas.remax),
    "gpg": ("gpg", {}, formulas.gpg),
    "opo": ("opo", {}, formulas.opo),
    "cpgd std": ("cpgd", {"cpgd_weight": "std"}, formulas.cpgd_advantage),
    "cpgd equal": ("cpgd", {"cpgd_weight": "equal"}, formulas.cpgd_advantage),
    "cpgd clip_filter": ("cpgd", {"cpgd_weight": "clip_filter"}, formulas.cpgd_advantage),
}
ALL = pytest.mark.parametrize("case", CASES)
# whose advantage is one number per sequence, and 0 where a group's scores are all equal
BY_GROUP = ["grpo", "dr_grpo", "rloo", "gpg", "opo", "cpgd std", "cpgd equal", "cpgd clip_filter"]
# whose advantage is whitened, and 0 where the scores of the step are all equal
WHITENED = [
    "gae, undiscounted",
    "reinforce_plus_plus, undiscounted",
    "reinforce_plus_plus_baseline",
]
SEVERAL = tuple(max(size, 2) for size in SIZES)  # no group of one, whose score counts as it is


def test_every_advantage_is_tested():
    assert {name for name, _, _ in CASES.values()} == set(ADVANTAGES)
    for name, options, _ in CASES.values():
        assert set(options) == set(ADVANTAGES[name].options)


class Step:
    """Rewards of some sequences, and what algorithms may need beside them."""

    def __init__(self, seed, *, dense, sizes=SIZES):
        self.sequences = random_sequences(seed, sizes)
        count, rng = len(self.sequences), np.random.default_rng(seed)
        score = rng.choice([0.0, 1.0, 0.1, 2.5], count).astype(np.float32)
        for i, s in enumerate(self.sequences):
            if s.group == 3:
                score[i] = 0.1  # all alike
        self.reward = draw(seed + 1, self.sequences, 0.3)
        for s, r, x in zip(self.sequences, self.reward, score, strict=True):
            r[:] = r if dense and s.group != 3 else 0
            r[np.flatnonzero(s.mask)[-1:]] += x
        self.value = draw(seed + 2, self.sequences, 0.5)
        self.baseline = rng.normal(size=count).astype(np.float32)

    def scored(self, score_of, value=0.0):
        """The step with these scores at last tokens, and the same value of the critic everywhere.

        score_of: number of a sequence -> its score; also ReMax's baseline, of the sequence before.
        """
        for i, (s, r) in enumerate(zip(self.sequences, self.reward, strict=True)):
            r[:] = 0
            r[np.flatnonzero(s.mask)[-1:]] = score_of(i)
            self.value[i][:] = value
            self.baseline[i] = score_of(max(i - 1, 0))
        return self

    def compute(self, case, packed: Packed, poison=0.0):
        """(advantage, returns) of each sequence, from rows."""
        score = packed.per_sequence(self.baseline, poison)
        tokens = (packed.tokens(x, poison) for x in (self.reward, self.value))
        out = compiled(case)(*tokens, score, packed.rows)
        assert all(x.dtype == jnp.float32 for x in out)
        outside = ~np.asarray(packed.rows.response_mask)
        assert all((np.asarray(x)[outside] == 0).all() for x in out)
        return tuple(packed.unpack(x) for x in out)


@functools.cache
def compiled(case):
    name, options, _ = CASES[case]
    kind = ADVANTAGES[name]

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(reward, value, baseline, rows):
        extra = {"value": value, "baseline": baseline}
        extra = {field: extra[field] for field in kind.reads}
        return ESTIMATORS[name](Outcome(reward, rows, GROUPS, **extra), **options)

    return run


def packed_of(step, seed, shared=False):
    return pack(step.sequences, seed, shared=shared, shape=TWO)


@ALL
@pytest.mark.parametrize("dense", [False, True], ids=["score at the end", "reward on every token"])
@pytest.mark.parametrize("shared", [False, True], ids=["own prompts", "shared prompts"])
def test_matches_the_definition(case, dense, shared):
    step = Step(1, dense=dense)
    _, options, reference = CASES[case]
    expected = reference(step.sequences, step.reward, step.value, step.baseline, **options)
    got = step.compute(case, packed_of(step, 2, shared))
    for what, mine, wanted in zip(("advantage", "returns"), got, expected, strict=True):
        assert_close(np.concatenate(mine), np.concatenate(wanted), what)
    assert np.abs(np.concatenate(got[0])).max() > 0.1


@ALL
@pytest.mark.parametrize("poison", [np.inf, np.nan])
def test_places_outside_the_mask_do_not_matter(case, poison):
    step = Step(3, dense=True)
    packed = packed_of(step, 4, True)
    clean, dirty = step.compute(case, packed), step.compute(case, packed, poison)
    for a, b in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(np.concatenate(a), np.concatenate(b))


@ALL
def test_numbers_of_groups_and_samples_do_not_matter(case):
    step = Step(9, dense=True)
    plain = step.compute(case, packed_of(step, 10))
    rename = np.random.default_rng(11).permutation(GROUPS)
    packed = packed_of(step, 10)
    packed.rows.group = jnp.asarray(rename[packed.rows.group], jnp.int32)
    packed.rows.member = packed.rows.member[..., ::-1]
    for a, b in zip(plain, step.compute(case, packed), strict=True):
        np.testing.assert_array_equal(np.concatenate(a), np.concatenate(b))


@ALL
def test_groups_wait_for_the_batch_only_where_they_must(case):
    """Some groups alone get the advantages that they get among all, or there is a reason."""
    step, part_G = Step(9, dense=False), np.arange(GROUPS) < 4
    packed = packed_of(step, 10)
    whole, _ = step.compute(case, packed)
    packed = dataclasses.replace(packed, rows=rows_of_groups(packed.rows, part_G))
    alone, _ = step.compute(case, packed)
    name, options, _ = CASES[case]
    reason = advantage_waits(AlgorithmConfig(advantage=name, **options))
    pairs = [
        (a, b) for a, b, s in zip(whole, alone, step.sequences, strict=True) if part_G[s.group]
    ]
    same = all(np.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in pairs)
    assert same == (reason == ""), reason
    assert name in reason or "cpgd" in reason or same


@pytest.mark.parametrize("case", BY_GROUP)
@pytest.mark.parametrize("score", [0.1, 0.7, -0.3, 1e-8, 3e7])
def test_equal_scores_give_exactly_zero(case, score):
    """The mean of seven float32 0.1 is not 0.1: divided by a tiny sd it would be a signal."""
    step = Step(12, dense=False)
    sizes = np.bincount([s.group for s in step.sequences if s.mask.any()], minlength=GROUPS)
    for s, r in zip(step.sequences, step.reward, strict=True):
        r[:] = 0
        r[np.flatnonzero(s.mask)[-1:]] = score
    got, _ = step.compute(case, packed_of(step, 13))
    for s, x in zip(step.sequences, got, strict=True):
        if sizes[s.group] > 1:
            np.testing.assert_array_equal(x, 0)
        elif case != "cpgd clip_filter":  # where only groups of one differ, and weigh more
            np.testing.assert_allclose(x[s.mask], score, rtol=2e-6)  # a group of one keeps it


SIZES_OF_SCORES = [0.1, -0.3, 1e-8, 1e-30, 7.3, 1e6, -1e6, 3e7, 1e18]


@pytest.mark.parametrize("case", WHITENED)
@pytest.mark.parametrize("value", [0.0, 0.25], ids=["no value", "a value"])
def test_equal_scores_are_whitened_to_exactly_zero(case, value):
    """Of any size, in any rows, whatever masked places hold: no rounding of a mean is divided by
    the little that it leaves of a deviation."""
    step = Step(12, dense=False, sizes=SEVERAL)
    for seed, score in enumerate(SIZES_OF_SCORES):
        step.scored(lambda _, score=score: score, np.float32(score * value))
        got, _ = step.compute(case, packed_of(step, seed, seed % 2), poison=np.nan)
        np.testing.assert_array_equal(np.concatenate(got), 0, str(score))


@ALL
@pytest.mark.parametrize("offset", [100.0, 1e4, 1e6, -1e6, 2.0**22])
def test_what_is_added_to_all_scores_changes_nothing(case, offset):
    """1e6 + {0, 1} is {0, 1}: a float32 mean of 1e6 is wrong by a part of the scores' range."""
    if case in ("gae", "reinforce_plus_plus"):
        pytest.skip("discounted: what is added counts less on earlier tokens")
    halves = np.random.default_rng(30).integers(1, 4, 100) / 2  # gpg counts scores of 0
    step = Step(31, dense=False, sizes=SEVERAL)
    packed = packed_of(step, 32, True)
    got = [
        np.concatenate(step.scored(lambda i, a=a: a + halves[i]).compute(case, packed)[0])
        for a in (0.0, offset)
    ]
    assert np.abs(got[0]).max() > 0.1
    # below 256 times the range nothing is subtracted, and float32 has 100.5 to 4e-6
    np.testing.assert_allclose(*got, rtol=1e-5, atol=1e-5)


@ALL
@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1e3, 1e9, 1e17])
def test_scores_of_any_range_match_the_definition(case, scale):
    drawn = np.random.default_rng(33).normal(size=100)
    step = Step(34, dense=False).scored(lambda i: scale * drawn[i], np.float32(scale / 3))
    _, options, reference = CASES[case]
    expected, _ = reference(step.sequences, step.reward, step.value, step.baseline, **options)
    expected, got = (
        np.concatenate(x) for x in (expected, step.compute(case, packed_of(step, 35))[0])
    )
    largest = np.abs(expected).max()
    np.testing.assert_allclose(got / largest, expected / largest, rtol=1e-5, atol=2e-6)


@ALL
@pytest.mark.parametrize("poison", [0.0, np.inf, np.nan])
def test_a_step_without_tokens_has_no_advantage(case, poison):
    """All responses masked out, or none at all: zeros, and nothing is nan."""
    step = Step(36, dense=True)
    blank = [dataclasses.replace(s, mask=np.zeros_like(s.mask)) for s in step.sequences]
    for sequences in (blank, []):
        step.sequences = sequences
        packed = packed_of(step, 37)
        score = packed.per_sequence(step.baseline[: len(sequences)], poison)
        tokens = (packed.tokens(x[: len(sequences)], poison) for x in (step.reward, step.value))
        for x in compiled(case)(*tokens, score, packed.rows):
            np.testing.assert_array_equal(x, 0)


@pytest.mark.parametrize("case", ["grpo_passk", "grpo_passk, no sd"])
@pytest.mark.parametrize("score", [0.1, 3e7])
def test_passk_without_a_single_best_is_exactly_zero(case, score):
    """Of two best responses neither is needed, and a group of one has no second response."""
    step = Step(12, dense=False)
    for s, r in zip(step.sequences, step.reward, strict=True):
        r[:] = 0
        r[np.flatnonzero(s.mask)[-1:]] = score if s.sample != 1 else score / 2
    got, _ = step.compute(case, packed_of(step, 13))
    counted = [s for s in step.sequences if s.mask.any()]
    for s, x in zip(step.sequences, got, strict=True):
        best = [o for o in counted if o.group == s.group and o.sample != 1]
        lower = [o for o in counted if o.group == s.group and o.sample == 1]
        if len(best) == 1 and lower and s is best[0]:
            assert (x[s.mask] > 0).all()
        else:
            np.testing.assert_array_equal(x, 0)


def test_a_group_of_one_counts_as_different_in_clip_filter():
    """With one sample per prompt no group has an equal other: the weight is 1, not 3."""
    several = [s for s in random_sequences(20) if s.mask.any()][:GROUPS]
    alone = [dataclasses.replace(s, group=i, sample=0) for i, s in enumerate(several)]
    packed = pack(alone, 21, shared=False, shape=TWO)
    reward = [np.where(s.mask, 0.5, 0).astype(np.float32) for s in alone]
    got, _ = compiled("cpgd clip_filter")(
        packed.tokens(reward),
        packed.tokens(reward),
        packed.per_sequence([0.0] * GROUPS),
        packed.rows,
    )
    for s, x in zip(alone, packed.unpack(got), strict=True):
        np.testing.assert_allclose(x[s.mask], 0.5 * s.length, rtol=1e-6)


@pytest.mark.parametrize("scores", ["any", "far from 0", "equal"])
@pytest.mark.parametrize("case", ["gae, undiscounted", "grpo"])
def test_the_mesh_does_not_matter(case, scores):
    """Rows divided over 4 devices: groups, and the whitening, are over all of them."""
    step = Step(18, dense=True, sizes=SEVERAL)
    if scores != "any":
        step.scored(lambda i: 1e6 + (scores == "far from 0") * (i % 3))
    packed = packed_of(step, 19, True)
    plain = step.compute(case, packed)
    assert (np.abs(np.concatenate(plain[0])).max() == 0) == (scores == "equal")
    mesh = Mesh(np.array(jax.devices()[:4], dtype=object), ("fsdp",))
    place = functools.partial(
        jax.device_put, device=NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    )
    tokens = (place(packed.tokens(x)) for x in (step.reward, step.value))
    score = place(packed.per_sequence(step.baseline))
    divided = compiled(case)(*tokens, score, jax.tree.map(place, packed.rows))
    for a, b in zip(plain, divided, strict=True):
        assert_close(np.concatenate(packed.unpack(b)), np.concatenate(a))
