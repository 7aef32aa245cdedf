"""Attention over pages against softmax in float64, whoever shares which prompt.

Nightly: attention over pages with a window equals a softmax in float64.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_model import TINY, mesh_of

from distflow_jax.models.attention import UNLIMITED
from distflow_jax.rollout.kv_cache import kernel_attention
from distflow_jax.rollout.kv_cache.page_walk_attention import (
    over_cache,
    slot_attention,
    slot_readers,
)
from distflow_jax.rollout.kv_cache.pages import Cache
from distflow_jax.rollout.kv_cache.shared_prompt_attention import Contexts

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


def statement(q, k, v, held, prompt, layer, window=None):
    """Softmax attention in float64, over the last `window` tokens: q [D, S, Q, N, H], k and v
    [D, S, Q, K, H]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out, group = np.zeros(q.shape), q.shape[3] // k.shape[3]
    for rank, slot, token, head in np.ndindex(q.shape[:4]):
        of = [(rank, SLOTS + prompt[rank][slot]), (rank, slot)]
        old = [[x[layer] for x in held[owner]] for owner in of if owner in held]
        new = [x[rank, slot, : token + 1] for x in (k, v)]
        keys, values = (np.concatenate(x) for x in zip(*old, new, strict=True))
        if window is not None:
            keys, values = keys[-window:], values[-window:]
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


def compare(name, queries, window=None, *, kernels=False):
    """The window, where there is one, is that of layer 0; layer 1 sees all."""
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
    own, prompts, prompt_of, member = (
        jnp.asarray(x, jnp.int32) for x in (own, prompts, prompt, member)
    )
    windows = {"sliding_window": window or 0, "queries": queries}

    @jax.jit
    def attend(cache, q, k, v, layer, *seen):
        if kernels:
            ways = {"mesh": mesh_of(len(own), 1, names=("data", "tensor"))}
            ways |= {"implementation": "reference", "longest": (LONGEST, LONGEST)}
            over_owners = kernel_attention.over_cache
        else:
            over_owners, ways = over_cache, {"longest": LONGEST}
        contexts = Contexts(own, prompts, prompt_of, member)
        over = over_owners(cache, contexts, members=members, **ways, **windows)
        return slot_attention(q, k, v, layer, over, *seen)

    for layer in range(LAYERS):
        seen = () if window is None else (jnp.int32((window, UNLIMITED)[layer]),)
        got = attend(cache, q, k, v, jnp.int32(layer), *seen)
        wanted = statement(q, k, v, held, prompt, layer, None if layer else window)
        np.testing.assert_allclose(got, wanted, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_attention_is_that_over_prompt_response_and_new_tokens(name, queries):
    compare(name, queries)


def more(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("name", "queries", "window", "kernels"),
    [
        ("all share one of several blocks", 1, 150, False),  # begins in the second block
        ("no two share one", 3, 20, False),
        ("ranks with different numbers of prompts and blocks", 3, 140, True),
        # the new tokens alone, and not even all of them
        more("all share one of several blocks", 3, 2, False),
        more("all share one of several blocks", 3, 2, True),
        more("some share, and nobody answers one", 3, 30, False),
        more("ranks with different numbers of prompts and blocks", 1, 25, False),
        more("ranks with different numbers of prompts and blocks", 3, 140, False),
        more("no two share one", 1, 20, True),
        more("nobody has a prompt", 1, 6, False),
    ],
)
def test_a_layer_with_a_window_sees_the_last_tokens(name, queries, window, kernels):
    compare(name, queries, window, kernels=kernels)


def test_pages_before_the_window_are_not_read():
    own = [[40, 33, 20, 5, 70, 1]]
    cache, _ = laid_out(own, [[60, 100, 0, 0]], np.random.default_rng(0))
    own = jnp.asarray(own, jnp.int32)
    near, every = slot_readers(cache, own, own + 1 - 20), slot_readers(cache, own)
    # a window of 20: of 40 tokens 21 to 39, in pages 1 and 2; of 33 14 to 32, in 0 to 2; ...
    assert int((every.count > 0).sum()) == 3 + 3 + 2 + 1 + 5 + 1
    assert int((near.count > 0).sum()) == 2 + 3 + 2 + 1 + 2 + 1
