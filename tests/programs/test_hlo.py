"""Bytes, collectives and products of compiled programs, against what one computes by hand.

Nightly: devices of a tensor axis divide the products of an update; none computes another's share.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support.tiny_model import mesh_of
from support.training_programs import trace

from distflow_jax.programs.bounded_loops import bounded_loop, seldom
from distflow_jax.programs.hlo import read
from distflow_jax.programs.jaxpr_flops import matmul_flops
from distflow_jax.programs.overlap import Beside

# code of the same instructions, made faster
QUICK = {"xla_backend_optimization_level": 0}


def ones(*shape):
    return jnp.ones(shape, jnp.float32)


def compiled(f, *args):
    return jax.jit(f).lower(*args).compile(compiler_options=QUICK)


def module(f, *args):
    found = read(compiled(f, *args).as_text())
    assert found.unread == 0
    return found


def test_bytes_of_a_product():
    found = module(jnp.dot, ones(96, 64), ones(64, 32))
    assert found.bytes_accessed == 4 * (96 * 64 + 64 * 32 + 96 * 32)
    assert found.flops == 2 * 96 * 64 * 32


def test_an_elementwise_chain_reads_once_and_writes_once():
    found = module(lambda x, y: jnp.tanh(x * x + y) - x, ones(64, 32), ones(64, 32))
    assert found.bytes_accessed == 3 * 4 * 64 * 32
    assert found.flops == 0


def test_bytes_are_those_of_xla_where_nothing_loops():
    """XLA's own count of the same text, where it counts every instruction once."""

    def f(x, w, index):
        y = jnp.tanh(x @ w[0]) @ jax.lax.dynamic_index_in_dim(w, index, keepdims=False)
        w = jax.lax.dynamic_update_index_in_dim(w, y + 1, index, axis=0)
        return w, jnp.sort(y, axis=1), y.sum(0)

    made = compiled(f, ones(64, 64), ones(5, 64, 64), jnp.int32(1))
    wanted = made.cost_analysis()["bytes accessed"]
    assert read(made.as_text()).bytes_accessed == pytest.approx(wanted, rel=0.001)


def test_rows_looked_up_and_added_to_cost_these_rows():
    table, index = ones(512, 64), jnp.arange(4, dtype=jnp.int32)

    def f(table, index):
        rows = jnp.tanh(jnp.take(table, index, axis=0, mode="clip"))
        return table.at[index].add(rows, mode="clip")

    made = jax.jit(f, donate_argnums=0).lower(table, index).compile()
    # XLA counts the whole table where a fusion looks up or adds
    assert read(made.as_text()).bytes_accessed < 0.1 * table.nbytes
    assert read(made.as_text()).bytes_accessed > 5 * 4 * 4 * 64


def scan(length, x):
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ x), None), x, length=length)[0]


def test_a_scan_costs_its_body_as_often_as_it_runs():
    x = ones(64, 64)
    one, seven, forty = (module(functools.partial(scan, n), x) for n in (3, 7, 40))
    assert seven.flops == 7 * 2 * 64**3
    body = (seven.bytes_accessed - one.bytes_accessed) / 4
    assert forty.bytes_accessed - seven.bytes_accessed == 33 * body
    # product in and out, and the counter's few bytes
    assert 3 * 4 * 64**2 <= body < 6 * 4 * 64**2


def test_nested_and_bounded_loops_multiply():
    def bounded(x, n, most, inner):
        return bounded_loop(n, lambda _, x: scan(inner, x), x, most=most)

    x, n = ones(64, 64), jnp.int32(1)
    a, b, c = (module(functools.partial(bounded, most=m, inner=3), x, n) for m in (2, 10, 50))
    assert a.flops == 2 * 3 * 2 * 64**3
    assert (b.flops, c.flops) == (5 * a.flops, 25 * a.flops)
    # but for what is outside of the loops
    assert c.bytes_accessed - b.bytes_accessed == 5 * (b.bytes_accessed - a.bytes_accessed)
    assert c.unbounded == ()


def test_a_loop_without_a_bound_is_named_and_counted_once():
    def f(x):
        return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ x, x)

    found = module(f, ones(64, 64))
    assert found.flops == 2 * 64**3
    assert found.unbounded == ("jit(f)/while",)


