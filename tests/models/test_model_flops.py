"""FLOPs that the work needs, against those of traced programs and against masks of packed rows."""

import dataclasses

import numpy as np
import pytest
from support.tiny_model import TINY, random_samples, rows_of
from support.training_programs import MINI_BATCHES, MIXTURE, MODEL, ROWS, TOKENS, trace

from distflow_jax.batch import RowShape
from distflow_jax.config.training_config import LoraConfig
from distflow_jax.coordinator.assignment import PackingPlan, Shares, StepLengths
from distflow_jax.coordinator.first_fit import RowLimits
from distflow_jax.layout import Layout
from distflow_jax.models.attention import packed_mask, within
from distflow_jax.models.decoder_config import adapted, scalar_model
from distflow_jax.models.model_flops import BatchWork, causal_pairs, forward_flops, training_flops
from distflow_jax.programs.jaxpr_flops import matmul_flops
from distflow_jax.training.forward import parent_segment


def full_rows(minis):
    """The work that programs execute: every row full, attention a square."""
    rows = minis * ROWS
    return BatchWork(tokens=rows * TOKENS, scored=rows * TOKENS, pairs=rows * TOKENS**2)


@pytest.mark.parametrize("kind, network", [("logp", MODEL), ("values", scalar_model(MODEL))])
def test_forward_is_what_programs_execute(kind, network):
    found = matmul_flops(trace(kind).jaxpr).total
    assert found == pytest.approx(forward_flops(network, full_rows(MINI_BATCHES)), rel=0.01)


def test_training_is_what_an_update_executes_without_what_it_makes_again():
    work = full_rows(1)
    logits_again = 2 * work.scored * MODEL.vocab_size * MODEL.hidden_size
    found = matmul_flops(trace("update", remat="none").jaxpr).total - logits_again
    assert found == pytest.approx(training_flops(MODEL, work), rel=0.01)


def test_training_is_three_times_the_forward():
    work = BatchWork(tokens=100, scored=60, pairs=3000)
    for network in (TINY, MIXTURE, scalar_model(TINY)):
        assert training_flops(network, work) == 3 * forward_flops(network, work)


def test_the_formula_in_the_papers_words():
    """6 N for a token, N the matrices with the head's, and 12 layers heads dims for a pair."""
    d, h = TINY.hidden_size, TINY.head_dim
    layer = d * h * (2 * TINY.num_heads + 2 * TINY.num_kv_heads) + 3 * d * TINY.mlp_size
    n = TINY.num_layers * layer + TINY.vocab_size * d
    attention = 12 * TINY.num_layers * TINY.num_heads * h * causal_pairs(50)
    work = BatchWork(tokens=50, scored=50, pairs=causal_pairs(50))
    assert training_flops(TINY, work) == 6 * n * 50 + attention


def test_of_experts_only_those_that_a_token_goes_through():
    work = BatchWork(tokens=100, scored=0, pairs=0)
    more = dataclasses.replace(MIXTURE, num_experts=2 * MIXTURE.num_experts)
    router = MIXTURE.num_layers * MIXTURE.hidden_size * MIXTURE.num_experts
    assert forward_flops(more, work) - forward_flops(MIXTURE, work) == 2 * 100 * router


def test_gradients_of_frozen_weights_are_no_work():
    lora = adapted(TINY, LoraConfig(rank=4))
    work = BatchWork(tokens=100, scored=60, pairs=3000)
    base, whole = (forward_flops(network, work) for network in (TINY, lora))
    attention = forward_flops(TINY, BatchWork(0, 0, 3000))
    products, adapters = base - attention, whole - base
    assert training_flops(lora, work) == pytest.approx(2 * products + 3 * adapters + 3 * attention)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("window", [0, 6])
def test_pairs_of_packed_rows_are_those_that_their_masks_let_through(shared, window):
    samples = random_samples(3, groups=5, size=4)
    shape = RowShape(mini_batches=1, rows=12, tokens=96, sequences=8)
    rows, _ = rows_of(samples, shape, shared=shared)
    columns = (f.name for f in dataclasses.fields(rows))
    arrays = {name: getattr(rows, name) for name in columns}
    first = {name: array[0] for name, array in arrays.items() if array is not None}
    rows = dataclasses.replace(rows, **first)
    seen = packed_mask(rows.segment, parent_segment(rows))
    if window:
        seen &= within(rows.position, rows.position, window)
    layout = Layout("mesh", (("fsdp", 1), ("tensor", 1)))
    limits = RowLimits(shape.tokens, shape.sequences, shared, 0)
    shares = Shares.make(
        PackingPlan(limits, 1, 5, {layout: shape.rows}, layout),
        StepLengths(
            np.array([p.counter for p in samples.prompt]),
            np.zeros(len(samples), np.int64),
            np.array([len(p.tokens) for p in samples.prompt]),
            np.array([len(r) for r in samples.response]),
        ),
        processes=1,
    )
    assert shares.pairs(window) == int(np.asarray(seen).sum())
    assert shares.tokens_per_rank(layout).sum() == (rows.segment > 0).sum()


def test_pairs_of_one_sequence():
    assert [causal_pairs(n) for n in (0, 1, 4)] == [0, 1, 10]
    assert causal_pairs(10, window=3) == 1 + 2 + 8 * 3
    assert causal_pairs(2, window=3) == 3
