"""Pages: who has them, who gets the next ones, and what is written where."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny_model import TINY, mesh_of

from distflow_jax.rollout.kv_cache import pages
from distflow_jax.rollout.kv_cache.kernel_attention import append_pages

SLOTS, OWNERS, PAGES, WIDTH = 3, 6, 8, 4
PROMPT = 4  # an owner that is a prompt


MOE = dataclasses.replace(TINY, num_experts=8, experts_per_token=3)


def make(ranks=2, model=TINY):
    """Of a mixture, experts are recorded."""
    return pages.empty(
        model,
        ranks=ranks,
        pages=PAGES,
        page_size=WIDTH,
        owners=OWNERS,
        dtype=jnp.float32,
        record_experts=model is MOE,
    )


def ints(*rows):
    return jnp.array(rows, jnp.int32)


def take(cache, need, which):
    return pages.take_low(cache, jnp.array(need), ints(*which), OWNERS)


def test_slots_take_the_lowest_pages_in_their_order():
    need = [[True, False, True], [False, True, False]]
    cache, got = take(make(), need, [[0, 0, 0], [0, 0, 0]])
    np.testing.assert_array_equal(got, need)
    cache, got = take(cache, [[True, True, False], [True, False, False]], [[1, 0, 0], [0, 0, 0]])
    np.testing.assert_array_equal(cache.owner[:, :5], [[0, 2, 0, 1, 6], [1, 0, 6, 6, 6]])
    np.testing.assert_array_equal(cache.rank[0, :4], [0, 0, 1, 0])
    np.testing.assert_array_equal(pages.free_pages(cache, OWNERS), [4, 6])


def test_the_last_go_without():
    cache = make(1)
    for number in range(2):
        cache, got = take(cache, [[True] * 3], [[number] * 3])
        assert got.all()
    cache, got = take(cache, [[True] * 3], [[2] * 3])
    np.testing.assert_array_equal(got, [[True, True, False]])
    assert int(pages.free_pages(cache, OWNERS)[0]) == 0


def test_pages_of_those_who_are_gone_are_free():
    cache, _ = take(make(1), [[True] * 3], [[0] * 3])
    alive = np.array([[True, False, True, False, False, False]])
    cache = pages.release(cache, jnp.array(alive))
    np.testing.assert_array_equal(cache.owner[0, :4], [0, 6, 2, 6])
    cache, _ = take(cache, [[False, True, False]], [[0, 5, 0]])
    assert (int(cache.owner[0, 1]), int(cache.rank[0, 1])) == (1, 5)


def test_prompts_take_the_highest_pages():
    """A part of a row that starts at its fourth token."""
    rng = np.random.default_rng(0)
    shape = (TINY.num_layers, 4 * WIDTH, TINY.num_kv_heads, TINY.head_dim)
    key, value = (jnp.array(rng.normal(size=shape), jnp.float32) for _ in range(2))
    cache, _ = take(make(), [[True] * 3] * 2, [[0] * 3] * 2)
    cache = pages.write_prompt(
        cache,
        pages.PromptRows(key, value),
        data_rank=jnp.int32(1),
        owner=jnp.int32(PROMPT),
        owners=OWNERS,
        offset=jnp.int32(3),
        count=jnp.int32(2),
    )
    np.testing.assert_array_equal(cache.owner[1], [0, 1, 2, 6, 6, 6, PROMPT, PROMPT])
    np.testing.assert_array_equal(cache.rank[1, 6:], [1, 0])
    assert PROMPT not in np.asarray(cache.owner[0])
    for page, start in ((7, 3), (6, 3 + WIDTH)):
        np.testing.assert_array_equal(
            cache.key[:, 1, page], key[:, start : start + WIDTH].transpose(0, 2, 3, 1)
        )
        np.testing.assert_array_equal(
            cache.value[:, 1, page], value[:, start : start + WIDTH].transpose(0, 2, 1, 3)
        )


def test_tables_list_pages_in_their_order():
    cache = make(1)
    for number in range(2):
        cache, _ = take(cache, [[number == 0, True, False]], [[number] * 3])
    table = pages.tables(cache, first=0, count=SLOTS, longest=3)
    np.testing.assert_array_equal(table, [[[0, 8, 8], [1, 2, 8], [8, 8, 8]]])


@pytest.mark.parametrize(("axes", "model"), [((2, 1), TINY), ((2, 2), MOE)])
def test_both_ways_to_append_write_the_same(axes, model):
    rng = np.random.default_rng(1)
    mesh = mesh_of(*axes, names=("data", "tensor"))
    shape = (TINY.num_layers, 2, SLOTS, TINY.num_kv_heads, TINY.head_dim)
    key, value = (jnp.array(rng.normal(size=shape), jnp.float32) for _ in range(2))
    experts = None
    if model is MOE:
        experts = jnp.array(rng.integers(0, 8, (*shape[:3], 3)), jnp.int8)
    cache, _ = take(make(model=model), [[True] * 3, [False, True, True]], [[0] * 3] * 2)
    page, within = pages.place(cache, ints([0, 3, -1], [2, 1, 0]))
    np.testing.assert_array_equal(page, [[0, 1, PAGES], [PAGES, 0, 1]])
    wanted = pages.append(cache, key, value, page, within, experts)
    run = jax.jit(lambda *x, experts: append_pages(*x, mesh, experts))
    got = run(cache, key, value, page, within, experts=experts)
    keys = got.key
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    if experts is not None:
        np.testing.assert_array_equal(got.experts[:, 0, 1, :, 3], experts[:, 0, 1])
    np.testing.assert_array_equal(keys[:, 0, 1, :, :, 3], key[:, 0, 1])
    assert np.count_nonzero(keys) == np.count_nonzero(key[:, 0, :2]) + np.count_nonzero(
        key[:, 1, 1:]
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_token_changes_one_tile_of_its_page_of_values(dtype):
    """As by the scatter of other platforms, and of values only the rows of a tile are moved."""
    model = dataclasses.replace(TINY, head_dim=128)
    sizes = {"ranks": 1, "pages": PAGES, "page_size": 128, "owners": OWNERS, "dtype": dtype}
    rng = np.random.default_rng(0)

    def drawn(x):
        return jnp.asarray(rng.integers(-9, 9, x.shape), x.dtype)

    cache = jax.tree.map(drawn, pages.empty(model, **sizes))
    shape = (model.num_layers, 1, SLOTS, model.num_kv_heads, 128)
    key, value = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2))
    page, within = ints([5, PAGES, 2]), ints([127, 3, 40])
    run = jax.jit(lambda *x: append_pages(*x, mesh_of(1, 1, names=("data", "tensor"))))
    got = run(cache, key, value, page, within)
    wanted = pages.append(cache, key, value, page, within)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
