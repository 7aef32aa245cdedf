"""Decode attention over pages: every implementation against a float64 statement of it.

The kernels run interpreted, and are lowered for their platform without a device of it. Undefined
table entries, pages that no owner uses and tokens beyond a length hold what would spoil a result.

Nightly: the decode kernels with a window that covers everything equal those without a window.
"""

import contextlib
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.accelerators import TRITON_DEPRECATED, abstract_gpu

from distflow_jax.models.kernels import decode_gpu, decode_tpu
from distflow_jax.models.kernels.decode_attention import members_attention, partial_attention
from distflow_jax.models.kernels.decode_tpu import Members
from distflow_jax.models.kernels.merge_partial import merge
from distflow_jax.rollout.kv_cache.shared_prompt_attention import answering

IMPLEMENTATIONS = ("reference", "gpu", "tpu")
# the TPU kernel takes pages of 128 tokens, so that its cases hold fewer of them
WIDTH = {"reference": 16, "gpu": 16, "tpu": 128}
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


def make_case(lengths, *, kv_heads=2, rows=3, head_dim=32, width=16, dtype="float32", seed=0):
    """Arguments of `partial_attention`, with nan and garbage wherever nothing may be read."""
    rng = np.random.default_rng(seed)
    owners, slots = len(lengths), 3
    pages = owners * slots + 2
    q = rng.normal(size=(owners, kv_heads, rows, head_dim)).astype(np.float32)
    key = rng.normal(size=(pages, kv_heads, head_dim, width)).astype(np.float32)
    value = rng.normal(size=(pages, kv_heads, width, head_dim)).astype(np.float32)
    table = rng.permutation(pages)[: owners * slots].reshape(owners, slots).astype(np.int32)
    counts = np.zeros(pages, int)
    for owner, length in enumerate(lengths):
        for slot in range(slots):
            counts[table[owner, slot]] = np.clip(length - slot * width, 0, width)
        table[owner, -(-length // width) :] = rng.choice([pages, -7, 2**30])
    unread = np.arange(width) >= counts[:, None]
    case = {"q": jnp.asarray(q, "bfloat16" if dtype == "bfloat16" else "float32")}
    if dtype == "int8":
        scales = rng.uniform(0.5, 2.0, size=(2, pages, kv_heads, width)).astype(np.float32) / 50
        scales = np.where(unread[:, None], np.nan, scales)
        key, value = np.rint(40 * key).clip(-127, 127), np.rint(40 * value).clip(-127, 127)
        case |= {"key_scale": jnp.asarray(scales[0]), "value_scale": jnp.asarray(scales[1])}
    else:
        key = np.where(unread[:, None, None], np.nan, key)
        value = np.where(unread[:, None, :, None], np.nan, value)
    return case | {
        "key_pages": jnp.asarray(key, dtype),
        "value_pages": jnp.asarray(value, dtype),
        "table": jnp.asarray(table),
        "length": jnp.asarray(lengths, jnp.int32),
    }


def statement(case):
    """Softmax attention in float64, owner by owner, over the tokens that count."""
    wide = {name: np.asarray(array).astype(np.float64) for name, array in case.items()}
    first = np.asarray(case["first"]) if "first" in case else None
    owners, kv_heads, rows, head_dim = wide["q"].shape
    width = wide["key_pages"].shape[-1]
    out, lse = np.zeros(wide["q"].shape), np.full((owners, kv_heads, rows), -np.inf)
    for owner, length in enumerate(np.asarray(case["length"])):
        index = np.asarray(case["table"])[owner, : -(-length // width)]
        if not length:
            continue
        key = wide["key_pages"][index].transpose(1, 2, 0, 3)  # [K, H, pages, W]
        value = wide["value_pages"][index].swapaxes(0, 1)  # [K, pages, W, H]
        if "key_scale" in wide:
            key = key * wide["key_scale"][index].swapaxes(0, 1)[:, None]
            value = value * wide["value_scale"][index].swapaxes(0, 1)[..., None]
        key = key.reshape(kv_heads, head_dim, -1)[:, :, :length]
        value = value.reshape(kv_heads, -1, head_dim)[:, :length]
        score = wide["q"][owner] @ key / math.sqrt(head_dim)
        top = score.max(-1, keepdims=True)
        weight = np.exp(score - top)
        if first is not None:
            weight = np.where(np.arange(length) >= first[owner][:, None], weight, 0)
        total = weight.sum(-1, keepdims=True)
        some = np.maximum(total, 1e-300)
        lse[owner] = np.where(total > 0, top + np.log(some), -np.inf)[..., 0]
        out[owner] = weight @ value / some
    return out, lse


@functools.partial(jax.jit, static_argnames=("implementation",))
def attend(case, implementation):
    interpret = implementation != "reference"
    return partial_attention(**case, implementation=implementation, interpret=interpret)


def assert_states(got, case, tolerance):
    out, lse = statement(case)
    assert got[0].dtype == got[1].dtype == jnp.float32
    np.testing.assert_allclose(got[0], out, atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(got[1], lse, atol=tolerance, rtol=tolerance)


def ragged(width):
    return [0, 1, width - 1, width, width + 1, 3 * width, 0]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_ragged_owners_attend_to_their_own_tokens_alone(implementation, dtype):
    width = WIDTH[implementation]
    case = make_case(ragged(width), width=width, dtype=dtype)
    got = attend(case, implementation)
    assert_states(got, case, TOLERANCE.get(dtype, 1e-5))
    empty = np.asarray(case["length"]) == 0
    assert np.all(np.asarray(got[0])[empty] == 0)
    assert np.all(np.asarray(got[1])[empty] == -np.inf)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("kv_heads", "rows"), [(1, 1), (3, 8), (1, 70)])
def test_any_number_of_heads_and_query_rows(implementation, kv_heads, rows):
    width = WIDTH[implementation]
    case = make_case([2 * width - 3, 5], kv_heads=kv_heads, rows=rows, width=width)
    assert_states(attend(case, implementation), case, 1e-5)


def with_windows(case, width):
    """Rows of an owner begin apart: before its first token, in the midst, and beyond the last."""
    length = np.asarray(case["length"])[:, None]
    row = np.arange(case["q"].shape[2])[None]
    first = np.where(row % 4 == 3, 2**30, length - width - 2 + row)
    first = np.where((length > width) & (row == 0), length - 1, first)
    # of one owner no row sees anything
    return case | {"first": jnp.asarray(np.where(length == width, length, first), jnp.int32)}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("dtype", "rows"), [("float32", 70), ("int8", 5)])
def test_rows_see_from_their_first_token_on(implementation, dtype, rows):
    width = WIDTH[implementation]
    case = with_windows(make_case(ragged(width), rows=rows, width=width, dtype=dtype), width)
    got = attend(case, implementation)
    assert_states(got, case, 1e-5)
    nothing = np.asarray(got[1]) == -np.inf
    assert nothing.any(axis=(1, 2)).all() and not nothing[5].all()


@pytest.mark.parametrize(
    "implementation",
    ["reference", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpu", "tpu"))],
)
def test_a_window_that_reaches_everything_changes_nothing(implementation):
    width = WIDTH[implementation]
    case = make_case(ragged(width), width=width)
    whole = case | {"first": jnp.full((7, 3), 1 - 2**30, jnp.int32)}
    for mine, wanted in zip(*(attend(c, implementation) for c in (whole, case)), strict=True):
        np.testing.assert_array_equal(mine, wanted)


# owners of slots, some of them out of range; which slots of an owner are its members 0, 1, 2
OWNER, NUMBER = (5, 2, 5, 7, 0, 5, -1, 4, 3), (2, 0, 0, 0, 1, 1, 0, 2, 0)


def with_members(case, rows):
    """(arguments of members_attention, those of the statement in which each slot has an owner)."""
    owners, (_, kv_heads, _, head_dim) = len(case["length"]), case["q"].shape
    owner, number = (np.asarray(x, np.int32) for x in (OWNER, NUMBER))
    q = np.random.default_rng(1).normal(size=(len(owner), kv_heads, rows, head_dim))
    q = jnp.asarray(q, case["q"].dtype)
    table = answering(owner, number, owners, 3).reshape(owners, 3)
    known, at = (owner >= 0) & (owner < owners), np.clip(owner, 0, owners - 1)
    length = jnp.where(known, case["length"][at], 0)
    stated = case | {"q": q, "table": case["table"][at], "length": length}
    return case | {"q": q, "members": Members(table, owner, number)}, stated


@functools.partial(jax.jit, static_argnames=("implementation",))
def attend_members(case, implementation):
    interpret = implementation != "reference"
    return members_attention(**case, implementation=implementation, interpret=interpret)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("dtype", "rows", "windows"),
    [("float32", 3, False), ("bfloat16", 7, False), ("int8", 8, True), ("bfloat16", 5, True)],
)
def test_slots_attend_to_the_owner_that_they_share(implementation, dtype, rows, windows):
    width = WIDTH[implementation]
    case, stated = with_members(make_case(ragged(width), width=width, dtype=dtype), rows)
    if windows:
        stated = with_windows(stated, width)
        case["first"] = stated["first"]
    assert_states(attend_members(case, implementation), stated, TOLERANCE.get(dtype, 1e-5))


@pytest.mark.parametrize(("slots", "whole"), [(9, True), (4096, False)])
def test_the_tpu_kernel_takes_the_rows_of_slots_where_they_fit(slots, whole):
    """Else, and on other platforms, it takes a copy of them for each owner and member."""
    case, _ = with_members(make_case(ragged(128), width=128, head_dim=128, dtype="bfloat16"), 7)
    more = ((0, slots - 9), (0, 0), (0, 0), (0, 0))
    case["q"] = jnp.pad(case["q"], more)
    run = functools.partial(members_attention, implementation="tpu")
    traced = jax.jit(lambda case: run(**case)).trace(case)
    (kernel,) = kernels_in(traced.jaxpr)
    assert (kernel.outvars[0].aval.shape == (slots, 2, 7, 128)) == whole
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


def kernels_in(jaxpr):
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            found.append(eqn)
        elif "jaxpr" in eqn.params:
            found += kernels_in(eqn.params["jaxpr"])
    return found


@pytest.mark.parametrize("head_dim", [16, 128])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_any_head_dim(implementation, head_dim):
    width = WIDTH[implementation]
    case = make_case([width + 1, 2], head_dim=head_dim, width=width, dtype="int8")
    assert_states(attend(case, implementation), case, 1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_call_in_which_no_owner_has_tokens(implementation):
    case = make_case([0, 0], width=WIDTH[implementation])
    out, lse = attend(case, implementation)
    assert np.all(np.asarray(out) == 0) and np.all(np.asarray(lse) == -np.inf)


@pytest.mark.parametrize("width", [4, 64, 256])
@pytest.mark.parametrize("splits", [1, 2, 8])
def test_gpu_programs_share_an_owner_in_any_number(width, splits):
    # 64 and 256: a program's step of 128 tokens takes several pages, or a part of one
    case = make_case(ragged(width), width=width, head_dim=64, dtype="int8")
    run = jax.jit(
        lambda case: decode_gpu.gpu_attention(*positional(case), splits=splits, interpret=True)
    )
    for each in (case, with_windows(case, width))[: 1 + (splits == 8)]:
        assert_states(run(each), each, 1e-5)


def positional(case):
    names = "q key_pages value_pages table length key_scale value_scale first".split()
    return [case.get(name) for name in names]


def test_tpu_lists_exactly_the_pages_in_use():
    table = jnp.asarray([[9, 9, 9], [4, 2, 9], [9, 9, 9], [7, 5, 3]], jnp.int32)
    length = jnp.asarray([0, 5, 0, 12], jnp.int32)
    owner, first, page, count = decode_tpu.used_pages(table, length, 4)
    assert count == 5
    assert owner.tolist() == [1, 1, 3, 3, 3] + [0] * 7
    assert first.tolist() == [0, 4, 0, 4, 8] + [0] * 7
    assert page.tolist() == [4, 2, 7, 5, 3] + [0] * 7


def test_tpu_lists_no_page_before_a_window():
    table = jnp.asarray([[9, 9, 9], [4, 2, 9], [8, 1, 9], [7, 5, 3]], jnp.int32)
    length, begin = jnp.asarray([0, 5, 5, 12], jnp.int32), jnp.asarray([0, 4, 8, 4], jnp.int32)
    owner, first, page, count = decode_tpu.used_pages(table, length, 4, begin)
    assert count == 3
    assert owner.tolist() == [1, 3, 3] + [0] * 9
    assert first.tolist() == [4, 4, 8] + [0] * 9
    assert page.tolist() == [2, 5, 3] + [0] * 9


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_layers_in_one_array_are_reached_through_the_table(implementation):
    width = WIDTH[implementation]
    layers = [make_case([width + 1, 3], width=width, seed=seed) for seed in (0, 1)]
    pages = len(layers[0]["key_pages"])
    both = {
        n: jnp.concatenate([layer[n] for layer in layers]) for n in ("key_pages", "value_pages")
    }
    for index, layer in enumerate(layers):
        case = layer | both | {"table": layer["table"] + index * pages}
        assert_states(attend(case, implementation), layer, 1e-5)


def test_merge_is_attention_over_the_union():
    whole = make_case([16 * 3, 5, 0], width=16)
    first = whole | {"length": jnp.minimum(whole["length"], 16)}
    rest = whole | {
        # the same pages from the second on; what was read already is undefined here
        "table": jnp.roll(whole["table"], -1, axis=1),
        "length": jnp.maximum(whole["length"] - 16, 0),
    }
    parts = [attend(case, "reference") for case in (first, rest)]
    assert_states(jax.jit(merge)(parts), whole, 1e-5)
    assert_states(merge(parts[::-1]), whole, 1e-5)
    assert_states(merge([attend(whole, "reference")]), whole, 1e-5)


def test_merge_of_parts_far_apart_neither_overflows_nor_loses_the_larger():
    out = jnp.asarray([[1.0], [2.0]])
    parts = [(out, jnp.asarray([300.0, -300.0])), (-out, jnp.asarray([-300.0, -300.0]))]
    merged, lse = merge(parts)
    np.testing.assert_allclose(merged, [[1.0], [0.0]], atol=1e-6)
    np.testing.assert_allclose(lse, [300.0, -300.0 + math.log(2)], rtol=1e-6)


@pytest.mark.filterwarnings(TRITON_DEPRECATED)
@pytest.mark.parametrize(
    "platform",
    [pytest.param("gpu", marks=pytest.mark.gpu), pytest.param("tpu", marks=pytest.mark.tpu)],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("windows", [False, True])
def test_compiled_for_a_device(platform, dtype, windows):
    # JAX_PLATFORMS=cuda,cpu python -m pytest -m gpu tests/models/test_decode_attention.py
    case = make_case(ragged(128), width=128, head_dim=64, dtype=dtype)
    case = with_windows(case, 128) if windows else case
    case = jax.device_put(case, jax.devices(platform)[0])
    run = functools.partial(partial_attention, implementation=platform)
    # exponentials of accelerators are good to about six digits
    assert_states(jax.jit(lambda case: run(**case))(case), case, TOLERANCE.get(dtype, 1e-4) * 3)


@pytest.mark.filterwarnings(TRITON_DEPRECATED)
@pytest.mark.parametrize(("platform", "name"), [("cuda", "triton"), ("tpu", "tpu_custom_call")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(
    ("rows", "head_dim", "width", "windows"),
    [(3, 64, 128, False), (72, 128, 256, False), (24, 256, 128, True)],
)
def test_lowers_without_a_device(platform, name, dtype, rows, head_dim, width, windows):
    implementation = "gpu" if platform == "cuda" else platform
    case = make_case([5, 0], rows=rows, head_dim=head_dim, width=width, dtype=dtype)
    case = with_windows(case, width) if windows else case
    traced = jax.jit(lambda case: partial_attention(**case, implementation=implementation))
    with abstract_gpu() if platform == "cuda" else contextlib.nullcontext():
        lowered = traced.trace(case).lower(lowering_platforms=(platform,))
    assert name in lowered.as_text()


@pytest.mark.parametrize("most", [0, 7])
def test_a_tpu_kernel_costs_the_pages_that_owners_may_have(most):
    case = make_case([300, 5, 0], width=128, head_dim=64, dtype="bfloat16")
    run = functools.partial(partial_attention, implementation="tpu", most_pages=most)
    jaxpr = jax.make_jaxpr(lambda case: run(**case))(case)
    (kernel,) = [e for e in jaxpr.eqns if e.primitive.name == "pallas_call"]
    pages, (_, kv_heads, _, width) = most or case["table"].size, case["key_pages"].shape
    of_pages = pages * 2 * kv_heads * 64 * width * 2
    read = kernel.params["cost_estimate"].bytes_accessed
    assert of_pages < read < of_pages + 2**16  # and the queries


@pytest.mark.parametrize(
    ("implementation", "sizes", "message"),
    [
        ("gpu", {"head_dim": 96}, 'got 96: use implementation="reference"'),
        ("gpu", {"width": 24}, "got 24: use 32"),
        ("tpu", {"width": 16}, "got 16: use 128"),
        ("tpu", {"width": 128, "head_dim": 40}, 'got 40: use implementation="reference"'),
        ("tpu", {"width": 128, "rows": 3000}, "fewer than 3000 query rows per call"),
        ("gpt", {}, "reference, gpu, tpu, got 'gpt'"),
    ],
)
def test_a_shape_that_cannot_run_says_what_would(implementation, sizes, message):
    with pytest.raises(ValueError, match=message):
        partial_attention(**make_case([1, 2], **sizes), implementation=implementation)


def test_a_table_too_long_for_a_tpu_says_so():
    case = make_case([1, 2], width=128) | {"table": jnp.zeros((2, 2**16), jnp.int32)}
    with pytest.raises(ValueError, match=r"at most 65536 pages.*\[2, 65536\]"):
        partial_attention(**case, implementation="tpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": jnp.zeros(3, jnp.int32)}, r"length must be \[2\]"),
        ({"length": jnp.zeros(2)}, "must be int32, got int32 and float32"),
        ({"value_pages": jnp.zeros((8, 2, 32, 16))}, r"value_pages must be \[8, 2, 16, 32\]"),
        ({"q": jnp.zeros((2, 2, 3, 32), jnp.float16)}, "q must be bfloat16 or float32"),
        ({"key_pages": jnp.zeros((8, 2, 32, 16), jnp.int8)}, "got int8 and float32"),
        ({"key_scale": jnp.ones((8, 2, 16))}, "other pages take none"),
        ({"first": jnp.zeros((2, 4), jnp.int32)}, r"first must be \[2, 3\]"),
        ({"first": jnp.zeros((2, 3))}, "first must be int32, got float32"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        partial_attention(**make_case([1, 2]) | change, implementation="reference")


def test_int8_pages_need_scales():
    case = make_case([1, 2], dtype="int8")
    del case["value_scale"]
    with pytest.raises(ValueError, match="int8 pages take a key_scale and a value_scale"):
        partial_attention(**case, implementation="reference")
