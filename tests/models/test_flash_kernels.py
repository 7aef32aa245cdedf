"""The trainer's attention kernels without a device of theirs: lowered, compiled, counted, listed.

What they compute: test_block_attention.py. In the whole trainer: training/test_kernel_attention.py.

Nightly: the attention kernels compile for TPUs that are not present (needs libtpu).
"""

import contextlib
import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from support.accelerators import TRITON_DEPRECATED, abstract_gpu, needs_libtpu
from support.waiting import HANG

from distflow_jax.models.attention import InRow, masked_attention
from distflow_jax.models.block_attention import block_attention
from distflow_jax.models.kernels.flash_tpu import listed_tiles
from distflow_jax.models.kernels.library_attention import Segments, cudnn_attention, in_segments
from distflow_jax.models.kernels.tiles import Reach, flash_cost, tiles_of
from distflow_jax.programs.jaxpr_flops import matmul_flops

SIDE = {"gpu": 64, "tpu": 128}


def traced(by, *, heads=8, kv_heads=2, head_dim=64, dtype="bfloat16", sharding=None, side=0):
    """Output and gradients of two rows of 512 tokens, in layers with a window."""

    def run(q, k, v, g, segment, parent, position, window):
        reach = Reach(position, position, window)
        tiles = tiles_of(segment, parent, side or SIDE[by], reach=reach)
        attend = functools.partial(block_attention, tiles=tiles, reach=reach, implementation=by)
        out, back = jax.vjp(attend, q, k, v)
        return out, *back(g)

    shape = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    q, k = (shape((2, 512, n, head_dim), jnp.dtype(dtype)) for n in (heads, kv_heads))
    ids = shape((2, 512), jnp.int32)
    return jax.jit(run).trace(q, k, k, q, ids, ids, ids, shape((), jnp.int32))


@pytest.mark.filterwarnings(TRITON_DEPRECATED)
@pytest.mark.parametrize(("platform", "by"), [("cuda", "gpu"), ("tpu", "tpu")])
@pytest.mark.parametrize(
    "sizes",
    [
        dict(heads=3, kv_heads=1),
        dict(head_dim=128),
        dict(heads=2, head_dim=256),
    ],
)
def test_lowers_without_a_device(platform, by, sizes):
    with abstract_gpu() if by == "gpu" else contextlib.nullcontext():
        text = traced(by, **sizes).lower(lowering_platforms=(platform,)).as_text()
    for name in ("forward", "query", "key"):
        assert f"flash_attention_{name}_kernel" in text


def traced_by_library(function, *last, sharding=None, head_dim=64):
    """Output and gradients of two rows of 512 tokens by `function(q, k, v, *last)`; ids and masks
    are given by their shapes and dtypes."""

    def run(q, k, v, g, *last):
        out, back = jax.vjp(lambda *x: function(*x, *last), q, k, v)
        return out, *back(g)

    shape = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    q, k = (shape((2, 512, n, head_dim), jnp.bfloat16) for n in (8, 2))
    return jax.jit(run).trace(q, k, k, q, *(shape(*x) for x in last))


def traced_splash(sharding=None, head_dim=64):
    """Splash attention in a layer that may have a window of 200 tokens."""

    def attend(q, k, v, segment, window):
        return in_segments("splash", q, k, v, Segments(segment, segment, segment), 200, window)

    ids = ((2, 512), jnp.int32), ((), jnp.int32)
    return traced_by_library(attend, *ids, sharding=sharding, head_dim=head_dim)


def test_cudnn_is_called_forward_and_back_without_repeated_heads(monkeypatch):
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    traced = traced_by_library(cudnn_attention, ((2, 512, 512), jnp.bool_))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    for name in ("fmhaScaleBiasSoftmax", "fmhaScaleBiasSoftmaxBackward"):
        assert text.count(f"@__cudnn${name}(") == 1
    assert "tensor<2x512x8x64xbf16>, tensor<2x512x2x64xbf16>, tensor<2x512x2x64xbf16>" in text


COMPILE = """
import sys
import jax
from distflow_jax.pods.topology import open_topology
pod = open_topology(sys.argv[1])
from test_flash_kernels import traced, traced_splash
sharding = jax.sharding.SingleDeviceSharding(pod.devices[0])
large = dict(heads=14, kv_heads=2, head_dim=128, side=512)
for sizes in ({}, dict(heads=9, kv_heads=3), dict(head_dim=256, dtype="float32"), large):
    traced("tpu", sharding=sharding, **sizes).lower(lowering_platforms=("tpu",)).compile()
for head_dim in (64, 80, 128, 256):
    traced_splash(sharding, head_dim).lower(lowering_platforms=("tpu",)).compile()
print("compiled")
"""


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1"])
def test_compiles_for_a_tpu_that_is_not_there(topology, monkeypatch):
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    command = [sys.executable, "-c", COMPILE, topology]
    found = subprocess.run(command, capture_output=True, text=True, timeout=HANG)
    assert found.stdout.endswith("compiled\n"), found.stderr