def test_a_stacked_weight_costs_one_slice_per_layer():
    layers, size = 16, 64
    weights, x = ones(layers, size, size), ones(8, size)

    def f(x, weights):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x), x, weights)

    found = module(f, x, weights)
    # the slice is read, written as an operand and read again; whole, it would be 16 times as much
    assert found.bytes_accessed < 1.5 * 3 * weights.nbytes
    assert found.bytes_accessed > weights.nbytes


@pytest.mark.parametrize(
    ("before", "after", "kind", "size"),
    [
        (("fsdp", None), (None, None), "all-gather", 4 * 64 * 32),
        (("fsdp", None), (None, "fsdp"), "all-to-all", 4 * 64 * 32 / 4),
    ],
)
def test_reshards_are_found_with_their_bytes(before, after, kind, size):
    mesh = mesh_of(4, 1)
    layouts = [NamedSharding(mesh, PartitionSpec(*spec)) for spec in (before, after)]
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=layouts[0])
    made = jax.jit(lambda x: x, out_shardings=layouts[1]).lower(x).compile()
    found = read(made.as_text())
    assert {c.kind for c in found.collectives} == {kind}
    assert found.bytes_by(kind) == size
    assert all(c.groups for c in found.collectives)


def test_collectives_in_a_loop_count_every_time():
    mesh, spec = mesh_of(4, 1), PartitionSpec("fsdp")

    def local(x):
        def body(x, _):
            x = jax.lax.psum(x, "fsdp") * 0.5
            part = jax.lax.psum_scatter(x, "fsdp", scatter_dimension=0, tiled=True)
            return jax.lax.all_gather(jnp.tanh(part), "fsdp", axis=0, tiled=True), None

        return jax.lax.scan(body, x, length=7)[0]

    f = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    x = jax.ShapeDtypeStruct((4 * 64, 32), jnp.float32, sharding=NamedSharding(mesh, spec))
    found = module(f, x)
    whole = 7 * 4 * 64 * 32
    for kind in ("all-reduce", "reduce-scatter", "all-gather"):
        assert found.bytes_by(kind) == whole, kind
    assert found.bytes_by("all-to-all") == 0
    assert {c.times for c in found.collectives} == {7}


def over_devices(kind):
    traced = trace(kind, fsdp=2, tensor=2)
    found = read(traced.lower().compile(compiler_options=QUICK).as_text())
    assert found.unread == 0 and found.unbounded == ()
    assert 4 * found.flops == pytest.approx(matmul_flops(traced.jaxpr).total, rel=0.05)
    return found


def test_devices_share_the_products_of_log_probs():
    assert over_devices("logp").bytes_by("all-gather") > 0


@pytest.mark.slow
def test_devices_share_the_products_of_an_update():
    found = over_devices("update")
    # gradients are summed over the data ranks
    assert found.bytes_by("all-reduce") + found.bytes_by("reduce-scatter") > 0


