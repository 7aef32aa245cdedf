"""Prompts in one row: each where its offset says, however many short ones there are."""

import dataclasses

import numpy as np
import pytest
from support.tiny_sampler import CONFIG

from distflow_jax.rollout.prefill.prefill import buckets, max_prompts, pack

SIZES = dataclasses.replace(CONFIG, slots=64, max_prompt=128, prefill_tokens=512)


@pytest.mark.parametrize("count", [1, 4, 5, 8, 16, 32])
@pytest.mark.parametrize("tokens", [1, 2, 9, 16])
def test_every_prompt_lies_at_its_offset_and_ends_at_its_last(count, tokens):
    """A row of many short prompts is as long as their number asks, not only their tokens."""
    size = SIZES.page_size
    most = buckets(SIZES)[-1]
    count = min(count, max_prompts(most, size), most // tokens)
    prompts = [np.arange(1, tokens + 1, dtype=np.int32) + 100 * i for i in range(count)]
    row = pack(prompts, SIZES)
    assert len(row.tokens) in buckets(SIZES)
    for prompt, start, last in zip(prompts, row.offsets, row.last, strict=False):
        np.testing.assert_array_equal(row.tokens[start : start + tokens], prompt)
        assert last == start + tokens - 1
