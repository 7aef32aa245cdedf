"""Attention over pages against softmax in float64, whoever shares which prompt."""

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_model import TINY

from distflow_jax.rollout.cache import Cache
from distflow_jax.rollout.paged_attention import over_cache, slot_attention

SLOTS, PROMPTS, WIDTH, LONGEST, LAYERS = 6, 4, 16, 20, 2
NOBODY = PROMPTS


def laid_out(own, prompts, rng):
    """A cache whose pages lie in random order and hold nan where no token is, and what it holds:
    {(rank, owner): (key, value) [layers, T, K, H]}. Owners: slots, then prompts."""
    lengths = [[*slots, *entries] for slots, entries in zip(own, prompts, strict=True)]
    pages, owners = 64, SLOTS + PROMPTS
    shape = (LAYERS, len(lengths), pages, TINY.num_kv_heads, WIDTH, TINY.head_dim)
    key, value = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
    owner = np.full((len(lengths), pages), owners, np.int32)
    place = np.zeros((len(lengths), pages), np.int32)
    held = {}
    for rank, of_rank in enumerate(lengths):
        free = iter(rng.permutation(pages))
        for i, length in enumerate(of_rank):
            tokens = (LAYERS, length, TINY.num_kv_heads, TINY.head_dim)
            held[rank, i] = k, v = rng.normal(size=(2, *tokens)).astype(np.float32)
            for start in range(0, length, WIDTH):
                page, count = next(free), min(WIDTH, length - start)
                owner[rank, page], place[rank, page] = i, start // WIDTH
                for pool, x in ((key, k), (value, v)):
                    rows = x[:, start : start + count].swapaxes(1, 2)
                    pool[:, rank, page, :, :count] = rows
    arrays = (key.swapaxes(4, 5), value, owner, place)
    return Cache(*map(jnp.asarray, arrays)), held


def statement(q, k, v, held, prompt, layer):
    """Softmax attention in float64: q [D, S, Q, N, H], k and v [D, S, Q, K, H]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out, group = np.zeros(q.shape), q.shape[3] // k.shape[3]
    for rank, slot, token, head in np.ndindex(q.shape[:4]):
        of = [(rank, SLOTS + prompt[rank][slot]), (rank, slot)]
        old = [[x[layer] for x in held[owner]] for owner in of if owner in held]
        new = [x[rank, slot, : token + 1] for x in (k, v)]
        keys, values = (np.concatenate(x) for x in zip(*old, new, strict=True))
        score = keys[:, head // group] @ q[rank, slot, token, head] / np.sqrt(q.shape[-1])
        weight = np.exp(score - score.max())
        out[rank, slot, token, head] = weight @ values[:, head // group] / weight.sum()
    return out


CASES = {
    # members at most, own tokens, prompts' tokens, the prompt of each slot: a row per data rank
    "all share one of several blocks": (6, [[3] * 6], [[300, 0, 0, 0]], [[0] * 6]),
    "no two share one": (
        1,
        [[1, 0, 17, 5, 0, 33]],
        [[16, 1, 150, 40]],
        [[2, 0, 1, NOBODY, 3, NOBODY]],
    ),
    "some share, and nobody answers one": (
        3,
        [[5, 0, 16, 2, 40, 1]],
        [[130, 0, 7, 128]],
        [[3, 0, 3, NOBODY, 0, 3]],
    ),
    "ranks with different numbers of prompts and blocks": (
        4,
        [[0, 9, 1, 1, 1, 20], [2] * 6],
        [[300, 20, 129, 0], [0, 12, 0, 0]],
        [[2, 0, 0, 1, 2, 0], [1, NOBODY, 1, NOBODY, 1, 1]],
    ),
    "nobody has a prompt": (2, [[4, 5, 6, 7, 8, 9]], [[0] * 4], [[NOBODY] * 6]),
}


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_attention_is_that_over_prompt_response_and_new_tokens(name, queries):
    members, own, prompts, prompt = CASES[name]
    rng = np.random.default_rng(len(name))
    cache, held = laid_out(own, prompts, rng)
    count = {}  # numbers among the members of a prompt, in any order
    member = np.zeros((len(own), SLOTS), np.int32)
    for rank, slot in np.ndindex(member.shape):
        who = rank, prompt[rank][slot]
        member[rank, slot] = count.get(who, 0) % members
        count[who] = count.get(who, 0) + 1
    new = (len(own), SLOTS, queries)
    q = rng.normal(size=(*new, TINY.num_heads, TINY.head_dim)).astype(np.float32)
    k, v = rng.normal(size=(2, *new, TINY.num_kv_heads, TINY.head_dim)).astype(np.float32)
    over = over_cache(
        cache,
        *(jnp.asarray(x, jnp.int32) for x in (own, prompts, prompt, member)),
        members=members,
        longest=LONGEST,
    )
    for layer in range(LAYERS):
        got = slot_attention(*map(jnp.asarray, (q, k, v)), jnp.int32(layer), over)
        wanted = statement(q, k, v, held, prompt, layer)
        np.testing.assert_allclose(got, wanted, atol=2e-6, rtol=2e-5)