# What other platforms print: tilings, memory spaces, asynchronous pairs, no trip counts.
ACCELERATOR = """HloModule jit_f, is_scheduled=true, entry_computation_layout={(bf16[8,128]{1,0:T(8,128)(2,1)})->f32[8]{0}}

%fused_computation.1 (param_0.1: bf16[3,8,128], param_1.1: s32[], param_2.1: f32[8,128]) -> f32[8,128] {
  %param_0.1 = bf16[3,8,128]{2,1,0:T(8,128)(2,1)S(1)} parameter(0)
  %param_1.1 = s32[]{:T(128)} parameter(1)
  %param_2.1 = f32[8,128]{1,0:T(8,128)} parameter(2)
  %constant.7 = s32[]{:T(128)} constant(0)
  %bitcast.9 = bf16[3,8,128]{2,1,0:T(8,128)(2,1)} bitcast(%param_0.1)
  %dynamic-slice.1 = bf16[1,8,128]{2,1,0:T(8,128)(2,1)} dynamic-slice(%bitcast.9, %param_1.1, %constant.7, %constant.7), dynamic_slice_sizes={1,8,128}
  %bitcast.1 = bf16[8,128]{1,0:T(8,128)(2,1)} bitcast(%dynamic-slice.1)
  %convert.1 = f32[8,128]{1,0:T(8,128)} convert(%bitcast.1)
  ROOT %add.1 = f32[8,128]{1,0:T(8,128)} add(%convert.1, %param_2.1)
}

%async_computation (param_0.2: f32[8,128]) -> f32[2,128] {
  %param_0.2 = f32[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %reduce-scatter.1 = f32[2,128]{1,0:T(8,128)} reduce-scatter(%param_0.2), channel_id=2, replica_groups=[1,4]<=[4], dimensions={0}, to_apply=%sum
}

%body (arg: (s32[], f32[8,128], bf16[3,8,128])) -> (s32[], f32[8,128], bf16[3,8,128]) {
  %arg = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}, /*index=2*/bf16[3,8,128]{2,1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%arg), index=0
  %x = f32[8,128]{1,0:T(8,128)} get-tuple-element(%arg), index=1
  %w = bf16[3,8,128]{2,1,0:T(8,128)(2,1)S(1)} get-tuple-element(%arg), index=2
  %fusion.1 = f32[8,128]{1,0:T(8,128)} fusion(%w, %i, %x), kind=kLoop, calls=%fused_computation.1
  %ag = (f32[8,128]{1,0:T(8,128)}, f32[32,128]{1,0:T(8,128)}) all-gather-start(%fusion.1), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
  %ag-done = f32[32,128]{1,0:T(8,128)} all-gather-done(%ag)
  %async = ((f32[8,128]{1,0:T(8,128)}), f32[2,128]{1,0:T(8,128)}, u32[]{:S(2)}) async-start(%fusion.1), calls=%async_computation
  %async-done = f32[2,128]{1,0:T(8,128)} async-done(%async)
  ROOT %out = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}, /*index=2*/bf16[3,8,128]{2,1,0:T(8,128)(2,1)S(1)}) tuple(%i, %fusion.1, %w)
}

%cond (arg.1: (s32[], f32[8,128], bf16[3,8,128])) -> pred[] {
  %end = s32[]{:T(128)} constant(3)
  %arg.1 = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}, /*index=2*/bf16[3,8,128]{2,1,0:T(8,128)(2,1)S(1)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%arg.1), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i.1, %end), direction=LT
}

ENTRY %main (p: f32[8,128], q: bf16[3,8,128]) -> f32[8,16] {
  %p = f32[8,128]{1,0:T(8,128)} parameter(0)
  %q = bf16[3,8,128]{2,1,0:T(8,128)(2,1)} parameter(1)
  %zero = s32[] constant(0)
  %copy-start = (bf16[3,8,128]{2,1,0:T(8,128)(2,1)S(1)}, bf16[3,8,128]{2,1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%q)
  %copy-done = bf16[3,8,128]{2,1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start)
  %t = (s32[], f32[8,128], bf16[3,8,128]) tuple(%zero, %p, %copy-done)
  %while.1 = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}, bf16[3,8,128]{2,1,0:T(8,128)(2,1)S(1)}) while(%t), condition=%cond, body=%body, metadata={op_name="jit(f)/while"}
  %y = f32[8,128]{1,0} get-tuple-element(%while.1), index=1
  %rhs = f32[128,16]{1,0} constant({...})
  ROOT %gemm = (f32[8,16]{1,0}, s8[64]{0}) custom-call(%y, %rhs), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
}
"""  # noqa: E501


KERNEL = """\
HloModule jit_f, is_scheduled=true, num_partitions=1

ENTRY %main (p: bf16[8,128]) -> bf16[8,128] {
  %p = bf16[8,128]{1,0} parameter(0)
  ROOT %k = bf16[8,128]{1,0} custom-call(%p), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"body":"TUw","cost_estimate":{"flops":"4096","transcendentals":"8","bytes_accessed":"1"}}}
}
"""  # noqa: E501