@pytest.mark.parametrize(
    "platform",
    [pytest.param("gpu", marks=pytest.mark.gpu), pytest.param("tpu", marks=pytest.mark.tpu)],
)
def test_a_device_gives_what_loops_give(platform):
    # JAX_PLATFORMS=cuda,cpu python -m pytest -m gpu tests/models/test_flash_kernels.py
    rng = np.random.default_rng(0)
    tokens = 512
    q, g = rng.normal(size=(2, 2, tokens, 8, 128)).astype(np.float32)
    k, v = rng.normal(size=(2, 2, tokens, 2, 128)).astype(np.float32)
    q, k, v, g = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v, g))
    segment = np.repeat(np.arange(1, 9, dtype=np.int32), tokens // 8)[None].repeat(2, axis=0)
    segment[1, 400:] = 0
    parent = np.where(segment > 4, 1, segment).astype(np.int32)

    def run(by, *arguments):
        tiles = tiles_of(jnp.asarray(segment), jnp.asarray(parent), SIDE[platform])
        attend = functools.partial(block_attention, tiles=tiles, implementation=by)
        out, back = jax.vjp(attend, *arguments)
        return out, *back(jnp.where(segment[..., None, None] > 0, g, 0))

    device, host = jax.devices(platform)[0], jax.devices("cpu")[0]
    found = jax.jit(functools.partial(run, platform))(*jax.device_put((q, k, v), device))
    exact = [np.asarray(x, np.float32) for x in (q, k, v)]
    g = g.astype(jnp.float32)
    with jax.default_device(host):
        wanted = jax.jit(functools.partial(run, "loops"))(*exact)
    for mine, theirs in zip(found, wanted, strict=True):
        error = np.abs(np.asarray(mine, np.float32) - np.asarray(theirs))
        assert error.max() < 0.02 * max(1, np.abs(theirs).max())


def test_a_kernel_counts_all_of_its_products():
    """Two forward, and seven backward: both kernels compute scores and their gradients again. In
    tiles of a row that is one sequence, of which there are none above the diagonal."""
    q, k = jnp.zeros((2, 512, 8, 64)), jnp.zeros((2, 512, 2, 64))
    mask = jnp.ones((2, 512, 512), bool)
    masked = matmul_flops(jax.make_jaxpr(masked_attention)(q, k, k, mask)).total
    for by in ("gpu", "tpu"):
        found = matmul_flops(traced(by).jaxpr)
        delta = 2 * q.size
        one = jnp.ones((1, 512), jnp.int32)
        tiles = tiles_of(one, one, SIDE[by])
        share = int(tiles.num_keys.sum()) / tiles.keys.size
        assert found.total == masked / 2 * share * (2 + 3 + 4) + delta and not found.unbounded


def test_parts_of_a_row_count_as_many_tiles_each():
    """A device has a piece from each end of the row, so that all have as many tiles."""

    def cost(parts):
        q, k = jnp.zeros((1, 32 // parts, 2, 64, 32)), jnp.zeros((1, 32, 2, 16, 32))
        return flash_cost(q, k, products=1, moved=0).flops

    assert 4 * cost(4) == cost(1) == 2 * 32 * 33 / 2 * 2 * 64 * 16 * 32
    one, place = jnp.ones((1, 512), jnp.int32), jnp.arange(512, dtype=jnp.int32)[None]
    for part in range(4):
        own = jnp.concatenate([jnp.split(place, 8, axis=1)[i] for i in (part, 7 - part)], axis=1)
        tiles = tiles_of(one[:, :128], one[:, :128], 16, InRow(own, one, place))
        assert 2 * 64 * 16 * 32 * 2 * int(tiles.num_keys.sum()) == cost(4)


def test_listed_are_the_tiles_in_use():
    others = jnp.asarray([[[0, 9, 9], [1, 0, 9]], [[9, 9, 9], [2, 1, 0]]], jnp.int32)
    number = jnp.asarray([[1, 2], [0, 3]], jnp.int32)
    owner, other, count = listed_tiles(others, number)
    assert count == 6
    assert owner.tolist() == [0, 1, 1, 3, 3, 3] + [-1] * 7
    assert other[:6].tolist() == [0, 1, 0, 5, 4, 3]
    # a grid has a step: the block that it computes is dropped
    owner, _, count = listed_tiles(others, jnp.zeros_like(number))
    assert count == 1 and owner.tolist()[1:] == [-1] * 12 and owner[0] >= 0