def test_a_kernel_costs_what_it_says():
    """It reads what it says of its operands, at most all of them, and writes its result."""
    found = read(KERNEL)
    assert found.flops == 4096 and found.bytes_accessed == 1 + 2 * 8 * 128
    more = KERNEL.replace('"bytes_accessed":"1"', '"bytes_accessed":"9999999"')
    assert read(more).bytes_accessed == 2 * 2 * 8 * 128


@pytest.mark.parametrize(("end", "step", "trips"), [(3, 1, 3), (4, 2, 2), (5, 2, 3)])
def test_a_counter_may_be_unsigned_and_take_larger_steps(end, step, trips):
    """As in XLA's loops of products and permutations, unrolled once."""
    text = ACCELERATOR.replace("%end = s32[]{:T(128)} constant(3)", f"%end = u32[] constant({end})")
    added = f"  %by = s32[] constant({step})\n  %next = s32[] add(%i, %by)\n  ROOT %out"
    text = text.replace("tuple(%i, %fusion.1, %w)", "tuple(%next, %fusion.1, %w)")
    found = read(text.replace("  ROOT %out", added))
    assert not found.unbounded and {c.times for c in found.collectives} == {trips}


def test_texts_of_other_platforms():
    found = read(ACCELERATOR)
    row = 4 * 8 * 128
    copy = 2 * 3 * 8 * 128  # into S(1), a memory of its own, which is read for nothing
    fusion = 4 + row + row  # the slice's index, x, the result
    gathered, scattered = row + 4 * row, row + row // 4
    compare = 4 + 4 + 1
    gemm = row + 4 * 128 * 16 + 4 * 8 * 16 + 64
    once = fusion + gathered + scattered + compare
    assert found.bytes_accessed == copy + 3 * once + gemm
    assert found.flops == 2 * 8 * 128 * 16
    assert found.bytes_by("all-gather") == 3 * 4 * row
    assert found.bytes_by("reduce-scatter") == 3 * row
    assert [c.groups for c in found.collectives] == ["{{0,1,2,3},{4,5,6,7}}", "[1,4]<=[4]"]
    assert found.unbounded == ()
    assert [c.overlapped for c in found.collectives] == [True, True]
    assert found.unread == 1  # %sum, which is not there


# Of TPUs with room beside their cores, S(1): a fusion that ends there behind a bitcast, and a slice
# that is fetched meanwhile.
NEAR = """HloModule jit_f, is_scheduled=true

%fused (param_0: f32[16,8,128]) -> f32[128,128] {
  %param_0 = f32[16,8,128]{2,1,0:T(8,128)} parameter(0)
  %copy.1 = f32[16,8,128]{2,0,1:T(8,128)} copy(%param_0)
  ROOT %bitcast.1 = f32[128,128]{1,0:T(8,128)S(1)} bitcast(%copy.1)
}

ENTRY %main (p: f32[16,8,128], w: s8[4096]) -> f32[128,128] {
  %p = f32[16,8,128]{2,1,0:T(8,128)} parameter(0)
  %w = s8[4096]{0:T(1024)} parameter(1)
  %slice-start = ((s8[4096]{0:T(1024)}), s8[1024]{0:T(1024)S(1)}, s32[]{:S(2)}) slice-start(%w), slice={[1024:2048]}
  %fusion.1 = f32[128,128]{1,0:T(8,128)S(1)} fusion(%p), kind=kLoop, calls=%fused
  %slice-done = s8[1024]{0:T(1024)S(1)} slice-done(%slice-start)
  ROOT %out = f32[128,128]{1,0:T(8,128)} copy(%fusion.1)
}
"""  # noqa: E501


def test_values_beside_the_cores_cost_no_main_memory():
    """The fusion reads alone, the last copy writes alone, of `w` the slice is read."""
    array, context = 4 * 128 * 128, 4
    assert read(NEAR).bytes_accessed == 2 * array + 1024 + context
    far = NEAR.replace("S(1)", "")
    assert read(far).bytes_accessed == 4 * array + 2 * 1024 + context


# The weights of a product, in another shape by a fusion of their own inside its fusion.
INNER = """HloModule jit_f, is_scheduled=true

%reshaped (param_0: bf16[64,2,32]) -> bf16[64,64] {
  %param_0 = bf16[64,2,32]{2,1,0} parameter(0)
  ROOT %bitcast.1 = bf16[64,64]{1,0} bitcast(%param_0)
}

%fused (param_0.1: bf16[64,2,32], param_1.1: bf16[8,64]) -> bf16[8,64] {
  %param_0.1 = bf16[64,2,32]{2,1,0} parameter(0)
  %param_1.1 = bf16[8,64]{1,0} parameter(1)
  %fusion.1 = bf16[64,64]{1,0} fusion(%param_0.1), kind=kLoop, calls=%reshaped
  ROOT %convolution.1 = bf16[8,64]{1,0} convolution(%param_1.1, %fusion.1), dim_labels=bf_io->bf
}

ENTRY %main (w: bf16[64,2,32], x: bf16[8,64]) -> bf16[8,64] {
  %w = bf16[64,2,32]{2,1,0} parameter(0)
  %x = bf16[8,64]{1,0} parameter(1)
  ROOT %fusion.2 = bf16[8,64]{1,0} fusion(%w, %x), kind=kOutput, calls=%fused
}
"""


def test_weights_that_a_fusion_inside_reshapes_are_read():
    assert read(INNER).bytes_accessed == 2 * (64 * 64 + 2 * 8 * 64)


# A page of int8 that is changed in place, of a cache which a fusion inside gives another tiling.
TILED = """HloModule jit_f, is_scheduled=true

%copied (param_0: s8[16,32,128]) -> s8[16,32,128] {
  %param_0 = s8[16,32,128]{2,1,0:T(32,128)(4,1)} parameter(0)
  ROOT %copy.1 = s8[16,32,128]{2,1,0:T(8,128)(4,1)} copy(%param_0)
}

%fused (param_0.1: s8[16,32,128], param_1.1: s32[]) -> s8[16,32,128] {
  %param_0.1 = s8[16,32,128]{2,1,0:T(32,128)(4,1)} parameter(0)
  %param_1.1 = s32[]{:T(128)S(6)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %fusion.1 = s8[16,32,128]{2,1,0:T(8,128)(4,1)} fusion(%param_0.1), kind=kLoop, output_to_operand_aliasing={{}: (0, {})}, calls=%copied
  %page = s8[1,32,128]{2,1,0:T(8,128)(4,1)} dynamic-slice(%fusion.1, %param_1.1, %zero, %zero), dynamic_slice_sizes={1,32,128}
  %changed = s8[1,32,128]{2,1,0:T(8,128)(4,1)} negate(%page)
  ROOT %cache = s8[16,32,128]{2,1,0:T(32,128)(4,1)} dynamic-update-slice(%fusion.1, %changed, %param_1.1, %zero, %zero)
}

ENTRY %main (cache: s8[16,32,128], at: s32[]) -> s8[16,32,128] {
  %cache = s8[16,32,128]{2,1,0:T(32,128)(4,1)} parameter(0)
  %at = s32[]{:T(128)S(6)} parameter(1)
  ROOT %fusion.2 = s8[16,32,128]{2,1,0:T(32,128)(4,1)} fusion(%cache, %at), kind=kLoop, calls=%fused
}
"""  # noqa: E501


def test_a_page_that_is_changed_in_place_is_all_that_is_moved():
    assert read(TILED).bytes_accessed == 2 * 32 * 128


def test_a_branch_that_is_seldom_taken_costs_as_little_as_the_other():
    x = ones(64, 64)

    def run(x, mark):
        with mark():
            y = jax.lax.cond(x[0, 0] > 2, lambda: (x @ x @ x).sum(), lambda: x[0, 0])
        return y + 1.0

    product = 2 * 64**3
    for mark, products in ((contextlib.nullcontext, 2), (seldom, 0)):
        f = functools.partial(run, mark=mark)
        found = module(f, x)
        assert found.flops == matmul_flops(jax.make_jaxpr(f)(x)).total == products * product
        assert (found.bytes_accessed > 4 * 64**2) == bool(products)


# A start and a done with a product between them, and a second collective beside part of it
SCHEDULE = """HloModule jit_f, is_scheduled=true

ENTRY %main (p: f32[8,128], q: f32[24,128], x: f32[128,128], y: f32[128,128]) -> f32[128,128] {
  %p = f32[8,128]{1,0} parameter(0)
  %q = f32[24,128]{1,0} parameter(1)
  %x = f32[128,128]{1,0} parameter(2)
  %y = f32[128,128]{1,0} parameter(3)
  %before = f32[128,128]{1,0} dot(%x, %y), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %one = (f32[8,128]{1,0}, f32[32,128]{1,0}) all-gather-start(%p), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}
  %first = f32[128,128]{1,0} dot(%x, %before), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %two = (f32[24,128]{1,0}, f32[96,128]{1,0}) all-gather-start(%q), channel_id=2, replica_groups={{0,1,2,3}}, dimensions={0}
  %both = f32[128,128]{1,0} dot(%x, %first), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %one-done = f32[32,128]{1,0} all-gather-done(%one)
  %two-done = f32[96,128]{1,0} all-gather-done(%two)
  ROOT %after = f32[128,128]{1,0} dot(%x, %both), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""  # noqa: E501


def test_a_collective_is_beside_what_the_schedule_puts_between_its_start_and_end():
    product, moved = 2 * 128**3, 3 * 4 * 128**2
    one, two = read(SCHEDULE).collectives
    # what is beside both is divided by their bytes, 1 to 3
    assert one.beside.flops == 1.25 * product and two.beside.flops == 0.75 * product
    assert two.beside.bytes == 0.75 * moved
    at_once = SCHEDULE.replace("all-gather-start", "all-gather").replace("all-gather-done", "copy")
    assert {c.beside for c in read(at_once).collectives} == {Beside()}


# A TPU's all-gather that goes on while two products are computed, and its reduce-scatter
PIECES = """HloModule jit_f, is_scheduled=true

%start (p.0: bf16[32,256]) -> (bf16[32,256], bf16[256,256], u32[]) {
  %p.0 = bf16[32,256]{1,0:T(8,128)(2,1)} parameter(0)
  %ag.0 = bf16[256,256]{1,0:T(8,128)(2,1)} all-gather(%p.0), channel_id=9, replica_groups=[2,8]<=[8,2]T(1,0), dimensions={0}, backend_config={"async_collective_fusion_config":{"flag_start":"-1","flag_end":"-1"}}
  ROOT %begin = (bf16[32,256]{1,0:T(8,128)(2,1)}, bf16[256,256]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) custom-call(%ag.0), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.1 (p.1: bf16[32,256], q.1: bf16[256,256], x.1: bf16[128,256], y.1: bf16[256,64]) -> (f32[128,64], bf16[32,256], bf16[256,256]) {
  %x.1 = bf16[128,256]{1,0:T(8,128)(2,1)} parameter(2)
  %y.1 = bf16[256,64]{1,0:T(8,128)(2,1)} parameter(3)
  %dot.1 = f32[128,64]{1,0:T(8,128)} convolution(%x.1, %y.1), dim_labels=bf_io->bf
  %p.1 = bf16[32,256]{1,0:T(8,128)(2,1)} parameter(0)
  %q.1 = bf16[256,256]{1,0:T(8,128)(2,1)} parameter(1)
  %ag.1 = bf16[256,256]{1,0:T(8,128)(2,1)} all-gather(%p.1), channel_id=9, replica_groups=[2,8]<=[8,2]T(1,0), dimensions={0}, backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}
  ROOT %t.1 = (f32[128,64]{1,0:T(8,128)}, bf16[32,256]{1,0:T(8,128)(2,1)}, bf16[256,256]{1,0:T(8,128)(2,1)}) tuple(%dot.1, %p.1, %ag.1)
}

%end (p.2: bf16[32,256], q.2: bf16[256,256]) -> bf16[256,256] {
  %p.2 = bf16[32,256]{1,0:T(8,128)(2,1)} parameter(0)
  %q.2 = bf16[256,256]{1,0:T(8,128)(2,1)} parameter(1)
  %ag.2 = bf16[256,256]{1,0:T(8,128)(2,1)} all-gather(%p.2), channel_id=9, replica_groups=[2,8]<=[8,2]T(1,0), dimensions={0}, backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}
  ROOT %finish = bf16[256,256]{1,0:T(8,128)(2,1)} custom-call(%ag.2, %q.2), custom_call_target="AsyncCollectiveDone"
}

%all-reduce-scatter (p.3: f32[256,64]) -> f32[32,64] {
  %p.3 = f32[256,64]{1,0:T(8,128)} parameter(0)
  %ar = f32[256,64]{1,0:T(8,128)} all-reduce(%p.3), channel_id=7, replica_groups={{0,2,4,6,8,10,12,14},{1,3,5,7,9,11,13,15}}
  %zero = s32[] constant(0)
  ROOT %mine = f32[32,64]{1,0:T(8,128)} dynamic-slice(%ar, %zero, %zero), dynamic_slice_sizes={32,64}
}

ENTRY %main (p: bf16[32,256], x: bf16[128,256], y: bf16[256,64], g: f32[256,64]) -> bf16[256,256] {
  %p = bf16[32,256]{1,0:T(8,128)(2,1)} parameter(0)
  %x = bf16[128,256]{1,0:T(8,128)(2,1)} parameter(1)
  %y = bf16[256,64]{1,0:T(8,128)(2,1)} parameter(2)
  %g = f32[256,64]{1,0:T(8,128)} parameter(3)
  %s = (bf16[32,256]{1,0:T(8,128)(2,1)}, bf16[256,256]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) fusion(%p), kind=kCustom, calls=%start
  %s0 = bf16[32,256]{1,0:T(8,128)(2,1)} get-tuple-element(%s), index=0
  %s1 = bf16[256,256]{1,0:T(8,128)(2,1)} get-tuple-element(%s), index=1
  %f = (f32[128,64]{1,0:T(8,128)}, bf16[32,256]{1,0:T(8,128)(2,1)}, bf16[256,256]{1,0:T(8,128)(2,1)}) fusion(%s0, %s1, %x, %y), kind=kOutput, output_to_operand_aliasing={{1}: (0, {}), {2}: (1, {})}, calls=%async_collective_fusion.1
  %f1 = bf16[32,256]{1,0:T(8,128)(2,1)} get-tuple-element(%f), index=1
  %f2 = bf16[256,256]{1,0:T(8,128)(2,1)} get-tuple-element(%f), index=2
  %rs = f32[32,64]{1,0:T(8,128)} fusion(%g), kind=kCustom, calls=%all-reduce-scatter
  ROOT %e = bf16[256,256]{1,0:T(8,128)(2,1)} fusion(%f1, %f2), kind=kCustom, calls=%end
}
"""  # noqa: E501


def test_a_collective_in_pieces_counts_once():
    found = read(PIECES)
    assert found.unread == 0
    assert found.bytes_by("all-gather") == 2 * 256 * 256
    assert found.bytes_by("reduce-scatter") == 4 * 256 * 64 and found.bytes_by("all-reduce") == 0
    overlapped = {c.kind: c.overlapped for c in found.collectives}
    assert overlapped == {"all-gather": True, "reduce-scatter": False}
    assert found.flops == 2 * 128 * 256 * 64
    # only the fusion that continues it is beside the all-gather
    beside = {c.kind: c.beside for c in found.collectives}
    assert beside["all-gather"].flops == found.flops and beside["reduce-scatter"] == Beside()
    # the product's sides and result are its own; what is gathered passes by
    product = 2 * (128 * 256 + 256 * 64) + 4 * 128 * 64
    scattered = 4 * (256 + 32) * 64
    gathered = 2 * (256 + 32) * 256
    assert product + scattered < found.bytes_accessed <= product + scattered + 2 * gathered


# Two gradients in one reduce-scatter
SHARDS = """HloModule jit_f, is_scheduled=true

%all-reduce-scatter (p.0: bf16[64,8], p.1: bf16[32,8]) -> (bf16[16,8], bf16[8,8]) {
  %p.0 = bf16[64,8]{1,0} parameter(0)
  %p.1 = bf16[32,8]{1,0} parameter(1)
  %ar = (bf16[64,8]{1,0}, bf16[32,8]{1,0}) all-reduce(%p.0, %p.1), channel_id=1, replica_groups={{0,1,2,3}}
  %first = bf16[64,8]{1,0} get-tuple-element(%ar), index=0
  %other = bf16[32,8]{1,0} get-tuple-element(%ar), index=1
  %zero = s32[] constant(0)
  %mine.0 = bf16[16,8]{1,0} dynamic-slice(%first, %zero, %zero), dynamic_slice_sizes={16,8}
  %mine.1 = bf16[8,8]{1,0} dynamic-slice(%other, %zero, %zero), dynamic_slice_sizes={8,8}
  ROOT %both = (bf16[16,8]{1,0}, bf16[8,8]{1,0}) tuple(%mine.0, %mine.1)
}

ENTRY %main (p: bf16[64,8], q: bf16[32,8]) -> (bf16[16,8], bf16[8,8]) {
  %p = bf16[64,8]{1,0} parameter(0)
  %q = bf16[32,8]{1,0} parameter(1)
  ROOT %rs = (bf16[16,8]{1,0}, bf16[8,8]{1,0}) fusion(%p, %q), kind=kCustom, calls=%all-reduce-scatter
}
"""  # noqa: E501


def test_shards_of_several_sums_are_scattered():
    found = read(SHARDS)
    assert found.bytes_by("reduce-scatter") == 2 * 8 * (64 + 32) and len(found.collectives) == 1
    assert found.bytes_accessed == 2 * 8 * (64 + 32 + 16 + 8)


# A TPU's forms of the trainer's products: sizes of both sides and the result, how, multiply-adds
CONVOLUTIONS = {
    "mlp": ("128,64 64,64 128,64", "dim_labels=bf_io->bf", 128 * 64 * 64),
    "heads": (
        "2,64,64,1 64,2,16,1 2,64,2,16",
        "window={size=1x2 pad=0_0x1_1 rhs_reversal=0x1}, dim_labels=0bf1_i1o0->0b1f",
        128 * 64 * 2 * 16,
    ),
    "head weights' gradient": (
        "2,64,64,1 2,64,2,16 64,2,16,1",
        "window={size=2x2 pad=1_1x0_0 rhs_reversal=1x0}, dim_labels=1fb0_1i0o->b0f1",
        128 * 64 * 2 * 16,
    ),
    "scores": (
        "2,128,16 2,64,16 2,128,64",
        "window={size=2 lhs_dilate=2}, dim_labels=0bf_0oi->0bf",
        2 * 128 * 64 * 16,
    ),
    "logits": (
        "2,16,64 160,64,1 2,16,160",
        "window={size=1}, dim_labels=0bf_oi0->0bf",
        2 * 16 * 64 * 160,
    ),
    "their weight's gradient": (
        "2,16,160 2,16,64 160,64,1",
        "window={size=2}, dim_labels=0fb_0io->bf0",
        2 * 16 * 64 * 160,
    ),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_products_that_became_convolutions(name):
    sizes, how, multiply_adds = CONVOLUTIONS[name]
    lhs, rhs, out = (f"f32[{dims}]{{0:T(8,128)}}" for dims in sizes.split())
    text = f"""ENTRY %main (a: f32[], b: f32[]) -> f32[] {{
  %a = {lhs} parameter(0)
  %b = {rhs} parameter(1)
  ROOT %c = {out} convolution(%a, %b), {how}, feature_group_count=1
}}"""
    found = read(text)
    assert found.flops == 2 * multiply_adds and found.unread == 0


@pytest.mark.parametrize("cut", [1, 3, 7, 40])
def test_a_damaged_text_costs_what_can_be_read_of_it(cut):
    lines = ACCELERATOR.splitlines()
    for text in (
        "\n".join(lines[::cut]),
        "\n".join(line[: len(line) // cut] for line in lines),
        "\n".join(line[cut:] for line in lines),
        ACCELERATOR.replace("(", "", cut),
        ACCELERATOR.replace("%", "", cut),
        ACCELERATOR[: len(ACCELERATOR) // cut],
    ):
        read(text)
    assert read("").unread == read("not HLO at all").unread == 1
